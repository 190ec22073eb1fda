"""Trace: the finished canvas plus the step at which each position was filled.

Every intermediate state is derived from the two, so a rollout of T steps is never stored T times:

    s_t = state_before(trace, t) = the canvas with every position filled at step t or later put back to MASK
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.core.shapes import GIVEN, NEVER
from unmask.core.token_sampling import TokenSampling, pad_ids


@dataclass(frozen=True)
class Trace:
    """B rollouts. Prompts are padded on the left, so the completions are the last columns."""

    tokens_BL: Tensor
    """The finished canvas; MASK where a retired row was never filled."""
    step_BL: Tensor
    """The step that filled each position; GIVEN where never masked, NEVER where never filled."""
    block_BL: Tensor
    """The semi-autoregressive block of each position, counted from the row's first; GIVEN before the completion."""
    attended_BL: Tensor
    """False on padding."""
    counted_BL: Tensor
    """Which tokens count: the end-token rule of the run."""
    logp_BL: Tensor
    """The sampler's own log-probability of each token, by the distribution it was drawn from; 0 elsewhere."""
    group_B: Tensor
    """Traces are compared within a group: of one prompt or, for branches, of one state."""
    mask_id: int
    eos_id: int
    steps: int
    """T, the denoising steps of the schedule."""
    sampling: TokenSampling = TokenSampling()
    order: str = ""
    """The order in which the sampler committed positions: a name of ORDERS, or custom; empty if it is not known."""
    threshold: float | None = None
    """The threshold that decided how many positions a step committed; None: a schedule did."""
    min_per_step: int = 1
    """With a threshold: the positions that a step committed at least."""
    causal_block: int | None = None
    """Of a block-causal model: the length of the blocks, counted from a row's first real token, that are finished
    before the next begins. None: attention is full."""
    appended: bool = False
    """Blocks were appended one after the other: no state shows the blocks after that in which a step wrote."""
    seen: dict[str, Tensor] = field(default_factory=dict)
    """What was recorded (specs.Record), over the completion's columns only. If a name starts with `step_`, the first
    dimension is the step and the second the trace."""

    def __len__(self) -> int:
        return len(self.tokens_BL)

    @property
    def canvas_BL(self) -> Tensor:
        """Positions that began masked."""
        return self.step_BL != GIVEN

    @property
    def filled_BL(self) -> Tensor:
        """Positions the rollout wrote."""
        return (self.step_BL != GIVEN) & (self.step_BL != NEVER)


TokenRule = Callable[[Trace], Tensor]


def state_before(trace: Trace, step_B: Tensor | int) -> Tensor:
    """The canvas as the policy saw it before `step`: step 0 is all masked, step T the finished canvas."""
    if isinstance(step_B, Tensor):
        step_B = step_B[:, None]
    return trace.tokens_BL.masked_fill(trace.step_BL >= step_B, trace.mask_id)


def all_tokens(trace: Trace) -> Tensor:
    """Every token that was written counts."""
    return trace.filled_BL


def until_eos(trace: Trace) -> Tensor:
    """Tokens up to and including the first end token count (d1, SPG)."""
    ended_BL = (trace.tokens_BL == trace.eos_id) & (trace.block_BL != GIVEN)
    return trace.filled_BL & (ended_BL.long().cumsum(-1) - ended_BL.long() == 0)


def select_traces(trace: Trace, index: Tensor) -> Trace:
    """The traces at `index` (booleans or positions), with everything that was recorded about them."""
    chosen = {f.name: getattr(trace, f.name)[index] for f in fields(trace) if f.name.endswith(("_B", "_BL"))}
    seen = {name: value[:, index] if name.startswith("step_") else value[index] for name, value in trace.seen.items()}
    return replace(trace, **chosen, seen=seen)


def pad_traces(trace: Trace, width: int) -> Trace:
    """The traces with padding on the left, to `width` columns."""
    fill = {"tokens_BL": trace.mask_id, "step_BL": GIVEN, "block_BL": GIVEN}
    more = (width - trace.tokens_BL.shape[1], 0)
    names = [f.name for f in fields(trace) if f.name.endswith("_BL")]
    wide: dict[str, Any] = {name: F.pad(getattr(trace, name), more, value=fill.get(name, 0)) for name in names}
    return replace(trace, **wide)


def concat_traces(traces: list[Trace]) -> Trace:
    """Several batches as one, padded on the left to the widest; give their groups different numbers first."""
    if len({(t.order, t.threshold, t.min_per_step) for t in traces}) > 1:
        raise ValueError("traces of different orders or thresholds cannot be one batch")
    width = max(t.tokens_BL.shape[1] for t in traces)
    traces = [pad_traces(t, width) for t in traces]
    names = [f.name for f in fields(Trace) if f.name.endswith(("_B", "_BL"))]
    merged: dict[str, Any] = {name: torch.cat([getattr(t, name) for t in traces]) for name in names}

    def recorded(name: str) -> Tensor:
        widest = max(t.seen[name].shape[-1] for t in traces)
        return torch.cat([pad_ids(t.seen[name], widest) for t in traces], dim=int(name.startswith("step_")))

    return replace(traces[0], **merged, seen={name: recorded(name) for name in traces[0].seen})
