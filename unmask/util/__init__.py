"""Small things without a domain: files that are whole or absent, YAML and strict models, signals, statistics, plots,
forward-pass metering, the micro-batch size, versions. Imports nothing else of the package.
"""
