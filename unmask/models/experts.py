"""Mixtures of experts: routers, and the matrices of all experts of a layer as one grouped product.

The matrices of a layer's experts are stacks, (experts, outputs, inputs). Sharding splits a stack by experts; checkpoint
files have one matrix per expert (checkpoint.py). Shapes: T tokens, K experts of a token, R = T K rows, E experts,
D channels.
"""

from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.models.llama import FeedForward

ALIGNED = 16  # bytes: rows of operands of torch's grouped product start at multiples


# --- routers ------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """Chooses the experts of every token, and their weights in the sum.

    expert_bias   from a checkpoint, never trained: load balancing moved it during pre-training
    """

    expert_bias: Tensor | None

    def __init__(self, width: int, experts: int, chosen: int, bias: bool) -> None:
        super().__init__()
        self.chosen = chosen
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.expert_bias = nn.Buffer(torch.zeros(experts)) if bias else None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts, each (T, K)."""
        raise NotImplementedError


class SoftmaxRouter(Router):
    """The softmax over all experts (Qwen3-MoE, LLaDA-MoE). A bias is added to it and stays in the weights.

    normalised   the weights of the chosen experts are divided by their sum
    """

    def __init__(self, width: int, experts: int, chosen: int, bias: bool, normalised: bool) -> None:
        super().__init__(width, experts, chosen, bias)
        self.normalised = normalised

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        score_TE = F.linear(x_TD, self.weight)
        score_TE = score_TE.softmax(-1, dtype=_wide(score_TE))
        if self.expert_bias is not None:
            score_TE = score_TE + self.expert_bias
        weight_TK, expert_TK = score_TE.topk(self.chosen)
        if self.normalised:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return weight_TK.to(x_TD.dtype), expert_TK


class SigmoidRouter(Router):
    """The sigmoid of every expert, in fp32 (LLaDA2). The bias decides which experts are chosen, not their weights.

    Experts come in `groups`. Only the `kept` groups with the largest sums of their two best scores can be chosen from.
    scaling   of the weights, which sum to 1 before it unless only one expert is chosen
    """

    def __init__(self, width: int, experts: int, chosen: int, groups: int, kept: int, scaling: float) -> None:
        super().__init__(width, experts, chosen, bias=True)
        self.groups, self.kept, self.scaling = groups, kept, scaling

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        wide = _wide(x_TD)
        score_TE = F.linear(x_TD.to(wide), self.weight.to(wide)).sigmoid()
        assert self.expert_bias is not None
        with torch.no_grad():
            biased_TE = score_TE + self.expert_bias
            group_TGM = biased_TE.unflatten(-1, (self.groups, -1))
            best_TG = group_TGM.topk(2).values.sum(-1)
            dropped_TG = torch.ones_like(best_TG, dtype=torch.bool)
            dropped_TG.scatter_(-1, best_TG.topk(self.kept).indices, False)
            expert_TK = group_TGM.masked_fill(dropped_TG[..., None], -torch.inf).flatten(-2).topk(self.chosen).indices
        weight_TK = score_TE.gather(-1, expert_TK)
        if self.chosen > 1:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return weight_TK * self.scaling, expert_TK


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# --- grouped products ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A linear layer of every expert: a stack of matrices, (experts, outputs, inputs)."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x_RD: Tensor, end_E: Tensor) -> Tensor:
        return grouped_linear(x_RD, self.weight, end_E)


def grouped_linear(x_RD: Tensor, weight_EOD: Tensor, end_E: Tensor) -> Tensor:
    """The rows up to end_E[0] times the first matrix, those up to end_E[1] times the second, and so on."""
    if has_grouped_kernel(x_RD, weight_EOD):
        return F.grouped_mm(x_RD, weight_EOD.transpose(1, 2), offs=end_E)
    return looped_linear(x_RD, weight_EOD, end_E)


def looped_linear(x_RD: Tensor, weight_EOD: Tensor, end_E: Tensor) -> Tensor:
    """`grouped_linear` as a loop over the experts."""
    weights = weight_EOD.unbind()  # one gradient for the stack; an index would write one for each expert
    parts = [] if len(x_RD) else [F.linear(x_RD, weights[0])]
    for number, (start, end) in enumerate(pairwise([0, *end_E.tolist()])):
        if start < end:
            parts.append(F.linear(x_RD[start:end], weights[number]))
    return torch.cat(parts)


