"""The bases of the shelf: their probes and weights against loops, their objectives in place, their limits."""

import math
from dataclasses import replace
from functools import partial
from inspect import signature

import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st

from helpers import (
    MASK,
    Net,
    assert_close,
    assert_identical,
    generator,
    loss_and_slope,
    moved,
    parts_of,
    positions,
    random_trace,
    rewards,
    rolled,
    rows_of,
    slopes,
)
from unmask.core.advantage import EPSILON, batch_z_score, group_mean, leave_one_out, z_score
from unmask.core.objective import (
    k2,
    sequence_clip,
    sequence_divergence,
    sequence_mean,
    token_clip,
    token_divergence,
    token_mean,
    trace_sum,
)
from unmask.core.probes import ask, fully_masked, unit_likelihood
from unmask.core.shapes import NEVER
from unmask.core.states import coupled, coupled_views, elbo, elbo_views
from unmask.core.steps import sampled_steps
from unmask.core.strata import strata_views
from unmask.core.trace import all_tokens, until_eos
from unmask.methods import BASES, diffu_grpo, espo, gspo, reinforce_pp, unigrpo, wd1
from unmask.methods.unigrpo import masked_at_ratio, random_ratio
from unmask.methods.wd1 import preference_weight
from unmask.training.update import term_loss

SEEDS = st.integers(0, 10**6)


def rollout(length=6, **settings):
    """Some rows retire, some write past an end token."""
    policy = Net(1, ends=1.0)
    rollouts = rolled(policy, length=length, block=3, **settings)
    assert (rollouts.trace.step_BL == NEVER).any()
    assert (until_eos(rollouts.trace) != all_tokens(rollouts.trace)).any()
    return policy, rollouts


def assert_same_rows(probes, expected):
    """The same questions, in whatever order."""

    def plain(rows):
        return sorted((b, sorted(masked), sorted(asked.items())) for b, masked, asked in rows)

    found, wanted = plain(rows_of(probes)), plain(expected)
    assert [row[:2] for row in found] == [row[:2] for row in wanted]
    for (_, _, shares), (_, _, others) in zip(found, wanted, strict=True):
        assert dict(shares) == pytest.approx(dict(others))


# The words in the blanks: advantage, what counts, surrogate with its default bounds, divergence with its default weight

BY_TOKEN, BY_SEQUENCE = {"normaliser": token_mean}, {"normaliser": sequence_mean}
SEQUENCE_K3, SEQUENCE_K2 = partial(token_divergence, **BY_SEQUENCE), partial(sequence_divergence, kl=k2)
WORDS_OF = {
    "diffu_grpo": (group_mean, until_eos, token_clip, 0.5, 0.5, token_divergence, 0.04, BY_TOKEN),
    "coupled_grpo": (leave_one_out, until_eos, token_clip, 0.5, 0.5, token_divergence, 0.01, BY_TOKEN),
    "unigrpo": (z_score, until_eos, token_clip, 0.2, 0.2, token_divergence, 0.01, BY_SEQUENCE),
    "gspo": (z_score, until_eos, sequence_clip, 3e-4, 4e-4, SEQUENCE_K3, 0.0, {}),
    "espo": (leave_one_out, all_tokens, sequence_clip, 0.2, 0.2, SEQUENCE_K2, 0.01, {}),
    "agrpo": (group_mean, all_tokens, partial(token_clip, normaliser=trace_sum), 0.2, 0.2, None, 0.0, {}),
}


@pytest.mark.parametrize("name", WORDS_OF)
@pytest.mark.parametrize("default", [True, False])
def test_a_base_is_the_words_its_paper_puts_in_the_blanks(name, default):
    advantage, counted, surrogate, low, high, divergence, kl, options = WORDS_OF[name]
    settings = {} if default else {"low": 0.03, "high": 0.11} | ({"kl": 0.2} if divergence else {})
    method = BASES[name](**settings)
    low, high, kl = (settings.get(key, value) for key, value in (("low", low), ("high", high), ("kl", kl)))
    policy, rollouts = rollout(counted=counted)
    (part,) = parts_of(method, rollouts, generator(), moved(policy, 0.03), moved(policy, seed=3))
    logp_NL, probes, trace = ask(policy, part.probes), part.probes, rollouts.trace
    reference_NL, value_B = ask(moved(policy, seed=3), probes), advantage(rewards(trace), trace.group_B)
    ones_BL = torch.ones_like(trace.logp_BL)
    loss, _ = surrogate(logp_NL, part.old_NL, probes, value_B, ones_BL, low=low, high=high, **options)
    loss = loss + kl * divergence(logp_NL, reference_NL, probes, **options) if kl else loss
    assert_close(term_loss(part, logp_NL)[0], loss, 1e-12)
    assert method.counted is counted and method.needs_reference == (kl > 0) and method.name == name


