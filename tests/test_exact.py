"""The sum over orders is the enumeration of every trajectory, for every order, schedule, law and end of a row."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unmask.core.order import ORDERS
from unmask.core.schedule import timestep
from unmask.core.token_sampling import TokenSampling
from unmask.rollout.decoding import Decoding
from unmask.studies.audit.exact import TooManyStates, can_sum_orders, sum_over_orders
from unmask.util.micro_batch import MicroBatch
from world import NetPolicy, Paths, TablePolicy, World, enumerated, gradient, noise, number, relative_error

EVERYTHING = 1e-300


def decoding_of(world: World) -> Decoding:
    steps, block = world.steps or world.length, world.block or world.length
    threshold = world.threshold if world.threshold < math.inf else None
    return Decoding(world.length, steps, block, world.sampling, ORDERS[world.order], threshold=threshold)


def by_canvas(world: World, paths: Paths) -> Tensor:
    """log of the probability of each trajectory's canvas: all trajectories that end with it, added up."""
    code_B = number(paths.trace.tokens_BL[:, -world.length :], world.policy.words + 1)
    _, index_B = code_B.unique(return_inverse=True)
    total = torch.zeros(int(index_B.max()) + 1, dtype=torch.float64).index_add(0, index_B, paths.probability_B)
    return total[index_B].log()


WORLDS = [
    *[World(NetPolicy(2, 4, seed=5), order) for order in ORDERS],
    *[World(NetPolicy(3, 4, seed=6), order, steps=2) for order in ORDERS],
    *[World(NetPolicy(2, 4, seed=7), order, steps=2, block=2) for order in ORDERS],
    World(NetPolicy(2, 4, seed=7), "low_confidence", steps=3, prompt=(1, 0)),
    World(NetPolicy(3, 4, seed=8), "low_confidence", sampling=TokenSampling(temperature=0.6, top_k=2)),
    World(NetPolicy(3, 4, seed=8), "drawn_confidence", sampling=TokenSampling(temperature=1.7, top_p=0.8)),
    World(TablePolicy(2, 4, scale=0.0), "low_confidence", steps=2),  # nothing but ties
    *[World(NetPolicy(3, 4, seed=9, eos=2), order) for order in ("random", "low_confidence", "left_to_right")],
    World(NetPolicy(3, 4, seed=9, eos=0), "low_confidence", steps=2),
    World(NetPolicy(3, 4, seed=9, eos=1), "surest_position", steps=4, block=2),
    World(NetPolicy(3, 4, seed=9, eos=1), "low_confidence", steps=4, block=2),
]


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w.order}-{w.steps}-{w.block}-{w.policy.eos_id}")
def test_the_sum_over_orders_is_the_enumeration(world: World) -> None:
    paths = enumerated(world)
    found = sum_over_orders(world.policy, paths.trace, decoding_of(world), MicroBatch(7), tolerance=EVERYTHING)
    exact_B = by_canvas(world, paths)
    assert found.logp_B.detach() == pytest.approx(exact_B.detach(), abs=1e-10)
    assert found.path_B == pytest.approx(paths.probability_B.detach().log(), abs=1e-10)
    assert found.slack == 0
    weight_B = noise(0, len(paths.trace))
    slope_P, exact_P = (gradient(world.policy, (weight_B * logp_B).sum()) for logp_B in (found.logp_B, exact_B))
    assert relative_error(slope_P, exact_P) < 1e-8


def test_the_canvases_have_probability_one_together() -> None:
    world = World(NetPolicy(3, 4, seed=9, eos=2), "low_confidence", steps=2)
    paths = enumerated(world)
    with torch.no_grad():
        found = sum_over_orders(world.policy, paths.trace, decoding_of(world), MicroBatch(512), tolerance=EVERYTHING)
    canvas_B = number(paths.trace.tokens_BL, 4).tolist()
    assert math.fsum(dict(zip(canvas_B, found.logp_B.exp().tolist(), strict=True)).values()) == pytest.approx(1)


def test_steps_that_commit_nothing_change_nothing() -> None:
    """Dream's schedule of 4 positions in 6 steps has empty ones."""
    world = World(NetPolicy(2, 4, seed=3), "low_confidence")
    sizes = timestep(4, 6, 4)[0]
    assert 0 in sizes
    trace = enumerated(world).trace
    plain = decoding_of(world)
    dense = replace(plain, schedule=lambda *_: [[size for size in sizes if size]])
    gappy = replace(plain, schedule=lambda *_: [sizes])
    when = torch.tensor([step for step, size in enumerate(sizes) for _ in range(size)])
    order_BC = trace.step_BL.argsort(-1).argsort(-1)
    kept = replace(trace, step_BL=when[order_BC], steps=len(sizes))
    index = torch.tensor([sum(1 for size in sizes[:step] if size) for step in when.tolist()])
    close = replace(trace, step_BL=index[order_BC], steps=sum(1 for size in sizes if size))
    one = sum_over_orders(world.policy, kept, gappy, MicroBatch(64), tolerance=EVERYTHING)
    other = sum_over_orders(world.policy, close, dense, MicroBatch(64), tolerance=EVERYTHING)
    assert torch.equal(one.logp_B, other.logp_B) and torch.equal(one.path_B, other.path_B)


@torch.no_grad()
def test_what_is_not_followed_is_bounded() -> None:
    world = World(NetPolicy(2, 4, seed=36, scale=3.0), "low_confidence")
    trace, whole_B = (paths := enumerated(world)).trace, by_canvas(world, paths)
    everything = sum_over_orders(world.policy, trace, decoding_of(world), MicroBatch(512), tolerance=EVERYTHING)
    pruned = sum_over_orders(world.policy, trace, decoding_of(world), MicroBatch(512), tolerance=0.5)
    assert pruned.states < everything.states
    assert (pruned.logp_B <= whole_B + 1e-12).all() and (whole_B <= pruned.logp_B + pruned.slack + 1e-12).all()
    assert float((whole_B - pruned.logp_B).max()) > 1e-3  # something was lost, so the bound was put to the test
    assert (pruned.logp_B >= pruned.path_B).all()


def test_no_more_states_than_allowed() -> None:
    world = World(NetPolicy(2, 4, seed=5))
    trace = enumerated(world).trace
    needed = sum_over_orders(world.policy, trace, decoding_of(world), MicroBatch(512)).states
    assert sum_over_orders(world.policy, trace, decoding_of(world), MicroBatch(512), most=needed).states == needed
    with pytest.raises(TooManyStates):
        sum_over_orders(world.policy, trace, decoding_of(world), MicroBatch(512), most=needed - 1)


def test_what_cannot_be_listed_is_not_tried() -> None:
    assert can_sum_orders(Decoding(64, 64, 32))
    assert not can_sum_orders(Decoding(64, 64, 64))  # sets of 64 positions have no number
    assert not can_sum_orders(Decoding(32, 4, 32))  # ten million sets of 8
    assert not can_sum_orders(Decoding(8, 8, 8, threshold=0.9))  # a step may commit any number
