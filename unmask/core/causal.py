"""Questions to a block-causal model, asked with the context that its sampler had.

The sampler finishes one block before it begins the next, and a token sees its own block and the finished text before
it. A view that masks tokens of several blocks would show an earlier block masked. So such a view is asked in two
streams: the token's own block as in the view, and the text before it as it was written (`Probes.clean_SL`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.core.trace import Trace

if TYPE_CHECKING:
    from unmask.core.probes import Probes


def causal_blocks(trace: Trace) -> Tensor:
    """The block of every position, (B, L), counted from the first real token."""
    assert trace.causal_block is not None
    return (trace.attended_BL.cumsum(1) - 1).clamp(min=0) // trace.causal_block


def finished_text(trace: Trace, masked_KBL: Tensor, asked_KBL: Tensor) -> Tensor | None:
    """What the sampler saw before each block, (K, B, L): the finished completion, and the prompt as it is in the view.

    None if the views show the same, and for full attention.
    """
    if trace.causal_block is None:
        return None
    block_BL, hidden_KBL = causal_blocks(trace), masked_KBL & trace.canvas_BL
    first_KB1 = torch.where(hidden_KBL, block_BL, block_BL.shape[1]).min(-1, keepdim=True).values
    if not (asked_KBL & (block_BL > first_KB1)).any():
        return None
    return torch.where(masked_KBL & ~trace.canvas_BL, trace.mask_id, trace.tokens_BL)


def share_states(probes: "Probes") -> "Probes":
    """Steps of different blocks of a trace asked at one state, if that is less work: each block is at its own step.

    The states are those before steps of the sampler. If steps of several blocks were merged into one question, it is
    asked in two streams.
    """
    trace, count = probes.trace, len(probes.asked_NL)
    if trace.causal_block is None or not count:
        return probes
    block_NL = causal_blocks(trace)[probes.trace_N]
    block_N1 = torch.where(probes.asked_NL, block_NL, 0).max(-1, keepdim=True).values
    if (probes.asked_NL & (block_NL != block_N1)).any():
        return replace(probes, clean_SL=trace.tokens_BL[probes.trace_N])
    _, place_N = (probes.trace_N * block_NL.shape[1] + block_N1.squeeze(1)).unique(return_inverse=True)
    group_S, state_N = (probes.trace_N * count + _turns(place_N)).unique(return_inverse=True)
    width, completion = block_NL.shape[1], int(trace.canvas_BL.any(0).sum())
    if len(group_S) * (width + completion) >= count * width:
        return probes
    source_S = group_S // count
    states_SL = trace.tokens_BL[source_S].clone()
    row, column = (block_NL == block_N1).nonzero(as_tuple=True)
    states_SL[state_N[row], column] = probes.states_SL[probes.state_N[row], column]
    return replace(
        probes,
        states_SL=states_SL,
        attended_SL=trace.attended_BL[source_S],
        clean_SL=trace.tokens_BL[source_S],
        state_N=state_N,
    )


def _turns(place_N: Tensor) -> Tensor:
    """How many earlier questions have the same place."""
    order_N, number_N = place_N.argsort(stable=True), torch.arange(len(place_N), device=place_N.device)
    sorted_N = place_N[order_N]
    first_N = torch.full_like(number_N, len(number_N)).scatter_reduce(0, sorted_N, number_N, "amin")[sorted_N]
    return torch.empty_like(number_N).scatter(0, order_N, number_N - first_N)