# wd1


@given(seed=SEEDS, psi=st.sampled_from([0.5, 1.0, 40.0]))
@bounded(max_examples=20)
def test_preference_weights_are_their_loop(seed, psi):
    trace = random_trace(seed)
    reward_B = 3 * torch.rand(len(trace), generator=generator(seed), dtype=torch.float64)
    weight_B = preference_weight(reward_B, trace.group_B, psi)
    for b in range(len(trace)):
        group = [r for r, g in zip(reward_B.tolist(), trace.group_B.tolist(), strict=True) if g == trace.group_B[b]]
        a, mean = reward_B[b].item(), sum(group) / len(group)
        up = math.exp(psi * (a - mean)) / sum(math.exp(psi * (r - mean)) for r in group)
        down = math.exp(psi * (mean - a)) / sum(math.exp(psi * (mean - r)) for r in group)
        assert weight_B[b].item() == pytest.approx(len(group) * (up - down), abs=1e-9)


def test_preference_weights_of_a_narrow_group_survive_a_wide_one():
    weight_B = preference_weight(torch.tensor([0.0, 4000.0, 0.0, 0.01]), torch.tensor([0, 0, 1, 1]))
    assert_close(weight_B, torch.tensor([-2.0, 2.0, -0.01, 0.01]), 1e-4)


def test_wd1s_loss_is_the_weighted_log_likelihood_of_the_counted_tokens():
    policy, rollouts = rollout()
    trace = rollouts.trace
    (part,) = parts_of(wd1(psi=2.0), rollouts, generator(), moved(policy))
    logp_NL, reward = ask(policy, part.probes), rewards(trace).tolist()
    groups, loss = trace.group_B.tolist(), 0.0
    for group in sorted(set(groups)):
        mine = [b for b, g in enumerate(groups) if g == group]
        for b in mine:
            up = math.exp(2 * reward[b]) / sum(math.exp(2 * reward[c]) for c in mine)  # the mean cancels
            down = math.exp(-2 * reward[b]) / sum(math.exp(-2 * reward[c]) for c in mine)
            likelihood = sum(logp_NL[b, i].item() for i in positions(trace.counted_BL[b]))
            loss -= len(mine) / len(groups) * (up - down) * likelihood
    assert term_loss(part, logp_NL)[0].item() == pytest.approx(loss, rel=1e-10)


def test_wd1_tends_to_two_psi_times_diffu_grpos_on_policy_slope_as_rewards_draw_together():
    policy, rollouts = rollout()
    base = diffu_grpo(prompt_masking=0.0, kl=0.0, normaliser=trace_sum)
    (plain,) = parts_of(base, rollouts, generator())
    gaps = []
    for spread in (1e-1, 1e-2, 1e-3):
        (part,) = parts_of(wd1(prompt_masking=0.0, psi=0.7), rollouts, generator())
        reward_B, group_B = spread * rewards(rollouts.trace), rollouts.trace.group_B
        _, slope = slopes(policy, [replace(part, advantage_B=preference_weight(reward_B, group_B, 0.7))])
        _, expected = slopes(policy, [replace(plain, advantage_B=1.4 * group_mean(reward_B, group_B))])
        gaps.append(max(((a - b).norm() / b.norm()).item() for a, b in zip(slope, expected, strict=True)))
    assert gaps[0] > 1e-4 and gaps[2] < 1e-5  # quadratic in the spread


# ESPO and coupled-GRPO


