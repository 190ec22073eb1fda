"""AGRPO's expected on-policy update is the exact policy gradient of the denoising process, and what breaks that.

The expectation is over trajectories (enumerated), over the other traces of the group (enumerated), and over the
sampled steps (the levels are cut where the step changes, and every cell is integrated). Everything else is the
library's own code. With a group mean over G traces and sampled steps it must be (G - 1) / (G T) grad J.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from unmask.core.advantage import every_sample, group_mean, leave_one_out
from unmask.core.method import uniform_credit
from unmask.core.objective import step_clip, token_clip, trace_sum
from unmask.core.probes import Probes, every_step, fully_masked, left_to_right_views, visited
from unmask.core.steps import (
    STEP_DISTRIBUTIONS,
    StepDistribution,
    entropy_steps,
    last_word,
    uniform_steps,
    weighted_steps,
)
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, select_traces
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
    relative_error,
    reward_of,
    step_of,
    value_gradient,
)

TOLERANCE = 1e-9
TOKENS = partial(token_clip, normaliser=trace_sum)

WORLDS = {
    "one a step": World(NetPolicy(3, 3, seed=1)),
    "two a step": World(NetPolicy(2, 4, seed=2), steps=2),
    "a remainder": World(NetPolicy(2, 3, seed=2), steps=2),
    "blocks": World(NetPolicy(2, 4, seed=3), steps=4, block=2),
    "tempered": World(NetPolicy(2, 3, seed=4), sampling=TokenSampling(temperature=0.6)),
    "top k": World(NetPolicy(3, 3, seed=5), sampling=TokenSampling(temperature=1.3, top_k=2)),
    "top p, blocks, two a step": World(NetPolicy(3, 4, seed=6), steps=2, block=2, sampling=TokenSampling(top_p=0.8)),
    "end tokens": World(NetPolicy(3, 3, seed=7, eos=0)),
    "end tokens, blocks": World(
        NetPolicy(2, 4, seed=18, eos=1), steps=4, block=2, sampling=TokenSampling(temperature=0.7)
    ),
    "a table": World(TablePolicy(3, 3, seed=9)),
    "a prompt": World(NetPolicy(2, 3, seed=10), prompt=(1, 0)),
}
ORDERS = ("random", "left_to_right", "surest_position")
CASES = [pytest.param(replace(w, order=o), id=f"{o}, {name}") for o in ORDERS for name, w in WORLDS.items()]
EMPTY = {  # worlds in which rows leave steps empty: by a threshold, by ending, or both
    "end tokens": WORLDS["end tokens"],
    "a threshold": World(NetPolicy(3, 3, seed=20), "surest_position", threshold=0.5),
    "a threshold, blocks": World(NetPolicy(2, 4, seed=15), "surest_position", block=2, threshold=0.7),
    "a threshold, end tokens": World(NetPolicy(3, 4, seed=13, eos=0), "surest_position", block=2, threshold=0.5),
}
CASES += [pytest.param(world, id=name) for name, world in EMPTY.items() if name not in WORLDS]


def level_cells(mass_BT: Tensor, draws: int, spread: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Every cell of the levels on which no step changes: a point in it (B, K), and its probability (B,)."""
    edge_BT = (mass_BT / mass_BT.sum(-1, keepdim=True)).cumsum(-1)
    start_BT = torch.cat([torch.zeros_like(edge_BT[:, :1]), edge_BT[:, :-1]], 1)
    for steps in product(range(mass_BT.shape[1]), repeat=draws):
        level, chance_B = [], torch.ones(len(mass_BT), dtype=torch.float64)
        for j, t in enumerate(steps):
            low, high = (j / draws, (j + 1) / draws) if spread else (0.0, 1.0)
            left_B, right_B = start_BT[:, t].clamp(low, high), edge_BT[:, t].clamp(low, high)
            level.append((left_B + right_B) / 2)
            chance_B = chance_B * (right_B - left_B) / (high - low)
        yield torch.stack(level, 1).clamp(max=1 - 1e-12), chance_B


