"""Generated tasks, small enough for the embedded model: one character is one token.
Each module offers a class; `unmask.tasks.TASKS` has them by name.
"""
