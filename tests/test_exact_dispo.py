"""DiSPO's expected update is the exact gradient of the value of filling a visited state in one shot.

The expectation is over the branch step, the visited state and every Z-tuple of fillings, all enumerated; with a
group mean it must be (Z - 1) / (Z L) grad J_step, with leave_one_out grad J_step / L.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from branching import branch_traces, fillings, visits
from helpers import ON_ROLLOUTS, sample
from unmask.core.advantage import group_mean, leave_one_out
from unmask.core.method import Method, uniform_credit
from unmask.core.order import ORDERS
from unmask.core.probes import ask, every_step, one_shot
from unmask.core.specs import Branch
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, all_tokens, select_traces, state_before, until_eos
from unmask.methods import BASES, agrpo, daca, diffu_grpo, dispo
from unmask.rollout.sample import Rollouts
from unmask.training.update import LossTerm
from world import (
    NetPolicy,
    Paths,
    TablePolicy,
    World,
    chance_of_worse,
    enumerated,
    expected_advantage,
    gradient,
    laws,
    number,
    relative_error,
    reward_of,
    step_of,
)

TOLERANCE = 1e-9


def every_branch(world: World, paths: Paths, branch: Branch, counted=all_tokens) -> tuple[Trace, Tensor, Tensor]:
    """Every Z-tuple of fillings of every visited state, its weight (as in `grouped`), and J_step.

    J_step is the mean over branches that exist: a row that has retired before its branch step has none.
    """
    _, drawn_SCV = laws(world)
    states, tokens, weights, value, alive = [], [], [], 0.0, 0.0
    for step, state_SC, mass_S in visits(world, paths):
        for state_C, mass in zip(state_SC, mass_S * branch.step_probabilities(paths.trace.steps)[step], strict=True):
            tokens_AC, probability_A = fillings(world, state_C, drawn_SCV)
            trace = branch_traces(world, state_C.expand_as(tokens_AC), tokens_AC, torch.arange(len(tokens_AC)))
            value = value + mass * (probability_A * reward_of(world, trace)).sum()
            alive += mass
            tuple_PZ = torch.tensor(list(product(range(len(tokens_AC)), repeat=branch.fillings)))
            states.append(state_C.expand(tuple_PZ.numel(), -1))
            tokens.append(tokens_AC[tuple_PZ.flatten()])
            weights.append(mass * probability_A.detach()[tuple_PZ].prod(-1))
    weight_P = torch.cat(weights) / alive
    group_B = torch.arange(len(weight_P)).repeat_interleave(branch.fillings)
    trace = branch_traces(world, torch.cat(states), torch.cat(tokens), group_B, counted)
    return trace, (weight_P * len(weight_P))[group_B], value / alive


def branch_part(method: Method, world: World, trace: Trace, weight_B: Tensor | float) -> LossTerm:
    (term,) = method.further
    advantage_B = term.advantage(reward_of(world, trace), trace.group_B) * weight_B
    return LossTerm(one_shot(trace), advantage_B, uniform_credit(trace), term.objective, weight=term.weight)


WORLDS = {
    "one a step": World(NetPolicy(2, 3, seed=1)),
    "three words": World(NetPolicy(3, 2, seed=2)),
    "two a step": World(NetPolicy(2, 3, seed=3), steps=2),
    "blocks": World(NetPolicy(2, 4, seed=4), steps=4, block=2),
    "tempered": World(NetPolicy(2, 3, seed=5), sampling=TokenSampling(temperature=0.6)),
    "top k": World(NetPolicy(3, 2, seed=6), sampling=TokenSampling(temperature=1.3, top_k=2)),
    "end tokens": World(NetPolicy(3, 2, seed=7, eos=0)),
    "a table": World(TablePolicy(2, 3, seed=8)),
    "a prompt": World(NetPolicy(2, 3, seed=9), prompt=(1, 0)),
}


@pytest.mark.parametrize("order", ["random", "low_confidence"])
@pytest.mark.parametrize("name", WORLDS)
def test_branches_give_the_gradient_of_filling_in_one_shot(name, order):
    world = replace(WORLDS[name], order=order)
    paths = enumerated(world)
    for lateness, (advantage, factor) in product((0.0, 4.0), ((group_mean, 0.5), (leave_one_out, 1.0))):
        method = dispo(diffu_grpo(), weight=1.0, lateness=lateness, advantage=advantage)
        trace, weight_B, value = every_branch(world, paths, method.request.branch)
        found = step_of(world.policy, [branch_part(method, world, trace, weight_B)])
        truth = gradient(world.policy, value) / world.length
        assert truth.norm() > 1e-3
        assert relative_error(found, factor * truth) < TOLERANCE


@pytest.mark.parametrize("branches", [3, 4])
def test_z_branches_scale_the_gradient_by_z_minus_one_over_z(branches):
    world = World(NetPolicy(2, 2, seed=10))
    method = dispo(diffu_grpo(), branches=branches, weight=1.0)
    trace, weight_B, value = every_branch(world, enumerated(world), method.request.branch)
    found = step_of(world.policy, [branch_part(method, world, trace, weight_B)])
    truth = (branches - 1) / branches * gradient(world.policy, value) / world.length
    assert relative_error(found, truth) < TOLERANCE


def test_counting_only_up_to_the_first_end_token_keeps_the_gradient_exact():
    """What stands after it is not in the text, so it has no part in the reward; given their state, fillings of
    different positions are independent, so leaving those tokens out removes noise and nothing else."""
    world = World(NetPolicy(3, 2, seed=7, eos=0))
    method = dispo(diffu_grpo(), weight=1.0)
    trace, weight_B, value = every_branch(world, enumerated(world), method.request.branch, until_eos)
    assert (trace.filled_BL & ~trace.counted_BL).any()
    found = step_of(world.policy, [branch_part(method, world, trace, weight_B)])
    assert relative_error(found, gradient(world.policy, value) / (2 * world.length)) < TOLERANCE


def test_with_a_base_the_expectations_add_up_by_weight():
    """Theorem 4.2 on AGRPO's all-steps gradient: (G - 1)/G grad J + weight (Z - 1)/(Z L) grad J_step."""
    world = World(NetPolicy(2, 3, seed=11))
    paths = enumerated(world)
    for weight in (0.1, 0.5):
        method = dispo(agrpo(), weight=weight, lateness=2.0)
        branches, weight_B, step_value = every_branch(world, paths, method.request.branch)
        value = (paths.probability_B * reward_of(world, paths.trace)).sum()
        truth = gradient(world.policy, value) / 2 + weight * gradient(world.policy, step_value) / (2 * 3)
        advantage_B = expected_advantage(method.advantage, reward_of(world, paths.trace), paths.probability_B)
        advantage_B = advantage_B * paths.probability_B.detach() * len(paths.trace)
        base = LossTerm(
            every_step(paths.trace, torch.Generator()), advantage_B, method.credit(paths.trace), method.objective
        )
        found = step_of(world.policy, [base, branch_part(method, world, branches, weight_B)])
        assert relative_error(found, truth) < TOLERANCE


