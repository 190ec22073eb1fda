"""What a run has spent: forward passes, counted by the models that make them.

The unit is a whole canvas going through the trunk once. A pass that computes only some columns against a cache counts
for its share of the canvas; a pass with gradient counts for three, because the backward pass costs two forwards (what
gradient checkpointing computes again is not counted: it is a choice of memory, not of the method). With an adapter the
frozen weights need no gradient and two would be nearer; it counts three all the same, so that runs can be compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

WITH_GRADIENT = 3
"""Forwards that a pass with gradient is worth: itself, and two for the backward pass."""


@dataclass
class Meter:
    """Counts the passes of this process. To continue an earlier count, start with its value."""

    forwards: float = 0.0

    def record(self, tokens_SL: Tensor, columns: int) -> None:
        """Count a pass that computes so many columns of these canvases."""
        rows, width = tokens_SL.shape
        self.forwards += rows * (columns / width) * (WITH_GRADIENT if torch.is_grad_enabled() else 1)


class Metered:
    """A model that counts its passes."""

    meter: Meter | None = None

    def record_pass(self, tokens_SL: Tensor, columns: int) -> None:
        if self.meter is not None:
            self.meter.record(tokens_SL, columns)


@contextmanager
def count_passes(meter: Meter | None, *models: object) -> Iterator[None]:
    """Count the passes of these models on this meter; None: on none. Others, such as None, are left alone."""
    metered = [(model, model.meter) for model in models if isinstance(model, Metered)]
    for model, _ in metered:
        model.meter = meter
    try:
        yield
    finally:
        for model, before in metered:
            model.meter = before
