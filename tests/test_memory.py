"""When memory runs out, or is shared out: fewer canvases at a time, the same rollouts, the same update."""

import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from helpers import Net, assert_close, generator, moved, parts_of, sample
from naive import assert_same
from unmask.core.specs import Branch, Record
from unmask.core.token_sampling import TokenSampling
from unmask.distributed.processes import Ranks
from unmask.methods import agrpo, dispo
from unmask.rollout.sample import Rollouts, row_seeds
from unmask.training.update import LossTerm, accumulate, logprobs, update
from unmask.util.micro_batch import MicroBatch

PROMPTS = [[3, 4], [5], [3, 1, 6, 4], [6, 6], [4, 5, 3], [6] * 6]
SEED_B = row_seeds(3, len(PROMPTS))
GROUP_B = torch.tensor([0, 0, 0, 1, 1, 1])


class Cramped(Net):
    """No room for more than `most` canvases; the backward pass breaks off the `breaks`-th time."""

    most, breaks, backwards, most_held = 10**9, 0, 0, 0

    def __init__(self, **room: int) -> None:
        super().__init__(1, ends=0.5)
        self.held: list[weakref.ref] = []
        for name, value in room.items():
            setattr(self, name, value)

    def hidden(self, tokens_SL: Tensor, *rest) -> Tensor:
        if len(tokens_SL) > self.most:
            raise torch.OutOfMemoryError("forward")
        return _Breaks.apply(super().hidden(tokens_SL, *rest), self)


class _Activations:
    """Stands for what a graph holds until its backward pass is done."""


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, policy: Cramped) -> Tensor:
        ctx.policy, ctx.activations = policy, _Activations()
        policy.held = [ref for ref in policy.held if ref() is not None] + [weakref.ref(ctx.activations)]
        policy.most_held = max(policy.most_held, len(policy.held))
        return x.clone()

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, None]:
        ctx.policy.backwards += 1
        if ctx.policy.backwards == ctx.policy.breaks:
            raise torch.OutOfMemoryError("backward")
        del ctx.activations
        return slope, None


@cache
def parts() -> list[LossTerm]:
    """Two parts, the base's with several states a trace and the branches', of a policy that has moved."""
    method, policy = dispo(replace(agrpo(draws=5), kl=0.1), weight=0.6), Net(1, ends=0.5)
    trace, branches = sample(policy, PROMPTS, SEED_B, length=6, block=3, branch=Branch(2, 0.0), record=method.record)
    rollouts = Rollouts(replace(trace, group_B=GROUP_B), branches)
    return parts_of(method, rollouts, generator(4), moved(policy, 0.2), moved(policy, 0.3, seed=3))


