"""Compiled layers: what enters a ratio is asked by one and the same program, so that a policy that has not moved has
ratio one and no divergence from where it began."""

import zlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from unmask.core.options import LoraOptions
from unmask.models import Tiny, TinyShape, tiny_policy
from unmask.models.lora import ReferencePolicy, add_adapter, trainable_parameters

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own modules, which compiling imports and calls


def small() -> Tiny:
    """One layer is compiled like four, in a quarter of the time; and two adapters like seven."""
    policy = tiny_policy(TinyShape(layers=1), seed=1)
    add_adapter(policy, LoraOptions(rank=4, targets=["q_proj", "down_proj"]), seed=0)
    return policy


def asked(policy) -> tuple[Tensor, None, Tensor]:
    rng = torch.Generator().manual_seed(0)
    tokens_SL = torch.randint(4, 60, (3, 24), generator=rng)
    tokens_SL[:, 12:] = policy.mask_id
    return tokens_SL, None, torch.arange(3)[:, None].mul(24).add(torch.arange(12, 24)).flatten()


def rounded(program: GraphModule, _: list[Tensor]) -> Callable[..., list]:
    """A backend under which two programs never round alike: each adds a number of its own to what it returns."""
    error = zlib.crc32(program.code.encode()) / 2**37

    def run(given: list[Tensor]) -> list:
        found = program(*given)
        given.clear()
        return [each + error if isinstance(each, Tensor) and each.is_floating_point() else each for each in found]

    run._boxed_call = True
    return run


def test_old_answers_the_reference_and_new_answers_are_bit_for_bit_those_of_the_policy(monkeypatch) -> None:
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=rounded, inference_compiler=rounded)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    policy = small()
    references = [ReferencePolicy(policy, alike=alike) for alike in (True, False)]
    plain_QV = policy(*asked(policy))
    policy.compile_layers()
    new_QV = policy(*asked(policy))
    with torch.no_grad():
        old_QV = policy(*asked(policy))
        alike_QV, other_QV = (reference(*asked(policy)) for reference in references)
        with policy.rollout():
            rolled_QV = policy(*asked(policy))
    assert new_QV.requires_grad and not old_QV.requires_grad
    assert torch.equal(old_QV, new_QV) and torch.equal(alike_QV, new_QV)
    for elsewhere_QV in (plain_QV, other_QV, rolled_QV):  # by other programs
        assert 0 < (elsewhere_QV - new_QV).abs().max() < 0.5


def test_gradients_are_those_of_the_layers_as_written() -> None:
    from torch._inductor import config

    policy, found = small(), []
    for compiled, gradient_checkpointing in ((False, False), (True, False), (True, True)):
        policy.gradient_checkpointing = gradient_checkpointing
        if compiled and not policy.compiled:
            policy.compile_layers()
        with config.patch(fallback_by_default=True):  # inductor with torch's kernels: no C++ is written and compiled
            policy(*asked(policy)).log_softmax(-1)[:, 7].sum().backward()
        found.append(torch.cat([weight.grad.flatten() for weight in trainable_parameters(policy)]))
        policy.zero_grad()
    scale = found[0].abs().max()
    assert all((other - found[0]).abs().max() < 1e-5 * scale for other in found[1:])
