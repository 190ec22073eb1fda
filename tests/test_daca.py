"""SML and DPS against loops; DPS recomputes every belief by asking the policy at every state."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st

from helpers import (
    MASK,
    ON_ROLLOUTS,
    WORDS,
    Net,
    assert_close,
    assert_identical,
    generator,
    moved,
    padded,
    parts_of,
    random_trace,
    rolled,
    sample,
    slopes,
)
from unmask.core.advantage import EPSILON, correct_only, group_mean
from unmask.core.credit import shuffled_steps
from unmask.core.method import uniform_credit
from unmask.core.order import ORDERS
from unmask.core.probes import ask, fully_masked, unit_likelihood
from unmask.core.schedule import timestep
from unmask.core.shapes import NEVER
from unmask.core.specs import Record
from unmask.core.strata import LAYOUTS, decode_order_strata, random_strata, stratified, strided_strata
from unmask.core.token_sampling import token_logprobs
from unmask.core.trace import all_tokens, state_before
from unmask.methods import BASES, agrpo, daca, diffu_grpo, dps, positive, raft, sml
from unmask.methods.daca import SCOPES, VARIANTS, beliefs, own_progress, progress_credit, standardised
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms

EVERYTHING = Record(top=WORDS, entropy=True)


def rollout(blocks=2, record=EVERYTHING, ends=1.0, **settings):
    """Six positions in six steps (or as told); some rows retire."""
    policy = Net(1, ends=ends)
    rollouts = rolled(policy, block=6 // blocks, record=record, **settings)
    assert (rollouts.trace.step_BL == NEVER).any() or ends < 1
    return policy, rollouts


# Stratified Masking Likelihood


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=st.integers(0, 10**6), strata=st.integers(1, 5))
@bounded(max_examples=12)
def test_every_position_is_masked_in_one_stratum_and_asked_there_once(layout, seed, strata):
    trace = random_trace(seed)
    probes = stratified(trace, generator(seed), strata, LAYOUTS[layout])
    place_BL = LAYOUTS[layout](trace, generator(seed)) % strata
    for b in range(len(trace)):
        rows = probes.trace_N == b
        assert torch.equal(probes.asked_NL[rows].sum(0), trace.filled_BL[b].long())
        assert (probes.share_NL[rows] == 1).all()
        sizes = [int((trace.canvas_BL[b] & (place_BL[b] == k)).sum()) for k in range(strata)]
        assert sum(sizes) == 5 and max(sizes) - min(sizes) <= 1
        for state_L, asked_L in zip(probes.states_SL[rows], probes.asked_NL[rows], strict=True):
            never_L = trace.step_BL[b] == NEVER
            assert torch.equal((state_L == MASK) & ~never_L, asked_L)
            stratum = place_BL[b][asked_L].unique()
            assert len(stratum) == 1
            assert torch.equal(asked_L, trace.filled_BL[b] & (place_BL[b] == stratum))


def test_the_layouts_are_what_they_say():
    _, (trace, _) = rollout(ends=-9.0)
    strided_BL = strided_strata(trace, generator()) % 3
    assert strided_BL[:, 4:].tolist() == [[0, 1, 2, 0, 1, 2]] * len(trace)
    decoded_BL = decode_order_strata(trace, generator()) % 3
    for b in range(len(trace)):
        order = sorted(range(4, 10), key=lambda i: int(trace.step_BL[b, i]))
        assert [int(decoded_BL[b, i]) for i in order] == [0, 1, 2, 0, 1, 2]
        for k in range(3):  # every stratum spans the early and the late half of the decoding
            steps = trace.step_BL[b][trace.canvas_BL[b] & (decoded_BL[b] == k)]
            assert steps.min() < 3 <= steps.max()
    drawn = torch.stack([random_strata(trace, generator(seed))[:, 4:] % 3 for seed in range(300)])
    for k in range(3):
        assert ((drawn == k).double().mean((0, 1)) - 1 / 3).abs().max() < 0.03


@pytest.mark.parametrize("name", ["diffu_grpo", "gspo", "wd1", "reinforce_pp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_stratum_is_mean_field_without_prompt_masking_bit_for_bit(name, layout):
    policy, rollouts = rollout()
    base = BASES[name](prompt_masking=0.0)
    plain = parts_of(base, rollouts, generator(), moved(policy), moved(policy, seed=3))
    one = sml(base, strata=1, layout=LAYOUTS[layout], anchor=0.0, kl=base.kl, negative=1.0)
    found = parts_of(one, rollouts, generator(5), moved(policy), moved(policy, seed=3))
    assert_identical(slopes(policy, found), slopes(policy, plain))


def test_as_many_strata_as_positions_is_leave_one_out_bit_for_bit():
    policy, (trace, _) = rollout()
    for layout in LAYOUTS.values():
        probes = stratified(trace, generator(), 6, layout)
        found_BL = unit_likelihood(ask(policy, probes, micro_batch=1), probes)
        for b in range(len(trace)):
            for i in trace.filled_BL[b].nonzero().flatten().tolist():
                state_1L = trace.tokens_BL[b : b + 1].clone()
                state_1L[0, i] = MASK
                logits_1V = policy(state_1L, trace.attended_BL[b : b + 1], torch.tensor([i]))
                logp_V = logits_1V[0].index_fill(0, torch.tensor([MASK]), -torch.inf).log_softmax(-1)
                assert torch.equal(found_BL[b, i], logp_V[trace.tokens_BL[b, i]])


@pytest.mark.parametrize("anchor", [0.3, 0.75])
def test_the_anchor_is_its_share_of_mean_field_and_the_rest_of_the_stratum(anchor):
    policy, (trace, _) = rollout()
    probes, plain = (stratified(trace, generator(2), 3, anchor=a) for a in (anchor, 0.0))
    full = fully_masked(trace, generator())
    anchored_BL, strata_BL, full_BL = (unit_likelihood(ask(policy, p), p) for p in (probes, plain, full))
    assert_close(anchored_BL, anchor * full_BL + (1 - anchor) * strata_BL, 1e-12)
    assert len(probes.state_N) == len(plain.state_N) + len(trace)


def test_bad_strata_and_anchors_are_refused():
    _, rollouts = rollout()
    for strata in (0, -1, 7):
        with pytest.raises(ValueError, match=f"strata={strata} .*1 and the 6 "):
            sml(diffu_grpo(), strata=strata).probe(rollouts.trace, generator(), 1)
    for anchor in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match=rf"anchor={anchor} .*\[0, 1\)"):
            sml(diffu_grpo(), anchor=anchor).probe(rollouts.trace, generator(), 1)


def test_sml_keeps_the_base_but_for_its_estimator_its_signs_and_its_kl():
    for name, base in ON_ROLLOUTS.items():
        if not base().trajectory:
            method, plain = sml(base(), kl=0.2), base()
            assert method.kl == 0.2 and method.name == f"{name}+sml" and sml(base()).kl == 0
            for part in ("counted", "record", "reward_kl", "further", "credit", "skip_zero_advantage", "weight"):
                assert getattr(method, part) == getattr(plain, part), part
            reward_B, group_B = torch.tensor([0.0, 1.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 1])
            plain_B = plain.advantage(reward_B, group_B)
            assert torch.equal(method.advantage(reward_B, group_B), plain_B.clamp(min=0))
            if name not in ("raft", "dtm"):  # which have no negative advantages
                assert (plain_B < 0).any()
                assert torch.equal(sml(base(), negative=1.0).advantage(reward_B, group_B), plain_B)


@pytest.mark.parametrize("negative", [0.0, 0.5])
@pytest.mark.parametrize("inner_steps", [1, 2])
def test_wrong_answers_are_pushed_down_at_visited_states_by_agrpos_own_term(negative, inner_steps):
    """Base and exact term are two losses on the same rollouts: their gradients add up, on every inner step."""
    policy, rollouts = rollout()
    reward_B = torch.rand(len(rollouts.trace), generator=generator(1), dtype=torch.float64)
    batch = ScoredRollouts(rollouts, reward_B)
    method = sml(diffu_grpo(), negative=negative, exact_negative=0.7)
    (exact,) = method.further
    steps = loss_terms(method, batch, Scorer(policy), generator(3), inner_steps)
    rng = generator(3)
    scored = loss_terms(sml(diffu_grpo(), negative=negative), batch, Scorer(policy), rng, inner_steps)
    agrpo_steps = loss_terms(agrpo(), batch, Scorer(policy), rng, inner_steps)
    now = moved(policy, seed=5)
    for (first, second), (alone,), (visited,) in zip(steps, scored, agrpo_steps, strict=True):
        assert_identical(slopes(now, [first]), slopes(now, [alone]))
        wanted = replace(visited, advantage_B=group_mean(reward_B, rollouts.trace.group_B).clamp(max=0), weight=0.7)
        assert_identical(slopes(now, [second]), slopes(now, [wanted]))
        assert second.label == exact.label != first.label == ""


@pytest.mark.parametrize("base", [raft(), positive(diffu_grpo()), diffu_grpo(advantage=correct_only)])
def test_weights_of_negative_advantages_are_refused_if_there_are_none(base):
    for option in ("negative", "exact_negative"):
        with pytest.raises(ValueError, match="no negative advantages, so negative and exact_negative would do nothing"):
            sml(base, **{option: 0.1})


def test_sml_refuses_agrpo_and_daca_on_it_is_dps_alone():
    policy, rollouts = rollout(counted=all_tokens)
    with pytest.raises(ValueError, match=r"agrpo .*SML"):
        sml(agrpo())
    both, half = (parts_of(method, rollouts, generator(), moved(policy)) for method in (daca(agrpo()), dps(agrpo())))
    assert_identical(slopes(policy, both), slopes(policy, half))
    assert daca(agrpo()).kl == 0 and daca(agrpo()).name == "agrpo+daca"
    assert_identical(slopes(policy, parts_of(daca(agrpo(), anchor=0.0), rollouts, generator(), moved(policy))),
                     slopes(policy, half))  # fmt: skip
    for option in (
        {"strata": 2},
        {"layout": strided_strata},
        {"anchor": 0.1},
        {"kl": 0.2},
        {"negative": 1.0},
        {"exact_negative": 1.0},
    ):
        with pytest.raises(ValueError, match="on agrpo daca is DPS alone"):
            daca(agrpo(), **option)


# Denoising Progress Scores


def beliefs_by_loop(policy, trace, top=WORDS):
    """b[variant][t][b][i] for the still masked positions of the block of step t, by asking at every state."""
    per_block = trace.steps // (int(trace.block_BL.max()) + 1)
    found = {"likelihood": {}, "agreement": {}, "confidence": {}}
    for t in range(trace.steps):
        state_BL = state_before(trace, t)
        logits_QV = policy(state_BL, trace.attended_BL, torch.arange(state_BL.numel()))
        logp_BLV = logits_QV.index_fill(1, torch.tensor([MASK]), -torch.inf).log_softmax(-1).view(*state_BL.shape, -1)
        for b in range(len(trace)):
            for i in range(state_BL.shape[1]):
                if trace.block_BL[b, i] == t // per_block and t <= trace.step_BL[b, i] < NEVER:
                    final, ranked = logp_BLV[b, i, trace.tokens_BL[b, i]].item(), logp_BLV[b, i].sort(descending=True)
                    known = trace.tokens_BL[b, i] in ranked.indices[:top]
                    found["likelihood"][t, b, i] = final if known else ranked.values[top - 1].item()
                    found["agreement"][t, b, i] = float(ranked.indices[0] == trace.tokens_BL[b, i])
                    found["confidence"][t, b, i] = ranked.values[0].exp().item()
    return found


def scores_by_loop(policy, trace, variant, top=WORDS):
    """score[b, i] of every written position at which the variant is defined."""
    belief, scores = beliefs_by_loop(policy, trace, top), {}
    per_block = trace.steps // (int(trace.block_BL.max()) + 1)
    for b in range(len(trace)):
        for i in trace.filled_BL[b].nonzero().flatten().tolist():
            t = int(trace.step_BL[b, i])
            if variant == "own":
                first = t // per_block * per_block
                scores[b, i] = belief["likelihood"][t, b, i] - belief["likelihood"][first, b, i]
                continue
            values = belief[variant]
            rest = [j for j in range(10) if (t + 1, b, j) in values and (t, b, j) in values]
            if rest and (t + 1) % per_block:
                scores[b, i] = statistics.fmean(values[t + 1, b, j] - values[t, b, j] for j in rest)
    return scores


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("order", ["random", "low_confidence"])
def test_every_variant_is_its_loop_over_the_states_of_the_rollout(variant, blocks, order):
    policy, (trace, _) = rollout(blocks, order=ORDERS[order], steps=6 if order == "random" else 4, ends=2.0)
    score_BL, defined_BL = VARIANTS[variant](trace)
    scores = scores_by_loop(policy, trace, variant)
    for b in range(len(trace)):
        for i in range(10):
            assert defined_BL[b, i].item() == ((b, i) in scores)
            if (b, i) in scores:
                assert score_BL[b, i].item() == pytest.approx(scores[b, i], abs=1e-10)
    last_of_block_BL = (trace.step_BL + 1) % (trace.steps // blocks) == 0
    assert variant == "own" or not (defined_BL & last_of_block_BL).any()
    assert len(set(scores.values())) > 5 or variant == "agreement"


@pytest.mark.parametrize("variant", ["likelihood", "own"])
def test_a_small_record_floors_what_it_missed_at_its_last_probability(variant):
    policy, (trace, _) = rollout(record=Record(top=2), ends=0.0)
    score_BL, _ = VARIANTS[variant](trace)
    scores, exact = (scores_by_loop(policy, trace, variant, top) for top in (2, WORDS))
    assert any(abs(scores[key] - exact[key]) > 0.1 for key in scores)
    for (b, i), score in scores.items():
        assert score_BL[b, i].item() == pytest.approx(score, abs=1e-10)


def z_by_loop(trace, scores, scope):
    """(score - mean) / (std + epsilon): every distinct (trace, step) one voice, its tokens' scores averaged in."""
    scope_of = {"rollout": lambda b: b, "group": lambda b: int(trace.group_B[b]), "batch": lambda b: 0}[scope]
    steps = {}
    for (b, i), score in scores.items():
        steps.setdefault((b, int(trace.step_BL[b, i])), []).append(score)
    z_BL = torch.zeros(trace.tokens_BL.shape, dtype=torch.float64)
    for (b, i), score in scores.items():
        voices = [v for (c, _), v in steps.items() if scope_of(c) == scope_of(b)]
        mean = statistics.fmean(statistics.fmean(v) for v in voices)
        variance = statistics.fmean(statistics.fmean((x - mean) ** 2 for x in v) for v in voices)
        z_BL[b, i] = (score - mean) / (math.sqrt(variance) + EPSILON)
    return z_BL


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("variant", ["likelihood", "own"])
def test_scores_are_standardised_over_their_scope_with_one_voice_a_step(variant, scope):
    policy, (trace, _) = rollout(blocks=1, steps=4, ends=2.0)  # steps of two tokens and of one
    z_BL = standardised(VARIANTS[variant](trace), trace, SCOPES[scope])
    assert_close(z_BL, z_by_loop(trace, scores_by_loop(policy, trace, variant), scope), 1e-8)
    assert z_BL.abs().max() > 1


