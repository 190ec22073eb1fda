"""The cost of a run: forward passes, counted by the models that make them.

The unit is one whole canvas through the trunk. A pass that computes only some columns against a cache counts for its
share of the canvas. A pass with gradient counts three, because the backward pass costs two forwards; what gradient
checkpointing recomputes is not counted. With an adapter the frozen weights need no gradient and two would be closer,
but it also counts three, so that runs can be compared. Equal canvases of a rollout count each, though they may go
through the model once: on a CPU without a cache, and in the first pass with a cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

WITH_GRADIENT = 3
"""Forwards that a pass with gradient counts for."""


@dataclass
class Meter:
    """Counts the passes of this process. To continue an earlier count, start with its value."""

    forwards: float = 0.0

    def record(self, tokens_SL: Tensor, columns: int) -> None:
        """Count a pass that computes this many columns of these canvases."""
        rows, width = tokens_SL.shape
        self.forwards += rows * (columns / width) * (WITH_GRADIENT if torch.is_grad_enabled() else 1)


class PassCounterMixin:
    """A model that counts its passes."""

    meter: Meter | None = None

    def record_pass(self, tokens_SL: Tensor, columns: int) -> None:
        if self.meter is not None:
            self.meter.record(tokens_SL, columns)


@contextmanager
def count_passes(meter: Meter | None, *models: object) -> Iterator[None]:
    """Count the passes of these models on this meter; None counts nowhere. Models that do not count are ignored."""
    metered = [(model, model.meter) for model in models if isinstance(model, PassCounterMixin)]
    for model, _ in metered:
        model.meter = meter
    try:
        yield
    finally:
        for model, before in metered:
            model.meter = before
