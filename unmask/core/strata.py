"""The Stratified Masking Likelihood of DACA (methods/daca.py), which other methods use too: its estimator.

the canvas is partitioned into K strata S_1 .. S_K
l_i = anchor * log p(o_i | q, all of o masked) + (1 - anchor) * log p(o_i | q, o without S_k),   i in S_k
"""

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.core.probes import Probes, random_rank, rank, views
from unmask.core.shapes import GIVEN
from unmask.core.trace import Trace

Layout = Callable[[Trace, torch.Generator], Tensor]
"""(trace, rng) -> the place of each canvas position, (B, L); position p goes to stratum p mod K."""


def random_strata(trace: Trace, rng: torch.Generator) -> Tensor:
    """Positions assigned in random order."""
    return random_rank(trace, rng)


def strided_strata(trace: Trace, rng: torch.Generator) -> Tensor:
    """Every K-th position."""
    return trace.canvas_BL.long().cumsum(-1) - 1


def decode_order_strata(trace: Trace, rng: torch.Generator) -> Tensor:
    """Positions assigned in the order of decoding, so that every stratum has early and late tokens."""
    return rank(trace.step_BL.masked_fill(trace.step_BL == GIVEN, 2**31))


LAYOUTS: dict[str, Layout] = {
    "random": random_strata,
    "strided": strided_strata,
    "decode_order": decode_order_strata,
}


def strata_views(trace: Trace, stratum_BL: Tensor, strata: int, anchor: float = 0.0) -> Probes:
    """One view a stratum, masked and asked there; with `anchor`, also a fully masked view that asks every token."""
    number_K = torch.arange(strata, device=stratum_BL.device)[:, None, None]
    masked_KBL = trace.canvas_BL & (stratum_BL == number_K)
    share_K = torch.full((strata,), 1.0 - anchor, dtype=torch.float64, device=stratum_BL.device)
    if anchor:
        masked_KBL = torch.cat([masked_KBL, trace.canvas_BL[None]])
        share_K = torch.cat([share_K, share_K.new_tensor([anchor])])
    return views(trace, masked_KBL, masked_KBL, share_K[:, None, None].expand(masked_KBL.shape))


STRATA = 3
"""The fewest with which a token sees most of the sequence: at equal passes fewer strata score higher
(docs/results.md)."""


def stratified(
    trace: Trace,
    rng: torch.Generator,
    strata: int = STRATA,
    layout: Layout = random_strata,
    anchor: float = 0.0,
) -> Probes:
    """SML: every token asked once, with the other strata visible."""
    if not 0 <= anchor < 1:
        raise ValueError(f"anchor={anchor} must lie in [0, 1): it is the share of the fully masked view")
    positions = int(trace.canvas_BL.sum(-1).min())
    if not 1 <= strata <= positions:
        raise ValueError(f"strata={strata} must lie between 1 and the {positions} positions of the completion")
    return strata_views(trace, layout(trace, rng) % strata, strata, anchor)
