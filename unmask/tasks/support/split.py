"""Which problems belong to which split, and the random numbers that a split is drawn with.

The validation split has problems to choose settings on, so that the test split is used once. It is part of the training
split, by a hash of the prompt, and a run that is evaluated on it does not train on it: the hash separates it from the
training prompts, and the task itself from the test split. Only prompts are compared: a validation Sudoku may have the
grid of a training puzzle, with other holes.
"""

import hashlib
import random

from unmask.tasks.task import Row, Task

SPLITS = ("train", "test")
TEST_SHARE = 5  # one problem in five is a test problem
VALIDATION_SHARE = 8  # one training problem in eight is for validation
TRIES = 64  # times n rows that are searched before a task has too few
DRAWS = 20_000  # for a generated problem, on average, before there are too few


def _first_byte(text: str) -> int:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[0]


def in_test(problem: str) -> bool:
    """Whether a problem belongs to the test split, where nothing else decides: a stable hash of its text."""
    return _first_byte(problem) % TEST_SHARE == 0


def in_validation(prompt: str) -> bool:
    """Whether a training problem is held back: a stable hash of its prompt, unrelated to that of `in_test`."""
    return _first_byte(f"unmask validation {prompt}") % VALIDATION_SHARE == 0


def hashed_split(problem: str) -> str:
    """The split that `in_test` decides on, by name."""
    return "test" if in_test(problem) else "train"


def split_rng(task: str, split: str, seed: int) -> random.Random:
    """The random numbers of one (task, split, seed); seeded by a text, so that no two streams are related."""
    if split not in SPLITS:
        raise ValueError(f'{task} has the splits "train" and "test", not {split!r}.')
    return random.Random(f"unmask {task} {split} {seed}")


class GeneratedTask(Task):
    """A task whose rows are drawn one after another."""

    stream: str = ""
    """The name of its random numbers, if not the task's."""
    scarcity: str = "hardly any problem fits the options"

    def draw(self, rng: random.Random, split: str) -> Row | None:
        """A random row, without its id; None where the draw does not belong to the split."""
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
    """The task with part of its training problems as its test problems.

    A finite set with fewer than n of them gives all, each once.
    """

    def rows(split: str, n: int, seed: int) -> list[Row]:
        held_back, count = split != "train", 2 * n + VALIDATION_SHARE
        while True:
            chosen = [r for r in task.rows("train", count, seed) if in_validation(task.prompt(r)) == held_back]
            if held_back:
                first: dict[str, Row] = {}
                for row in chosen:
                    first.setdefault(task.prompt(row), row)
                chosen = list(first.values())
            if len(chosen) >= n:
                return chosen[:n]
            if count > TRIES * (n + VALIDATION_SHARE):
                if held_back and chosen:
                    return chosen
                raise ValueError(f"{task.name} has too few training problems to hold some back for validation")
            count *= 2

    return task.variant(rows=rows)