def expected_update(world: World, paths: Paths, probed, objective=TOKENS, advantage=group_mean) -> Tensor:
    """E over trajectories, their partners and the cells that `probed` lists: (Probes, probability of the cell)."""
    trace, probability_B = paths.trace, paths.probability_B.detach()
    advantage_B = expected_advantage(advantage, reward_of(world, trace), probability_B)
    weight_B = probability_B * len(trace)  # the objective averages over traces
    parts = [
        LossTerm(probes, advantage_B * weight_B * chance_B, uniform_credit(trace), objective)
        for probes, chance_B in probed
    ]
    return step_of(world.policy, parts)


def at_sampled_steps(
    paths: Paths, draws: int = 2, law=uniform_steps, spread: bool = True
) -> Iterator[tuple[Probes, Tensor]]:
    for level_BK, chance_B in level_cells(law(paths.trace), draws, spread):
        if spread:  # the library does that itself
            level_BK = level_BK * draws - torch.arange(draws)
        yield visited(paths.trace, *weighted_steps(paths.trace, level_BK, law, spread=spread)), chance_B


@pytest.mark.parametrize("world", CASES)
def test_sampled_steps_give_the_exact_policy_gradient(world):
    paths = enumerated(world)
    truth = value_gradient(world, paths) / (2 * len(world.commits))
    assert truth.norm() > 1e-3
    for law, spread in product(STEP_DISTRIBUTIONS.values(), (False, True)):
        found = expected_update(world, paths, at_sampled_steps(paths, law=law, spread=spread))
        assert relative_error(found, truth) < TOLERANCE, (law, spread)


@pytest.mark.parametrize("world", CASES)
def test_all_steps_give_the_exact_policy_gradient(world):
    """Units are added up, so there is no 1/T: (G - 1) / G grad J, and grad J itself with leave_one_out."""
    paths = enumerated(world)
    truth, certain_B = value_gradient(world, paths), torch.ones(len(paths.trace), dtype=torch.float64)
    probed = [(every_step(paths.trace, torch.Generator()), certain_B)]
    assert relative_error(expected_update(world, paths, probed), truth / 2) < TOLERANCE
    assert relative_error(expected_update(world, paths, probed, TOKENS, leave_one_out), truth) < TOLERANCE
    assert relative_error(expected_update(world, paths, probed, step_clip), truth / 2) < TOLERANCE


@pytest.mark.parametrize("world", CASES[:11])
def test_without_selection_nothing_is_learned_at_visited_states_and_something_at_others(world):
    """The score has mean zero where the likelihood is exact; a biased likelihood pulls towards the policy's samples."""
    paths = enumerated(world)
    certain_B = torch.ones(len(paths.trace), dtype=torch.float64)
    probed = [(every_step(paths.trace, torch.Generator()), certain_B)]
    scale = expected_update(world, paths, probed, TOKENS, leave_one_out).norm()
    assert expected_update(world, paths, probed, TOKENS, every_sample).norm() < TOLERANCE * scale
    hidden = [(fully_masked(paths.trace, torch.Generator(), prompt_masking=0), certain_B)]
    if len(world.commits) > 1:
        assert expected_update(world, paths, hidden, TOKENS, every_sample).norm() > 1e-3 * scale


# Steps at which a row wrote nothing


def all_alike(trace: Trace) -> Tensor:
    """Every step, whether something was written there or not."""
    return torch.ones(len(trace), trace.steps, dtype=torch.float64)


@pytest.mark.parametrize("name", EMPTY)
def test_in_these_worlds_rows_leave_steps_empty_and_leaving_them_out_changes_no_expectation(name):
    world = EMPTY[name]
    paths = enumerated(world)
    wrote_BT = torch.stack([(paths.trace.step_BL == t).any(-1) for t in range(paths.trace.steps)], 1)
    assert torch.equal(uniform_steps(paths.trace), wrote_BT.double())
    assert len(wrote_BT.sum(-1).unique()) > 1 and (paths.step_BT[~wrote_BT] == 1).all()
    assert abs(paths.probability_B.sum().item() - 1) < 1e-12
    truth = value_gradient(world, paths) / (2 * len(world.commits))
    for law, draws, spread in product((all_alike, uniform_steps, entropy_steps), (1, 3), (False, True)):
        found = expected_update(world, paths, at_sampled_steps(paths, draws, law, spread))
        assert relative_error(found, truth) < TOLERANCE, (law, draws, spread)


