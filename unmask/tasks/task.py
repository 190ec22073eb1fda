"""What a task is: where its rows come from, how a row is asked, and what an answer is worth."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unmask.core.policy import Policy
from unmask.tasks.support.manner import FIELD, Manner

Row = dict[str, Any]


class Grade(NamedTuple):
    """Points of a completion out of so many; a set's score is the sum of points over the sum of what they are of."""

    points: float
    out_of: float
    answer: str = ""
    """What was taken for the answer, to read."""


class Outcome(NamedTuple):
    """What a completion earned, and whether it is right."""

    reward: float
    solved: bool
    parts: dict[str, float]
    """What the reward is made of, without weights; empty where it has no parts."""


@dataclass(frozen=True)
class About:
    """What can be said of a task without any of its rows."""

    source: str = "generated"
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Rows of each split where it is known: a generator has no end, and a file as many as it has."""
    apart: str = "no problem of one split is in the other"
    """What keeps the splits apart."""
    example: Row | None = None
    """A row to show the prompt with, also where no data can be had; None: the first that is generated."""
    protocols: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """What must be installed besides."""


@dataclass(frozen=True)
class Task:
    """Everything the loop needs to know about a task; all five functions are pure.

    rows(split, n, seed)      n rows of "train" or "test"; the same arguments give the same rows, more rows
                              begin with the fewer, and no test problem is ever a training problem
    prompt(row)               the text the model is given
    solution(row)             one correct completion
    reward(row, completion)   within `reward_range`; never raises, whatever the model wrote
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
    fixed: bool = False
    """Whether test rows are a set that has an end, rather than made, as many as are asked for."""
    grade: Callable[[Row, str], Grade] | None = None
    """How a named protocol scores a completion; None: one point if it is solved."""
    beside: Mapping[str, Callable[[Row, str], Grade]] = field(default_factory=dict)
    """Other scores of the same completions by name, told beside the protocol's."""
    stored: Callable[[Row], Row] = dict
    """The row that a line of stored generations is about: by default the line itself."""
    verdict: Callable[[Row, str], str] | None = None
    """What the grader has to say of a completion beside its score, in a line; None: nothing."""
    facts: Callable[[Sequence[Row]], dict[str, int]] | None = None
    """What is worth knowing of a set of rows, to tell beside a score of it; None: nothing."""
    board: bool = False
    """Whether an answer is a Sudoku whose givens are the row's `puzzle`: the viewer draws it as a board."""

    ahead: Callable[[list[Row], list[str]], object] | None = None
    """Does the work of many rewards at once, side by side, so that each is then quick; None: nothing to gain."""
    parts: Callable[[Row, str], dict[str, float]] | None = None
    """What the reward is the weighted sum of, each part without its weight; None: it has no parts."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each part."""
    reward_range: tuple[float, float] | None = (0.0, 1.0)
    """The least and the most that can be earned; None: not known."""
    elsewhere: Callable[[Row, str, float], Outcome] | None = None
    """`outcome` in a process of its own, ended after so many seconds; None: the reward is known to end."""
    about: About = About()

    protocol: str = "unmask"
    """The name under which prompt, grader and what follows belong together."""
    system: str = ""
    """What a system's turn says before the prompt."""
    manner: Manner = FIELD
    """How the protocol has answers made when it is measured."""

    def outcome(self, row: Row, completion: str) -> Outcome:
        """Reward, verdict and parts; ValueError where one of them is no finite number."""
        solved = bool(self.solved(row, completion))
        if self.parts is None:
            return Outcome(finite("the reward", self.reward(row, completion)), solved, {})
        parts = {name: finite(name, value) for name, value in self.parts(row, completion).items()}
        return Outcome(weighted(parts, self.weights), solved, parts)

    def graded(self, row: Row, completion: str) -> Grade:
        if self.grade is not None:
            return self.grade(row, completion)
        return Grade(float(self.solved(row, completion)), 1.0)


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return float(sum(weight * parts[name] for name, weight in weights.items()))


def finite(name: str, value: Any) -> float:
    """A number of whatever library, as a float; ValueError for what is none, a text of digits included."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {value!r}, not a finite number")
    return number


def checked_partial(task: str, partial: float) -> float:
    if not 0.0 <= partial < 1.0:
        raise ValueError(f"{task}: partial must be at least 0 and below 1, what a solution earns, not {partial}.")
    return float(partial)


def prompt_ids(policy: Policy, task: Task, row: Row) -> list[int]:
    """What the model is given for a row: the prompt as a user's turn, after a system's if the task has one, and what
    every answer begins with."""
    ids = policy.tokenizer.prompt(task.prompt(row), task.system)
    return ids + policy.tokenizer.encode(task.prefill) if task.prefill else ids
