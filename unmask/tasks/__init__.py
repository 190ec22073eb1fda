"""The tasks, by name: TASKS["sudoku"](holes=(9, 12)) makes a Task."""

from collections.abc import Callable

from unmask.tasks import own
from unmask.tasks.benchmarks import (
    gsm8k,
    humaneval,
    json_schema,
    math500,
    mbpp,
    multiple_choice,
    reasoning_gym,
    text_countdown,
    text_sudoku,
    word_problems,
)
from unmask.tasks.puzzles import arithmetic, code_mini, countdown, json_mini, large_sudoku, sudoku
from unmask.tasks.task import Row, Task

TASKS: dict[str, Callable[..., Task]] = {
    "sudoku": sudoku.task,
    "sudoku_large": large_sudoku.task,
    "countdown": countdown.task,
    "gsm8k": gsm8k.task,
    "math500": math500.task,
    "humaneval": humaneval.task,
    "mbpp": mbpp.task,
    "countdown_text": text_countdown.task,
    "sudoku_text": text_sudoku.task,
    "word_problems": word_problems.task,
    "json_schema": json_schema.task,
    "json_mini": json_mini.task,
    "arithmetic": arithmetic.task,
    "code_mini": code_mini.task,
    "multiple_choice": multiple_choice.task,
    "reasoning_gym": reasoning_gym.task,
    "own": own.task,
}

__all__ = ["TASKS", "Row", "Task", "countdown", "sudoku"]