def variance_of_draws(slope_BTP: Tensor, trace: Trace, law: StepDistribution, draws: int, spread: bool) -> Tensor:
    """Of sum_j v_j / k grad log p(step t_j), of each row: all cells enumerated. Its mean is a mean over T steps."""
    nothing_B1P = torch.zeros_like(slope_BTP[:, :1])
    slope_BTP = torch.cat([slope_BTP, nothing_B1P], 1)  # at step T, where draws go that are not needed
    mean_BP, square_B = torch.zeros_like(slope_BTP[:, 0]), torch.zeros_like(slope_BTP[:, 0, 0])
    for level_BK, chance_B in level_cells(law(trace), draws, spread):
        if spread:
            level_BK = level_BK * draws - torch.arange(draws)
        step_BK, weight_BK = weighted_steps(trace, level_BK, law, spread=spread)
        found_BP = (weight_BK[..., None] * slope_BTP[torch.arange(len(trace))[:, None], step_BK]).sum(1)
        mean_BP += chance_B[:, None] * found_BP
        square_B += chance_B * found_BP.square().sum(-1)
    assert relative_error(mean_BP, slope_BTP.sum(1) / trace.steps) < TOLERANCE
    return square_B - mean_BP.square().sum(-1)


@pytest.mark.parametrize("name", EMPTY)
def test_leaving_them_out_lowers_the_variance_of_the_draws(name):
    world = EMPTY[name]
    paths = enumerated(world)
    trace, steps = paths.trace, len(world.commits)
    rows = [[gradient(world.policy, p.log()) for p in row_T] for row_T in paths.step_BT]
    slope_BTP = torch.stack([torch.stack(row) for row in rows])
    advantage_B = expected_advantage(group_mean, reward_of(world, trace), paths.probability_B)
    weight_B = paths.probability_B.detach() * advantage_B**2
    empty_B = (uniform_steps(trace) == 0).any(-1)

    def variance(law: StepDistribution, draws: int, spread: bool) -> Tensor:
        return variance_of_draws(slope_BTP, trace, law, draws, spread)

    for draws in (1, 2):
        alike_B, less_B = (variance(law, draws, False) for law in (all_alike, uniform_steps))
        assert (less_B[empty_B] < alike_B[empty_B]).all() and torch.equal(less_B[~empty_B], alike_B[~empty_B])
        alike_B, less_B = (variance(law, draws, True) for law in (all_alike, uniform_steps))
        assert weight_B @ less_B < weight_B @ alike_B
        assert torch.equal(less_B[~empty_B], alike_B[~empty_B])
    for law in (uniform_steps, entropy_steps):  # as many draws as there are steps are all of them
        assert variance(law, steps - 1, True)[empty_B].abs().max() < 1e-12
    assert variance(uniform_steps, steps, True).abs().max() < 1e-12


@pytest.mark.parametrize("draws", [1, 3])
def test_any_number_of_draws_is_exact_and_t_spread_draws_are_all_steps(draws):
    world = WORLDS["one a step"]
    paths = enumerated(world)
    truth = value_gradient(world, paths) / (2 * 3)
    for spread in (False, True):
        found = expected_update(world, paths, at_sampled_steps(paths, draws, spread=spread))
        assert relative_error(found, truth) < TOLERANCE
    level_BK = (torch.arange(3) + torch.rand(len(paths.trace), 3, generator=torch.Generator().manual_seed(0))) / 3
    step_BK, weight_BK = weighted_steps(paths.trace, level_BK.double())
    assert torch.equal(step_BK, torch.arange(3).expand_as(step_BK))
    assert torch.allclose(weight_BK, torch.tensor(1 / 3, dtype=torch.float64), rtol=1e-14)


