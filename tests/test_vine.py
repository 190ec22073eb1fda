"""Vine: with enumerated values its expected update is the policy gradient; its estimated values are unbiased."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_continuation import exact_values, one_shot_values
from test_exact import decoding_of
from test_exact_agrpo import level_cells
from torch import Tensor

from helpers import assert_close
from unmask.config import parse_config
from unmask.core.probes import visited
from unmask.core.specs import StepValues
from unmask.core.steps import entropy_steps, uniform_steps, weighted_steps
from unmask.core.trace import select_traces
from unmask.methods import agrpo, vine
from unmask.methods.vine import step_advantages, valued_steps
from unmask.rollout.sample import row_seeds
from unmask.rollout.step_values import continue_steps, with_state_values
from unmask.training.update import LossTerm
from world import NetPolicy, World, enumerated, relative_error, reward_of, step_of, value_gradient

WORLDS = {
    "random": (World(NetPolicy(2, 3, seed=5), "random", steps=3), False),
    "two a step, left to right": (World(NetPolicy(2, 4, seed=2), "left_to_right", steps=2), False),
    "low confidence, with its choice": (World(NetPolicy(2, 3, seed=7), "low_confidence", steps=3), True),
}
BY_THRESHOLD = {
    order: (World(NetPolicy(2, 3, seed=7), order, steps=3, threshold=0.6), True)
    for order in ("left_to_right", "low_confidence")
}


def with_exact_values(world: World, one_shot: bool = False):
    """Every trajectory with the exact values of its states."""
    paths = enumerated(world)
    trace, reward_B, value_BT = exact_values(world)
    value_BT = one_shot_values(world) if one_shot else value_BT
    assert torch.equal(trace.tokens_BL, paths.trace.tokens_BL) and torch.equal(trace.step_BL, paths.trace.step_BL)
    return paths, replace(paths.trace, seen=paths.trace.seen | {"state_value": value_BT.double()}), reward_B


def expected_update(world: World, choice: bool, final: bool, draws: int, law, one_shot: bool = False) -> Tensor:
    paths, trace, _ = with_exact_values(world, one_shot)
    method, probability_B, parts = vine(choice=choice, final=final), paths.probability_B.detach(), []
    for level_BK, chance_B in level_cells(law(trace), draws, spread=True):
        step_BK, weight_BK = weighted_steps(trace, level_BK * draws - torch.arange(draws), law, spread=True)
        drawn = replace(trace, seen=trace.seen | {"value_step": step_BK, "value_weight": weight_BK})
        advantage_B = probability_B * len(trace) * chance_B  # the objective averages over traces
        credit_BL = method.credit(drawn)
        parts.append(LossTerm(valued_steps(drawn, choice, final), advantage_B, credit_BL, method.objective))
    return step_of(world.policy, parts)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("name", WORLDS | BY_THRESHOLD)
def test_the_expected_update_is_the_policy_gradient(name: str, final: bool) -> None:
    world, choice = (WORLDS | BY_THRESHOLD)[name]
    truth = value_gradient(world, enumerated(world)) / world.steps
    for draws, law in ((1, uniform_steps), (2, entropy_steps)):
        assert relative_error(expected_update(world, choice, final, draws, law), truth) < 1e-9


ONE_SHOT_ERROR = {
    "random": 0.020,
    "two a step, left to right": 0.0,  # after a step at most one is left
    "low confidence, with its choice": 0.040,
    "random, four sharp tokens": 1.410,
    "low confidence, four sharp tokens": 0.079,
}
"""Relative error of the expected update if states are completed in one shot (docs/methods/vine.md)."""
DEEPER = {
    "random, four sharp tokens": (World(NetPolicy(2, 4, seed=3, scale=6.0), "random", steps=4), False),
    "low confidence, four sharp tokens": (World(NetPolicy(2, 4, seed=3, scale=6.0), "low_confidence", steps=4), True),
}


@pytest.mark.parametrize("name", ONE_SHOT_ERROR)
def test_one_shot_values_bias_the_expected_update_but_not_as_a_baseline(name: str) -> None:
    world, choice = (WORLDS | DEEPER)[name]
    truth = value_gradient(world, enumerated(world)) / world.steps
    biased, control = (expected_update(world, choice, final, 1, uniform_steps, True) for final in (False, True))
    assert relative_error(biased, truth) == pytest.approx(ONE_SHOT_ERROR[name], abs=5e-4)
    assert relative_error(control, truth) < 1e-9


@pytest.mark.parametrize("name", WORLDS)
def test_estimated_values_are_the_enumerated_ones_and_gains_add_up(name: str) -> None:
    world, _ = WORLDS[name]
    trace, reward_B, exact_BT = exact_values(world)
    times, steps = 100, trace.steps
    values = StepValues(partial(weighted_steps, steps=uniform_steps, spread=True), steps, 2)  # every step is drawn
    many = select_traces(trace, torch.arange(len(trace)).repeat_interleave(times))
    seed_B = row_seeds(-1, len(many))
    drawn, continued = continue_steps(world.policy, many, seed_B, values, decoding_of(world), 10**6)
    found = with_state_values(drawn, continued, reward_of(world, many), reward_of(world, continued))
    value_BT = found.seen["state_value"]
    assert not value_BT.isnan().any()
    spread = float(reward_B.max() - reward_B.min()) / 2
    mean_BT = value_BT.view(len(trace), times, -1).mean(1)
    assert (mean_BT - exact_BT).abs().max() < 4.5 * spread / math.sqrt(2 * times)
    assert_close(step_advantages(found).sum(-1), reward_of(world, many).double() - value_BT[:, 0])
    assert len(continued) == 2 * steps * len(many)  # the states before the T steps; the last one is the reward


def test_only_the_states_around_drawn_steps_are_completed_and_silent_steps_are_not_asked() -> None:
    world, _ = WORLDS["random"]
    trace, reward_B, _ = exact_values(world)
    values = StepValues(partial(weighted_steps, steps=uniform_steps, spread=True), 1, 3)
    drawn, continued = continue_steps(world.policy, trace, row_seeds(3, len(trace)), values, decoding_of(world))
    step_B = drawn.seen["value_step"][:, 0]
    for row, step in enumerate(step_B.tolist()):
        from_N = continued.seen["from_step"][continued.group_B == row].tolist()
        wanted = [step] * 3 + ([step + 1] * 3 if step + 1 < trace.steps else [])
        assert from_N == wanted
    equal_N = reward_B[continued.group_B]  # completions that earn what the rollout earned: no step matters
    silent = with_state_values(drawn, continued, reward_B, equal_N)
    assert not len(valued_steps(silent).state_N) and not step_advantages(silent).any()


def test_with_the_reward_for_every_step_it_is_agrpo_without_a_baseline() -> None:
    world, _ = WORLDS["two a step, left to right"]
    trace, reward_B, _ = exact_values(world)
    value_BT = torch.zeros(len(trace), trace.steps + 1, dtype=torch.float64)
    value_BT[:, -1] = reward_B
    step_BK, weight_BK = weighted_steps(trace, torch.rand(len(trace), 1, dtype=torch.float64), uniform_steps)
    drawn = replace(trace, seen={"state_value": value_BT, "value_step": step_BK, "value_weight": weight_BK})
    method, one_B, one_BL = vine(final=True), torch.ones_like(value_BT[:, 0]), torch.ones_like(trace.logp_BL)
    ours = LossTerm(valued_steps(drawn, final=True), one_B, method.credit(drawn), method.objective)
    agrpos = LossTerm(visited(trace, step_BK, weight_BK), reward_B.double(), one_BL, agrpo().objective)
    assert relative_error(step_of(world.policy, [ours]), step_of(world.policy, [agrpos])) < 1e-12


def test_it_is_refused_where_states_cannot_be_completed() -> None:
    with pytest.raises(ValueError, match=r"rollout.cache: vine .*rollout.cache=none"):
        parse_config({"method": "vine", "rollout": {"block": 4, "cache": "prefix"}})
    with pytest.raises(ValueError, match="vine reads values of states"):
        vine().credit(exact_values(WORLDS["random"][0])[0])
    with pytest.raises(ValueError, match="completions=0 must be at least 1"):
        vine(completions=0)
    with pytest.raises(ValueError, match="value_steps=-1 must be at least 0"):
        vine(value_steps=-1)
    assert vine().values.most_steps is None and vine(value_steps=2).values.most_steps == 2
    assert vine().uses_equal_rewards and agrpo().values is None
