"""What a method asks of the sampler in addition to tokens, steps and log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from unmask.core.trace import TokenRule, Trace, all_tokens


@dataclass(frozen=True)
class Record:
    """What to record in addition to tokens, steps and their log-probabilities.

    `top` > 0: `step_top_id`, `step_top_logp` (T, B, W, top): the likeliest tokens at temperature 1 of every
    position of the current block; id -1, log-probability 0 where it was not masked or the row had ended.
    `entropy`: (B, C) entropy of the distribution each token was drawn from.
    `confidence`: (B, C) log-probability of each token at temperature 1.
    `choice`: `step_above` (T, B, C): how many tokens of each position that a step passed over rank above the draws that
    it kept (choice.cut); 0 elsewhere. For the order low_confidence, and left_to_right by threshold.
    """

    top: int = 0
    entropy: bool = False
    confidence: bool = False
    choice: bool = False

    def __or__(self, other: "Record") -> "Record":
        return Record(**{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


@dataclass(frozen=True)
class Branch:
    """Fill one visited state of every row `fillings` times in one shot.

    The state is the one before step t, drawn before the rollout with probability in proportion to
    ((t + 1) / T) ** lateness: 0 is uniform, 4 favours late states, -4 early ones.
    """

    fillings: int = 2
    lateness: float = 4.0

    def step_probabilities(self, steps: int) -> Tensor:
        """The probability of branching before each step, (T,)."""
        place_T = torch.arange(1, steps + 1, dtype=torch.float64) / steps
        return (self.lateness * place_T.log()).softmax(0)


@dataclass(frozen=True)
class RolloutRequest:
    """What a method asks of the sampler: which tokens count, what to record, where to branch."""

    counted: TokenRule = all_tokens
    record: Record = Record()
    branch: Branch | None = None


@dataclass(frozen=True)
class StepValues:
    """Estimate the value of the states before and after some steps of every rollout (rollout/step_values.py)."""

    steps: Callable[[Trace, Tensor], tuple[Tensor, Tensor]]
    """(trace, level_BK in [0, 1)) -> the drawn steps, (B, K), and their weights; step T: none."""
    draws: int
    """K."""
    completions: int
    """Completions of each state."""
    most_steps: int | None = None
    """The most steps in each block of a completion; None: all that remain, as in the sampler."""
