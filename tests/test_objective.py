"""Objectives, normalisers and divergences against loops over units, tokens and rows: value and gradient."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st

from helpers import (
    Plain,
    assert_close,
    cells_of,
    generator,
    loss_and_slope,
    objective_and_slope,
    random_answers,
    random_credit,
    random_probes,
)
from unmask.core.objective import (
    KLS,
    NORMALISERS,
    clipped_surrogate,
    counted_units,
    k1,
    k2,
    k3,
    policy_gradient,
    reward_divergence,
    sequence_clip,
    sequence_divergence,
    sequence_mean,
    step_clip,
    token_clip,
    token_divergence,
)

SEEDS = st.integers(0, 10**6)
LOW, HIGH = 0.15, 0.4


# Straight lines


def clip_by_case(ratio, value, low, high):
    """PPO's cases, and which of them it was."""
    if value > 0 and ratio > 1 + high:
        return (1 + high) * value, "above"
    if value < 0 and ratio < 1 - low:
        return (1 - low) * value, "below"
    return ratio * value, "free"


def scale(name, probes, plain, m):
    """The normaliser's weight of a counted token of unit m."""
    mine = [u for u in plain.units if plain.trace[u] == plain.trace[m]]
    if name == "token_mean":
        return 1 / sum(len(tokens) for tokens in plain.tokens)
    if name == "sequence_mean":
        return 1 / plain.batch / sum(len(plain.tokens[u]) for u in mine)
    if name == "canvas_mean":
        return 1 / plain.batch / sum(step != -1 for step in probes.trace.step_BL[plain.trace[m]].tolist())
    if name == "trace_sum":
        return 1 / plain.batch
    if name == "unit_mean":
        return 1 / sum(map(bool, plain.tokens)) / len(plain.tokens[m])
    assert name == "step_mean"
    return 1 / plain.batch / sum(bool(plain.tokens[u]) for u in mine) / len(plain.tokens[m])


def token_clip_by_loop(logp_NL, old_NL, probes, advantage_B, credit_BL, low, high, name):
    plain, gain = Plain(probes), cells_of(logp_NL - old_NL)
    advantage, credit = advantage_B.tolist(), credit_BL.tolist()
    loss, cases = 0.0, []
    for m, b in enumerate(plain.trace):
        for i in plain.tokens[m]:
            ratio = plain.likelihood(gain, m, i).exp()
            surrogate, case = clip_by_case(ratio, advantage[b] * credit[b][i], low, high)
            loss = loss - plain.weight[m] * scale(name, probes, plain, m) * surrogate
            cases.append(case)
    return loss, cases


def step_clip_by_loop(logp_NL, old_NL, probes, advantage_B, credit_BL, low, high):
    plain, gain = Plain(probes), cells_of(logp_NL - old_NL)
    advantage, credit = advantage_B.tolist(), credit_BL.tolist()
    passed = None if probes.passed_NL is None else probes.passed_NL.tolist()
    loss, cases = 0.0, []
    for m, b in enumerate(plain.trace):
        if not plain.tokens[m]:
            continue
        log_ratio = sum(plain.likelihood(gain, m, i) for i in plain.tokens[m])
        if passed is not None:
            log_ratio = log_ratio + sum(g for n in plain.rows[m] for g, p in zip(gain[n], passed[n], strict=True) if p)
        mean_credit = sum(credit[b][i] for i in plain.tokens[m]) / len(plain.tokens[m])
        surrogate, case = clip_by_case(log_ratio.exp(), advantage[b] * mean_credit, low, high)
        loss = loss - plain.weight[m] * surrogate / plain.batch
        cases.append(case)
    return loss, cases


def lengths(probes):
    """The written tokens of each trace that count, also those that are not asked."""
    trace = probes.trace
    return [sum(row) for row in (trace.counted_BL & trace.filled_BL).long().tolist()]


