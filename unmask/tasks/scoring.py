"""Rewards and grades of completions, and the handling of rewards that fail.

A reward, which may be a user's program, fails if it raises, returns something else than a finite number, takes too
long, or ends its process. With `on_error: stop` the first failure stops the run. With `zero` the completion scores 0,
is counted, and is recorded with its row.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.options import RewardConfig
from unmask.distributed.processes import ALONE, Ranks
from unmask.tasks.task import Grade, Outcome, Row, Task

SHOWN = 200  # characters of a completion in a message


class RewardFailure(NamedTuple):
    task: str
    row: Row
    completion: str
    error: str


class RewardError(ValueError):
    """A reward failed, and the run must stop."""

    def __init__(self, failures: Sequence[RewardFailure]) -> None:
        self.failures = list(failures)
        first = failures[0]
        shown = first.completion if len(first.completion) <= SHOWN else first.completion[:SHOWN] + "..."
        super().__init__(
            f"the reward of task {first.task!r} failed: {first.error} (completion {shown!r}); "
            "reward.on_error=zero counts a failure as 0 and continues"
        )


class Scores(NamedTuple):
    reward_B: Tensor
    solved_B: Tensor
    parts: dict[str, Tensor]
    """The parts of the rewards, (B,) each."""
    failures: list[RewardFailure]
    behaviours: Mapping[str, Tensor] = {}
    """Which behaviour each completion shows, (B,) zeros and ones by name; empty if the task names none."""


def score(
    task: Task,
    rows: Sequence[Row],
    texts: Sequence[str],
    how: RewardConfig | None = None,
    ranks: Ranks = ALONE,
    device: torch.device | str = "cpu",
    once: bool = False,
) -> Scores:
    """Rewards of the completions of all processes; `rows` and `texts` are this process's. With `once` equal completions
    of a row are scored once.

    If one process has a failure that stops the run, all raise RewardError, so they stop together.
    """
    how = how or RewardConfig()
    pairs = list(zip(rows, texts, strict=True))
    keys = [(id(row), text if once else number) for number, (row, text) in enumerate(pairs)]
    distinct = dict(zip(keys, pairs, strict=True))
    scored, failures = _outcomes(task, [*distinct.values()], how)
    outcome_of = dict(zip(distinct, scored, strict=True))
    outcomes = [outcome_of[key] for key in keys]
    failures = _all_failures(failures, ranks, device)
    if failures and how.on_error == "stop":
        raise RewardError(failures)

    def column(values: list[float]) -> Tensor:
        return ranks.gather(torch.tensor(values, dtype=torch.float64, device=device))

    return Scores(
        column([outcome.reward for outcome in outcomes]),
        column([outcome.solved for outcome in outcomes]).bool(),
        {name: column([outcome.parts[name] for outcome in outcomes]) for name in task.weights},
        failures,
        {name: column([outcome.behaviour == name for outcome in outcomes]) for name in task.behaviour_names},
    )


def grade(task: Task, row: Row, text: str, how: RewardConfig | None = None) -> tuple[Grade, list[RewardFailure]]:
    """The protocol's grade, and the failure if there is one. A user's task is graded by `solved`."""
    if not task.runs_user_code:
        return task.grade(row, text), []
    scores = score(task, [row], [text], how)
    return Grade(float(scores.solved_B[0]), 1.0), scores.failures


def grades(
    task: Task, rows: Sequence[Row], texts: Sequence[str], how: RewardConfig | None = None
) -> tuple[list[Grade], list[RewardFailure]]:
    task.prepare(rows, texts)
    pairs = [grade(task, row, text, how) for row, text in zip(rows, texts, strict=True)]
    return [one for one, _ in pairs], [failure for _, failures in pairs for failure in failures]


def failure_summary(failures: Sequence[RewardFailure]) -> str:
    """One line about at least one failure."""
    first = failures[0]
    count = "1 reward" if len(failures) == 1 else f"{len(failures)} rewards"
    return f"{count} of {first.task} failed and count as wrong; the first: {first.error}"


def _outcomes(
    task: Task, pairs: Sequence[tuple[Row, str]], how: RewardConfig
) -> tuple[list[Outcome], list[RewardFailure]]:
    """The outcome of each completion, 0 if its reward failed. After a failure that stops the run, none is called."""
    outcomes, failures = list[Outcome](), list[RewardFailure]()
    task.prepare([row for row, _ in pairs], [text for _, text in pairs])
    for row, text in pairs:
        outcome = Outcome(0.0, False, dict.fromkeys(task.weights, 0.0))
        if not failures or how.on_error == "zero":
            try:
                if how.timeout is None:
                    outcome = task.outcome(row, text)
                else:
                    outcome = task.outcome_in_process(row, text, how.timeout)
                outcome = outcome._replace(behaviour=task.behaviour(row, text, outcome.solved))
            except Exception as error:  # of any kind: a reward may be a user's code
                message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                failures.append(RewardFailure(task.name, row, text, message))
        outcomes.append(outcome)
    return outcomes, failures


def _all_failures(failures: list[RewardFailure], ranks: Ranks, device: torch.device | str) -> list[RewardFailure]:
    """The failures of all processes, sent as lines of JSON."""
    if ranks.size == 1 or not ranks.max(len(failures), torch.device(device)):
        return failures
    lines = "".join(json.dumps(failure) + "\n" for failure in failures).encode()
    received = ranks.gather(torch.tensor(list(lines), dtype=torch.uint8, device=device))
    return [RewardFailure(*json.loads(line)) for line in bytes(received.tolist()).decode().splitlines()]