def test_elbo_shares_are_l_plus_one_over_the_size_and_the_halves_complement_each_other():
    _, (trace, _) = rollout()
    rank_KBL = torch.stack([torch.randperm(10, generator=generator(k)).expand(len(trace), -1) for k in range(2)])
    rank_KBL = rank_KBL.masked_fill(~trace.canvas_BL, 99).argsort(-1).argsort(-1)
    size_KB = torch.arange(2 * len(trace)).view(2, -1) % 7
    expected = []
    for k in range(2):
        for b in range(len(trace)):
            canvas, filled = positions(trace.canvas_BL[b]), positions(trace.filled_BL[b])
            never, x = canvas - filled, int(size_KB[k, b])
            first = {i for i in canvas if rank_KBL[k, b, i] < x}
            for half, size in ((first, x), (canvas - first, 6 - x)):
                if half & filled:
                    expected.append((b, half | never, {i: 7 / size / 4 for i in half & filled}))
    assert_same_rows(elbo_views(trace, rank_KBL, size_KB), expected)


def test_elbo_sizes_are_stratified_over_the_draws_of_each_trace():
    trace = rolled(Net(1), length=7).trace
    trace = replace(trace, step_BL=trace.step_BL.clamp(max=6), tokens_BL=trace.tokens_BL.clamp(min=3))
    for seed in range(10):
        sizes = {b: [] for b in range(len(trace))}
        for b, masked, asked in rows_of(elbo(trace, generator(seed), draws=8)):
            assert all(share == pytest.approx(8 / len(masked) / 16) for share in asked.values())
            sizes[b].append(len(masked))
        for b in sizes:  # x = 0, 1, ..., 7, each once, and every complement; an empty half asks nothing
            assert sorted(sizes[b]) == sorted([*range(1, 8), *range(1, 8)])


def test_espos_objective_is_one_share_weighted_ratio_a_trace():
    policy, rollouts = rollout(counted=all_tokens)
    (part,) = parts_of(espo(low=0.01, high=0.02), rollouts, generator(), moved(policy), moved(policy, seed=3))
    logp_NL = ask(policy, part.probes).detach().requires_grad_()
    loss, clips = 0.0, set()
    for b in range(len(rollouts.trace)):
        size, bound, old, ref = int(rollouts.trace.filled_BL[b].sum()), 0.0, 0.0, 0.0
        for n in (part.probes.unit_N == b).nonzero().flatten().tolist():
            for i in part.probes.asked_NL[n].nonzero().flatten().tolist():
                share = part.probes.share_NL[n, i].item()
                bound = bound + share * logp_NL[n, i]
                old, ref = old + share * part.old_NL[n, i].item(), ref + share * part.reference_NL[n, i].item()
        ratio, a = ((bound - old) / size).exp(), part.advantage_B[b].item()
        clip = min(max(ratio.item(), 0.99), 1.02) * a
        clips.add((a > 0, clip < ratio.item() * a))
        surrogate = clip if clip < ratio.item() * a else ratio * a
        loss = loss - surrogate / len(rollouts.trace) + 0.01 * (ref - bound) ** 2 / 2 / size / len(rollouts.trace)
    assert clips >= {(True, True), (False, True)}
    found = term_loss(part, logp_NL)[0]
    assert_close(loss_and_slope(found, logp_NL, part.probes), loss_and_slope(loss, logp_NL, part.probes))


def test_an_espo_draw_that_masks_everything_is_half_of_l_plus_one_over_l_of_mean_field():
    policy, (trace, _) = rollout()
    rank_BL = trace.canvas_BL.long().cumsum(-1) - 1
    probes = elbo_views(trace, rank_BL.expand(2, -1, -1), torch.full((2, len(trace)), 6))
    mean_field = fully_masked(trace, generator())
    found_BL, plain_BL = (unit_likelihood(ask(policy, p), p) for p in (probes, mean_field))
    assert len(probes.state_N) == 2 * len(trace)
    assert_close(found_BL, 7 / 12 * plain_BL, 1e-12)