def rolled(world: World, rows: int, branch: Branch, **more) -> Rollouts:
    prompts, seed_B = [list(world.prompt)] * rows, torch.arange(rows)
    shape = {"steps": world.steps or None, "block": world.block or None, "sampling": world.sampling}
    order = ORDERS[world.order]
    return sample(world.policy, prompts, seed_B, length=world.length, order=order, branch=branch, **shape, **more)


def test_only_the_newly_filled_positions_of_the_branch_states_have_a_gradient():
    world = World(TablePolicy(2, 4, seed=12), steps=2)
    branches = rolled(world, 12, Branch(2, 1.0)).branches
    part = branch_part(dispo(diffu_grpo()), world, branches, 1.0)
    slope_SCV = step_of(world.policy, [part]).view_as(world.policy.table)
    state_BC = state_before(branches, 0)
    touched_SC = torch.zeros(slope_SCV.shape[:2], dtype=torch.bool)
    for state_C, s in zip(state_BC, number(state_BC, 3), strict=True):
        touched_SC[s] = state_C == world.policy.mask_id
    assert (slope_SCV[~touched_SC] == 0).all()
    assert (slope_SCV[touched_SC] != 0).any() and 0 < touched_SC.sum() < touched_SC.numel() / 4


def test_identical_branches_have_no_gradient_at_all():
    world = World(NetPolicy(2, 3, seed=13))
    branches = rolled(world, 8, Branch(3, 0.0)).branches
    first_B = torch.arange(len(branches)) // 3 * 3
    same = replace(branches, tokens_BL=branches.tokens_BL[first_B])
    assert (step_of(world.policy, [branch_part(dispo(diffu_grpo()), world, same, 1.0)]) == 0).all()
    assert (step_of(world.policy, [branch_part(dispo(diffu_grpo()), world, branches, 1.0)]) != 0).any()


