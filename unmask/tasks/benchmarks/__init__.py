"""The benchmarks of papers, in natural language, for models with a word tokenizer. `unmask.tasks.TASKS` has them by
name.
"""