def has_grouped_kernel(x_RD: Tensor, weight_EOD: Tensor) -> bool:
    """Whether torch's grouped product takes these operands."""
    if x_RD.device.type == "cuda":
        known = x_RD.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x_RD.device) >= (8, 0)
    else:
        known = x_RD.device.type == "cpu" and x_RD.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and all(size * x_RD.element_size() % ALIGNED == 0 for size in weight_EOD.shape[1:])


def product_waits(x_RD: Tensor, weight_EOD: Tensor) -> bool:
    """Whether a product of these operands waits for the device to learn how many rows each expert has: a loop does, and
    torch's grouped product on GPUs for which it has no kernel (other than compute capability 9 and 10)."""
    if x_RD.device.type == "cuda" and torch.cuda.get_device_capability(x_RD.device)[0] not in (9, 10):
        return True
    return not has_grouped_kernel(x_RD, weight_EOD)


# --- the layer ----------------------------------------------------------------------------------------------


class ExpertFeedForward(nn.Module):
    """SwiGLU of every expert."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = Experts(experts, width, hidden)
        self.up_proj = Experts(experts, width, hidden)
        self.down_proj = Experts(experts, hidden, width)
        self.experts = experts

    def forward(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """The weighted sum of the outputs of every token's experts."""
        expert_TK, place_TK = expert_TK.sort(dim=-1)
        weight_TK = weight_TK.gather(-1, place_TK)
        expert_R, order_R = expert_TK.flatten().sort(stable=True)
        back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        number_E = torch.arange(self.experts, device=expert_R.device)
        end_E = torch.searchsorted(expert_R, number_E, right=True, out_int32=True)
        x_RD = _Rows.apply(x_TD, order_R // expert_TK.shape[1], back_R)
        y_RD = self.down_proj(F.silu(self.gate_proj(x_RD, end_E)) * self.up_proj(x_RD, end_E), end_E)
        y_TKD = _Rows.apply(y_RD, back_R, order_R).unflatten(0, expert_TK.shape) * weight_TK[..., None]
        if y_TKD.dtype.itemsize == 2:  # rounded after every expert, in the order of the experts, as the originals do
            return reduce(torch.add, y_TKD.unbind(1))
        return y_TKD.sum(1).to(x_TD.dtype)


class _Rows(torch.autograd.Function):
    """x[row_R]; its gradient is a gather and a sum, which is the same in every run. That of an index is not on a GPU.

    back_R   the position in row_R of the first use of x[0], of its second use, ..., of the first use of x[1], and so on
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        ctx.rows = len(x)
        return x[row_R]

    @staticmethod
    def backward(ctx: Any, *slope_RD: Tensor) -> tuple[Tensor, None, None]:
        (back_R,) = ctx.saved_tensors
        uses = len(back_R) // max(1, ctx.rows)
        return slope_RD[0][back_R].unflatten(0, (ctx.rows, uses)).sum(1), None, None


class Mixture(nn.Module):
    """A feed-forward layer of routed experts, and `shared` channels of an expert that every token uses."""

    def __init__(self, gate: Router, hidden: int, shared: int) -> None:
        super().__init__()
        experts, width = gate.weight.shape
        self.gate = gate
        self.experts = ExpertFeedForward(experts, width, hidden)
        self.shared_experts = FeedForward(width, shared) if shared else None

    @property
    def used(self) -> float:
        """The share of the routed experts' weights that a token uses."""
        return self.gate.chosen / self.experts.experts

    def forward(self, x_SWD: Tensor) -> Tensor:
        x_TD = x_SWD.flatten(0, 1)
        weight_TK, expert_TK = self.gate(x_TD)
        y_SWD = self.experts(x_TD, weight_TK, expert_TK).view_as(x_SWD)
        return y_SWD if self.shared_experts is None else y_SWD + self.shared_experts(x_SWD)


def add_mixtures(lm: Any, layers: list[bool], hidden: int, shared: int, router: Callable[[], Router]) -> None:
    """Replace the feed-forward half of the chosen layers by mixtures."""
    for layer, mixed in zip(lm.model.layers, layers, strict=True):
        if mixed:
            layer.mlp = Mixture(router(), hidden, shared).eval()
