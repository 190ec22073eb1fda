"""How completions are made: the settings of a rollout, in training and evaluation."""

from dataclasses import dataclass, field, replace
from math import gcd

from unmask.core.order import Order, left_to_right, low_confidence, score_threshold
from unmask.core.policy import CachingPolicy
from unmask.core.schedule import CommitCounts, Schedule, at_least, even
from unmask.core.token_sampling import TokenSampling
from unmask.rollout.cache import Cache, CacheSetting
from unmask.rollout.graphs import Graphs


@dataclass(frozen=True)
class Decoding:
    """The settings of `sample`. Only the length is required: by default a step commits one position, in one block.

    With a `threshold` a step commits every position whose score reaches it, or the first `min_per_step` of the order
    if fewer do. In the order left_to_right the score is that of low_confidence. `steps` and `schedule` then have no
    effect; a trace has the steps that the smallest number needs, and a row skips those it does not need.
    """

    length: int
    """Positions to denoise after the prompt."""
    steps: int = -1
    """Denoising steps; -1: one for each position."""
    block: int = -1
    """Positions of a semi-autoregressive block; -1: one block, or for a block-causal model its own blocks."""
    sampling: TokenSampling = TokenSampling()
    order: Order = low_confidence
    schedule: Schedule = even
    threshold: float | None = None
    min_per_step: int = 1
    """With a threshold: the positions that a step commits at least."""
    cache: CacheSetting = "auto"
    attend_padding: bool = False
    """The model attends to padding, so a row depends on its batch: for d1's evaluation, not for training."""
    stops: bool = True
    """An end token with nothing masked before it ends a row. False, as in d1's evaluation: every position is filled."""
    append: bool = False
    """A block is put on the canvas when the one before it is finished (iLLaDA): nothing masked after it is seen. A
    block-causal model never sees later blocks. There is no cache for it."""
    graphs: Graphs = field(default_factory=Graphs, compare=False, repr=False)
    """Captured steps, on a GPU. Keep a `Decoding` for many rollouts, and later ones replay what the first captured."""
    causal_block: int | None = None
    """The block of a block-causal model; `for_policy` sets it."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length}: a completion needs at least one position")
        for name in ("steps", "block"):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, self.length)
        self.sure_score()  # a threshold that the order cannot reach is refused
        if self.min_per_step != 1 and self.threshold is None:
            raise ValueError(f"min_per_step={self.min_per_step} needs a threshold; without one, choose steps")
        if self.min_per_step != 1 and self.order is left_to_right:
            raise ValueError(f"min_per_step={self.min_per_step} needs an order by confidence, not left_to_right")
        if self.append and isinstance(self.cache, Cache):
            raise ValueError("append=True has no cache: choose cache none")

    def greedy(self) -> "Decoding":
        return replace(self, sampling=replace(self.sampling, temperature=0.0))

    def for_policy(self, policy: object) -> "Decoding":
        """These settings for a model. A block-causal model is sampled in its own blocks, which count from the first
        token of the prompt, or in equal parts of them."""
        causal = getattr(policy, "causal_block", None)
        if causal is None:
            return replace(self, causal_block=None)
        block = causal if self.block == self.length or self.block % causal == 0 else self.block
        if causal % block:
            raise ValueError(f"block={block} must be a divisor of {causal}, the block of this block-causal model")
        cache = Cache() if self.cache == "auto" and isinstance(policy, CachingPolicy) else self.cache
        return replace(self, block=block, causal_block=causal, append=False, cache=cache)

    @property
    def used_cache(self) -> Cache | None:
        """The cache of a rollout with these settings, once they are `for_policy`."""
        return None if self.cache == "auto" else self.cache

    def commit_counts(self) -> CommitCounts:
        """How many positions each step of each block commits, at least.

        Under block-causal attention a prompt can end inside a block. Its row then begins with the rest of that block
        and needs one block more, so there is always one more, in which other rows have nothing to do.
        """
        if self.causal_block is None:
            if self.threshold is not None:
                return at_least(self.length, self.min_per_step, self.block)
            return self.schedule(self.length, self.steps, self.block)
        blocks = (self.length + self.block - 2) // self.block + 1
        if self.threshold is not None:
            return at_least(self.block, self.min_per_step, self.block) * blocks
        steps, rest = divmod(self.steps * self.block, self.length)
        if rest:
            least = self.length // gcd(self.length, self.block)
            raise ValueError(
                f"steps={self.steps} for a length of {self.length} is not a whole number of steps for each block of "
                f"{self.block}: choose a multiple of {least}"
            )
        return self.schedule(self.block, steps, self.block) * blocks

    def sure_score(self) -> float | None:
        """The score (`sureness`) from which on a position is committed at once; None without a threshold."""
        return None if self.threshold is None else score_threshold(self.order, self.threshold)
