"""Rewards of several parts, each with a weight in the configuration: `gsm8k.weights={correctness: 1, format: 0.2}`.

The parts of a built-in task in natural language:

    correctness  what the task has always paid: 1 for a solution, else its partial credit
    format       1 where the completion has the form that the prompt asks for
    length       1 - characters / budget, at least 0, of a completion that solves the task, and 0 of any other

Only a solution is paid for being short: else the best answer to a hard problem would be to say nothing. Characters
and not tokens, because a reward sees text; the budget is four for each token of the task's usual length.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from unmask.tasks.support.answers import spoken
from unmask.tasks.task import Row, Task, weighted

CHARACTERS = 4  # of a token, in English and in code about

Weights = dict[str, Any] | None
"""As a configuration has them: a number for each part that is to weigh other than it does."""
Rewards = Literal["unmask", "d1"]
"""Whose parts a benchmark's reward has: correctness, format and length, or those of unmask.tasks.support.d1_rewards."""


class RewardPart(NamedTuple):
    value: Callable[[Row, str], float]
    """Of a row and a completion."""
    weight: float
    """Where the configuration names none."""
    low: float = 0.0
    high: float = 1.0


def weighed(where: str, weights: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    """A weight for every part: the default where none is given."""
    parts = f"the parts of the reward are {', '.join(defaults)}"
    for name, weight in weights.items():
        if name not in defaults:
            raise ValueError(f"{where}: there is a weight for {name!r}, but {parts}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"{where}: the weight of {name} must be a number, not {weight!r}; {parts}")
    found = {name: float(weights.get(name, default)) for name, default in defaults.items()}
    if not any(found.values()):
        raise ValueError(f"{where}: every weight is 0, which rewards nothing; {parts}")
    return found


def composite(task: Task, parts: Mapping[str, RewardPart], weights: Weights = None, where: str | None = None) -> Task:
    """The task with a reward that is the weighted sum of parts. `where` names it in an error."""
    found = weighed(where or task.name, weights or {}, {name: part.weight for name, part in parts.items()})
    ends = [sorted((found[name] * part.low, found[name] * part.high)) for name, part in parts.items()]
    counting = {name: weight for name, weight in found.items() if weight}

    def values(row: Row, completion: str) -> dict[str, float]:
        return {name: part.value(row, completion) for name, part in parts.items()}

    def reward(row: Row, completion: str) -> float:
        return weighted({name: parts[name].value(row, completion) for name in counting}, counting)

    low, high = (math.fsum(column) for column in zip(*ends, strict=True))
    return replace(task, reward=reward, parts=values, weights=found, reward_range=(low, high))


def standard(task: Task, formed: Callable[[str], bool]) -> dict[str, RewardPart]:
    """Correctness (the task's reward so far), format and length; by default correctness alone counts."""

    def length(row: Row, completion: str) -> float:
        return brevity(completion, CHARACTERS * task.length) if task.solved(row, completion) else 0.0

    return {
        "correctness": RewardPart(task.reward, 1.0),
        "format": RewardPart(lambda row, completion: float(formed(completion)), 0.0),
        "length": RewardPart(length, 0.0),
    }


def brevity(completion: str, budget: int) -> float:
    """1 for nothing said, 0 from `budget` characters on, counted up to the first end token."""
    return max(0.0, 1 - len(spoken(completion).strip()) / budget)
