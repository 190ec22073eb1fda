"""Generated tasks for the embedded model: one character is one token. `unmask.tasks.TASKS` has them by name."""
