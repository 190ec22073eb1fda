"""AdamW for weights in half precision: a step smaller than their rounding is not lost."""

from typing import Any

import torch
from torch import nn


class MasterAdamW:
    """AdamW on fp32 copies of the weights. After each step the weights are the copies, rounded.

    bf16 keeps eight bits: a weight of 1 would not move by steps below 0.004, and at the learning rates of full
    fine-tuning all steps are. Sharded weights (DTensor) have sharded copies.
    """

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        self.masters = [weight.detach().float() for weight in parameters]
        self.inner = torch.optim.AdamW(self.masters, **options)
        self.param_groups = [{"params": parameters}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none  # zeros would be kept for nothing
        for weight in self.param_groups[0]["params"]:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        weights = self.param_groups[0]["params"]
        for master, weight in zip(self.masters, weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.inner.step()
        for master, weight in zip(self.masters, weights, strict=True):
            weight.copy_(master)
            master.grad = None