def sequence_clip_by_loop(logp_NL, old_NL, probes, advantage_B, credit_BL, low, high):
    plain, gain = Plain(probes), cells_of(logp_NL - old_NL)
    advantage, credit, length = advantage_B.tolist(), credit_BL.tolist(), lengths(probes)
    loss, cases = 0.0, []
    for m, b in enumerate(plain.trace):
        if plain.tokens[m]:
            log_ratio = sum(credit[b][i] * plain.likelihood(gain, m, i) for i in plain.tokens[m])
            ratio = (log_ratio / length[b]).exp()
            surrogate, case = clip_by_case(ratio, advantage[b], low, high)
            loss = loss - plain.weight[m] * surrogate / plain.batch
            cases.append(case)
    return loss, cases


# Objectives


def compared(objective, by_loop, seed, passed=False, spread=0.6):
    """Value and slope of both, and the clip cases that occurred."""
    probes = random_probes(seed, passed=passed)
    logp_NL, old_NL, _ = random_answers(probes, seed, spread)
    given_here = logp_NL, old_NL, probes, *random_credit(probes, seed)
    loss, cases = by_loop(*given_here)
    assert_close(objective_and_slope(objective, *given_here), loss_and_slope(loss, logp_NL, probes))
    return cases


@pytest.mark.parametrize("name", NORMALISERS)
@given(seed=SEEDS)
@bounded(max_examples=6)
def test_token_clip_is_its_loop(name, seed):
    objective = partial(token_clip, low=LOW, high=HIGH, normaliser=NORMALISERS[name])
    cases = compared(objective, partial(token_clip_by_loop, low=LOW, high=HIGH, name=name), seed)
    assert {"above", "below", "free"} == set(cases)


@pytest.mark.parametrize("passed", [True, False])
@given(seed=SEEDS)
@bounded(max_examples=12)
def test_step_clip_is_its_loop_with_and_without_passed_positions(passed, seed):
    objective = partial(step_clip, low=LOW, high=HIGH)
    cases = compared(objective, partial(step_clip_by_loop, low=LOW, high=HIGH), seed, passed)
    assert len(set(cases)) > 1


@given(seed=SEEDS)
@bounded(max_examples=20)
def test_sequence_clip_is_its_loop(seed):
    objective = partial(sequence_clip, low=LOW, high=HIGH)
    cases = compared(objective, partial(sequence_clip_by_loop, low=LOW, high=HIGH), seed, spread=1.0)
    assert len(set(cases)) > 1


@pytest.mark.parametrize(("objective", "passed"), [(step_clip, True), (sequence_clip, False)])
def test_a_fixed_case_of_the_unit_ratios_is_clipped_on_both_sides(objective, passed):
    loops = {step_clip: step_clip_by_loop, sequence_clip: sequence_clip_by_loop}
    by_loop = partial(loops[objective], low=LOW, high=HIGH)
    assert [] in Plain(random_probes(5, passed=passed)).tokens  # a unit in which nothing counts
    cases = compared(partial(objective, low=LOW, high=HIGH), by_loop, 5, passed, spread=1.0)
    assert set(cases) == {"above", "below", "free"}


@pytest.mark.parametrize("name", NORMALISERS)
@given(seed=SEEDS)
@bounded(max_examples=5)
def test_policy_gradient_is_its_loop_and_ignores_the_old_policy(name, seed):
    probes = random_probes(seed)
    logp_NL, old_NL, other_NL = random_answers(probes, seed)
    advantage_B, credit_BL = random_credit(probes, seed)
    plain, cells, loss = Plain(probes), cells_of(logp_NL), 0.0
    for m, b in enumerate(plain.trace):
        for i in plain.tokens[m]:
            value = (advantage_B[b] * credit_BL[b, i]).item() * plain.weight[m] * scale(name, probes, plain, m)
            loss = loss - value * plain.likelihood(cells, m, i)
    objective = partial(policy_gradient, normaliser=NORMALISERS[name])
    found = objective_and_slope(objective, logp_NL, old_NL, probes, advantage_B, credit_BL)
    assert_close(found, loss_and_slope(loss, logp_NL, probes))
    again = objective_and_slope(objective, logp_NL, other_NL, probes, advantage_B, credit_BL)
    assert torch.equal(found[1], again[1])