@pytest.mark.parametrize("strength", [0.1, 3.0])
def test_credit_is_clipped_and_then_mean_one_over_the_counted(strength):
    policy, (trace, _) = rollout()
    z_BL = z_by_loop(trace, scores_by_loop(policy, trace, "likelihood"), "group")
    found_BL, clips = progress_credit(trace, strength), set()
    for b in range(len(trace)):
        raw = [1 + strength * z for z in z_BL[b].tolist()]
        clipped = [min(max(w, 0.2), 5.0) for w in raw]
        clips |= {w > r for w, r in zip(clipped, raw, strict=True) if w != r}
        counted = [i for i in range(10) if trace.counted_BL[b, i]]
        mean = statistics.fmean(clipped[i] for i in counted)
        assert_close(found_BL[b], torch.tensor([w / mean for w in clipped], dtype=torch.float64), 1e-8)
        assert statistics.fmean(found_BL[b, counted].tolist()) == pytest.approx(1.0, abs=1e-12)
    assert clips == (set() if strength == 0.1 else {True, False})
    assert (found_BL > 0).all()


def test_a_rollout_in_which_nothing_progresses_is_worth_one_everywhere():
    policy = Net(1)
    trace = rolled(policy, steps=1, record=EVERYTHING).trace  # the only step is the last
    assert torch.equal(progress_credit(trace, 3.0), torch.ones_like(trace.logp_BL))


