"""SPG (arXiv 2510.09541): a bound on the log-likelihood chosen by the sign of the advantage.

    loss = - 1/(sum of |o_g|) sum_g |o_g| A_g B_g,      A_g = r_g - mean
    A > 0:   B = ELBO = mean over draws of the mean over masked tokens of log p_i
    A <= 0:  B = mix * EUBO + (1 - mix) * ELBO
             EUBO = 1/beta * mean_i log( mean over draws of 1{i masked} p_i^beta / t ),  t = the draw's masked share

Draws (`block_random`): a random block; before it a share of the tokens is hidden (15 %, the prompt too) and the rest is
clean; in it a uniform number of tokens is masked; after it, and after the first end token, everything is masked. As in
the authors' code the mean runs over all masked completion tokens, later blocks too, without 1/t. Tokens that no draw
masked are left out of the upper bound. Credit (DPS) multiplies each token inside both bounds: our choice.

No ratio, no clip, no KL. Exact when the tokens are independent given the prompt and the draws hide nothing else; as
coded, without 1/t, the two are not bounds of the sequence likelihood, and their gap can be negative. Reduces to a
weighted mean-field likelihood when every draw masks everything; on strata (SML, anchor 0) with equally many counted
tokens each token is masked once and the two bounds coincide. Shares have no effect here: with an anchor the fully
masked view is one more draw.
"""

from functools import partial
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage, group_mean
from unmask.core.method import MOST, Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, counted_units, k3, token_divergence
from unmask.core.probes import Probes, rank, uniform, views
from unmask.core.shapes import Metrics
from unmask.core.trace import Trace, until_eos


def block_random(trace: Trace, rng: torch.Generator, draws: int = 2, hidden: float = 0.15) -> Probes:
    """`draws` semi-autoregressive maskings of each trace."""
    check_range(1, MOST + 1, draws=draws)
    hidden_KBL = torch.stack([_block_masking(trace, rng, hidden) for _ in range(draws)])
    return views(trace, hidden_KBL, hidden_KBL & trace.canvas_BL)


def _block_masking(trace: Trace, rng: torch.Generator, hidden: float) -> Tensor:
    blocks_B = trace.block_BL.max(-1).values + 1
    at_B1 = (uniform(rng, trace.group_B) * blocks_B).long()[:, None]
    here_BL = (trace.block_BL == at_B1) & trace.canvas_BL
    size_B = here_BL.sum(-1)
    masked_B1 = 1 + (uniform(rng, trace.group_B) * size_B).long()[:, None]  # 1..size
    rank_BL = rank(uniform(rng, trace.tokens_BL).masked_fill(~here_BL, 2.0))
    clean_BL = trace.attended_BL & (trace.block_BL < at_B1)
    noise_BL = clean_BL & (uniform(rng, trace.tokens_BL) < hidden)
    tail_BL = trace.canvas_BL & ~until_eos(trace)
    return noise_BL | (here_BL & (rank_BL < masked_B1)) | (trace.block_BL > at_B1) | tail_BL


def sandwiched_policy_gradient(
    logp_NL: Tensor,
    old_NL: Tensor,
    probes: Probes,
    advantage_B: Tensor,
    credit_BL: Tensor,
    *,
    beta: float = 1.5,
    mix: float = 0.5,
) -> tuple[Tensor, Metrics]:
    """- sum_g |o_g| A_g B_g / sum |o_g|, the bound B chosen by the sign of A."""
    counted_NL = probes.asked_NL & probes.trace.counted_BL[probes.trace_N]
    length_M = probes.trace.counted_BL.sum(-1)[probes.trace_M].to(logp_NL.dtype)
    size_N = counted_NL.sum(-1).to(logp_NL.dtype)
    credit_NL = credit_BL[probes.trace_N].to(logp_NL.dtype)
    logp_NL = logp_NL.masked_fill(~counted_NL, 0.0)
    units = torch.zeros_like(length_M)
    draws_M = units.index_add(0, probes.unit_N, (size_N > 0).to(logp_NL.dtype)).clamp(min=1)

    mean_N = (credit_NL * logp_NL).sum(-1) / size_N.clamp(min=1)
    lower_M = units.index_add(0, probes.unit_N, mean_N) / draws_M

    share_N = size_N.clamp(min=1) / length_M.clamp(min=1)[probes.unit_N]
    power_NL = (beta * logp_NL.double() - share_N[:, None].log()).masked_fill(~counted_NL, -torch.inf)
    counted_ML = counted_units(probes)
    mean_ML = _unit_logsumexp(power_NL, probes, counted_ML) - draws_M[:, None].log()
    upper_ML = mean_ML.masked_fill(~counted_ML, 0.0).to(logp_NL.dtype) / beta
    upper_ML = credit_BL[probes.trace_M].to(logp_NL.dtype) * upper_ML
    upper_M = upper_ML.sum(-1) / counted_ML.sum(-1).clamp(min=1)

    value_M = advantage_B[probes.trace_M].to(logp_NL.dtype)
    bound_M = torch.where(value_M > 0, lower_M, mix * upper_M + (1 - mix) * lower_M)
    loss = -(length_M * value_M * bound_M).sum() / length_M.sum().clamp(min=1)
    return loss, {"elbo": lower_M.detach().mean(), "gap": (upper_M - lower_M).detach().mean()}


def _unit_logsumexp(value_NL: Tensor, probes: Probes, counted_ML: Tensor) -> Tensor:
    """log of the sum of exp(value) over the questions of each unit, (M, L), without underflow; 0 if none is counted."""
    index_NL, floor_ML = probes.unit_N[:, None].expand_as(value_NL), torch.full(counted_ML.shape, -torch.inf)
    largest_ML = floor_ML.to(value_NL).scatter_reduce(0, index_NL, value_NL.detach(), "amax")
    largest_ML = largest_ML.masked_fill(~counted_ML, 0.0)
    total_ML = torch.zeros_like(largest_ML).index_add(0, probes.unit_N, (value_NL - largest_ML[probes.unit_N]).exp())
    return torch.where(counted_ML, total_ML, 1.0).log() + largest_ML


def spg(
    draws: int = 2,
    hidden: float = 0.15,
    beta: float = 1.5,
    mix: float = 0.5,
    kl: float = 0.0,
    kl_kind: KL = k3,
    advantage: Advantage = group_mean,
) -> Method:
    """A lower bound pushed up for good traces, an upper bound pushed down for bad ones."""
    check_range(0, 1, hidden=hidden)
    check_range(0, inf, mix=mix)
    if not 0 < beta < inf:
        raise ValueError(f"beta={beta} must be above 0")
    check_functions(kl_kind=kl_kind)
    return Method(
        name="spg",
        probe=each_inner_step(partial(block_random, draws=draws, hidden=hidden)),
        advantage=advantage,
        objective=partial(sandwiched_policy_gradient, beta=beta, mix=mix),
        uses_old_logprobs=False,
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind),
    )
