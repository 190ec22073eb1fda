"""Small things without a domain: files, YAML, strict models, signals, statistics, plots, metering, versions.

Imports no other room.
"""
