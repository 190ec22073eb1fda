"""d2-StepMerge (arXiv 2509.21474): a trajectory likelihood with few passes.

    the T steps are cut into N segments, e_n = floor(n T / N)
    l_i  = log p(o_i | q', s_{e_n}),  e_n <= step of i < e_{n+1};   q' = the prompt, each token hidden with prob. 0.15
    loss = - 1/(sum of |o_g|) sum_g sum_i Clip(exp(l_i - l_i_old), A_g) + kl * k3_i,      A_g = r_g - mean

The tokens of a segment are asked at the segment's first state, as if they had been written in one step. The prompt is
masked in all segments alike, as in the authors' code.

Exact when every segment writes tokens that are independent given its first state, prompt_masking = 0, and the order
does not depend on the draws. Reduces to diffu_grpo with one segment, bit for bit, and to the trajectory of every step,
with a token mean, with T segments.
"""

from dataclasses import replace
from functools import partial
from math import inf

from unmask.core.advantage import Advantage, group_mean
from unmask.core.method import Method, check_range, each_inner_step
from unmask.core.objective import KL, Normaliser, k3, token_mean
from unmask.core.probes import segmented
from unmask.methods.diffu_grpo import diffu_grpo


def step_merge(
    segments: int = 4,
    prompt_masking: float = 0.15,
    low: float = 0.5,
    high: float = 0.5,
    kl_kind: KL = k3,
    kl: float = 0.04,
    advantage: Advantage = group_mean,
    normaliser: Normaliser = token_mean,
) -> Method:
    """The steps in segments, each scored at its first state: d2's GRPO. (The paper takes 16 segments of 64 steps.)"""
    check_range(1, inf, segments=segments)
    base = diffu_grpo(prompt_masking, low, high, kl_kind, kl, advantage, normaliser)
    probe = each_inner_step(partial(segmented, segments=segments, prompt_masking=prompt_masking))
    return replace(base, name="step_merge", probe=probe, trajectory=True)
