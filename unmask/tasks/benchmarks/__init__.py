"""The benchmarks that papers report, in natural language, for models with a tokenizer of words.
Each module offers a class; `unmask.tasks.TASKS` has them by name.
"""