def test_coupled_shares_are_a_half_and_the_halves_of_one_over_the_ratio():
    _, (trace, _) = rollout()
    masked_BL, ratio_B = torch.rand(len(trace), 10, generator=generator()) < 0.5, torch.linspace(0.2, 0.8, len(trace))
    expected = []
    for b in range(len(trace)):
        canvas, filled, t = positions(trace.canvas_BL[b]), positions(trace.filled_BL[b]), ratio_B[b].item()
        first = canvas & positions(masked_BL[b])
        for half, share in ((canvas, 0.5), (first, 0.5 / t), (canvas - first, 0.5 / (1 - t))):
            if half & filled:
                expected.append((b, half | (canvas - filled), {i: share for i in half & filled}))
    assert_same_rows(coupled_views(trace, masked_BL, ratio_B), expected)


def test_coupled_masks_at_ratios_between_a_fifth_and_four_fifths():
    trace = rolled(Net(1)).trace
    probes = [coupled(trace, generator(seed)) for seed in range(40)]
    share_S = torch.cat([p.share_NL[:, 0] for p in probes])
    ratio_S = 0.5 / share_S[share_S != 0.5]
    assert 0.2 <= ratio_S.min() < 0.25 and 0.75 < ratio_S.max() <= 0.8
    masked = sum(len(set(asked)) for p in probes for _, _, asked in rows_of(p))
    assert masked == 2 * 40 * int(trace.filled_BL.sum())  # once fully masked, once in the pair


def test_coupled_at_one_half_without_its_factor_is_two_strata_with_anchor_one_half():
    policy, (trace, _) = rollout()
    masked_BL = torch.rand(len(trace), 10, generator=generator()) < 0.5
    pair = coupled_views(trace, masked_BL, torch.full((len(trace),), 0.5, dtype=torch.float64))
    pair = replace(pair, share_NL=pair.share_NL.clamp(max=0.5))
    strata = strata_views(trace, (~masked_BL).long(), 2, anchor=0.5)
    pair_ML, strata_ML = (unit_likelihood(ask(policy, p), p) for p in (pair, strata))
    assert_close(pair_ML, strata_ML, 1e-12)
    assert len(pair.state_N) == len(strata.state_N)


# UniGRPO, GSPO, REINFORCE++


def test_unigrpos_ratios_are_spread_over_the_inner_updates_of_each_trace():
    trace = replace(rolled(Net(1)).trace, step_BL=torch.zeros(11, 10).long(), attended_BL=torch.ones(11, 10).bool())
    wide = replace(trace, **{n: getattr(trace, n).repeat(1, 60) for n in ("tokens_BL", "step_BL", "attended_BL")})
    turns = unigrpo().probe(wide, generator(), 4)
    share_UB = torch.zeros(4, 11)
    for u, probes in enumerate(turns):
        share_UB[u, probes.trace_N] = (probes.states_SL == MASK).double().mean(-1).float()
        assert torch.equal(probes.asked_NL, probes.states_SL == MASK)
    spread_UB = share_UB.sort(0).values.diff(dim=0)
    assert (spread_UB - 0.25).abs().max() < 0.1  # 600 positions: a standard error of 0.02
    start_B = share_UB[0]
    assert start_B.min() < 0.3 and start_B.max() > 0.7
    assert ((share_UB[1] - start_B) % 1 - 0.25).abs().max() < 0.1


def test_unigrpo_at_ratio_one_is_mean_field_bit_for_bit():
    policy, (trace, _) = rollout()
    ones_B = torch.ones(len(trace), dtype=torch.float64)
    probes, plain = masked_at_ratio(trace, generator(), ones_B), fully_masked(trace, generator())
    assert torch.equal(ask(policy, probes), ask(policy, plain))
    assert torch.equal(probes.asked_NL, plain.asked_NL) and torch.equal(probes.unit_N, plain.unit_N)
    assert len(random_ratio(trace, generator()).state_N) <= len(trace)


def test_gspo_has_diffu_grpos_on_policy_slope_with_sequence_mean_and_the_same_advantage():
    policy, rollouts = rollout()
    one = parts_of(gspo(advantage=group_mean), rollouts, generator(5))
    other = parts_of(diffu_grpo(kl=0.0, normaliser=sequence_mean), rollouts, generator(5))
    found, expected = slopes(policy, one), slopes(policy, other)
    assert_close(found[1], expected[1], 1e-12)
    assert max(slope.abs().max() for slope in found[1]) > 1e-3


