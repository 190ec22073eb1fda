"""Low-confidence decoding draws everywhere and keeps the surest draws: the closed form of `ask`, against all drafts.

The truth is the enumeration of drafts in world.py; the formula under test (docs/estimators.md) is not used there.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import lcm

import pytest
import torch
from torch import Tensor

from unmask.core.advantage import group_mean
from unmask.core.answers import FLOOR
from unmask.core.method import uniform_credit
from unmask.core.objective import step_clip
from unmask.core.probes import ask, every_step, visited
from unmask.core.shapes import NEVER
from unmask.core.steps import uniform_steps, weighted_steps
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import select_traces
from unmask.methods.agrpo import agrpo
from unmask.training.update import LossTerm
from world import (
    NetPolicy,
    Paths,
    TablePolicy,
    World,
    cosine,
    enumerated,
    expected_advantage,
    gradient,
    grouped,
    number,
    relative_error,
    reward_of,
    step_of,
    traced,
    value_gradient,
)


def world_of(policy, **shape) -> World:
    return World(policy, "low_confidence", **shape)


def tied(seed: int, words: int = 3, length: int = 3) -> TablePolicy:
    """Logits on a grid of two values: words tie within a position and across positions."""
    policy = TablePolicy(words, length, seed)
    with torch.no_grad():
        policy.table.copy_((policy.table > 0.3).double())
    return policy


def certain(seed: int) -> TablePolicy:
    """Probabilities of exactly 1 at some positions of some states, as in the tails of end tokens."""
    policy = TablePolicy(2, 3, seed)
    with torch.no_grad():
        policy.table.masked_fill_(policy.table > 1.0, 900.0)
    return policy


def repeated() -> TablePolicy:
    """The same law at every position of every state: kept draws tie with each other and with what was passed."""
    policy = TablePolicy(2, 4)
    with torch.no_grad():
        policy.table.copy_(torch.tensor([0.0, 1.0, 0.0]).double().expand_as(policy.table))
    return policy


WORLDS = {
    "one a step": world_of(NetPolicy(3, 3, seed=1)),
    "two a step": world_of(NetPolicy(2, 4, seed=2), steps=2),
    "a remainder": world_of(NetPolicy(3, 3, seed=2), steps=2),
    "blocks": world_of(NetPolicy(2, 4, seed=3), steps=4, block=2),
    "cold": world_of(NetPolicy(3, 3, seed=4), sampling=TokenSampling(temperature=0.6)),
    "hot, two a step": world_of(NetPolicy(2, 4, seed=4), steps=2, sampling=TokenSampling(temperature=2.0)),
    "top k": world_of(NetPolicy(3, 3, seed=5), sampling=TokenSampling(temperature=1.3, top_k=2)),
    "top p, blocks": world_of(NetPolicy(3, 4, seed=6), steps=4, block=2, sampling=TokenSampling(top_p=0.8)),
    "end tokens": world_of(NetPolicy(3, 3, seed=7, eos=0)),
    "end tokens, blocks": world_of(
        NetPolicy(2, 4, seed=18, eos=1), steps=4, block=2, sampling=TokenSampling(temperature=0.7)
    ),
    "a table": world_of(TablePolicy(3, 3, seed=9)),
    "ties": world_of(tied(1)),
    "ties, two a step, cold": world_of(tied(2, words=2, length=4), steps=2, sampling=TokenSampling(temperature=0.5)),
    "ties, top k": world_of(tied(3), sampling=TokenSampling(top_k=2)),
    "ties all over, two a step": world_of(repeated(), steps=2, sampling=TokenSampling(temperature=2.0)),
    "all alike": world_of(TablePolicy(2, 4, scale=0.0), steps=2),
    "certainties": world_of(certain(4)),
}
CASES = [pytest.param(world, id=name) for name, world in WORLDS.items()]


def step_likelihood(world: World, trace, choice: bool = True) -> Tensor:
    """log-probability of every step of every trace by `ask`, (B, T); 0 where a retired row did nothing."""
    probes = every_step(trace, torch.Generator(), choice)
    row_N = ask(world.policy, probes).sum(-1)
    live_BT = (trace.step_BL[:, None] == torch.arange(trace.steps)[:, None]).any(-1)
    return torch.zeros(live_BT.shape, dtype=torch.float64).masked_scatter(live_BT, row_N)


@pytest.mark.parametrize("world", CASES)
def test_the_closed_form_of_a_step_is_the_sum_over_all_its_drafts(world):
    paths = enumerated(world)
    found_BT = step_likelihood(world, paths.trace)
    assert (found_BT - paths.step_BT.log()).abs().max() < 1e-10
    assert abs(found_BT.sum(-1).exp().sum().item() - 1) < 1e-10


@pytest.mark.parametrize("world", CASES)
def test_the_outcomes_of_every_visited_state_sum_to_one(world):
    trace = enumerated(world).trace
    chance_BT = step_likelihood(world, trace).exp().detach()
    for step in range(trace.steps):
        live_B = ((trace.step_BL >= step) & (trace.step_BL != NEVER)).any(-1)
        before, after = (
            trace.tokens_BL.masked_fill(trace.step_BL >= t, trace.mask_id)[live_B] for t in (step, step + 1)
        )
        moves, first = torch.cat([before, after], 1).unique(dim=0, return_inverse=True)
        chance_O = torch.zeros(len(moves), dtype=torch.float64).scatter(0, first, chance_BT[live_B, step])
        states, index_O = moves[:, : trace.tokens_BL.shape[1]].unique(dim=0, return_inverse=True)
        total_S = torch.zeros(len(states), dtype=torch.float64).index_add(0, index_O, chance_O)
        assert (total_S - 1).abs().max() < 1e-10


def test_the_worlds_with_ties_do_tie_and_the_tie_rule_decides():
    """Without the rule the formula is wrong there: mirrored ties (to the right) give other probabilities."""
    world = WORLDS["all alike"]
    paths = enumerated(world)
    first_B = (paths.trace.step_BL == 0).nonzero()[:, 1].view(-1, 2)
    assert (first_B == torch.tensor([0, 1])).all()  # every draw scores the same, so the left two are kept
    mirrored = replace(paths.trace, step_BL=1 - paths.trace.step_BL)
    assert (step_likelihood(world, mirrored)[:, 0] < FLOOR).all()


@pytest.mark.parametrize("world", CASES)
def test_the_gradient_of_the_closed_form_is_that_of_the_enumeration(world):
    paths = enumerated(world)
    weight_BT = torch.sin(torch.arange(paths.step_BT.numel(), dtype=torch.float64)).view_as(paths.step_BT)
    truth = gradient(world.policy, (weight_BT * paths.step_BT.log()).sum())
    found = gradient(world.policy, (weight_BT * step_likelihood(world, paths.trace)).sum())
    assert (found - truth).norm() < 1e-9 * (1 + truth.norm())


def expected_update(world: World, paths: Paths, choice: bool) -> Tensor:
    """AGRPO on all pairs of trajectories, both sampled steps integrated: equal cells, and no step changes in one."""
    trace, probability_B = paths.trace, paths.probability_B.detach()
    method, cells = agrpo(draws=2, spread=False, choice=choice), lcm(*(uniform_steps(trace).sum(-1).long().tolist()))
    advantage_B = expected_advantage(method.advantage, reward_of(world, trace), probability_B)
    advantage_B = advantage_B * probability_B * len(trace) / cells**2
    parts = []
    for first, second in product(range(cells), repeat=2):
        level_BK = (torch.tensor([[first, second]], dtype=torch.float64) + 0.5) / cells
        probes = visited(trace, *weighted_steps(trace, level_BK.repeat(len(trace), 1), uniform_steps), choice)
        parts.append(LossTerm(probes, advantage_B, uniform_credit(trace), method.objective))
    return step_of(world.policy, parts)


@pytest.mark.parametrize("world", CASES)
def test_agrpo_with_the_choice_of_positions_is_exact(world):
    paths = enumerated(world)
    truth = value_gradient(world, paths) / (2 * paths.trace.steps)
    assert relative_error(expected_update(world, paths, choice=True), truth) < 1e-9


BLIND = {  # without the choice term: relative error, cosine
    "one a step": (0.456197219554, 0.895163221753),
    "two a step": (0.674301348589, 0.744738378233),
    "blocks": (0.075570974606, 0.997647062379),
    "hot, two a step": (0.301031737613, 0.953829443230),
    "top k": (0.440004705169, 0.901643843441),
    "end tokens": (0.420325504154, 0.909390684864),
    "a table": (0.379754787055, 0.930267160529),
}


@pytest.mark.parametrize("name", BLIND)
def test_agrpo_without_the_choice_of_positions_is_off_by_this_much(name):
    """Frozen from this enumeration: what every published trajectory estimator leaves out."""
    world = WORLDS[name]
    paths = enumerated(world)
    truth = value_gradient(world, paths) / (2 * paths.trace.steps)
    found = expected_update(world, paths, choice=False)
    error, angle = relative_error(found, truth), cosine(found, truth)
    print(f"\n{name}: without the choice of positions, relative error {error:.3f}, cosine {angle:.3f}")
    assert (error, angle) == pytest.approx(BLIND[name], abs=1e-9)
    assert error > 0.05


def test_groups_enumerated_whole_through_the_method_give_the_exact_gradient():
    world = world_of(NetPolicy(2, 3, seed=3))
    paths = enumerated(world)
    groups, weight_B = grouped(paths.trace, paths.probability_B, 2)
    advantage_B = group_mean(reward_of(world, groups), groups.group_B) * weight_B
    probes = every_step(groups, torch.Generator(), choice=True)
    found = step_of(world.policy, [LossTerm(probes, advantage_B, uniform_credit(groups), step_clip)])
    assert relative_error(found, value_gradient(world, paths) / 2) < 1e-9


# The likelihood of a text


def moves(filled: frozenset[int], world: World) -> Iterator[tuple[frozenset[int], int]]:
    """The sets of positions that can be filled next, and the step that does it."""
    done = 0
    for step, (block, size) in enumerate(world.commits):
        if done == len(filled):
            inside = range(block * world.width, (block + 1) * world.width)
            yield from ((frozenset(k), step) for k in combinations([i for i in inside if i not in filled], size))
        done += size


def likelihood(world: World, text: tuple[int, ...]) -> Tensor:
    """pi(text | prompt) by a dynamic programme over the subsets of filled positions, each move by `ask`."""
    reached = {frozenset(): torch.ones((), dtype=torch.float64)}
    everything = frozenset(range(world.length))
    while everything not in reached:
        ways = [(filled, new, step) for filled in reached for new, step in moves(filled, world)]
        when_BC = torch.tensor(
            [[0 if i in filled else 1 if i in new else 2 for i in range(world.length)] for filled, new, _ in ways]
        )
        trace = traced(world, torch.tensor([text]).expand(len(ways), -1), when_BC)
        one_B1 = torch.ones(len(ways), 1, dtype=torch.long)
        probes = visited(trace, one_B1, one_B1.double(), choice=world.order == "low_confidence")
        chance_B = ask(world.policy, probes).sum(-1).exp()
        grown: dict[frozenset[int], Tensor] = {}
        for (filled, new, _), chance in zip(ways, chance_B, strict=True):
            share = reached[filled] * chance
            if world.order == "random":
                share = share / sum(1 for _ in moves(filled, world))
            grown[filled | new] = grown.get(filled | new, 0) + share
        reached = grown
    return reached[everything]


@pytest.mark.parametrize(
    "world",
    [
        world_of(NetPolicy(2, 4, seed=1)),
        world_of(NetPolicy(2, 4, seed=2), steps=2, sampling=TokenSampling(temperature=0.7)),
        world_of(NetPolicy(3, 4, seed=3), steps=2, block=2),
        world_of(tied(2, words=2, length=4)),
        World(NetPolicy(2, 4, seed=1)),
        World(NetPolicy(2, 4, seed=1), steps=2),
    ],
    ids=["one", "two, cold", "blocks", "ties", "random", "random, two"],
)
def test_the_likelihood_of_a_text_by_subsets_is_the_sum_over_its_trajectories(world):
    paths = enumerated(world)
    text_B = number(paths.trace.tokens_BL, world.policy.words)
    total_X = torch.zeros(world.policy.words**world.length, dtype=torch.float64)
    total_X = total_X.index_add(0, text_B, paths.probability_B.detach())
    texts = list(product(range(world.policy.words), repeat=world.length))
    for x in range(0, len(texts), max(1, len(texts) // 16)):
        assert abs(likelihood(world, texts[x]).item() - total_X[x]) < 1e-12


def test_a_choice_that_the_asked_policy_could_not_make_is_floored_and_its_gradient_is_finite():
    """Off-policy a rank can swap: then every draw at the passed position outranks the one that was kept."""
    world = world_of(TablePolicy(2, 2, seed=0))
    trace = select_traces(enumerated(world).trace, torch.tensor([0]))
    kept, passed = trace.step_BL[0].argsort().tolist()
    with torch.no_grad():
        world.policy.table[-1, passed] = 0.0  # both words have 1/2
        world.policy.table[-1, kept] = torch.nn.functional.one_hot(1 - trace.tokens_BL[0, kept], 3).double()
    answer_NL = ask(world.policy, every_step(trace, torch.Generator(), choice=True))
    assert answer_NL[0, passed].item() == FLOOR
    slope_SCV = gradient(world.policy, answer_NL.sum()).view_as(world.policy.table)
    assert slope_SCV.isfinite().all() and (slope_SCV[-1, passed] == 0).all() and (slope_SCV[-1, kept] != 0).any()