@pytest.mark.parametrize("eos", [-7, 1])
def test_left_to_right_views_are_exact_when_the_rollout_went_left_to_right_one_token_a_step(eos):
    for shape in ({}, {"steps": 4, "block": 2}, {"sampling": TokenSampling(temperature=0.5)}):
        world = World(NetPolicy(2, 4, seed=11, eos=eos), "left_to_right", **shape)
        assert _error_of_left_to_right_views(world) < TOLERANCE


def test_left_to_right_views_are_not_exact_for_two_tokens_a_step_random_order_or_a_truncated_law():
    policy = NetPolicy(3, 4, seed=11)
    assert _error_of_left_to_right_views(World(policy, "left_to_right", steps=2)) > 0.1
    assert _error_of_left_to_right_views(World(NetPolicy(2, 3, seed=11))) > 0.1
    assert _error_of_left_to_right_views(World(policy, "left_to_right", sampling=TokenSampling(top_k=2))) > 0.1


def _error_of_left_to_right_views(world: World) -> float:
    paths = enumerated(world)
    probed = [(left_to_right_views(paths.trace, torch.Generator()), torch.ones(len(paths.trace)))]
    return relative_error(expected_update(world, paths, probed), value_gradient(world, paths) / 2)


def test_groups_of_two_and_three_enumerated_whole_through_the_method_give_the_same():
    """No use of linearity over the group: the method's own advantage, credit and objective on every group."""
    world = World(NetPolicy(2, 2, seed=12))
    paths = enumerated(world)
    truth = value_gradient(world, paths) / world.length
    method = agrpo(steps=entropy_steps)
    for size in (2, 3):
        groups, weight_B = grouped(paths.trace, paths.probability_B, size)
        advantage_B = method.advantage(reward_of(world, groups), groups.group_B)
        parts = []
        for level_BK, chance_B in level_cells(entropy_steps(groups), 2, True):
            probes = visited(groups, *weighted_steps(groups, level_BK, entropy_steps))
            parts.append(LossTerm(probes, advantage_B * weight_B * chance_B, method.credit(groups), method.objective))
        assert relative_error(step_of(world.policy, parts), (size - 1) / size * truth) < TOLERANCE


def test_a_weighted_batch_of_groups_is_the_expectation_over_batches_of_one_group():
    """The weights that `grouped` puts on advantages, against one accumulated update for every single group."""
    world = World(NetPolicy(2, 2, seed=12))
    paths = enumerated(world)
    groups, weight_B = grouped(paths.trace, paths.probability_B, 2)
    method, rng = agrpo(), torch.Generator()

    def part(trace, weight_B) -> LossTerm:
        advantage_B = method.advantage(reward_of(world, trace), trace.group_B) * weight_B
        return LossTerm(every_step(trace, rng), advantage_B, method.credit(trace), method.objective)

    whole = step_of(world.policy, [part(groups, weight_B)])
    count = len(groups) // 2
    pairs = [select_traces(groups, groups.group_B == number) for number in range(count)]
    one_by_one = step_of(world.policy, [part(p, weight_B[2 * i] / count) for i, p in enumerate(pairs)])
    assert relative_error(whole, one_by_one) < TOLERANCE


def test_the_draws_of_the_method_itself_average_to_the_exact_gradient():
    """The real probe with its real random numbers, 20 times for 40 copies of every trajectory: 4 standard errors."""
    world = World(NetPolicy(2, 3, seed=13, eos=0))
    paths = enumerated(world)
    truth = value_gradient(world, paths) / (2 * 3)
    trace = select_traces(paths.trace, torch.arange(len(paths.trace)).repeat(40))
    advantage_B = expected_advantage(group_mean, reward_of(world, paths.trace), paths.probability_B)
    advantage_B = (advantage_B * paths.probability_B.detach() * len(paths.trace)).repeat(40)
    for method in (agrpo(draws=2), agrpo(draws=2, spread=False), agrpo(draws=2, steps=entropy_steps)):
        rng, along = torch.Generator().manual_seed(0), []
        for _ in range(20):
            probes = method.probe(trace, rng, 1)[0]
            found = step_of(world.policy, [LossTerm(probes, advantage_B, method.credit(trace), method.objective)])
            along.append(found @ truth / truth.norm() ** 2)
        error = torch.stack(along).std() / 20**0.5
        assert abs(torch.stack(along).mean() - 1) < 4 * error and error < 0.02


