"""Linear layers that read the same input, multiplied as one product: one large GEMM is faster than a few small ones.

The weights of such layers are put side by side in memory, each still a parameter of its own. The matrix of all of them
is then a view of that memory. Whether there is one is read from the addresses of the weights, so it cannot be outdated.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.models.llama import Linear


class Matrix(NamedTuple):
    """The weights and biases of several layers, one layer after the other."""

    weight_MD: Tensor
    bias_M: Tensor | None


class Joined(NamedTuple):
    """The joint matrices of a decoder layer. None: multiply one by one."""

    query_key_value: Matrix | None = None
    gate_up: Matrix | None = None


APART = Joined()


def lay_side_by_side(linears: Sequence[Any]) -> None:
    """Move the weights of these layers to one place in memory. Nothing is done if they cannot be one product."""
    if not _alike(linears) or joined(linears) is not None:
        return
    for name in ("weight", "bias"):
        tensors = [getattr(each, name).data for each in linears if getattr(each, name) is not None]
        if tensors and not tensors[0].is_meta:
            for each, part in zip(linears, torch.cat(tensors).split([len(tensor) for tensor in tensors]), strict=True):
                getattr(each, name).data = part


def joined(linears: Sequence[Any]) -> Matrix | None:
    """The matrix of these layers, a view of their weights; None if they do not lie side by side."""
    if not _alike(linears):
        return None
    weight_MD = _whole([each.weight for each in linears])
    bias_M = None if linears[0].bias is None else _whole([each.bias for each in linears])
    if weight_MD is None or (bias_M is None) != (linears[0].bias is None):
        return None
    return Matrix(weight_MD, bias_M)


def products(x: Tensor, matrix: Matrix, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    """What each of these layers returns, from one product with their matrix."""
    return F.linear(x, *matrix).split([each.out_features for each in linears], dim=-1)


def lay_out(layer: Any) -> None:
    """Lay the weights of a decoder layer side by side, those under an adapter too."""
    for linears in (_attention_inputs(layer), _feed_forward_inputs(layer)):
        lay_side_by_side([getattr(each, "base_layer", each) for each in linears])


def joined_layer(layer: Any) -> Joined:
    """The joint matrices of a decoder layer as it is now."""
    gate_up = joined(_feed_forward_inputs(layer)) if _unhooked(layer.mlp) else None
    return Joined(joined(_attention_inputs(layer)), gate_up)


def _attention_inputs(layer: Any) -> list[Any]:
    return [getattr(layer.self_attn, name, None) for name in ("q_proj", "k_proj", "v_proj")]


def _feed_forward_inputs(layer: Any) -> list[Any]:
    return [getattr(layer.mlp, name, None) for name in ("gate_proj", "up_proj")]


def _alike(linears: Sequence[Any]) -> bool:
    """Whether they are plain linear layers, no adapters or fp8, with weights of one kind that are not sharded."""
    for each in linears:
        if type(each) not in (nn.Linear, Linear) or type(each.weight) is not nn.Parameter or not _unhooked(each):
            return False
    kinds = {
        (each.in_features, *[None if w is None else (w.dtype, w.device) for w in (each.weight, each.bias)])
        for each in linears
    }
    return len(kinds) == 1


def _unhooked(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that these are parts of, in this order and without gaps."""
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage()
    for part in parts:
        here = part.data_ptr() == end and part.untyped_storage().data_ptr() == storage.data_ptr()
        if not here or not part.is_contiguous():
            return None
        end += part.nbytes
    shape, stride = (sum(map(len, parts)), *first.shape[1:]), (*first.shape[1:], 1)
    # A parameter, so that the compiler takes its shape as fixed.
    return nn.Parameter(first.data.as_strided(shape, stride), requires_grad=False)
