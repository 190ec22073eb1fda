"""ForkGRPO (Fork-dLLM, 2026; no arXiv number known to us): decode by threshold, train on the fallback steps only.

    sampler  order left_to_right with a threshold: a step commits every draw whose probability reaches the threshold; if
             there is none, the leftmost masked position of the block. That is a fallback: one token at a fork.
    F_g    = the fallback steps of rollout g
    loss   = - mean_g 1/|F_g| sum over t in F_g of Clip(p(o_t|s_t) / p_old(o_t|s_t), A_g),    A_g = (r_g - mean) / std

Steps that commit draws above the threshold have no term. A rollout without a fallback adds zero.

Never the policy gradient of this sampler: parallel steps have no term, 1/|F_g| depends on the rollout, and whether a
step is a fallback depends on the draws. The probability of a fallback has a factor for every other position of the
block, the mass of its tokens below the threshold, which the published ratio leaves out; it is 1 if no token of theirs
reaches the threshold. agrpo with choice = True has all factors and all steps. Reduces to agrpo with k = T draws in
left-to-right order, one token a step, and advantage = z_score if nothing reaches the threshold and no row ends early.
"""

from functools import partial
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage, z_score
from unmask.core.method import Method, check_range, each_inner_step
from unmask.core.objective import token_clip, trace_sum
from unmask.core.order import left_to_right, score_threshold
from unmask.core.probes import Probes, visited
from unmask.core.specs import Record
from unmask.core.trace import Trace, all_tokens


def fallbacks(trace: Trace) -> Tensor:
    """The steps at which no draw reached the threshold, (B, T), as 0 and 1. They wrote one token, the leftmost."""
    if trace.order not in ("", "left_to_right") or trace.threshold is None:
        raise ValueError(
            "the steps that fork trains on are those at which no draw reaches the threshold and the leftmost position "
            "is committed: set rollout.order=left_to_right and rollout.threshold (paper: 0.8)"
        )
    if "confidence" not in trace.seen:
        raise ValueError("fork reads the probabilities of the drawn tokens: sample with request=method.request")
    confidence_BC = trace.seen["confidence"]
    step_BC, filled_BC = (value_BL[:, -confidence_BC.shape[1] :] for value_BL in (trace.step_BL, trace.filled_BL))
    alone_BC = filled_BC & (confidence_BC < score_threshold(left_to_right, trace.threshold))
    nothing_BT = torch.zeros(len(trace), trace.steps, dtype=torch.float64, device=step_BC.device)
    return nothing_BT.scatter_add(1, step_BC * alone_BC, alone_BC.double())


def fallback_steps(trace: Trace, rng: torch.Generator) -> Probes:
    """The states before the fallback steps of each rollout, asked about the token written there; weight 1/|F|."""
    fallback_BT = fallbacks(trace)
    count_B1 = fallback_BT.sum(-1, keepdim=True)
    step_T = torch.arange(trace.steps, device=fallback_BT.device)
    step_BT = torch.where(fallback_BT > 0, step_T, trace.steps).sort(-1).values
    step_BK = step_BT[:, : max(1, int(count_B1.max()))]
    return visited(trace, step_BK, (step_BK < trace.steps) / count_B1.clamp(min=1))


def fork(low: float = 0.2, high: float = 0.2, advantage: Advantage = z_score) -> Method:
    """The steps at which threshold decoding is unsure and commits the leftmost position."""
    check_range(0, inf, low=low, high=high)
    return Method(
        name="fork",
        probe=each_inner_step(fallback_steps),
        advantage=advantage,
        objective=partial(token_clip, low=low, high=high, normaliser=trace_sum),
        record=Record(confidence=True),
        counted=all_tokens,
        trajectory=True,
        skip_zero_advantage=True,
    )