def test_reinforce_pp_prices_the_reward_and_standardises_it_over_the_batch():
    policy, rollouts = rollout()
    (part,) = parts_of(reinforce_pp(kl=0.3), rollouts, generator(), moved(policy), Net(3))
    gap_NL, counted_BL, paid = part.old_NL - ask(Net(3), part.probes), rollouts.trace.counted_BL, []
    for b, reward in enumerate(rewards(rollouts.trace).tolist()):
        paid.append(reward - 0.3 * sum(gap_NL[b, i].item() for i in positions(counted_BL[b])))
    mean = sum(paid) / len(paid)
    std = math.sqrt(sum((r - mean) ** 2 for r in paid) / len(paid))
    assert part.advantage_B.tolist() == pytest.approx([(r - mean) / (std + EPSILON) for r in paid])
    assert part.kl == 0 and part.reference_NL is None


def test_reinforce_pp_baseline_is_group_centred_batch_scaled_and_pays_a_k2_loss():
    policy, rollouts = rollout()
    method = reinforce_pp(kl=0.3, baseline=True)
    (part,) = parts_of(method, rollouts, generator(), moved(policy), moved(policy, seed=3))
    trace, reward = rollouts.trace, rewards(rollouts.trace).tolist()
    groups = [[r for r, g in zip(reward, trace.group_B.tolist(), strict=True) if g == mine] for mine in trace.group_B]
    centred = [r - sum(group) / len(group) for r, group in zip(reward, groups, strict=True)]
    std = math.sqrt(sum(c * c for c in centred) / len(centred))
    assert part.advantage_B.tolist() == pytest.approx([c / (std + EPSILON) for c in centred])
    assert method.reward_kl == 0 and method.needs_reference

    logp_NL = ask(policy, part.probes).detach().requires_grad_()
    counted, loss = part.probes.trace.counted_BL.nonzero().tolist(), 0.0
    for b, i in counted:
        ratio, a = (logp_NL[b, i] - part.old_NL[b, i]).exp(), part.advantage_B[b].item()
        clip = min(max(ratio.item(), 0.8), 1.2) * a
        surrogate = clip if clip < ratio.item() * a else ratio * a
        loss = loss + (0.3 * (part.reference_NL[b, i] - logp_NL[b, i]) ** 2 / 2 - surrogate) / len(counted)
    found = term_loss(part, logp_NL)[0]
    assert_close(loss_and_slope(found, logp_NL, part.probes), loss_and_slope(loss, logp_NL, part.probes))


def test_reinforce_pp_without_a_price_is_diffu_grpo_with_a_batch_baseline_bit_for_bit():
    policy, rollouts = rollout()
    found = slopes(policy, parts_of(reinforce_pp(kl=0.0), rollouts, generator(), moved(policy)))
    other = diffu_grpo(low=0.2, high=0.2, kl=0.0, advantage=batch_z_score)
    expected = slopes(policy, parts_of(other, rollouts, generator(), moved(policy)))
    assert_identical(found, expected)


@pytest.mark.parametrize("name", BASES)
def test_an_option_outside_its_range_is_refused_by_name(name):
    ranges = {"low": (-0.1, math.nan), "high": (-0.1,), "kl": (-1e-3, math.nan), "prompt_masking": (-0.1, 1.0)}
    ranges |= {"psi": (-1.0,), "hidden": (1.0,), "mix": (-0.1,), "strata": (0,), "h": (-0.1, math.nan)}
    taken = [option for option in ranges if option in signature(BASES[name]).parameters]
    assert taken
    for option in taken:
        for value in ranges[option]:
            with pytest.raises(ValueError, match=rf"{option}=.* must be at least [01]|reward_kl=.* must be at least 0"):
                BASES[name](**{option: value})


def test_bad_draws_are_refused():
    _, (trace, _) = rollout()
    for estimator in (elbo, sampled_steps):
        with pytest.raises(ValueError, match="draws=0 must be at least 1"):
            estimator(trace, generator(), draws=0)
