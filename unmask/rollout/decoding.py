"""How completions are made: the settings of a rollout, in training and evaluation."""

from dataclasses import dataclass, replace

from unmask.core.order import Order, low_confidence, score_threshold
from unmask.core.schedule import CommitCounts, Schedule, even, one_by_one
from unmask.core.token_sampling import TokenSampling
from unmask.rollout.cache import Cache


@dataclass(frozen=True)
class Decoding:
    """The settings of `sample`. Only the length is required: by default a step commits one position, in one block.

    With a `threshold` a step commits every position whose score reaches it, and at least one. Then `steps` and
    `schedule` have no effect, and a trace has `length` steps, of which a row skips those it does not need.
    """

    length: int
    """Positions to denoise after the prompt."""
    steps: int = -1
    """Denoising steps; -1: one for each position."""
    block: int = -1
    """Positions of a semi-autoregressive block; -1: one block."""
    sampling: TokenSampling = TokenSampling()
    order: Order = low_confidence
    schedule: Schedule = even
    threshold: float | None = None
    cache: Cache | None = None
    attend_padding: bool = False
    """The model attends to padding, so a row depends on its batch: for d1's evaluation, not for training."""
    stops: bool = True
    """An end token with nothing masked before it ends a row. False, as in d1's evaluation: every position is filled."""

    def __post_init__(self) -> None:
        for name in ("steps", "block"):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, self.length)

    def greedy(self) -> "Decoding":
        return replace(self, sampling=replace(self.sampling, temperature=0.0))

    def commit_counts(self) -> CommitCounts:
        """How many positions each step of each block commits, at least."""
        schedule = self.schedule if self.threshold is None else one_by_one
        return schedule(self.length, self.steps, self.block)

    def sure_score(self) -> float | None:
        """The score of the order from which on a position is committed at once; None without a threshold."""
        return None if self.threshold is None else score_threshold(self.order, self.threshold)
