"""Weights sharded over the processes (FSDP2), and gathered for passes without gradient."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from unmask.distributed.processes import Ranks


def shard(policy: nn.Module, layers: Iterable[nn.Module], ranks: Ranks) -> Ranks:
    """Shard the weights over the processes, layer by layer (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    device = next(policy.parameters()).device
    mesh = init_device_mesh(device.type, (ranks.size,))
    precise = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precise)
    # Embedding, norm and head stay gathered from the forward pass to the end of the backward pass.
    fully_shard(policy, mesh=mesh, reshard_after_forward=False, mp_policy=precise)
    for method in ("hidden", "remember", "hidden_window", "hidden_blocks", "hidden_two_streams"):
        register_fsdp_forward_method(policy, method)  # the first one called has to pass the root module
    return replace(ranks, sharded=True)


def whole(value: Tensor) -> Tensor:
    """A sharded tensor put together; any other unchanged. Does not import DTensor, which takes a second."""
    full_tensor = getattr(value, "full_tensor", None)
    return value if full_tensor is None else full_tensor()


def placed_like(value: Tensor, weight: Tensor) -> Tensor:
    """A copy of a whole tensor on the device of a weight, sharded like it."""
    value = value.to(weight.device, copy=True)
    if not hasattr(weight, "placements"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(weight, DTensor)
    return distribute_tensor(value, weight.device_mesh, weight.placements)


@contextmanager
def unsharded(policy: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Gather sharded weights on every process, so that each can run its own passes without gradient."""
    if not ranks.sharded:
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(policy, FSDPModule)
    modules = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    policy.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
        policy.set_reshard_after_forward(True)
        policy.set_reshard_after_forward(False, recurse=False)