@pytest.mark.parametrize("base", ON_ROLLOUTS)
def test_daca_and_dispo_commute(base):
    world = World(NetPolicy(2, 4, seed=14), steps=4, block=2, prompt=(1,))
    found = []
    for method in (daca(dispo(BASES[base]())), dispo(daca(BASES[base]()))):
        trace, branches = rolled(
            world,
            12,
            method.request.branch,
            group_B=torch.arange(12) // 4,
            record=method.record,
            counted=method.counted,
        )
        probes = method.probe(trace, torch.Generator().manual_seed(0), 1)[0]
        advantage_B = method.advantage(reward_of(world, trace), trace.group_B)
        part = LossTerm(probes, advantage_B, method.credit(trace), method.objective)
        found.append(step_of(world.policy, [part, branch_part(method, world, branches, 1.0)]))
    assert found[0].norm() > 1e-3 and torch.equal(*found)


# The sampler's branches


@pytest.mark.parametrize("lateness", [-4.0, 0.0, 4.0])
def test_the_branch_step_law_is_the_polynomial_it_says(lateness):
    weight = [((t + 1) / 5) ** lateness for t in range(5)]
    assert Branch(2, lateness).step_probabilities(5).tolist() == pytest.approx([w / sum(weight) for w in weight])


@pytest.mark.parametrize("order", ["random", "low_confidence"])
@pytest.mark.parametrize(
    "law", [TokenSampling(), TokenSampling(temperature=1.4, top_k=2)], ids=["plain", "tempered top k"]
)
def test_the_sampler_fills_visited_states_with_their_probabilities(order, law):
    """(state, first filling, second filling) jointly, with end tokens: a retired row has no branch."""
    world = World(NetPolicy(3, 2, seed=15, eos=0), order, sampling=law)
    branch, rows = Branch(2, 1.0), 30_000
    branches = rolled(world, rows, branch).branches
    paths = enumerated(world)
    truth, weight_B, _ = every_branch(world, paths, branch)
    alive = sum(
        float(mass_S.sum() * branch.step_probabilities(paths.trace.steps)[step])
        for step, _, mass_S in visits(world, paths)
    )
    assert 0.2 < alive < 0.99

    def pair_number(twigs: Trace) -> Tensor:
        base = world.policy.words + 1
        return number(torch.cat([state_before(twigs, 0)[::2], twigs.tokens_BL[::2], twigs.tokens_BL[1::2]], 1), base)

    cell_X, index_P = pair_number(truth).unique(return_inverse=True)
    probability_X = torch.zeros(len(cell_X), dtype=torch.float64).index_add(0, index_P, weight_B[::2])
    probability_X = torch.cat([alive * probability_X / probability_X.sum(), torch.tensor([1 - alive]).double()])
    place_P = torch.searchsorted(cell_X, pair_number(branches))
    assert torch.equal(cell_X[place_P], pair_number(branches))
    dropped = rows - len(branches) // 2
    count_X = torch.cat([place_P.bincount(minlength=len(cell_X)), torch.tensor([dropped])])
    assert chance_of_worse(count_X, probability_X) > 1e-4


@pytest.mark.parametrize("law", [TokenSampling(), TokenSampling(temperature=1.4, top_k=2), TokenSampling(top_p=0.7)])
def test_the_recorded_log_probabilities_of_a_branch_are_what_it_is_asked_for(law):
    world = World(NetPolicy(3, 4, seed=17), "low_confidence", steps=4, block=2, sampling=law, prompt=(1,))
    branches = rolled(world, 40, Branch(3, 1.0)).branches
    assert (ask(world.policy, one_shot(branches)) - branches.logp_BL).abs().max() < 1e-12
    truth = branch_traces(world, state_before(branches, 0)[:, 1:], branches.tokens_BL[:, 1:], branches.group_B)
    assert (truth.logp_BL - branches.logp_BL).abs().max() < 1e-12


def test_a_branch_starts_at_a_state_its_own_row_visited_and_is_dropped_once_the_row_retired():
    world = World(NetPolicy(3, 4, seed=16, eos=0), "low_confidence", prompt=(1,))
    trace, branches = rolled(world, 400, Branch(2, 0.0))
    source_B = branches.group_B
    step_B = world.length - branches.filled_BL.sum(-1)  # one token a step
    assert torch.equal(state_before(branches, 0), state_before(select_traces(trace, source_B), step_B))
    live_B = ((trace.step_BL[source_B] >= step_B[:, None]) & trace.filled_BL[source_B]).any(-1)
    assert live_B.all() and 0 < len(branches) < 2 * len(trace)
    assert set(step_B.tolist()) == {0, 1, 2, 3}
    assert torch.equal(branches.group_B[::2], branches.group_B[1::2])  # two by two, in the order of the rows
    assert not (branches.tokens_BL == world.policy.mask_id).any()
