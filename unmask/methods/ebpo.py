"""EBPO, the method of LLaDA2.1 (arXiv 2602.08676, section 3.2).

    for each draw and block b of C_b written tokens:  x uniform on {1, ..., C_b},  M = x random tokens of the block
    B    = mean over draws of  sum_b  C_b / x  sum_{i in M} log p(o_i | q, the blocks before b, block b without M)
    rho  = exp((B - B_old) / L),   loss = - mean_g Clip(rho_g, A_g),   A_g = (r_g - mean) / std

B is an unbiased estimate of the sum over blocks of their ELBOs, each given the finished text before it: the context of
a sampler that goes block by block. The levels x / C_b of the draws and blocks of a rollout are equally spaced around a
random offset. A block-causal model answers one draw in one pass, over noisy and clean text; a model with full attention
needs one pass for each block, in which later blocks are masked.

The report gives no number of draws, no weights and no clip; those here are from DARE, whose ratio is that of the sum:
mean=False. A sum over hundreds of tokens leaves the clip almost at once.

Exact when blocks have one token, written from left to right, with nothing cut by top_k or top_p: B is then the
log-probability of the trajectory. Reduces to espo with one block, without the complements.
"""

from functools import partial
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage, z_score
from unmask.core.method import MOST, Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, k3, sequence_clip, sequence_divergence, step_clip
from unmask.core.probes import Probes, rank, uniform, views
from unmask.core.trace import Trace, all_tokens


def block_bounds(trace: Trace, rng: torch.Generator, draws: int = 4) -> Probes:
    """The ELBO of every block given the finished text before it, from `draws` masks of each block."""
    check_range(1, MOST + 1, draws=draws)
    block_BL = trace.block_BL.clamp(min=0)
    count_BK = block_BL.new_zeros(len(trace), int(block_BL.max()) + 1).scatter_add(1, block_BL, trace.filled_BL.long())
    number_B11 = (count_BK > 0).sum(-1)[None, :, None].clamp(min=1)  # blocks of the row
    cell_N11 = torch.arange(draws, device=block_BL.device)[:, None, None]
    cell_NBK = cell_N11 * number_B11 + torch.arange(count_BK.shape[1], device=block_BL.device)
    level_NBK = (uniform(rng, trace.group_B)[:, None] + cell_NBK / (draws * number_B11)) % 1
    size_NBK = 1 + (level_NBK * count_BK).long()
    noise_NBL = torch.stack([uniform(rng, trace.tokens_BL) for _ in range(draws)])
    return bound_views(trace, size_NBK, noise_NBL)


def bound_views(trace: Trace, size_NBK: Tensor, noise_NBL: Tensor) -> Probes:
    """For each draw the `size` tokens of each block with the least noise masked and asked, after finished text."""
    draws, blocks, block_BL = len(size_NBK), size_NBK.shape[-1], trace.block_BL.clamp(min=0)
    count_BK = block_BL.new_zeros(len(trace), blocks).scatter_add(1, block_BL, trace.filled_BL.long())
    before_BL = (count_BK.cumsum(-1) - count_BK).gather(1, block_BL)
    place_NBL = rank(torch.where(trace.filled_BL, block_BL + noise_NBL, inf)) - before_BL  # within the block
    size_NBL = size_NBK.gather(2, block_BL.expand(draws, -1, -1))
    asked_NBL = trace.filled_BL & (place_NBL < size_NBL)
    share_NBL = count_BK.gather(1, block_BL) / size_NBL.double() / draws
    if trace.causal_block is not None:
        return views(trace, asked_NBL, asked_NBL, share_NBL)
    number_K11 = torch.arange(blocks, device=block_BL.device)[:, None, None]
    asked_KNBL = asked_NBL & (block_BL == number_K11)[:, None]
    masked_KNBL = asked_KNBL | (trace.canvas_BL & (block_BL > number_K11))[:, None]
    share_KNBL = share_NBL.expand_as(asked_KNBL)
    return views(trace, masked_KNBL.flatten(0, 1), asked_KNBL.flatten(0, 1), share_KNBL.flatten(0, 1))


def ebpo(
    draws: int = 4,
    mean: bool = True,
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 0.0,
    kl_kind: KL = k3,
    advantage: Advantage = z_score,
) -> Method:
    """One ratio for a whole sequence, from the ELBOs of its blocks. (DARE's code takes 16 draws and mean=False.)"""
    check_range(1, MOST + 1, draws=draws)
    check_range(0, inf, low=low, high=high)
    check_functions(kl_kind=kl_kind)
    return Method(
        name="ebpo",
        probe=each_inner_step(partial(block_bounds, draws=draws)),
        advantage=advantage,
        objective=partial(sequence_clip if mean else step_clip, low=low, high=high),
        counted=all_tokens,
        kl=kl,
        divergence=partial(sequence_divergence, kl=kl_kind),
        skip_zero_advantage=True,
    )