@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_strength_zero_is_the_base_bit_for_bit(name):
    base = BASES[name]()
    policy, rollouts = rollout(counted=base.counted)
    for variant in VARIANTS.values():
        assert torch.equal(progress_credit(rollouts.trace, 0.0, variant), uniform_credit(rollouts.trace))
    found, plain = (
        parts_of(method, rollouts, generator(), moved(policy), moved(policy, seed=3))
        for method in (dps(base, strength=0.0), base)
    )
    assert_identical(slopes(policy, found), slopes(policy, plain))
    shaped = parts_of(dps(base, strength=1.0), rollouts, generator(), moved(policy), moved(policy, seed=3))
    assert not torch.equal(slopes(policy, shaped)[1][0], slopes(policy, plain)[1][0])


def test_the_shuffled_control_deals_each_traces_step_scores_to_its_steps_anew():
    _, (trace, _) = rollout()
    z_BL = standardised(VARIANTS["likelihood"](trace), trace, SCOPES["group"])
    dealt_BL, moved_traces = shuffled_steps(z_BL, trace), 0
    for b in range(len(trace)):
        steps = sorted(set(trace.step_BL[b][trace.filled_BL[b]].tolist()))
        before = [z_BL[b][trace.step_BL[b] == t].unique().tolist() for t in steps]
        after = [dealt_BL[b][trace.step_BL[b] == t].unique().tolist() for t in steps]
        assert all(len(scores) == 1 for scores in before + after)
        assert sorted(after) == [pytest.approx(scores, abs=1e-12) for scores in sorted(before)]
        moved_traces += before != after
    assert moved_traces > len(trace) // 2
    assert torch.equal(shuffled_steps(z_BL, trace), dealt_BL)
    wider = padded(fully_masked(trace, generator()), 2).trace  # nor does it depend on padding
    assert torch.equal(shuffled_steps(torch.nn.functional.pad(z_BL, (2, 0)), wider)[:, 2:], dealt_BL)
    assert (dealt_BL[~trace.filled_BL] == 0).all()
    control_BL = progress_credit(trace, 0.5, shuffled=True)
    mean_B = (control_BL * trace.counted_BL).sum(-1) / trace.counted_BL.sum(-1)
    assert_close(mean_B, torch.ones_like(mean_B), 1e-12)
    assert not torch.allclose(control_BL, progress_credit(trace, 0.5))