@given(seed=SEEDS)
@bounded(max_examples=10)
def test_on_policy_the_token_clip_has_the_policy_gradients_slope(seed):
    probes = random_probes(seed)
    logp_NL, _, _ = random_answers(probes, seed)
    given_here = logp_NL, logp_NL.detach(), probes, *random_credit(probes, seed)
    for normaliser in NORMALISERS.values():
        clip = objective_and_slope(partial(token_clip, normaliser=normaliser), *given_here)
        plain = objective_and_slope(partial(policy_gradient, normaliser=normaliser), *given_here)
        assert_close(clip[1], plain[1])


@pytest.mark.parametrize("name", NORMALISERS)
def test_every_normaliser_is_its_loop_and_zero_off_the_counted(name):
    probes = random_probes(3)
    counted_ML, plain = counted_units(probes), Plain(probes)
    found_ML, expected_ML = NORMALISERS[name](counted_ML, probes), torch.zeros(counted_ML.shape, dtype=torch.float64)
    for m in plain.units:
        for i in plain.tokens[m]:
            expected_ML[m, i] = scale(name, probes, plain, m)
    assert counted_ML.sum() > 20 and (~counted_ML).any()
    assert_close(found_ML, expected_ML)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "step_mean", "unit_mean"])
def test_a_mean_weighs_one_in_all(name):
    probes, plain = random_probes(3), Plain(random_probes(3))
    assert {b for m, b in enumerate(plain.trace) if plain.tokens[m]} == set(range(plain.batch))
    assert NORMALISERS[name](counted_units(probes), probes).sum().item() == pytest.approx(1.0, abs=1e-12)


def test_the_metrics_are_means_over_what_counts():
    probes = random_probes(11)
    logp_NL, old_NL, _ = random_answers(probes, 11, 0.6)
    advantage_B, credit_BL = random_credit(probes, 11)
    _, metrics = token_clip(logp_NL, old_NL, probes, advantage_B, credit_BL, low=LOW, high=HIGH)
    _, cases = token_clip_by_loop(logp_NL, old_NL, probes, advantage_B, credit_BL, LOW, HIGH, "token_mean")
    plain, gain = Plain(probes), cells_of(logp_NL - old_NL)
    gains = [plain.likelihood(gain, m, i).item() for m in plain.units for i in plain.tokens[m]]
    assert metrics["clipped"].item() == pytest.approx(sum(c != "free" for c in cases) / len(cases))
    assert metrics["ratio"].item() == pytest.approx(sum(math.exp(g) for g in gains) / len(gains))


@given(st.floats(0.01, 3), st.floats(-2, 2), st.floats(0, 0.9), st.floats(0, 0.9))
@bounded(max_examples=100)
def test_clipped_is_ppos_four_cases(ratio, value, low, high):
    found, active = clipped_surrogate(*torch.tensor([ratio, value], dtype=torch.float64), low, high)
    expected, case = clip_by_case(ratio, value, low, high)
    assert found.item() == pytest.approx(expected, abs=1e-12)
    if abs(found.item() - ratio * value) > 1e-12:
        assert active.item() == (case != "free")


# Divergences

FORMULAS = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.e**d - d - 1}


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("name", NORMALISERS)
@given(seed=SEEDS)
@bounded(max_examples=3)
def test_token_divergence_is_its_loop(kl, name, seed):
    probes = random_probes(seed)
    logp_NL, _, reference_NL = random_answers(probes, seed)
    plain, gap, loss = Plain(probes), cells_of(reference_NL - logp_NL), 0.0
    for m in plain.units:
        for i in plain.tokens[m]:
            value = FORMULAS[kl](plain.likelihood(gap, m, i))
            loss = loss + plain.weight[m] * scale(name, probes, plain, m) * value
    found = token_divergence(logp_NL, reference_NL, probes, kl=KLS[kl], normaliser=NORMALISERS[name])
    assert_close(loss_and_slope(found, logp_NL, probes), loss_and_slope(loss, logp_NL, probes))