def updated(
    rows: MicroBatch, policy: Cramped, asked: list[LossTerm] | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """How far one step goes, and what it tells."""
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = update(policy, optimizer, parts() if asked is None else asked, rows, max_grad_norm=1e9)
    return [old - p.detach() for p, old in zip(policy.parameters(), before, strict=True)], metrics


def assert_same_update(found: tuple, expected: tuple) -> None:
    assert max(slope.abs().max() for slope in expected[0]) > 1e-3
    for a, b in zip(found[0], expected[0], strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()
    assert found[1].keys() == expected[1].keys()
    assert_close(tuple(found[1].values()), tuple(expected[1].values()), 1e-12)


FORWARD = [(64, 3, 2, 5), (12, 3, 3, 2), (5, 1, 1, 2), (4, 4, 4, 0)]
BACKWARD = [(64, 1, 32), (64, 2, 32), (4, 3, 2), (5, 6, 2), (1, 40, 1)]


@pytest.mark.parametrize(("most", "room", "left", "halved"), FORWARD)
def test_an_update_in_less_memory_is_the_same_update(most, room, left, halved):
    rows = MicroBatch(most)
    assert_same_update(updated(rows, Cramped(most=room)), updated(MicroBatch(64), Cramped()))
    assert (rows.size, rows.halvings) == (left, halved)


@pytest.mark.parametrize(("most", "breaks", "left"), BACKWARD)
def test_a_backward_pass_that_breaks_off_is_made_again_from_the_start(most, breaks, left):
    """What had been added by then is thrown away, also by another part; and its graph before the next is made."""
    rows, policy = MicroBatch(most), Cramped(breaks=breaks)
    assert_same_update(updated(rows, policy), updated(MicroBatch(64), Cramped()))
    assert (rows.size, rows.halvings) == (left, int(left < most))
    assert policy.most_held == 1 and (policy.backwards > breaks) == (left < most)


@pytest.mark.parametrize("most", [1, 2, 12, 64])
def test_answers_in_less_memory_are_the_same(most):
    probes, rows = parts()[0].probes, MicroBatch(most)
    assert_close(logprobs(Cramped(most=1), probes, rows), logprobs(Cramped(), probes, MicroBatch(64)), 1e-12)
    assert rows.size == 1


def test_when_not_even_one_canvas_fits_the_error_is_the_devices():
    for room, where in (({"most": 0}, "forward"), ({"breaks": 1}, "backward")):
        rows = MicroBatch(1 if "breaks" in room else 6)
        with pytest.raises(torch.OutOfMemoryError, match=where):
            updated(rows, Cramped(**room))
        assert rows.size == 1
    with pytest.raises(torch.OutOfMemoryError, match="forward"):
        sample(Cramped(most=0), PROMPTS, SEED_B, group_B=SEED_B, micro_batch=MicroBatch(6), length=4)


ROLLOUT = {"length": 8, "steps": 6, "block": 4, "sampling": TokenSampling(1.2, top_k=5, top_p=0.9)}
ROLLOUT |= {"record": Record(top=4, entropy=True), "branch": Branch(3, 1.0)}


@pytest.mark.parametrize(("most", "room", "left", "halved"), [(100, 2, 1, 2), (6, 4, 3, 1), (4, 1, 1, 2)])
def test_rollouts_in_less_memory_are_the_same_rollouts(most, room, left, halved):
    policy, rows = Cramped(), MicroBatch(most)
    whole = sample(policy, PROMPTS, SEED_B, group_B=GROUP_B, **ROLLOUT)
    policy.most = room
    assert_same(sample(policy, PROMPTS, SEED_B, group_B=GROUP_B, micro_batch=rows, **ROLLOUT), whole)
    assert (rows.size, rows.halvings) == (left, halved)
    assert len(set(whole.branches.group_B.tolist())) > 3


class Apart(Ranks):
    """A process whose messages nobody answers."""

    def sum(self, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize("rows", [(64, 64, 64), (2, 64, 5), (64, 1, 3)])
def test_the_shares_of_several_processes_add_up_however_little_memory_one_of_them_has(rows):
    for part in parts():
        whole, shared = Cramped(), Cramped()
        accumulate(whole, part, 64)
        for rank, most in enumerate(rows):
            accumulate(shared, part, most, Apart(rank, len(rows)))
        for a, b in zip(shared.parameters(), whole.parameters(), strict=True):
            assert (a.grad - b.grad).norm() <= 1e-12 * b.grad.norm()


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_traces_that_learn_nothing_are_not_gone_back_through_and_hold_no_memory(rows):
    part = replace(parts()[0], kl=0.0, reference_NL=None, old_NL=None, skip_zero_advantage=True)
    part = replace(part, advantage_B=part.advantage_B * torch.tensor([0.0, 0, 1, 0, 0, 0]))
    policy, every = Cramped(), replace(part, skip_zero_advantage=False)
    assert_same_update(updated(MicroBatch(rows), policy, [part]), updated(MicroBatch(64), Cramped(), [every]))
    states = len(part.probes.trace_N[part.probes.trace_N == 2])
    assert policy.backwards == -(-states // rows) and policy.most_held == 1
