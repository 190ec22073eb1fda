"""coupled-GRPO (DiffuCoder, arXiv 2506.20639).

    t ~ U(0.2, 0.8), M = each completion token masked with probability t, M' = its complement
    l_i  = 1/2 log p(o_i | q, all masked) + 1/2 { log p(o_i | o without M) / t        for i in M
                                                { log p(o_i | o without M') / (1 - t)  for i in M'
    loss = - token mean of Clip(exp(l_i - l_i_old), A_g) + kl * k3_i,      A_g = r_g - mean of the others

Three views, as in the authors' code (the paper describes the complementary pair). With the 1/t weights l_i is not a
log-probability, and the ratio exponentiates it.

Exact when: never, not even for independent tokens: then l_i is log p_i times a random factor of mean 3/2. Reduces
to SML with the strata M, M' and anchor 1/2 if t = 1/2 and the factor 2 of 1/t is dropped.
"""

from functools import partial
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage, leave_one_out
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, Normaliser, k3, token_clip, token_divergence, token_mean
from unmask.core.probes import Probes, uniform, views
from unmask.core.trace import Trace


def coupled_views(trace: Trace, masked_BL: Tensor, ratio_B: Tensor) -> Probes:
    """The fully masked view, a mask and its complement, with their shares."""
    first_BL, second_BL = trace.canvas_BL & masked_BL, trace.canvas_BL & ~masked_BL
    ratio_B1 = ratio_B[:, None].expand_as(masked_BL)
    masked_KBL = torch.stack([trace.canvas_BL, first_BL, second_BL])
    share_KBL = torch.stack([torch.full_like(ratio_B1, 0.5), 0.5 / ratio_B1, 0.5 / (1 - ratio_B1)])
    return views(trace, masked_KBL, masked_KBL, share_KBL)


def coupled(trace: Trace, rng: torch.Generator) -> Probes:
    """A random complementary pair of masks and the fully masked view."""
    ratio_B = 0.2 + 0.6 * uniform(rng, trace.group_B)
    return coupled_views(trace, uniform(rng, trace.tokens_BL) < ratio_B[:, None], ratio_B)


def coupled_grpo(
    low: float = 0.5,
    high: float = 0.5,
    kl_kind: KL = k3,
    kl: float = 0.01,
    advantage: Advantage = leave_one_out,
    normaliser: Normaliser = token_mean,
) -> Method:
    """Complementary masks, every token scored once by the pair: DiffuCoder's GRPO."""
    check_range(0, inf, low=low, high=high)
    check_functions(normaliser=normaliser, kl_kind=kl_kind)
    return Method(
        name="coupled_grpo",
        probe=each_inner_step(coupled),
        advantage=advantage,
        objective=partial(token_clip, low=low, high=high, normaliser=normaliser),
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=normaliser),
        skip_zero_advantage=True,
    )
