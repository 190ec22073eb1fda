"""The plug-in `surprise` against loops, limits and enumeration."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from test_daca import rollout
from test_direction import Uphill

from helpers import ON_ROLLOUTS, assert_close, assert_identical, generator, moved, parts_of, random_trace, slopes
from unmask.core.method import uniform_credit
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import state_before
from unmask.methods import BASES, PLUGINS, daca, diffu_grpo, dps, surprise
from unmask.methods.surprise import surprise_credit
from world import NetPolicy, TablePolicy, World, cosine, enumerated, joint_policy, reward_of, table_of


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_weight_is_the_chance_of_another_token_over_its_mean_in_the_rollout(share: float) -> None:
    trace = random_trace(3)
    found_BL = surprise_credit(trace, share)
    for b in range(len(trace)):
        counted = [i for i, yes in enumerate(trace.counted_BL[b].tolist()) if yes]
        chances = [1 - trace.logp_BL[b, i].exp().item() for i in counted]
        for i, chance in zip(counted, chances, strict=True):
            wanted = 1 - share + share * chance * len(counted) / sum(chances)
            assert found_BL[b, i].item() == pytest.approx(wanted, abs=1e-6)


def test_rollouts_without_doubt_or_with_equal_doubt_have_uniform_weights() -> None:
    trace = random_trace(5)
    for logp in (0.0, -6e-8, -1.3):  # certain, certain up to rounding, equally uncertain
        even = replace(trace, logp_BL=torch.full_like(trace.logp_BL, logp))
        assert_close(surprise_credit(even)[even.counted_BL], torch.ones_like(even.logp_BL)[even.counted_BL], 1e-9)
    uncounted = replace(trace, counted_BL=torch.zeros_like(trace.counted_BL))
    assert_close(surprise_credit(uncounted), torch.ones_like(trace.logp_BL), 0)


@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_without_a_share_it_is_the_base_bit_for_bit_and_with_one_it_is_not(name: str) -> None:
    policy, rollouts = rollout()
    base = BASES[name]()
    parts = {
        label: slopes(policy, parts_of(method, rollouts, generator(), moved(policy), moved(policy, seed=3)))
        for label, method in {"base": base, "none": surprise(base, 0.0), "all": surprise(base)}.items()
    }
    assert_identical(parts["base"], parts["none"])
    assert not torch.allclose(parts["all"][1][0], parts["base"][1][0])
    assert surprise(base).name == f"{name}+surprise" and surprise(base).record == base.record


def test_the_control_gives_each_step_the_mean_surprise_of_a_step_of_the_same_rollout() -> None:
    _, (trace, _) = rollout()
    plain_BL, control_BL, moved_traces = surprise_credit(trace), surprise_credit(trace, shuffled=True), 0
    for b in range(len(trace)):
        steps = sorted(set(trace.step_BL[b][trace.counted_BL[b]].tolist()))
        rows = [(trace.step_BL[b] == t) & trace.filled_BL[b] & trace.counted_BL[b] for t in steps]
        assert all(len(control_BL[b][row].unique()) == 1 for row in rows)
        if bool((trace.counted_BL[b] == trace.filled_BL[b]).all()):  # else a step outside may be dealt, too
            before = sorted(plain_BL[b][row].mean().item() for row in rows)
            after = sorted(control_BL[b][row][0].item() for row in rows)
            ratio = [x / y for x, y in zip(after, before, strict=True)]
            assert ratio == pytest.approx([ratio[0]] * len(ratio), abs=1e-9)  # means of steps, with another mean of all
            moved_traces += not torch.allclose(control_BL[b][trace.counted_BL[b]], plain_BL[b][trace.counted_BL[b]])
        assert control_BL[b][trace.counted_BL[b]].mean().item() == pytest.approx(1.0, abs=1e-9)
    assert moved_traces


# How much a step can change the value


def changes(world: World) -> list[tuple[float, float]]:
    """Of every step of every trajectory: |V(s') - V(s)| over the range of the reward, and its sum of 1 - p."""
    paths = enumerated(world)
    reward_B, trace = reward_of(world, paths.trace), paths.trace
    chance_B, span = paths.probability_B.detach(), float(reward_B.max() - reward_B.min())
    mass, gain = defaultdict(float), defaultdict(float)
    state_BTL = torch.stack([state_before(trace, t) for t in range(trace.steps)] + [trace.tokens_BL], 1)
    states = [[tuple(state_L) for state_L in state_TL] for state_TL in state_BTL.tolist()]
    for b, visited in enumerate(states):
        for state in enumerate(visited):
            mass[state] += float(chance_B[b])
            gain[state] += float(chance_B[b] * reward_B[b])
    found = []
    for b, visited in enumerate(states):
        value_T = [gain[state] / mass[state] for state in enumerate(visited)]
        for t in range(trace.steps):
            doubt = float((1 - trace.logp_BL[b].exp())[trace.step_BL[b] == t].sum())
            found.append((abs(value_T[t + 1] - value_T[t]) / span, doubt))
    return found


WORLDS = {
    "left to right": World(NetPolicy(3, 3, seed=1), "left_to_right"),
    "surest position": World(NetPolicy(3, 3, seed=5), "surest_position"),
    "a table": World(TablePolicy(3, 3, seed=9, scale=3.0), "surest_position"),
    "tempered": World(NetPolicy(2, 3, seed=4), "surest_position", sampling=TokenSampling(temperature=0.6)),
    "two a step": World(NetPolicy(2, 4, seed=2), "left_to_right", steps=2),
    "blocks": World(NetPolicy(2, 4, seed=3), "surest_position", steps=4, block=2),
    "end tokens": World(NetPolicy(3, 3, seed=7, eos=0), "left_to_right"),
    "truncated": World(NetPolicy(3, 3, seed=5), "margin", sampling=TokenSampling(top_p=0.8)),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_no_step_changes_the_value_by_more_than_its_surprise(world: World) -> None:
    found = changes(world)
    assert all(change <= doubt + 1e-9 for change, doubt in found)
    assert any(change > doubt / 2 > 0.01 for change, doubt in found)  # the bound is not empty


MORE = {
    "low_confidence": World(NetPolicy(3, 3, seed=7), "low_confidence"),
    "a threshold": World(NetPolicy(3, 3, seed=3), "left_to_right", threshold=0.6),
    "random": World(NetPolicy(3, 3, seed=7), "random"),
}


@pytest.mark.parametrize("world", MORE.values(), ids=MORE)
def test_where_positions_depend_on_draws_or_chance_a_step_can_change_the_value_by_more(world: World) -> None:
    """Which position is kept says something about the draws that were not kept, or changes the value by itself."""
    assert max(change - doubt for change, doubt in changes(world)) > 0.05


# What is refused


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"share=.* must be at least 0 and at most 1"):
        surprise(diffu_grpo(), share)


def test_one_credit_at_a_time() -> None:
    for base in (dps(diffu_grpo()), surprise(diffu_grpo()), BASES["vine"]()):
        with pytest.raises(ValueError, match="has a credit of its own, which surprise would replace"):
            surprise(base)
    for plugin in (dps, daca):
        with pytest.raises(ValueError, match=r"^diffu_grpo\+surprise has a credit of its own, which DPS would replace"):
            plugin(surprise(diffu_grpo()))


@pytest.mark.parametrize("name", ["sml", "dispo", "positive", "keep_correct"])
def test_other_plugins_leave_its_credit_alone_in_either_order(name: str) -> None:
    plugin, trace = PLUGINS[name], random_trace(3)
    for method in (plugin(surprise(diffu_grpo(), shuffled=True)), surprise(plugin(diffu_grpo()), shuffled=True)):
        assert torch.equal(method.credit(trace), surprise_credit(trace, shuffled=True))
        assert all(term.credit is uniform_credit for term in method.further)


# Where the update points


def test_if_the_first_token_decides_the_fully_masked_update_becomes_exact() -> None:
    """Two texts that differ everywhere: the first token is uncertain, the rest certain. diffu_grpo scores all three."""
    joint = torch.full((2, 2, 2), 1e-12, dtype=torch.float64)
    joint[0, 0, 0], joint[1, 1, 1] = 0.3, 0.7
    where = Uphill(World(table_of(joint / joint.sum()), "left_to_right"))
    base = diffu_grpo(prompt_masking=0, kl=0)
    assert cosine(where.of_base(base, 1)[0], where.truth) == pytest.approx(3**-0.5, abs=1e-4)
    assert cosine(where.of_base(surprise(base), 1)[0], where.truth) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("order", ["left_to_right", "surest_position", "low_confidence", "random"])
def test_it_turns_mean_field_towards_the_gradient_in_two_of_four_orders(order: str) -> None:
    """Six worlds whose conditionals come from one joint distribution."""
    base, rows = diffu_grpo(prompt_masking=0, kl=0), []
    for seed in range(6):
        where = Uphill(World(joint_policy(2, 3, seed, scale=8.0)[0], order))
        rows.append([cosine(where.of_base(method, 1)[0], where.truth) for method in (base, surprise(base))])
        print(f"{order}, world {seed}: cosine {rows[-1][0]:.3f}, with surprise {rows[-1][1]:.3f}")
    means = {"left_to_right": (0.428, 0.663), "surest_position": (0.211, 0.361)}
    means |= {"low_confidence": (0.161, 0.137), "random": (0.860, 0.856)}
    assert [sum(column) / 6 for column in zip(*rows, strict=True)] == pytest.approx(means[order], abs=1e-3)
