"""SPG: the sandwich against a loop over draws and tokens, its masking, and where the two bounds coincide."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st

from helpers import (
    Net,
    Plain,
    assert_close,
    assert_identical,
    cells_of,
    generator,
    loss_and_slope,
    objective_and_slope,
    parts_of,
    positions,
    random_answers,
    random_credit,
    random_probes,
    random_trace,
    rolled,
    rows_of,
    slopes,
)
from unmask.core.probes import ask, fully_masked
from unmask.core.strata import stratified
from unmask.core.trace import until_eos
from unmask.methods import sml, spg
from unmask.methods.spg import block_random, sandwiched_policy_gradient

SEEDS = st.integers(0, 10**6)


def rollout(**settings):
    policy = Net(1, ends=1.0)
    return policy, rolled(policy, block=3, **settings)


def sandwich_by_loop(logp_NL, probes, advantage_B, credit_BL, beta, mix):
    plain, cells, advantage, credit = Plain(probes), cells_of(logp_NL), advantage_B.tolist(), credit_BL.tolist()
    counted = [{i for i, yes in enumerate(row) if yes} for row in probes.trace.counted_BL.tolist()]
    loss, lengths = 0.0, 0
    for m, b in enumerate(plain.trace):
        draws = [[i for i, asked in enumerate(plain.asked[n]) if asked and i in counted[b]] for n in plain.rows[m]]
        draws = [(n, tokens) for n, tokens in zip(plain.rows[m], draws, strict=True) if tokens]
        length = len(counted[b])
        lengths += length
        if not draws:
            continue
        lower = sum(sum(credit[b][i] * cells[n][i] for i in tokens) / len(tokens) for n, tokens in draws) / len(draws)
        upper = 0.0
        for i in plain.tokens[m]:
            powers = [(beta * cells[n][i]).exp() / (len(tokens) / length) for n, tokens in draws if i in tokens]
            upper = upper + credit[b][i] * (sum(powers) / len(draws)).log() / beta
        upper = upper / len(plain.tokens[m])
        bound = lower if advantage[b] > 0 else mix * upper + (1 - mix) * lower
        loss = loss - length * advantage[b] * bound
    return loss / lengths


@given(seed=SEEDS, beta=st.sampled_from([1.0, 1.5]), mix=st.sampled_from([0.0, 0.3, 1.0]))
@bounded(max_examples=20)
def test_the_sandwich_is_its_loop(seed, beta, mix):
    probes = random_probes(seed, units=1, rows=3)
    logp_NL, old_NL, _ = random_answers(probes, seed)
    advantage_B, credit_BL = random_credit(probes, seed)
    assert (advantage_B > 0).any() and (advantage_B < 0).any()
    loss = sandwich_by_loop(logp_NL, probes, advantage_B, credit_BL, beta, mix)
    objective = partial(sandwiched_policy_gradient, beta=beta, mix=mix)
    found = objective_and_slope(objective, logp_NL, old_NL, probes, advantage_B, credit_BL)
    assert_close(found, loss_and_slope(loss, logp_NL, probes))


def test_block_random_masks_a_uniform_part_of_a_uniform_block_and_everything_after_it():
    trace = random_trace(2)
    trace = replace(trace, step_BL=trace.step_BL.clamp(max=3), tokens_BL=trace.tokens_BL.clamp(min=3))
    found = []
    for seed in range(60):
        for b, masked, asked in rows_of(block_random(trace, generator(seed), draws=1, hidden=0.0)):
            at = int(trace.block_BL[b, min(masked)])
            here, later = positions(trace.block_BL[b] == at), positions(trace.block_BL[b] > at)
            assert later <= masked <= here | later and set(asked) == masked
            found.append((at, len(masked & here)))
    assert len(found) == 60 * len(trace)
    for case, share in {(0, 1): 1 / 6, (0, 2): 1 / 6, (0, 3): 1 / 6, (1, 1): 1 / 4, (1, 2): 1 / 4}.items():
        assert abs(found.count(case) / len(found) - share) < 0.06  # blocks of three and of two positions


def test_block_random_hides_a_share_of_what_is_before_its_block_and_all_of_the_end_token_tail():
    _, (trace, _) = rollout(length=9)
    hidden, open_to, prompts = 0, 0, 0
    for seed in range(40):
        clean, noisy = (
            {b: masked for b, masked, _ in rows_of(block_random(trace, generator(seed), 1, share))}
            for share in (0.0, 0.15)
        )
        for b in clean:
            tail = positions(trace.canvas_BL[b] & ~until_eos(trace)[b])
            assert tail <= clean[b] <= noisy[b]
            if clean[b] - tail:
                at = min(int(trace.block_BL[b, i]) for i in clean[b] - tail)
                earlier = positions(trace.attended_BL[b] & (trace.block_BL[b] < at))
                assert not clean[b] & earlier and noisy[b] - clean[b] <= earlier
                hidden, open_to = hidden + len(noisy[b] & earlier), open_to + len(earlier)
                prompts += len(noisy[b] & positions(~trace.canvas_BL[b]))
    assert abs(hidden / open_to - 0.15) < 0.03 and prompts > 20


def test_on_strata_of_equal_size_the_two_bounds_of_spg_coincide():
    trace = rolled(Net(1), length=8, counted=lambda trace: trace.canvas_BL).trace
    trace = replace(trace, step_BL=trace.step_BL.clamp(max=7))  # every position written
    for strata, coincide in ((4, True), (3, False)):
        probes = stratified(trace, generator(), strata)
        logp_NL, _, _ = random_answers(probes, 0)
        credit = random_credit(probes, 0)
        lower, upper = (
            sandwiched_policy_gradient(logp_NL, logp_NL, probes, *credit, mix=mix)[0].item() for mix in (0.0, 1.0)
        )
        assert (abs(lower - upper) < 1e-12) == coincide


def test_an_spg_draw_that_masks_everything_is_a_weighted_mean_field_likelihood():
    policy, (trace, _) = rollout()
    probes = fully_masked(trace, generator())
    logp_NL = ask(policy, probes)
    advantage_B, credit_BL = random_credit(probes, 0)
    ones_BL, counted_BL = torch.ones_like(credit_BL), trace.counted_BL
    expected = -(advantage_B[:, None] * logp_NL * counted_BL).sum() / counted_BL.sum()
    assert_close(sandwiched_policy_gradient(logp_NL, logp_NL, probes, advantage_B, ones_BL)[0], expected, 1e-12)


def test_the_anchor_of_sml_is_one_more_draw_of_spg_whatever_its_share():
    policy, rollouts = rollout()
    small, large, none = (
        slopes(policy, parts_of(sml(spg(), anchor=anchor, kl=0.0), rollouts, generator(2))) for anchor in (0.1, 0.7, 0)
    )
    assert_identical(small, large)
    assert not torch.equal(small[0], none[0])


def test_no_draws_are_refused():
    with pytest.raises(ValueError, match="draws=0 must be at least 1"):
        block_random(random_trace(0), generator(), draws=0)


@pytest.mark.parametrize("depth", [-3.0, -497.0, -2000.0, -9000.0])
def test_however_unlikely_the_tokens_the_bounds_and_their_slopes_are_finite_and_move_with_them(depth):
    """B(logp + c) = B(logp) + c for both bounds, so that the loss moves by a known constant and its slope not at all.
    Below -497 the powers underflow in double."""
    probes = random_probes(3)
    trace = probes.trace
    logp_NL, credit_BL = random_answers(probes, 4)[0], torch.ones_like(trace.logp_BL)
    advantage_B = torch.linspace(-1, 1.5, len(trace), dtype=torch.float64)

    def of(answer_NL):
        answer_NL = answer_NL.detach().requires_grad_()
        loss, metrics = sandwiched_policy_gradient(answer_NL, answer_NL.detach(), probes, advantage_B, credit_BL)
        return loss.detach(), torch.autograd.grad(loss, answer_NL)[0], metrics

    (loss, slope_NL, metrics), (deep, deep_slope_NL, deep_metrics) = of(logp_NL), of(logp_NL + depth)
    assert_close(deep_slope_NL, slope_NL, 1e-9)
    assert_close(deep_metrics["gap"], metrics["gap"], 1e-9)
    assert_close(deep - loss, depth * slope_NL.sum(), 1e-9)
