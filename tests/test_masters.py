"""AdamW on half-precision weights moves them as AdamW on exact ones would, rounded."""

import torch
from torch import nn

from unmask.config import parse_config
from unmask.models import tiny_policy
from unmask.training.optim import MasterAdamW, make_optimizer

RATE = 1e-5


def trained(kind: torch.dtype, optimizer_kind, steps: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight vector of about 1, after gradients that are the same in every run."""
    rng = torch.Generator().manual_seed(0)
    weight = nn.Parameter((1 + 0.1 * torch.randn(64, generator=rng)).bfloat16().to(kind))
    start, optimizer = weight.detach().clone(), optimizer_kind([weight], lr=RATE, weight_decay=0.1)
    for _ in range(steps):
        gradient = (1 + 0.2 * torch.randn(64, generator=rng)).to(kind)
        (weight * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return start, weight.detach()


def test_small_steps_add_up_and_plain_adamw_in_bf16_loses_them() -> None:
    start, exact = trained(torch.float32, torch.optim.AdamW)
    _, ours = trained(torch.bfloat16, MasterAdamW)
    _, plain = trained(torch.bfloat16, torch.optim.AdamW)
    assert torch.equal(plain.float(), start)  # 400 steps, and not one has moved it
    assert (start - exact).mean() > 0.5 * RATE * 400
    # The gradients were rounded to bf16, the weights once at the end: half a unit in the last of eight bits.
    assert ((ours.float() - exact).abs() <= exact.abs() * 2**-8).all() and not torch.equal(ours.float(), start)


def test_the_rounded_weights_are_those_of_the_copies_after_every_step() -> None:
    weight = nn.Parameter(torch.randn(32, generator=torch.Generator().manual_seed(1)).bfloat16())
    untouched = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = MasterAdamW([weight, untouched], lr=1e-2)
    twin = nn.Parameter(weight.detach().float())
    by_hand = torch.optim.AdamW([twin], lr=1e-2)
    for number in range(5):
        (weight * (0.5 - number)).sum().backward()
        twin.grad = torch.full_like(twin, 0.5 - number)
        optimizer.step()
        by_hand.step()
        optimizer.zero_grad()
        assert torch.equal(weight.detach(), twin.detach().bfloat16())
    assert torch.equal(untouched.detach(), torch.ones(3).bfloat16())  # it never had a gradient


def test_gradients_of_many_passes_are_added_up_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = MasterAdamW([weight], lr=1e-3)
    for _ in range(1000):
        (weight * 0.001).sum().backward()
    one = float(torch.tensor(0.001).bfloat16())
    (found,) = [p.grad for group in optimizer.param_groups for p in group["params"]]
    assert found.dtype == torch.float32 and torch.allclose(found, torch.full((4,), 1000 * one), rtol=1e-4)
    assert weight.grad is None
    in_bf16 = torch.zeros(4).bfloat16()
    for _ in range(1000):
        in_bf16 += 0.001
    assert float(in_bf16[0]) < 0.6  # what would have come of it


def test_the_trainer_takes_it_for_half_precision_weights_only() -> None:
    config = parse_config({"optimizer": {"lr": 0.5, "schedule": "linear"}, "updates": 4})
    assert isinstance(make_optimizer(tiny_policy().bfloat16(), config.optimizer), MasterAdamW)
    assert isinstance(make_optimizer(tiny_policy(), config.optimizer), torch.optim.AdamW)
