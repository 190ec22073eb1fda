"""TraceRL (arXiv 2509.06949) without its value model, and CJ-GRPO (arXiv 2509.23924).

    the steps that wrote something, in order, are merged `merge` at a time; R rows in the batch, each a merged step
    l_i  = log p(o_i | state before the row of i)
    loss = - 1/R sum over rows of the mean over its tokens of Clip(exp(l_i - l_i_old), A_g),    A_g = (r_g - mean) / std

A rollout with more rows weighs more. CJ-GRPO takes every step (merge = 1) and the mean over a rollout's steps first:
normaliser = step_mean. The authors add 0.01 times a KL to the old policy, summed over a row's tokens. On the first
inner step its gradient is zero, and the clip bounds the later ones: it is left out. So is the value model, which
doubles memory and passes.

Exact when merge = 1, on-policy, and the order is random, left_to_right or surest_position, up to the weight of a step:
the mean over its tokens, where the policy gradient has their sum. With one token a step, normaliser = step_mean and
advantage = group_mean it is (G - 1) / (G T) grad J. Reduces to the fully masked canvas if merge is at least T.
"""

from dataclasses import replace
from functools import partial
from math import inf

import torch

from unmask.core.advantage import Advantage, z_score
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, Normaliser, k3, token_clip, token_divergence, unit_mean
from unmask.core.probes import Probes, every_step
from unmask.core.steps import uniform_steps
from unmask.core.trace import Trace


def merged_steps(trace: Trace, rng: torch.Generator, merge: int = 1) -> Probes:
    """Every `merge` steps that wrote something, asked at the state before the first of them; a unit each."""
    row_BT = ((uniform_steps(trace) > 0).long().cumsum(-1) - 1).clamp(min=0) // merge
    row_BL = row_BT.gather(1, torch.where(trace.filled_BL, trace.step_BL, 0))
    merged = replace(trace, step_BL=torch.where(trace.filled_BL, row_BL, trace.step_BL), steps=int(row_BT.max()) + 1)
    # Only a token that is asked at the state at which it was drawn is scored by the recorded cuts of top_k and top_p.
    return replace(every_step(merged, rng), trace=trace, visited=merge == 1)


def trace_rl(
    merge: int = 1,
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 0.0,
    kl_kind: KL = k3,
    advantage: Advantage = z_score,
    normaliser: Normaliser = unit_mean,
) -> Method:
    """Every visited state, or several steps merged. (The paper merges 8 of 512 steps for LLaDA.)"""
    check_range(1, inf, merge=merge)
    check_range(0, inf, low=low, high=high)
    check_functions(normaliser=normaliser, kl_kind=kl_kind)
    return Method(
        name="trace_rl",
        probe=each_inner_step(partial(merged_steps, merge=merge)),
        advantage=advantage,
        objective=partial(token_clip, low=low, high=high, normaliser=normaliser),
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=normaliser),
        trajectory=True,
        skip_zero_advantage=True,
    )