def test_own_progress_of_a_blocks_first_step_is_zero():
    _, (trace, _) = rollout()
    score_BL, defined_BL = own_progress(trace)
    first_BL = (trace.step_BL % 3 == 0) & trace.filled_BL
    assert (score_BL[first_BL] == 0).all() and first_BL.any() and torch.equal(defined_BL, trace.filled_BL)


def test_dps_without_a_record_and_a_negative_strength_are_refused():
    with pytest.raises(ValueError, match=r"request=method\.request"):
        beliefs(rolled(Net(1)).trace)
    with pytest.raises(ValueError, match=r"strength=-0\.1 .*0"):
        dps(diffu_grpo(), strength=-0.1)
    with pytest.raises(ValueError, match=r"top=0 .*1"):
        dps(diffu_grpo(), top=0)


def test_daca_is_sml_and_dps_together():
    policy, rollouts = rollout()
    both = daca(diffu_grpo(), strata=3, anchor=0.2, strength=0.7, layout=strided_strata)
    apart = dps(sml(diffu_grpo(), strata=3, anchor=0.2, layout=strided_strata), strength=0.7)
    parts = [parts_of(method, rollouts, generator(), moved(policy), moved(policy, seed=3)) for method in (both, apart)]
    assert_identical(slopes(policy, parts[0]), slopes(policy, parts[1]))
    assert both.record == Record(top=32) and both.name == "diffu_grpo+daca"


@pytest.mark.parametrize("steps", [4, 8, 16])
def test_own_progress_counts_from_the_first_state_also_where_steps_commit_nothing(steps):
    """Dream's schedule commits nothing at its first step when there are as many steps as positions."""
    policy = Net(1)
    settings = {"length": 8, "steps": steps, "schedule": timestep, "record": Record(top=WORDS)}
    trace = sample(policy, [[3, 4], [5]], torch.arange(2), **settings).trace
    score_BL, _ = own_progress(trace)
    for b, i in trace.filled_BL.nonzero().tolist():
        at = torch.tensor([b * trace.tokens_BL.shape[1] + i])
        said = [
            token_logprobs(policy(state_before(trace, step), trace.attended_BL, at), trace.mask_id)[
                0, trace.tokens_BL[b, i]
            ]
            for step in (int(trace.step_BL[b, i]), 0)
        ]
        assert_close(score_BL[b, i], said[0] - said[1], 1e-9)
