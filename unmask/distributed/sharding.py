"""Weights spread over the processes (FSDP2), and put together for passes without gradient."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from unmask.distributed.processes import Ranks


def shard(policy: nn.Module, layers: Iterable[nn.Module], ranks: Ranks) -> Ranks:
    """Spread the weights over the processes, layer by layer (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    device = next(policy.parameters()).device
    mesh = init_device_mesh(device.type, (ranks.size,))
    precise = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precise)
    # Embedding, norm and head stay whole from the trunk's pass to the end of the backward pass.
    fully_shard(policy, mesh=mesh, reshard_after_forward=False, mp_policy=precise)
    for way_in in ("hidden", "remember", "hidden_window"):  # whichever comes first has to pass the root
        register_fsdp_forward_method(policy, way_in)
    return replace(ranks, sharded=True)


@contextmanager
def unsharded(policy: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Sharded weights put together on every process, so that each can go its own way without gradient."""
    if not ranks.sharded:
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    root = policy
    assert isinstance(root, FSDPModule)
    for part in parts:
        part.unshard()
    root.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
        root.set_reshard_after_forward(True)
        root.set_reshard_after_forward(False, recurse=False)
