"""The equations: traces, probes, objectives, advantages, orders, schedules, token sampling, and the interfaces that
other rooms implement (Policy, Method, Record, Branch). Pure functions on tensors: no files, no models, no processes.
Imports util only.
"""
