"""What a task is: where its rows come from, how a row is asked, and what an answer is worth."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Row = dict[str, Any]

SPLITS = ("train", "test")


class Grade(NamedTuple):
    """Points of a completion out of so many; a set's score is the sum of points over the sum of what they are of."""

    points: float
    out_of: float
    answer: str = ""
    """What was taken for the answer, to read."""


@dataclass(frozen=True)
class Task:
    """Everything the loop needs to know about a task; all five functions are pure.

    rows(split, n, seed)      n rows of "train" or "test"; the same arguments give the same rows, more rows
                              begin with the fewer, and no test problem is ever a training problem
    prompt(row)               the text the model is given
    solution(row)             one correct completion
    reward(row, completion)   in [0, 1]; never raises, whatever the model wrote
    solved(row, completion)   whether the completion is a correct answer, not only the one we hold
    """

    name: str
    summary: str
    length: int  # characters of the longest completion: the size of the canvas for a character tokenizer
    rows: Callable[[str, int, int], list[Row]]
    prompt: Callable[[Row], str]
    solution: Callable[[Row], str]
    reward: Callable[[Row, str], float]
    solved: Callable[[Row, str], bool]
    prefill: str = ""
    """What every answer begins with; given to the model, and not part of the completion."""
    text: bool = False
    """In natural language, for models with a tokenizer of words: `length` is then a usual size and no minimum."""
    grade: Callable[[Row, str], Grade] | None = None
    """How a named protocol scores a completion; None: one point if it is solved."""

    ahead: Callable[[list[Row], list[str]], object] | None = None
    """Does the work of many rewards at once, side by side, so that each is then quick; None: nothing to gain."""

    def graded(self, row: Row, completion: str) -> Grade:
        if self.grade is not None:
            return self.grade(row, completion)
        return Grade(float(self.solved(row, completion)), 1.0)


def split_rng(task: str, split: str, seed: int) -> random.Random:
    """The random numbers of one (task, split, seed); seeded by a text, so that no two streams are related."""
    if split not in SPLITS:
        raise ValueError(f'{task} has the splits "train" and "test", not {split!r}.')
    return random.Random(f"unmask {task} {split} {seed}")


def checked_partial(task: str, partial: float) -> float:
    if not 0.0 <= partial < 1.0:
        raise ValueError(f"{task}: partial must be at least 0 and below 1, what a solution earns, not {partial}.")
    return float(partial)
