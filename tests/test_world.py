"""The enumerable world is itself sound: probabilities add up, gradients are slopes, one joint gives one law."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from branching import visits
from unmask.core.order import ORDERS
from unmask.core.shapes import NEVER
from unmask.core.token_sampling import TokenSampling
from world import (
    NetPolicy,
    TablePolicy,
    World,
    ended,
    enumerated,
    gradient,
    joint_policy,
    laws,
    number,
    reward_of,
    table_of,
)

SHAPES = [
    pytest.param({}, id="one-a-step"),
    pytest.param({"steps": 2}, id="two-a-step"),
    pytest.param({"steps": 4, "block": 2}, id="blocks"),
    pytest.param({"sampling": TokenSampling(0.6, top_k=2)}, id="tempered-top-k"),
    pytest.param({"sampling": TokenSampling(1.4, top_p=0.7)}, id="hot-top-p"),
]


@pytest.mark.parametrize("eos", [-7, 0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", [TablePolicy, NetPolicy])
def test_the_probabilities_of_all_trajectories_sum_to_one(build, order, shape, eos):
    world = World(build(3, 4, seed=1, eos=eos), order, **shape)
    trace, probability_B, step_BT = enumerated(world)
    assert abs(probability_B.sum().item() - 1) < 1e-12
    assert probability_B.min() > 0 and step_BT.max() <= 1 + 1e-12
    written = torch.cat([trace.tokens_BL, trace.step_BL], 1)
    assert len(written.unique(dim=0)) == len(trace)  # each is listed once
    assert all(ended(tuple(row), world.policy) for row in trace.tokens_BL.tolist())
    retired_B = (trace.step_BL == NEVER).any(-1)
    if eos != 0:
        assert not retired_B.any()
    elif order in ("random", "left_to_right"):  # elsewhere the end token may never be kept while something is masked
        assert retired_B.any() or world.steps == 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", [TablePolicy, NetPolicy])
def test_the_gradient_of_the_value_is_its_slope(build, order):
    """Along a random direction, by central differences; ranks and truncation sets do not change on so short a way."""
    world = World(build(3, 3, seed=2, eos=1), order, sampling=TokenSampling(0.8, top_k=2), prompt=(2,))

    def value() -> torch.Tensor:
        trace, probability_B, _ = enumerated(world)
        return (probability_B * reward_of(world, trace)).sum()

    slope = gradient(world.policy, value())
    rng, width = torch.Generator().manual_seed(0), 1e-5
    for _ in range(3):
        way = torch.randn(len(slope), generator=rng, dtype=torch.float64)
        sides = []
        for sign in (1, -1):
            _move(world.policy, sign * width * way)
            sides.append(value().detach())
            _move(world.policy, -sign * width * way)
        assert abs((sides[0] - sides[1]) / (2 * width) - slope @ way) < 1e-7 * slope.norm() * way.norm()


def _move(policy: torch.nn.Module, way: torch.Tensor) -> None:
    with torch.no_grad():
        for p, piece in zip(policy.parameters(), way.split([p.numel() for p in policy.parameters()]), strict=True):
            p += piece.view_as(p)


@pytest.mark.parametrize("order", ["random", "left_to_right", "surest_position"])
def test_conditionals_of_one_joint_sample_that_joint_in_any_order_that_ignores_the_draws(order):
    policy, joint_X = joint_policy(2, 4, seed=5)
    found_X = _texts(World(policy, order))
    assert (found_X - joint_X).abs().max() < 1e-12


def test_low_confidence_does_not_sample_the_joint_even_from_exact_conditionals():
    policy, joint_X = joint_policy(2, 4, seed=5)
    assert (_texts(World(policy, "low_confidence")) - joint_X).abs().sum() / 2 > 0.05


def _texts(world: World) -> torch.Tensor:
    trace, probability_B, _ = enumerated(world)
    words = world.policy.words
    nothing_X = torch.zeros(words**world.length, dtype=torch.float64)
    return nothing_X.index_add(0, number(trace.tokens_BL, words), probability_B.detach())


def test_the_net_couples_every_position_with_every_other_and_with_the_prompt():
    world = World(NetPolicy(2, 3, seed=4), prompt=(0,))
    _, drawn_SCV = laws(world)
    law_LLLCV = drawn_SCV.view(3, 3, 3, 3, 2)
    for place, other in permutations(range(3), 2):
        moved_LLV = (law_LLLCV.select(other, 0) - law_LLLCV.select(other, 1))[:, :, place]
        assert moved_LLV.abs().mean() > 0.05
    _, moved_SCV = laws(replace(world, prompt=(1,)))
    assert (moved_SCV - drawn_SCV).abs().mean() > 0.1


@pytest.mark.parametrize("order", ORDERS)
def test_live_states_are_visited_with_the_probability_of_not_having_retired(order):
    world = World(NetPolicy(3, 3, seed=4, eos=0), order)
    paths = enumerated(world)
    for step, _, mass_S in visits(world, paths):
        retired_B = ((paths.trace.step_BL < step) | (paths.trace.step_BL == NEVER)).all(-1)
        assert abs(mass_S.sum() - paths.probability_B[~retired_B].sum().detach()) < 1e-12


@pytest.mark.parametrize("order", ["low_confidence", "surest_position", "random"])
def test_low_confidence_gives_the_rarer_of_two_behaviours_the_power_of_its_share(order):
    """docs/studies/orders.md: with two texts that differ everywhere it is written only if every position draws it."""
    share, length = 0.4, 4
    joint = torch.full([2] * length, 1e-12, dtype=torch.float64)
    joint[(1,) * length], joint[(0,) * length] = share, 1 - share
    paths = enumerated(World(table_of(joint), order))
    rare = paths.probability_B[(paths.trace.tokens_BL == 1).all(1)].sum().item()
    assert rare == pytest.approx(share**length if order == "low_confidence" else share, rel=1e-6)


@pytest.mark.parametrize("order", ["low_confidence", "surest_position", "random", "left_to_right"])
@pytest.mark.parametrize("length", [2, 3])
def test_low_confidence_draws_an_end_token_again_until_it_is_kept(order, length):
    """docs/studies/orders.md: half of the answers are one token shorter. An end token drawn at the last position (1/2)
    is the likeliest draw and kept; a word drawn there (1/6) is behind the draws elsewhere (1/3) and drawn again."""
    words = end = 3
    joint = torch.full([words + 1] * length, 1e-12, dtype=torch.float64)
    joint[(slice(0, words),) * (length - 1)] = 0
    joint[(slice(0, words),) * (length - 1) + (end,)] = 0.5 / words ** (length - 1)
    joint[(slice(0, words),) * length] = 0.5 / words**length
    paths = enumerated(World(table_of(joint), order))
    ends = paths.probability_B[paths.trace.tokens_BL[:, -1] == end].sum().item()
    assert ends == pytest.approx(1 - 0.5**length if order == "low_confidence" else 0.5, rel=1e-6)
