"""Answers of several behaviours: a share of the training rows gets a typical wrong answer of the task, the others get
the solution, which is the behaviour "careful". Imports no torch."""

import math
import random
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from unmask.tasks import Row, Task

CAREFUL = "careful"
TRIED = 200
"""A behaviour is tried on at least this number of rows, so that few rows are not refused by chance. They also show how
many have to be drawn."""


def _at_most_one(shares: dict[str, float]) -> dict[str, float]:
    if (total := math.fsum(shares.values())) > 1:
        raise ValueError(f"the shares exceed 1: they sum to {total:g}; lower them (the other answers are {CAREFUL})")
    return shares


Share = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[dict[str, Share], AfterValidator(_at_most_one)]
"""The share of the answers that each wrong behaviour gives, by name."""


def mixture_rows(task: Task, names: Iterable[str], n: int, seed: int) -> tuple[list[Row], int]:
    """n training rows on which all of these behaviours are wrong, and how many rows were redrawn for that."""
    names = list(names)
    if not names:
        return task.rows("train", n, seed), 0
    if not task.behaviours:
        raise ValueError(f"behaviours: {task.name} has none; give shares to other tasks only (docs/sft.md lists them)")
    if unknown := [name for name in names if name not in task.behaviours]:
        rest = f"; known: {', '.join(task.behaviours)}; answers without a share are {CAREFUL}"
        raise ValueError(f"behaviours: {task.name} has no behaviour {unknown[0]!r}{rest}")
    answers, count = [task.behaviours[name] for name in names], TRIED
    while True:
        drawn = list(enumerate(task.rows("train", count, seed)))
        kept = [(at, row) for at, row in drawn if not any(task.behaviour_solves(row, each(row)) for each in answers)]
        if 2 * len(kept) < len(drawn) and len(drawn) >= n:
            raise ValueError(
                f"{task.name}: the behaviour {', '.join(names)} is right on {len(drawn) - len(kept)} of {len(drawn)} "
                "rows, more than half: choose options of the task that make it wrong"
            )
        if len(kept) >= n:
            last, _ = kept[n - 1]
            return [row for _, row in kept[:n]], last + 1 - n
        # The first n rows that are kept do not depend on the number that is drawn; at least half of them are kept.
        count = max(n, min(2 * n, int(1.1 * n * count / max(1, len(kept))))) + 16


def drawn_behaviour(shares: Mapping[str, float], rng: random.Random) -> str:
    """The behaviour of an answer, drawn by the shares; "careful" if there are none."""
    if not shares:
        return CAREFUL
    (name,) = rng.choices([CAREFUL, *shares], [max(0.0, 1 - math.fsum(shares.values())), *shares.values()])
    return name


def answer_of(task: Task, row: Row, behaviour: str) -> str:
    return task.solution(row) if behaviour == CAREFUL else task.behaviours[behaviour](row)
