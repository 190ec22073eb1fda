"""The positive part of the advantage, for any base: learn from the better rollouts of a group, not from the worse.

    A' = max(A, 0) + negative * min(A, 0)

A biased likelihood can pull towards a good answer, and is a poor tool to push a bad one down: at a state that the
sampler never visits, lowering the probability of a near-certain token moves mass anywhere. Exact when negative = 1 and
the base is exact. Reduces to the base with negative = 1, bit for bit.
"""

from dataclasses import replace
from functools import partial
from math import inf

from torch import Tensor

from unmask.core.advantage import Advantage
from unmask.core.method import Method, check_range


def scaled_negatives(reward_B: Tensor, group_B: Tensor, advantage: Advantage, negative: float) -> Tensor:
    """The advantage with its negative values multiplied by `negative`."""
    advantage_B = advantage(reward_B, group_B)
    return advantage_B.clamp(min=0) + negative * advantage_B.clamp(max=0)


def positive(base: Method, negative: float = 0.0) -> Method:
    """Scale negative advantages; by default they count nothing."""
    check_range(0, inf, negative=negative)
    if base.values is not None:
        raise ValueError(f"{base.name} has advantages of steps, which positive does not change: leave it out")
    advantage = partial(scaled_negatives, advantage=base.advantage, negative=negative)
    return replace(base, name=f"{base.name}+positive", advantage=advantage)
