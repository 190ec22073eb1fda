"""What a run has spent: forward passes, counted where they happen.

The unit is a whole canvas going through the trunk once. A pass that computes only some columns against a memory counts
for its share of the canvas; a pass with gradient counts for three, because the way back costs two forwards (what
checkpointing computes again is not counted: it is a choice of memory, not of the method). With an adapter the frozen
weights need no gradient and two would be nearer; it counts three all the same, so that runs can be compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

WITH_GRADIENT = 3
"""Forwards that a pass with gradient is worth: itself, and two for the way back."""


@dataclass
class Meter:
    """Counts the passes of this process. To count on from an earlier run, begin with what it had spent."""

    forwards: float = 0.0


_RUNNING: ContextVar[Meter | None] = ContextVar("meter", default=None)


@contextmanager
def count_passes(meter: Meter | None) -> Iterator[None]:
    """Count the passes made here on this meter; None: on none."""
    before = _RUNNING.set(meter)
    try:
        yield
    finally:
        _RUNNING.reset(before)


def record_pass(tokens_SL: Tensor, columns: int) -> None:
    """A model says that it computes so many columns of these canvases now."""
    meter = _RUNNING.get()
    if meter is not None:
        rows, width = tokens_SL.shape
        meter.forwards += rows * (columns / width) * (WITH_GRADIENT if torch.is_grad_enabled() else 1)
