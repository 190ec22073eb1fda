"""Compiled layers: what enters a ratio is asked by one and the same program, so that a policy that has not moved has
ratio one and no divergence from where it began."""

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unmask.core.options import LoraOptions
from unmask.models import Tiny, TinyShape, tiny_policy
from unmask.models.lora import ReferencePolicy, add_adapter, trainable_parameters

compilable = shutil.which("c++") is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()
pytestmark = [
    pytest.mark.skipif(not compilable, reason="torch.compile needs a C++ compiler and Python.h on a CPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own modules, which compiling imports and calls
]


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """The flags of the CPU say which vector instructions it has: no program has to be compiled to try each of them."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": True}):
        yield


def small(dtype: torch.dtype = torch.float32) -> Tiny:
    """One layer is compiled like four, in a quarter of the time; and two adapters like seven."""
    policy = tiny_policy(TinyShape(layers=1), seed=1).to(dtype)
    add_adapter(policy, LoraOptions(rank=4, targets=["q_proj", "down_proj"]), seed=0)
    return policy


def asked(policy) -> tuple[torch.Tensor, None, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    tokens_SL = torch.randint(4, 60, (3, 24), generator=rng)
    tokens_SL[:, 12:] = policy.mask_id
    return tokens_SL, None, torch.arange(3)[:, None].mul(24).add(torch.arange(12, 24)).flatten()


def test_old_answers_the_reference_and_new_answers_are_bit_for_bit_those_of_the_policy() -> None:
    policy, plain = (small(torch.bfloat16) for _ in range(2))
    reference = ReferencePolicy(policy, alike=True)
    policy.compile_layers()
    new_QV = policy(*asked(policy))
    with torch.no_grad():
        old_QV = policy(*asked(policy))
    assert new_QV.requires_grad and not old_QV.requires_grad
    assert torch.equal(old_QV, new_QV) and torch.equal(reference(*asked(policy)), new_QV)
    with policy.rollout(), torch.no_grad():
        rolled_QV = policy(*asked(policy))
    far = (plain(*asked(plain)) - new_QV).abs().max()
    assert far < 0.5 and (rolled_QV - new_QV).abs().max() < 0.5  # logits in bf16


def test_gradients_are_those_of_the_layers_as_written() -> None:
    policy, found = small(), []
    for compiled, gradient_checkpointing in ((False, False), (True, False), (True, True)):
        policy.gradient_checkpointing = gradient_checkpointing
        if compiled and not policy.compiled:
            policy.compile_layers()
        policy(*asked(policy)).log_softmax(-1)[:, 7].sum().backward()
        found.append(torch.cat([weight.grad.flatten() for weight in trainable_parameters(policy)]))
        policy.zero_grad()
    scale = found[0].abs().max()
    assert all((other - found[0]).abs().max() < 1e-5 * scale for other in found[1:])
