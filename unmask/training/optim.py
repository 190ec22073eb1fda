"""AdamW for weights in half precision: a step smaller than their rounding is not lost."""

from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW:
    """AdamW on fp32 copies of the weights. After each step the weights are the copies, rounded.

    bf16 keeps eight bits: a weight of 1 would not move by steps below 0.004, and at the learning rates of full
    fine-tuning all steps are. Gradients are added up in fp32 too, pass by pass. Sharded weights (DTensor) have sharded
    copies; theirs are added up by the sharding, and fetched from it.
    """

    def __init__(self, weights: list[nn.Parameter], **options: Any) -> None:
        self.weights = weights
        self.masters = [weight.detach().float() for weight in weights]
        self.inner = torch.optim.AdamW(self.masters, **options)
        for weight, master in zip(weights, self.masters, strict=True):
            weight.register_post_accumulate_grad_hook(lambda w, m=master: _moved(w, m))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The copies, whose gradients are all there is: what has not been fetched yet is now."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            _moved(weight, master)
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none  # zeros would be kept for nothing
        for tensor in (*self.weights, *self.masters):
            tensor.grad = None

    def step(self) -> None:
        self.inner.step()
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Make the weights what the copies are."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)


@torch.no_grad()
def _moved(weight: Tensor, master: Tensor) -> None:
    """Add the gradient of a weight to that of its copy."""
    if weight.grad is not None:
        master.grad = weight.grad.float() if master.grad is None else master.grad + weight.grad
        weight.grad = None
