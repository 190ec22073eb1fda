"""What completions earn. A reward may be a user's own: one that fails is named, and the run stops or goes on.

It fails where it raises, returns what is no finite number, or, asked in a process of its own, takes too long or takes
the process down. With `on_error: stop` the first failure stops the run; with `zero` the completion scores 0, is
counted, and is written down with its row.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.options import RewardConfig
from unmask.distributed.processes import ALONE, Ranks
from unmask.tasks.task import Grade, Outcome, Row, Task

SHOWN = 200  # characters of a completion in a message


class RewardFailure(NamedTuple):
    """A completion that a reward could not be had for, and what went wrong."""

    task: str
    row: Row
    completion: str
    error: str


class RewardError(ValueError):
    """A reward failed, and the run is to stop."""

    def __init__(self, failures: Sequence[RewardFailure]) -> None:
        self.failures = list(failures)
        first = failures[0]
        shown = first.completion if len(first.completion) <= SHOWN else first.completion[:SHOWN] + "..."
        super().__init__(
            f"the reward of task {first.task!r} failed: {first.error} (completion {shown!r}); "
            "reward.on_error=zero goes on without it"
        )


class Scores(NamedTuple):
    reward_B: Tensor
    solved_B: Tensor
    parts: dict[str, Tensor]
    """The parts of each reward, (B,) each."""
    failures: list[RewardFailure]


def score(
    task: Task,
    rows: Sequence[Row],
    texts: Sequence[str],
    how: RewardConfig | None = None,
    ranks: Ranks = ALONE,
    device: torch.device | str = "cpu",
) -> Scores:
    """Reward, verdict and parts of the completions of all processes, of which `texts` are this one's.

    RewardError in every process where one has met a failure and the run is to stop: so they stop together.
    """
    how = how or RewardConfig()
    outcomes, failures = _outcomes(task, rows, texts, how)
    failures = _of_all(failures, ranks, device)
    if failures and how.on_error == "stop":
        raise RewardError(failures)

    def column(values: list[float]) -> Tensor:
        return ranks.gather(torch.tensor(values, dtype=torch.float64, device=device))

    return Scores(
        column([outcome.reward for outcome in outcomes]),
        column([outcome.solved for outcome in outcomes]).bool(),
        {name: column([outcome.parts[name] for outcome in outcomes]) for name in task.weights},
        failures,
    )


def grades(
    task: Task, rows: Sequence[Row], texts: Sequence[str], how: RewardConfig | None = None
) -> tuple[list[Grade], list[RewardFailure]]:
    """The grade of every completion, and the rewards that failed: the protocol's grade, or the verdict of a task of
    one's own, asked as its reward is."""
    if task.elsewhere is not None:
        found = score(task, rows, texts, how)
        return [Grade(float(solved), 1.0) for solved in found.solved_B], found.failures
    if task.ahead is not None:
        task.ahead(list(rows), list(texts))
    return [task.graded(row, text) for row, text in zip(rows, texts, strict=True)], []


def failure_summary(failures: Sequence[RewardFailure]) -> str:
    """In one line, of at least one."""
    first = failures[0]
    count = "1 reward" if len(failures) == 1 else f"{len(failures)} rewards"
    return f"{count} of {first.task} failed and count as wrong; the first: {first.error}"


def _outcomes(
    task: Task, rows: Sequence[Row], texts: Sequence[str], how: RewardConfig
) -> tuple[list[Outcome], list[RewardFailure]]:
    """What each completion earned, nothing where the reward failed; if that stops the run, no other is asked then."""
    outcomes, failures = list[Outcome](), list[RewardFailure]()
    if task.ahead is not None:
        task.ahead(list(rows), list(texts))
    for row, text in zip(rows, texts, strict=True):
        outcome = Outcome(0.0, False, dict.fromkeys(task.weights, 0.0))
        if not failures or how.on_error == "zero":
            try:
                if task.elsewhere is None or how.timeout is None:
                    outcome = task.outcome(row, text)
                else:
                    outcome = task.elsewhere(row, text, how.timeout)
            except Exception as error:  # of whatever kind: a task may be a user's own
                told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                failures.append(RewardFailure(task.name, row, text, told))
        outcomes.append(outcome)
    return outcomes, failures


def _of_all(failures: list[RewardFailure], ranks: Ranks, device: torch.device | str) -> list[RewardFailure]:
    """The failures of all processes, sent as lines of JSON."""
    if ranks.size == 1 or not ranks.max(len(failures), torch.device(device)):
        return failures
    lines = "".join(json.dumps(failure) + "\n" for failure in failures).encode()
    received = ranks.gather(torch.tensor(list(lines), dtype=torch.uint8, device=device))
    return [RewardFailure(*json.loads(line)) for line in bytes(received.tolist()).decode().splitlines()]
