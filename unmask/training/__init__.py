"""The training loop and its stages: collect a batch, make the loss terms, update, log, evaluate, save. `loop.py`
shows the pipeline; `run/` is the run folder. Imports evaluation and what is below it.
"""