@pytest.mark.parametrize("kl", KLS)
@given(seed=SEEDS)
@bounded(max_examples=6)
def test_sequence_divergence_is_its_loop(kl, seed):
    probes = random_probes(seed)
    logp_NL, _, reference_NL = random_answers(probes, seed)
    plain, gap, loss = Plain(probes), cells_of(reference_NL - logp_NL), 0.0
    for m in plain.units:
        if tokens := plain.tokens[m]:
            d = sum(plain.likelihood(gap, m, i) for i in tokens)
            loss = loss + plain.weight[m] * FORMULAS[kl](d) / lengths(probes)[plain.trace[m]] / plain.batch
    found = sequence_divergence(logp_NL, reference_NL, probes, kl=KLS[kl])
    assert_close(loss_and_slope(found, logp_NL, probes), loss_and_slope(loss, logp_NL, probes))


@given(seed=SEEDS)
@bounded(max_examples=6)
def test_reward_divergence_is_its_loop(seed):
    probes = random_probes(seed)
    _, old_NL, reference_NL = random_answers(probes, seed)
    plain, gap = Plain(probes), cells_of(old_NL - reference_NL)
    expected_B = torch.zeros(plain.batch, dtype=torch.float64)
    for m, b in enumerate(plain.trace):
        expected_B[b] += plain.weight[m] * sum(plain.likelihood(gap, m, i) for i in plain.tokens[m])
    assert_close(reward_divergence(old_NL, reference_NL, probes), expected_B)


def expectations(kl, seed):
    """Over a categorical of five: E_p[kl], E_p[grad kl], and KL(p || ref), KL(ref || p) with their gradients."""
    logits_V = torch.randn(5, generator=generator(seed), dtype=torch.float64).requires_grad_()
    ref_V = torch.randn(5, generator=generator(seed + 1), dtype=torch.float64).log_softmax(-1)
    logp_V = logits_V.log_softmax(-1)
    p_V = logp_V.detach().exp()
    estimate = (p_V * kl(ref_V - logp_V)).sum()
    forward, backward = (logp_V.exp() * (logp_V - ref_V)).sum(), (ref_V.exp() * (ref_V - logp_V)).sum()
    values = estimate, forward, backward
    return [(value.item(), torch.autograd.grad(value, logits_V, retain_graph=True)[0]) for value in values]


@pytest.mark.parametrize("seed", range(4))
def test_k1_and_k3_are_unbiased_in_value_and_k2_is_not(seed):
    for kl in (k1, k3):
        (value, _), (exact, _), _ = expectations(kl, seed)
        assert value == pytest.approx(exact, rel=1e-10)
    (value, _), (exact, _), _ = expectations(k2, seed)
    assert abs(value - exact) > 1e-3 * exact


@pytest.mark.parametrize("seed", range(4))
def test_on_policy_k1_teaches_nothing_k2_the_kl_and_k3_the_reverse_kl(seed):
    (_, k1_slope_V), (_, forward_V), (_, backward_V) = expectations(k1, seed)
    assert_close(k1_slope_V, torch.zeros(5, dtype=torch.float64), 1e-12)
    assert_close(expectations(k2, seed)[0][1], forward_V, 1e-12)
    assert_close(expectations(k3, seed)[0][1], backward_V, 1e-12)
    assert not torch.allclose(forward_V, backward_V, atol=1e-2)


def test_k3_is_never_negative_and_keeps_small_differences():
    d = torch.tensor([-3.0, -1e-4, 0.0, 1e-4, 3.0])
    assert (k3(d) >= 0).all() and k3(d)[2] == 0
    assert k3(torch.tensor(1e-4)).item() == pytest.approx(0.5e-8, rel=0.02)  # exp(d) - d - 1 would round to 0


def test_sequence_mean_of_a_token_clip_is_the_sequence_clips_slope_on_policy():
    """One unit a trace that asks about all its tokens, as gspo and diffu_grpo have."""
    probes = random_probes(8, units=1)
    counted_BL = torch.zeros_like(probes.trace.counted_BL)
    counted_BL[probes.trace_M] = counted_units(probes)
    probes = replace(probes, trace=replace(probes.trace, counted_BL=counted_BL))
    logp_NL, _, _ = random_answers(probes, 8)
    given_here = logp_NL, logp_NL.detach(), probes, *random_credit(probes, 8)
    token = objective_and_slope(partial(token_clip, normaliser=sequence_mean), *given_here)
    assert_close(token[1], objective_and_slope(sequence_clip, *given_here)[1])
