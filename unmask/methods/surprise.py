"""Surprise as credit, for any base: a token that was nearly certain when it was drawn gets little of the update.

    w_i = (1 - share) + share * (1 - p_i) / mean(1 - p),     p_i the probability with which token i was drawn

The mean is over the counted tokens of the rollout, so the weights have the mean one. There is no paper. The idea: let
one token be drawn at a position that the state decides. Then V(s) = p V(s') + (1 - p) E[V | another token], so

    |V(s') - V(s)| = (1 - p) |V(s') - E[V | another token]| <= (1 - p) * (largest reward - smallest reward)

There a token that was nearly certain cannot change the value: its true credit is small (docs/credit.md). For a step
that writes several tokens, the sum of their 1 - p is a bound. If positions depend on the draws (low_confidence, a
threshold) or on chance (random), a step can change the value by more.

Exact when share = 0 and the base is exact. Otherwise the weight depends on what was drawn, and the update is not the
gradient of an objective. Reduces to the base with share = 0, and if all counted tokens of a rollout have the same p.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor, where

from unmask.core.credit import check_uniform_credit, shuffled_steps
from unmask.core.method import Method
from unmask.core.trace import Trace

CERTAIN = 1e-6
"""A smaller mean of 1 - p is rounding: such a rollout has uniform weights."""


def surprise_credit(trace: Trace, share: float = 1.0, shuffled: bool = False) -> Tensor:
    """1 - p of every counted token, over its mean in the trace; uniform if all tokens were certain."""
    surprise_BL = (1 - trace.logp_BL.exp()) * trace.counted_BL
    if shuffled:
        surprise_BL = shuffled_steps(surprise_BL, trace) * trace.counted_BL
    mean_B1 = surprise_BL.sum(-1, keepdim=True) / trace.counted_BL.sum(-1, keepdim=True).clamp(min=1)
    return (1 - share) + share * where(mean_B1 > CERTAIN, surprise_BL / mean_B1.clamp(min=CERTAIN), 1.0)


def surprise(base: Method, share: float = 1.0, shuffled: bool = False) -> Method:
    """Weight tokens by how uncertain they were when they were drawn."""
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must be at least 0 and at most 1")
    check_uniform_credit(base, "surprise")
    credit = partial(surprise_credit, share=share, shuffled=shuffled)
    return replace(base, name=f"{base.name}+surprise", credit=credit)
