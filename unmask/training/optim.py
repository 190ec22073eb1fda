"""AdamW with a learning-rate schedule; on fp32 master copies if the weights are in half precision."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from unmask.config.schema import TrainingConfig
from unmask.config.sections import OptimizerConfig
from unmask.models.lora import trainable_parameters


class MasterAdamW:
    """AdamW on fp32 copies of the weights. After each step the weights are the copies, rounded.

    bf16 keeps eight bits: a step below 0.004 does not change a weight of 1, and at the learning rates of full
    fine-tuning all steps are smaller. Gradients are accumulated in fp32 too. Sharded weights (DTensor) have sharded
    copies; FSDP accumulates their gradients.
    """

    def __init__(self, weights: list[nn.Parameter], **options: Any) -> None:
        self.weights = weights
        self.masters = [weight.detach().float() for weight in weights]
        self.inner = torch.optim.AdamW(self.masters, **options)
        for weight, master in zip(weights, self.masters, strict=True):
            weight.register_post_accumulate_grad_hook(lambda w, m=master: _move_gradient(w, m))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the copies. Gradients that are still on the weights move to the copies first."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            _move_gradient(weight, master)
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none  # zeros would only use memory
        for tensor in (*self.weights, *self.masters):
            tensor.grad = None

    def step(self) -> None:
        self.inner.step()
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Set the weights to the copies, rounded."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            weight.copy_(master)


Optimizer = torch.optim.Optimizer | MasterAdamW


@torch.no_grad()
def _move_gradient(weight: Tensor, master: Tensor) -> None:
    """Add the gradient of a weight to the gradient of its copy, and drop it."""
    if weight.grad is not None:
        master.grad = weight.grad.float() if master.grad is None else master.grad + weight.grad
        weight.grad = None


def make_optimizer(policy: nn.Module, settings: OptimizerConfig) -> Optimizer:
    """AdamW over the trainable weights: the adapter, or all."""
    weights = trainable_parameters(policy)
    options: dict[str, Any] = {
        "lr": settings.lr,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
        "fused": weights[0].is_cuda,  # avoids temporaries as large as the trainable weights
    }
    half = any(weight.dtype in (torch.bfloat16, torch.float16) for weight in weights)
    return MasterAdamW(weights, **options) if half else torch.optim.AdamW(weights, **options)


def learning_rate(config: TrainingConfig, step: int, spent: float = 0.0) -> float:
    """The rate of update `step`, from 1: linear warm-up, then constant, or a linear or cosine decay to zero.

    `spent` is the share of `max_forwards` that is spent: the decay follows it if it is ahead of the updates.
    """
    settings = config.optimizer
    if step <= settings.warmup:
        return settings.lr * (step / settings.warmup)
    done = (step - 1 - settings.warmup) / max(1, config.updates - settings.warmup)
    if spent:
        warm = settings.warmup * spent / (step - 1)  # the share that the warm-up took, at the pace so far
        done = max(done, (min(1.0, spent) - warm) / (1 - warm))
    if settings.schedule == "linear":
        return settings.lr * (1.0 - done)
    if settings.schedule == "cosine":
        return settings.lr * (0.5 * (1 + math.cos(math.pi * done)))
    return settings.lr


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
