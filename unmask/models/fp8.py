"""Linear layers in fp8 for rollouts: y = a b (x / a)(W / b)^T, with x / a and W / b rounded to e4m3.

Every token of x and every row of W has a scale of its own, its largest magnitude over 448. Products are summed fast, in
fewer bits than fp32 (that adds less than 0.3 % to the error of rounding the factors, which is 3.7 % of a product's
norm), and the output is bf16. Embedding, norms, attention, routers, routed experts and the head keep the model's dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from unmask.models.lora import Adaptable, linear_layers, merged_weight, target_paths

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
"""448."""
SMALLEST = 2.0**-100
"""The least magnitude that a row is scaled by, so that a row of zeros stays zero."""
ALIGNED = 16
"""Inputs and outputs of a layer must be multiples of this, or it keeps the model's dtype."""


def quantized(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3 and the scale of every row, (N, 1) in fp32: x is about their product.

    A value of at least 2^-6 scales changes by at most 1/16 of itself, a smaller one by at most 2^-10 scales.
    """
    most_N1 = torch.linalg.vector_norm(x_ND, torch.inf, -1, keepdim=True).float().clamp(min=SMALLEST)
    return (x_ND * (LARGEST / most_N1)).to(E4M3), most_N1 / LARGEST  # the product is in fp32


def scaled_product(x_ND: Tensor, weight_MD: Tensor, scale_1M: Tensor) -> Tensor:
    """x times a quantized matrix, (N, M) in bf16."""
    rows_ND, scale_N1 = quantized(x_ND)
    return torch._scaled_mm(
        rows_ND, weight_MD.t(), scale_a=scale_N1, scale_b=scale_1M, out_dtype=torch.bfloat16, use_fast_accum=True
    )


class Fp8Linear(nn.Module):
    """A quantized copy of a linear layer, for passes without gradient. Its buffers keep their addresses."""

    weight: Tensor
    scale_1M: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.empty_like(weight, dtype=E4M3, requires_grad=False), persistent=False)
        scale_1M = torch.empty(1, len(weight), dtype=torch.float32, device=weight.device)
        self.scale_1M = nn.Buffer(scale_1M, persistent=False)
        self.register_parameter("bias", None)

    def set_weight(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        rows_MD, scale_M1 = quantized(weight)
        self.weight.copy_(rows_MD)
        self.scale_1M.copy_(scale_M1.t())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y = scaled_product(x.flatten(0, -2), self.weight, self.scale_1M).to(x.dtype).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class Fp8Layers:
    """Quantized copies of the linear layers of a policy's blocks. They are made at the first use and stay in memory, a
    byte for each weight; every later use writes the weights of now into them."""

    def __init__(self, policy: Adaptable) -> None:
        check_fp8(next(iter(policy.lm.parameters())).device)
        self.policy, self.copies = policy, dict[str, Fp8Linear]()
        self.paths = fp8_paths(policy)
        if not self.paths:
            raise ValueError(
                f"rollout.precision: no linear layer of this model has inputs and outputs in multiples of {ALIGNED}, "
                "which fp8 needs; leave it out"
            )

    @torch.no_grad()
    def quantize(self, merge_adapter: bool = True) -> dict[str, nn.Module]:
        """Put the copies into the model, an adapter added to their weights unless `merge_adapter` is false. Returns the
        modules that were there, by path."""
        lm, replaced = self.policy.lm, dict[str, nn.Module]()
        for path in self.paths:
            module: Any = lm.get_submodule(path)
            linear, adapted = getattr(module, "base_layer", module), hasattr(module, "base_layer")
            weight = merged_weight(module) if adapted and merge_adapter else linear.weight
            copy = self.copies.get(path) or self.copies.setdefault(path, Fp8Linear(linear.weight))
            copy.set_weight(weight, linear.bias)
            place = f"{path}.base_layer" if adapted and not merge_adapter else path
            replaced[place] = linear if place != path else module
            lm.set_submodule(place, copy)
        return replaced

    @contextmanager
    def used(self, merge_adapter: bool = True) -> Iterator[None]:
        """Inside it the layers run in fp8."""
        replaced = self.quantize(merge_adapter)
        try:
            yield
        finally:
            for path, module in replaced.items():
                self.policy.lm.set_submodule(path, module)


def fp8_paths(policy: Adaptable) -> list[str]:
    """Paths of the layers that run in fp8: linear layers of the blocks, without routed experts."""
    linears = linear_layers(policy)
    sizes = {path: (linears[path].in_features, linears[path].out_features) for path in target_paths(policy, "all")}
    return [path for path, (inputs, outputs) in sizes.items() if inputs % ALIGNED == 0 and outputs % ALIGNED == 0]


def check_fp8(device: torch.device) -> None:
    """ValueError for a device without row-wise scaled fp8 products."""
    if not has_fp8(device):
        name = str(device)
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            name = f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
        raise ValueError(
            "rollout.precision: fp8 needs an NVIDIA GPU of compute capability 8.9 or more (H100, H200, RTX 4090), "
            f"not {name}; leave it out"
        )


@cache
def has_fp8(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    if device.type != "cpu":
        return False
    try:  # not faster on a CPU, and not in every build; for trying a configuration
        scaled_product(torch.zeros(1, 16), torch.zeros(16, 16, dtype=E4M3), torch.ones(1, 16))
    except (RuntimeError, NotImplementedError):
        return False
    return True
