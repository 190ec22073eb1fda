"""A validation split: problems to choose settings on, so that the test split is asked once.

It is carved out of the training split by a hash of the prompt, and a run that is evaluated on it does not train on it:
disjoint from its training prompts by the hash, and from the test split by the task's own promise. Prompts are what is
told apart: a validation Sudoku may have the grid of a training puzzle, with other holes.
"""

import hashlib
from dataclasses import replace

from unmask.tasks.task import Row, Task

SHARE = 8
"""One training problem in eight is for validation."""
TRIES = 64
"""How many times as many rows are looked through before a task has too few."""


def for_validation(prompt: str) -> bool:
    """Whether a training problem is held back: a stable hash of its prompt, unrelated to the one of tasks/split.py."""
    text = f"unmask validation {prompt}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[0] % SHARE == 0


def validating(task: Task) -> Task:
    """The task with part of its training problems in the place of its test problems.

    Of a set that has fewer than were asked for, all validation problems come, each once.
    """

    def rows(split: str, n: int, seed: int) -> list[Row]:
        held, asked = split != "train", 2 * n + SHARE
        while True:
            found = [row for row in task.rows("train", asked, seed) if for_validation(task.prompt(row)) == held]
            if held:
                first: dict[str, Row] = {}
                for row in found:
                    first.setdefault(task.prompt(row), row)
                found = list(first.values())
            if len(found) >= n:
                return found[:n]
            if asked > TRIES * (n + SHARE):
                if held and found:
                    return found
                raise ValueError(f"{task.name} has too few training problems to hold some back for validation")
            asked *= 2

    return replace(task, rows=rows)
