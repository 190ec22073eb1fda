"""Estimators by the state at which the tokens of a finished rollout are asked, for methods that raise a likelihood."""

from math import inf

import torch
from torch import Tensor

from unmask.core.method import check_range
from unmask.core.probes import Probes, rank, uniform, views
from unmask.core.trace import Trace


def semi_autoregressive(trace: Trace, rng: torch.Generator, draws: int = 1) -> Probes:
    """Blocks before a random one clean, blocks after it masked, and a random part of it masked and asked (DTM).

    The number of masked positions is uniform on 1..L; L positions were written. Every draw is a unit.
    """
    check_range(1, inf, draws=draws)
    level_KB = torch.rand(draws, len(trace), generator=rng, dtype=torch.float64, device=rng.device)
    noise_KBL = torch.stack([uniform(rng, trace.tokens_BL) for _ in range(draws)])
    return block_views(trace, level_KB.to(noise_KBL.device), noise_KBL)


def block_views(trace: Trace, level_KB: Tensor, noise_KBL: Tensor) -> Probes:
    """The semi-autoregressive state with 1 + floor(level * L) masked positions; in its block those with the least noise
    are masked."""
    block_BL, filled_BL = trace.block_BL.clamp(min=0), trace.filled_BL.long()
    count_BW = filled_BL.new_zeros(len(trace), int(block_BL.max()) + 1).scatter_add(1, block_BL, filled_BL)
    from_BW = count_BW.flip(-1).cumsum(-1).flip(-1)  # positions of a block and of all later ones
    from_BL, after_BL = (each_BW.gather(1, block_BL) for each_BW in (from_BW, from_BW - count_BW))
    masked_KB1 = 1 + (level_KB * from_BW[:, 0]).long()[..., None]
    here_KBL = trace.filled_BL & (after_BL < masked_KB1) & (masked_KB1 <= from_BL)
    asked_KBL = here_KBL & (rank(noise_KBL.masked_fill(~here_KBL, 2.0)) < masked_KB1 - after_BL)
    return views(trace, asked_KBL | (trace.canvas_BL & (from_BL < masked_KB1)), asked_KBL, apart=True)
