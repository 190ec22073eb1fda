"""The files of a run folder; folder.py says what is in them. Imports no torch."""

FINISHED, STARTS = "finished.json", "run.jsonl"
LOGS = ("metrics.jsonl", "samples.jsonl", "traces.jsonl", "errors.jsonl", "warnings.jsonl")
LAST, BEST = "checkpoint", "checkpoint-best"
