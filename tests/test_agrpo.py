"""AGRPO: step laws, spread draws and importance weights against loops; all steps as the limit."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st

import unmask
from helpers import EOS, Net, assert_close, generator, moved, parts_of, rolled, sample
from unmask.core.order import random, surest_position
from unmask.core.probes import ask, every_step, visited
from unmask.core.shapes import NEVER
from unmask.core.specs import Record
from unmask.core.steps import entropy_steps, last_word, sampled_steps, steps_at, uniform_steps, weighted_steps
from unmask.core.trace import Trace, all_tokens
from unmask.methods import agrpo
from unmask.rollout.sample import Rollouts
from unmask.training.update import term_loss
from wording import naming


def rollout(ends=1.0, **settings):
    policy = Net(1, ends=ends)
    return policy, rolled(policy, steps=6, block=3, record=Record(entropy=True), counted=all_tokens, **settings)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.floats(0, 1, exclude_max=True))
@bounded(max_examples=150)
def test_steps_at_is_the_inverse_of_the_cumulative_mass(mass, level):
    mass = mass if any(mass) else [1]
    step, probability = steps_at(torch.tensor([[level]], dtype=torch.float64), torch.tensor([mass]).double())
    total, edge, expected = sum(mass), 0.0, None
    for t, m in enumerate(mass):
        edge += m / total
        if m and (level < edge - 1e-12 or t == max(u for u, n in enumerate(mass) if n)):
            expected = t
            break
    near = any(abs(level - sum(mass[:k]) / total) < 1e-9 for k in range(len(mass) + 1))
    assert step.item() == expected or near
    assert mass[step.item()] > 0
    assert probability.item() == pytest.approx(mass[step.item()] / total)


def test_entropy_steps_weigh_a_step_by_the_entropy_of_what_was_drawn_there():
    _, (trace, _) = rollout()
    mass_BT = entropy_steps(trace)
    for b in range(len(trace)):
        for t in range(trace.steps):
            drawn = [i for i in range(10) if trace.step_BL[b, i] == t]
            expected = sum(trace.seen["entropy"][b, i - 4].item() + 1e-8 for i in drawn)
            assert mass_BT[b, t].item() == pytest.approx(expected, abs=1e-12)
    assert (mass_BT == 0).any() and (mass_BT > 0.1).any()


def test_uniform_steps_are_those_at_which_something_was_written():
    _, (trace, _) = rollout()
    wrote = [[float(t in row) for t in range(trace.steps)] for row in trace.step_BL.tolist()]
    assert uniform_steps(trace).tolist() == wrote
    assert {3, 6} <= {sum(row) for row in wrote}


def emptied(trace: Trace) -> Trace:
    """Its first row wrote nothing."""
    step_BL, seen = trace.step_BL.clone(), {"entropy": trace.seen["entropy"].clone()}
    step_BL[0, trace.canvas_BL[0]], seen["entropy"][0] = NEVER, 0.0
    tokens_BL = trace.tokens_BL.masked_fill(step_BL == NEVER, trace.mask_id)
    return replace(trace, step_BL=step_BL, tokens_BL=tokens_BL, seen=seen)


@pytest.mark.parametrize("law", [uniform_steps, entropy_steps])
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_a_row_that_wrote_nothing_is_asked_nothing_and_disturbs_no_other(law, truncate, spread):
    policy, rollouts = rollout()
    trace = emptied(rollouts.trace)
    settings = {"draws": 4, "steps": law, "truncate": truncate, "spread": spread}
    probes = sampled_steps(trace, generator(), **settings)
    assert probes.weight_M.isfinite().all() and (probes.trace_N > 0).all()
    whole = sampled_steps(rollouts.trace, generator(), **settings)
    kept_N = whole.trace_N > 0
    assert torch.equal(probes.asked_NL, whole.asked_NL[kept_N])
    assert torch.equal(probes.weight_M[probes.unit_N], whole.weight_M[whole.unit_N[kept_N]])
    (part,) = parts_of(agrpo(**settings), Rollouts(trace, None), generator(), moved(policy))
    assert term_loss(part, ask(policy, part.probes))[0].isfinite()


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("draws", [2, 3, 4, 9])
def test_no_draw_is_spent_on_an_empty_step_and_no_row_is_asked_more_often_than_it_has_others(draws, truncate):
    """By threshold a row leaves most steps empty; one that has no more than are drawn is asked at each of them once."""
    policy, seed_B = Net(1, ends=0.5), torch.arange(12)
    shape = {"length": 8, "block": 4, "order": surest_position, "threshold": 0.5}
    trace = sample(policy, [[3, 4], [5], [6, 6]] * 4, seed_B, counted=all_tokens, **shape).trace
    probes, drawn = sampled_steps(trace, generator(), draws, truncate=truncate), []
    for b, row in enumerate(trace.step_BL.tolist()):
        reach = int(last_word(trace)[b]) if truncate else trace.steps
        steps = sorted(t for t in {*row} if 0 <= t < reach)
        asked = [int(trace.step_BL[b][row_L].unique()) for row_L in probes.asked_NL[probes.trace_N == b]]
        weights = probes.weight_M[probes.unit_N[probes.trace_N == b]].tolist()
        if len(steps) <= draws:
            assert asked == steps and weights == [1 / reach] * len(steps)
        else:
            assert len(asked) == draws and {*asked} <= {*steps}
            assert weights == pytest.approx([len(steps) / reach / draws] * draws)
        drawn.append(len(steps))
    assert min(drawn) <= 2 < max(drawn) < trace.steps


@pytest.mark.parametrize("law", [uniform_steps, entropy_steps])
@pytest.mark.parametrize("draws", [4, 6, 9])
def test_a_row_that_left_no_step_empty_is_drawn_from_as_often_as_is_said(draws, law):
    _, (trace, _) = rollout(ends=-50.0)
    assert (uniform_steps(trace) == 1).all()
    level_BK = torch.rand(len(trace), draws, generator=generator(), dtype=torch.float64)
    spread = weighted_steps(trace, level_BK, law, spread=True)
    assert all(map(torch.equal, spread, weighted_steps(trace, (torch.arange(draws) + level_BK) / draws, law)))


def test_last_word_is_the_last_step_that_wrote_no_end_token():
    _, (trace, _) = rollout(ends=2.5)
    expected = []
    for steps, tokens in zip(trace.step_BL.tolist(), trace.tokens_BL.tolist(), strict=True):
        words = [s + 1 for s, v in zip(steps, tokens, strict=True) if 0 <= s < NEVER and v != EOS]
        expected.append(max(words, default=0))
    assert last_word(trace).tolist() == expected
    assert 0 in expected and max(expected) > 1 and len(set(expected)) > 2


@pytest.mark.parametrize("law", [uniform_steps, entropy_steps])
@pytest.mark.parametrize("truncate", [False, True])
def test_weights_are_one_over_m_k_p(law, truncate):
    _, (trace, _) = rollout(ends=2.5)
    level_BK = torch.rand(len(trace), 5, generator=generator(), dtype=torch.float64)
    step_BK, weight_BK = weighted_steps(trace, level_BK, law, truncate)
    mass_BT = law(trace)
    for b in range(len(trace)):
        m = int(last_word(trace)[b]) if truncate else trace.steps
        mass = [mass_BT[b, t].item() if t < m else 0.0 for t in range(trace.steps)]
        for step, weight in zip(step_BK[b].tolist(), weight_BK[b].tolist(), strict=True):
            if truncate and m == 0:
                assert weight == 0
            else:
                assert mass[step] > 0
                assert weight == pytest.approx(1 / m / 5 / (mass[step] / sum(mass)))


@pytest.mark.parametrize("law", [uniform_steps, entropy_steps])
def test_the_mean_over_levels_is_the_sum_over_steps_divided_by_t(law):
    """On a fine grid of levels every step with mass has weight 1 / T in all."""
    _, (trace, _) = rollout()
    level_BK = ((torch.arange(20000) + 0.5) / 20000).expand(len(trace), -1).double()
    step_BK, weight_BK = weighted_steps(trace, level_BK, law)
    total_BT = torch.zeros(len(trace), trace.steps, dtype=torch.float64).scatter_add(1, step_BK, weight_BK)
    asked_BT = law(trace) > 1e-3
    assert (total_BT[asked_BT] - 1 / trace.steps).abs().max() < 2e-3


def test_spread_draws_fall_one_into_each_part_of_the_steps():
    _, (trace, _) = rollout(ends=-9.0)
    spread = sampled_steps(trace, generator(), draws=3)
    for b in range(len(trace)):
        steps = [int(trace.step_BL[b][row].unique()) for row in spread.asked_NL[spread.trace_N == b]]
        assert [t // 2 for t in steps] == [0, 1, 2]
    loose = sampled_steps(trace, generator(), draws=3, spread=False)
    found = [int(trace.step_BL[b][row].unique()) for b, row in zip(loose.trace_N, loose.asked_NL, strict=True)]
    assert any([t // 2 for t in found[3 * b : 3 * b + 3]] != [0, 1, 2] for b in range(len(trace)))


@pytest.mark.parametrize("choice", [False, True])
def test_t_spread_uniform_draws_are_all_steps_exactly(choice):
    policy, rollouts = rollout()
    trace = rollouts.trace
    (part,) = parts_of(agrpo(draws=6, choice=choice), rollouts, generator(), moved(policy))
    step_BT = torch.arange(6).expand(len(trace), -1)
    all_steps = visited(trace, step_BT, torch.full(step_BT.shape, 1 / 6, dtype=torch.float64), choice)
    for name in ("states_SL", "asked_NL", "trace_M", "unit_N"):
        assert torch.equal(getattr(part.probes, name), getattr(all_steps, name)), name
    assert torch.equal(part.probes.weight_M[part.probes.unit_N], all_steps.weight_M[all_steps.unit_N])
    assert (part.probes.weight_M == 0).any()  # some rows ended
    assert torch.equal(part.probes.asked_NL, every_step(trace, generator()).asked_NL)
    loss, _ = part.objective(
        ask(policy, all_steps), ask(moved(policy), all_steps), all_steps, part.advantage_B, part.credit_BL
    )
    assert torch.equal(term_loss(part, ask(policy, part.probes))[0], loss)


def test_the_choice_metric_is_the_mean_over_steps_that_have_an_advantage():
    policy, rollouts = rollout()
    (part,) = parts_of(agrpo(draws=6, choice=True), rollouts, generator())
    part.advantage_B[0] = 0.0
    logp_NL, probes = ask(policy, part.probes).detach(), part.probes
    steps = {}
    for n, unit in enumerate(probes.unit_N.tolist()):
        if part.advantage_B[probes.trace_N[n]] and probes.asked_NL[n].any():
            steps[unit] = steps.get(unit, 0.0) + logp_NL[n][probes.passed_NL[n]].sum().item()
    assert min(steps.values()) < 0
    assert term_loss(part, logp_NL)[1]["choice_logp"].item() == pytest.approx(sum(steps.values()) / len(steps))


def test_agrpos_loss_is_a_mean_over_traces_of_weighted_steps_and_a_sum_over_their_tokens():
    policy, rollouts = rollout()
    (part,) = parts_of(agrpo(draws=3, steps=entropy_steps), rollouts, generator(), moved(policy))
    logp_NL, probes = ask(policy, part.probes), part.probes
    total, sides = 0.0, set()
    for n, i in probes.asked_NL.nonzero().tolist():
        ratio, a = (logp_NL[n, i] - part.old_NL[n, i]).exp().item(), part.advantage_B[probes.trace_N[n]].item()
        clip = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        sides.add((a > 0, clip < ratio * a))
        total -= probes.weight_M[probes.unit_N[n]].item() * clip / len(rollouts.trace)
    assert len(sides) == 4
    assert_close(term_loss(part, logp_NL)[0], torch.tensor(total, dtype=torch.float64))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"order": random}, ["random", "low_confidence"]),
        ({"order": surest_position}, ["surest_position", "low_confidence"]),
    ],
    ids=["random", "surest position"],
)
def test_the_choice_of_positions_is_scored_only_in_the_order_it_is_defined_for(settings, named):
    """From Python too: a rollout records its order, and the method checks it."""
    policy, method = Net(1), agrpo(choice=True)
    decoding = unmask.Decoding(length=6, **settings)
    rollouts = unmask.sample(
        policy, [[3], [3]], torch.arange(2), decoding, group_B=torch.zeros(2), request=method.request
    )
    batch = unmask.ScoredRollouts(rollouts, torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match=naming(*named)):
        unmask.loss_terms(method, batch, unmask.Scorer(policy), generator())
    unmask.loss_terms(agrpo(), batch, unmask.Scorer(policy), generator())  # which asks only about tokens


def test_steps_by_entropy_need_the_entropies_of_the_rollout():
    policy, method = Net(1), agrpo(steps=unmask.entropy_steps)
    trace = unmask.sample(policy, [[3]], torch.arange(1), unmask.Decoding(length=6)).trace
    with pytest.raises(ValueError, match=naming("request=method.request")):
        method.probe(trace, generator(), 1)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: agrpo(steps="entropy"), "steps='entropy'"),
        (lambda: agrpo(advantage="z_score"), "advantage='z_score'"),
        (lambda: unmask.diffu_grpo(normaliser="token_mean"), "normaliser='token_mean'"),
        (lambda: unmask.wd1(kl_kind="k3"), "kl_kind='k3'"),
        (lambda: unmask.sml(unmask.diffu_grpo(), layout="random"), "layout='random'"),
        (lambda: unmask.dps(unmask.diffu_grpo(), scope="group"), "scope='group'"),
        (lambda: unmask.dispo(unmask.diffu_grpo(), advantage="group_mean"), "advantage='group_mean'"),
    ],
)
def test_a_name_where_a_formula_is_meant_is_refused_at_once(make, option):
    with pytest.raises(ValueError, match=re.escape(option)):
        make()


def test_an_order_of_ones_own_is_recorded_as_such():
    """Whatever it is called: it is not the order that the choice of positions is defined for."""
    policy, method = Net(1), agrpo(choice=True)
    for order in (partial(surest_position), lambda logits: logits.noise_Q):
        decoding = unmask.Decoding(length=6, order=order)
        rollouts = unmask.sample(policy, [[3], [3]], torch.arange(2), decoding, group_B=torch.zeros(2))
        assert rollouts.trace.order == "custom"
        batch = unmask.ScoredRollouts(rollouts, torch.tensor([0.0, 1.0]))
        with pytest.raises(ValueError, match=naming("custom", "low_confidence")):
            unmask.loss_terms(method, batch, unmask.Scorer(policy), generator())
