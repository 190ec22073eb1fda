"""The split of a problem, and the random numbers of a split.

The validation split is for choosing settings, so that the test split is used once. It is a part of the training split,
by a hash of the prompt, and a run that is evaluated on it does not train on it. Only prompts are compared: a validation
Sudoku may have the grid of a training puzzle, with other holes.
"""

import hashlib
import random

from unmask.tasks.task import Row, Task

SPLITS = ("train", "test")
TEST_SHARE = 5  # one problem in five is a test problem
VALIDATION_SHARE = 8  # one training problem in eight is for validation
TRIES = 64  # search this many times n rows before a task has too few
DRAWS = 20_000  # average draws for a problem before the options are too narrow


def _first_byte(text: str) -> int:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[0]


def hashed_split(problem: str) -> str:
    """The split of a problem by a stable hash of its text."""
    return "train" if _first_byte(problem) % TEST_SHARE else "test"


def in_validation(prompt: str) -> bool:
    """Whether a training problem is held out, by a stable hash of its prompt, independent of `hashed_split`."""
    return _first_byte(f"unmask validation {prompt}") % VALIDATION_SHARE == 0


def split_rng(task: str, split: str, seed: int) -> random.Random:
    """The random numbers of a (task, split, seed), seeded by a text, so that no two streams are related."""
    if split not in SPLITS:
        raise ValueError(f'{task} has the splits "train" and "test", not {split!r}.')
    return random.Random(f"unmask {task} {split} {seed}")


class GeneratedTask(Task):
    stream: str = ""
    """The name of its random numbers, if not the task's."""
    scarcity: str = "hardly any problem fits the options"

    def draw(self, rng: random.Random, split: str) -> Row | None:
        """A random row without its id; None if the draw is not of the split."""
        raise NotImplementedError

    def rows(self, split: str, n: int, seed: int) -> list[Row]:
        stream, rows, draws = self.stream or self.name, list[Row](), 0
        rng = split_rng(stream, split, seed)
        while len(rows) < n:
            draws += 1
            if draws > DRAWS * (len(rows) + 1):
                raise ValueError(f"{self.name}: {self.scarcity}")
            if (row := self.draw(rng, split)) is not None:
                rows.append({"id": f"{stream.replace(' ', '-')}-{split}-{seed}-{len(rows)}", **row})
        return rows


def with_validation_split(task: Task) -> Task:
    """The task with a part of its training problems as test problems.

    A finite set with fewer than n of them gives all, once each.
    """

    def rows(split: str, n: int, seed: int) -> list[Row]:
        held_out, count = split != "train", 2 * n + VALIDATION_SHARE
        while True:
            chosen = [r for r in task.rows("train", count, seed) if in_validation(task.prompt(r)) == held_out]
            if held_out:
                first: dict[str, Row] = {}
                for row in chosen:
                    first.setdefault(task.prompt(row), row)
                chosen = list(first.values())
            if len(chosen) >= n:
                return chosen[:n]
            if count > TRIES * (n + VALIDATION_SHARE):
                if held_out and chosen:
                    return chosen
                raise ValueError(f"{task.name} has too few training problems to hold some out for validation")
            count *= 2

    return task.variant(rows=rows)
