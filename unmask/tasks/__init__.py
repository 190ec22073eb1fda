"""The tasks, by name: TASKS["sudoku"](holes=(9, 12)) makes a Task."""

from collections.abc import Callable

from unmask.tasks import countdown, sudoku
from unmask.tasks.task import Row, Task

TASKS: dict[str, Callable[..., Task]] = {
    "sudoku": sudoku.task,
    "countdown": countdown.task,
}

__all__ = ["TASKS", "Row", "Task", "countdown", "sudoku"]
