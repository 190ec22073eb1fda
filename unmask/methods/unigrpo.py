"""UniGRPO (MMaDA, arXiv 2505.15809).

    t_u  = frac(t_0 + u / mu) for inner update u of mu, t_0 ~ U(0, 1) for each trace
    M    = each completion token masked with probability t_u; the prompt never
    l_i  = log p(o_i | q, o without M)  for i in M
    loss = - mean_g 1/|M_g| sum over i in M_g of Clip(exp(l_i - l_i_old), A_g) + kl * k3_i,   A z-scored

MMaDA's reinforcement-learning code is not public; this follows its description: ratios on masked tokens only,
mask ratios spread uniformly over the inner updates from a random start. Defaults of clip and KL are ours.

Exact when the tokens are independent given the prompt. Reduces to diffu_grpo without prompt masking as
t -> 1, with the same advantage, normaliser, clip and KL.
"""

from functools import partial
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage, z_score
from unmask.core.method import Method, check_functions, check_range
from unmask.core.objective import KL, Normaliser, k3, sequence_mean, token_clip, token_divergence
from unmask.core.probes import Probes, uniform, views
from unmask.core.trace import Trace


def masked_at_ratio(trace: Trace, rng: torch.Generator, ratio_B: Tensor) -> Probes:
    """Each completion token masked with the trace's ratio, and asked where masked."""
    masked_BL = trace.canvas_BL & (uniform(rng, trace.tokens_BL) < ratio_B[:, None])
    return views(trace, masked_BL[None], masked_BL[None])


def spread_ratios(trace: Trace, rng: torch.Generator, inner_steps: int) -> list[Probes]:
    """One Probes for each inner update, the mask ratios spread over (0, 1) from a random start."""
    start_B = uniform(rng, trace.group_B)
    return [masked_at_ratio(trace, rng, (start_B + step / inner_steps).frac()) for step in range(inner_steps)]


def random_ratio(trace: Trace, rng: torch.Generator) -> Probes:
    """Tokens asked where masked, at a mask ratio uniform over (0, 1) for each trace."""
    return spread_ratios(trace, rng, 1)[0]


def unigrpo(
    low: float = 0.2,
    high: float = 0.2,
    kl_kind: KL = k3,
    kl: float = 0.01,
    advantage: Advantage = z_score,
    normaliser: Normaliser = sequence_mean,
) -> Method:
    """Random mask ratios, ratios on the masked tokens: MMaDA's GRPO."""
    check_range(0, inf, low=low, high=high)
    check_functions(normaliser=normaliser, kl_kind=kl_kind)
    return Method(
        name="unigrpo",
        probe=spread_ratios,
        advantage=advantage,
        objective=partial(token_clip, low=low, high=high, normaliser=normaliser),
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=normaliser),
        skip_zero_advantage=True,
    )
