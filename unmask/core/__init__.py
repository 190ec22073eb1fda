"""The equations: traces, probes, objectives, advantages, orders, schedules, token sampling, and the contracts that
the other rooms fill in (Policy, Method, Record, Branch). Pure functions on tensors: no files, no models, no
processes. Imports util only.
"""
