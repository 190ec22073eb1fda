"""Tasks that are generated and small enough for the embedded model: one character is one token. Each module offers
`task(...)`, which makes a Task; `unmask.tasks.TASKS` has them by name.
"""