def test_truncating_at_the_last_word_is_a_bias_of_this_size():
    """m depends on the future, so this is the gradient of no objective. The numbers are this enumeration's own."""
    world = World(NetPolicy(3, 3, seed=7, eos=0))
    paths = enumerated(world)
    trace, truth = paths.trace, value_gradient(world, paths) / (2 * 3)
    word_BL = trace.filled_BL & (trace.tokens_BL != 0)
    reach_B1 = torch.where(word_BL, trace.step_BL + 1, 0).amax(-1, keepdim=True)
    assert set(reach_B1.flatten().tolist()) == {0, 1, 2, 3}
    mass_BT = ((torch.arange(3) < reach_B1) | (reach_B1 == 0)).double()
    probed = [
        (visited(trace, *weighted_steps(trace, level_BK, truncate=True)), chance_B)
        for level_BK, chance_B in level_cells(mass_BT, 2, True)
    ]
    found = expected_update(world, paths, probed)
    advantage_B = expected_advantage(group_mean, reward_of(world, trace), paths.probability_B)
    early_BT = (torch.arange(3) < reach_B1).double() / reach_B1.clamp(min=1)
    mean_B = (early_BT * paths.step_BT.log()).sum(-1)  # over the steps up to the last word
    shaped = gradient(world.policy, (paths.probability_B.detach() * advantage_B * mean_B).sum())
    assert relative_error(found, shaped) < TOLERANCE
    assert relative_error(found, truth) == pytest.approx(0.403032564814, abs=1e-9)
    assert cosine(found, truth) == pytest.approx(0.930665326057, abs=1e-9)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("law", STEP_DISTRIBUTIONS.values())
def test_truncated_it_is_the_mean_over_the_steps_up_to_the_last_word_be_they_empty_or_not(law, spread):
    world = EMPTY["a threshold, end tokens"]
    paths = enumerated(world)
    trace, reach_B1 = paths.trace, last_word(paths.trace)[:, None]
    early_BT = (torch.arange(trace.steps) < reach_B1).double()
    assert ((uniform_steps(trace) == 0) & (early_BT == 1)).any() and (reach_B1 == 0).any()
    mass_BT = torch.where(reach_B1 > 0, law(trace) * early_BT, 1.0)
    probed = []
    for level_BK, chance_B in level_cells(mass_BT, 2, spread):
        level_BK = level_BK * 2 - torch.arange(2) if spread else level_BK
        probed.append((visited(trace, *weighted_steps(trace, level_BK, law, True, spread)), chance_B))
    advantage_B = expected_advantage(group_mean, reward_of(world, trace), paths.probability_B)
    mean_B = (early_BT / reach_B1.clamp(min=1) * paths.step_BT.log()).sum(-1)
    shaped = gradient(world.policy, (paths.probability_B.detach() * advantage_B * mean_B).sum())
    assert relative_error(expected_update(world, paths, probed), shaped) < TOLERANCE


def test_rows_of_end_tokens_only_have_no_weight_when_truncated():
    world = World(NetPolicy(2, 3, seed=7, eos=0))
    trace = enumerated(world).trace
    empty_B = ~((trace.tokens_BL != 0) & trace.filled_BL).any(-1)
    assert empty_B.any() and not empty_B.all()
    _, weight_BK = weighted_steps(trace, torch.full((len(trace), 2), 0.5, dtype=torch.float64), truncate=True)
    assert (weight_BK[empty_B] == 0).all() and (weight_BK[~empty_B] > 0).all()
