"""Try a method's questions on a blank canvas, without a model: an option that cannot work fails before a run."""

from dataclasses import replace

import torch

from unmask.core.method import Method
from unmask.core.shapes import GIVEN
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, all_tokens


def blank_trace(length: int, steps: int, block: int) -> Trace:
    """Two traces of one group, after a prompt of one token, filled left to right with token 1."""
    column_L = torch.arange(length + 1) - 1
    step_L = torch.where(column_L < 0, GIVEN, column_L * steps // length)
    entropy_BC = torch.ones(2, length, dtype=torch.float64)
    trace = Trace(
        tokens_BL=torch.ones(2, length + 1, dtype=torch.long),
        step_BL=step_L.repeat(2, 1),
        block_BL=torch.where(column_L < 0, GIVEN, column_L // block).repeat(2, 1),
        attended_BL=torch.ones(2, length + 1, dtype=torch.bool),
        counted_BL=torch.zeros(2, length + 1, dtype=torch.bool),
        logp_BL=torch.zeros(2, length + 1, dtype=torch.float64),
        group_B=torch.zeros(2, dtype=torch.long),
        mask_id=0,
        eos_id=2,
        steps=steps,
        sampling=TokenSampling(),
        seen={"entropy": entropy_BC},
    )
    return replace(trace, counted_BL=all_tokens(trace))


def rehearse(method: Method, length: int, steps: int, block: int) -> None:
    """Raises the method's own ValueError where its probes do not fit the canvas."""
    method.probe(blank_trace(length, steps, block), torch.Generator().manual_seed(0), 1)
