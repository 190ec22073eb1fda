"""Probes: every estimator of the spine against loops, and `ask` against the policy called one state at a time."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st

from helpers import (
    MASK,
    ON_ROLLOUTS,
    Net,
    assert_close,
    generator,
    padded,
    parts_of,
    permuted,
    random_probes,
    rolled,
)
from unmask.core.answers import FLOOR
from unmask.core.order import ORDERS, low_confidence
from unmask.core.probes import (
    ask,
    at_states,
    chunks,
    every_step,
    fully_masked,
    left_to_right_views,
    one_shot,
    random_rank,
    rank,
    segmented,
    unit_asked,
    unit_likelihood,
    visited,
)
from unmask.core.shapes import NEVER
from unmask.core.specs import Branch, Record
from unmask.core.states import coupled, elbo, semi_autoregressive
from unmask.core.steps import sampled_steps
from unmask.core.strata import stratified
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import all_tokens, select_traces, state_before
from unmask.methods import BASES, diffu_grpo, sml
from unmask.methods.spg import block_random
from unmask.methods.unigrpo import random_ratio
from unmask.training.update import term_loss

LAWS = {"plain": TokenSampling(), "warm": TokenSampling(1.4), "cut": TokenSampling(0.8, top_k=4, top_p=0.9)}
ESTIMATORS = {
    "fully_masked": fully_masked,
    "prompt_masked": partial(fully_masked, prompt_masking=0.5),
    "segmented": partial(segmented, segments=3),
    "left_to_right_views": left_to_right_views,
    "every_step": every_step,
    "choice": partial(every_step, choice=True),
    "coupled": coupled,
    "stratified": partial(stratified, anchor=0.3),
    "elbo": elbo,
    "block_random": block_random,
    "random_ratio": random_ratio,
    "sampled_steps": sampled_steps,
    "semi_autoregressive": partial(semi_autoregressive, draws=2),
}


def rollout(sampling=LAWS["plain"], **settings):
    """Two positions a step, two blocks; some rows retire, prompts are padded."""
    policy = Net(1, ends=settings.pop("ends", 0.0))
    rollouts = rolled(policy, sampling=sampling, steps=settings.pop("steps", 4), block=3, **settings)
    policy.calls.clear()
    return policy, rollouts


def questions(probes):
    """Every row as plain data: (trace, state, asked positions with shares), in any order."""
    found = []
    for n in range(len(probes.state_N)):
        asked = [(i, probes.share_NL[n, i].item()) for i in probes.asked_NL[n].nonzero().flatten().tolist()]
        found.append((probes.trace_N[n].item(), probes.states_SL[probes.state_N[n]].tolist(), asked))
    return sorted(found)


def questions_by_loop(trace, views):
    """`views(b)` lists (masked, asked) position sets of trace b, all shares one; rows that ask nothing fall out."""
    found = []
    for b in range(len(trace)):
        filled = set(trace.filled_BL[b].nonzero().flatten().tolist())
        for masked, asked in views(b):
            state = [MASK if i in masked else token for i, token in enumerate(trace.tokens_BL[b].tolist())]
            if asked & filled:
                found.append((b, state, [(i, 1.0) for i in sorted(asked & filled)]))
    return sorted(found)


def steps_of(trace, b, first, end=math.inf):
    """The positions of trace b filled at step `first` or later, and before `end`."""
    return {i for i, step in enumerate(trace.step_BL[b].tolist()) if first <= step < end}


# ask


def answer_by_loop(policy, probes, n, i):
    """log q of one token: one state, the whole vocabulary, MASK out, tempered, cut to what was kept then."""
    s, trace, b = probes.state_N[n], probes.trace, probes.trace_N[n]
    logits_V = policy(probes.states_SL[s : s + 1], probes.attended_SL[s : s + 1], torch.tensor([i]))[0]
    words = [v for v in range(len(logits_V)) if v != MASK]
    if probes.visited and "kept" in trace.seen:
        kept = trace.seen["kept"][b, i - (len(trace.tokens_BL[0]) - 6)].tolist()
        words = [v for v in words if v in kept]
    weight = {v: math.exp(logits_V[v] / trace.sampling.temperature) for v in words}
    return math.log(weight[int(trace.tokens_BL[b, i])] / sum(weight.values()))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("estimator", [stratified, every_step])
def test_ask_is_the_log_probability_at_each_state_by_itself(law, estimator):
    policy, (trace, _) = rollout(LAWS[law])
    probes = estimator(trace, generator())
    with torch.no_grad():
        found_NL = ask(policy, probes)
        for n, i in probes.asked_NL.nonzero().tolist():
            assert found_NL[n, i].item() == pytest.approx(answer_by_loop(policy, probes, n, i), abs=1e-10)
    assert (found_NL[~probes.asked_NL] == 0).all() and probes.asked_NL.sum() > 30


@pytest.mark.parametrize("law", LAWS)
def test_the_samplers_own_log_probabilities_are_the_answers_at_every_step(law):
    policy, (trace, branches) = rollout(LAWS[law], branch=Branch(2, 1.0))
    probes = every_step(trace, generator())
    total_BL = torch.zeros_like(trace.logp_BL).index_add(0, probes.trace_N, ask(policy, probes))
    assert_close(total_BL, trace.logp_BL)
    assert_close(ask(policy, one_shot(branches)), branches.logp_BL)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_answers_do_not_depend_on_order_padding_or_chunks(name, law):
    policy, (trace, _) = rollout(LAWS[law], order=low_confidence)
    probes = ESTIMATORS[name](trace, generator(3))
    whole_NL = ask(policy, probes)
    for rows in (1, 3, 1000):
        assert_close(ask(policy, probes, rows), whole_NL, 1e-12)
    assert_close(ask(policy, padded(probes, 3))[:, 3:], whole_NL, 1e-12)

    shuffled = permuted(replace(probes, share_NL=numbered(probes)), generator(4))
    home_N = shuffled.share_NL[:, 0].long()
    assert not torch.equal(home_N, torch.arange(len(home_N)))
    assert_close(ask(policy, shuffled), whole_NL[home_N], 1e-12)


def numbered(probes):
    """Row numbers in place of shares, to find a row again after a permutation."""
    return torch.arange(len(probes.state_N)).double()[:, None].expand_as(probes.share_NL)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_no_pass_sees_more_states_than_it_may_and_the_head_only_what_is_asked(rows):
    policy, (trace, _) = rollout()
    probes = stratified(trace, generator())
    ask(policy, probes, rows)
    assert max(len(call) for call in policy.calls) == rows
    assert sum(len(call) for call in policy.calls) == len(probes.states_SL)
    for number_N, piece in chunks(probes, rows):
        assert torch.equal(piece.asked_NL, probes.asked_NL[number_N])
        assert torch.equal(piece.states_SL[piece.state_N], probes.states_SL[probes.state_N[number_N]])


def test_a_pass_asks_the_head_at_the_asked_positions_only(monkeypatch):
    policy, (trace, _) = rollout()
    probes, wanted = stratified(trace, generator()), []
    monkeypatch.setattr(policy, "head", lambda hidden: wanted.append(len(hidden)) or hidden)
    ask(policy, probes)
    assert wanted == [int(probes.asked_NL.sum())]


def test_of_states_keeps_the_questions_put_at_those_states():
    _, (_, branches) = rollout(branch=Branch(3, 0.0))
    probes = one_shot(branches)
    some = at_states(probes, torch.tensor([1, 4]))
    rows = [n for n in range(len(probes.state_N)) if probes.state_N[n] in (1, 4)]
    assert len(some.states_SL) == 2 and len(rows) == 6
    assert torch.equal(some.states_SL[some.state_N], probes.states_SL[probes.state_N[rows]])
    assert torch.equal(some.asked_NL, probes.asked_NL[rows]) and torch.equal(some.trace_N, probes.trace_N[rows])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("flat", [False, True])
def test_log_f_is_the_mass_of_draws_that_rank_below_the_least_kept(law, flat):
    """A flat policy has one law everywhere, so that scores tie and positions decide."""
    policy, (trace, _) = rollout(LAWS[law], order=low_confidence)
    if flat:
        policy.out_DV.data.zero_()
        trace = rolled(policy, sampling=LAWS[law], steps=4, block=3, order=low_confidence).trace
    probes = every_step(trace, generator(), choice=True)
    found_NL, checked = ask(policy, probes), 0
    for n in range(len(probes.state_N)):
        s, b = probes.state_N[n], probes.trace_N[n]
        at_L = torch.arange(10)
        logits_LV = policy(probes.states_SL[s : s + 1], probes.attended_SL[s : s + 1], at_L)
        score_LV = logits_LV.index_fill(1, torch.tensor([MASK]), -torch.inf).log_softmax(-1)
        written = probes.asked_NL[n].nonzero().flatten().tolist()
        kept = [(score_LV[i, trace.tokens_BL[b, i]].item(), -i) for i in written]
        for j in probes.passed_NL[n].nonzero().flatten().tolist():
            assert probes.states_SL[s, j] == MASK and trace.block_BL[b, j] == trace.block_BL[b, -min(kept)[1]]
            law_V = (score_LV[j] / trace.sampling.temperature).softmax(-1)
            if trace.sampling.truncated:
                ranked, mass, words = law_V.sort(descending=True).indices.tolist(), 0.0, []
                while len(words) < trace.sampling.top_k and mass < trace.sampling.top_p:
                    words.append(ranked[len(words)])
                    mass += law_V[words[-1]].item()
                law_V = torch.zeros_like(law_V).index_put((torch.tensor(words),), law_V[words] / mass)
            below = sum(law_V[v].item() for v in range(7) if (score_LV[j, v].item(), -j) < min(kept))
            expected = math.log(below) if below > 0 else FLOOR
            assert found_NL[n, j].item() == pytest.approx(expected, abs=1e-9)
            checked += 1
    assert checked > 15


def test_a_greedy_trace_has_no_likelihood():
    policy, (trace, _) = rollout(TokenSampling(0.0))
    with pytest.raises(ValueError, match="a greedy trace"):
        ask(policy, fully_masked(trace, generator()))


# Estimators of the spine


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_is_never_hidden_or_asked_and_only_what_was_written_is_asked(name):
    _, (trace, _) = rollout()
    probes = ESTIMATORS[name](trace, generator(1))
    states_NL, padding_NL = probes.states_SL[probes.state_N], ~trace.attended_BL[probes.trace_N]
    assert padding_NL.any() and torch.equal(probes.attended_SL[probes.state_N], ~padding_NL)
    assert torch.equal(states_NL[padding_NL], trace.tokens_BL[probes.trace_N][padding_NL])
    assert not (probes.asked_NL & ~trace.filled_BL[probes.trace_N]).any() and probes.asked_NL.any(-1).all()
    assert (states_NL[probes.asked_NL] == MASK).all()
    shown_NL = states_NL != MASK
    assert torch.equal(states_NL[shown_NL], trace.tokens_BL[probes.trace_N][shown_NL])
    if name not in ("prompt_masked", "block_random"):
        prompt_NL = ~trace.canvas_BL[probes.trace_N]
        assert not (prompt_NL & ~shown_NL).any()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_fully_masked_hides_the_completion_and_of_the_prompt_its_share(share):
    _, (trace, _) = rollout()
    probes = [fully_masked(trace, generator(seed), share) for seed in range(30)]
    masked_KBL = torch.stack([p.states_SL == MASK for p in probes])
    prompt_BL = ~trace.canvas_BL & trace.attended_BL
    assert masked_KBL[:, trace.canvas_BL].all() and not masked_KBL[:, ~trace.attended_BL].any()
    found = masked_KBL[:, prompt_BL].double().mean().item()
    assert found == share if share in (0, 1) else abs(found - share) < 0.06
    assert all(torch.equal(p.asked_NL, trace.filled_BL) for p in probes)


@pytest.mark.parametrize("segments", [1, 2, 3, 4])
def test_segmented_asks_the_tokens_of_a_segment_at_its_first_state(segments):
    _, (trace, _) = rollout()
    edges = [k * trace.steps // segments for k in range(segments + 1)]

    def views(b):
        return [(steps_of(trace, b, e), steps_of(trace, b, e, f)) for e, f in pairwise(edges)]

    probes = segmented(trace, generator(), segments)
    assert questions(probes) == questions_by_loop(trace, views)
    assert torch.equal(probes.trace_M, torch.arange(len(trace)))


def test_segmented_with_every_step_a_segment_asks_what_every_step_asks():
    policy, (trace, _) = rollout()
    merged, single = segmented(trace, generator(), trace.steps), every_step(trace, generator())
    assert questions(merged) == questions(single)
    merged_ML = unit_likelihood(ask(policy, merged), merged)
    single_ML = torch.zeros_like(merged_ML).index_add(0, single.trace_M, unit_likelihood(ask(policy, single), single))
    assert_close(merged_ML, single_ML, 1e-12)


def test_segmented_with_one_segment_is_fully_masked_bit_for_bit():
    policy, (trace, _) = rollout()
    one, full = segmented(trace, generator(), 1), fully_masked(trace, generator())
    for name in ("states_SL", "asked_NL", "share_NL", "unit_N", "trace_M", "weight_M"):
        assert torch.equal(getattr(one, name), getattr(full, name))
    assert torch.equal(ask(policy, one), ask(policy, full))


def test_left_to_right_views_hide_a_token_and_everything_right_of_it():
    _, (trace, _) = rollout()
    columns = range(4, 10)
    expected = questions_by_loop(trace, lambda b: [({*range(i, 10)}, {i}) for i in columns])
    assert questions(left_to_right_views(trace, generator())) == expected


def test_left_to_right_views_are_the_trajectory_of_a_left_to_right_rollout():
    policy, (trace, _) = rollout(order=ORDERS["left_to_right"], steps=6)
    probes = left_to_right_views(trace, generator())
    assert_close(unit_likelihood(ask(policy, probes), probes), trace.logp_BL)


def test_visited_asks_what_a_step_committed_in_a_unit_of_its_own_with_its_weight():
    _, (trace, _) = rollout()
    step_BK = torch.randint(0, 4, (len(trace), 3), generator=generator())
    weight_BK = torch.rand(len(trace), 3, generator=generator(), dtype=torch.float64)
    probes = visited(trace, step_BK, weight_BK)

    def views(b):
        return [(steps_of(trace, b, s), steps_of(trace, b, s, s + 1)) for s in step_BK[b].tolist()]

    assert questions(probes) == questions_by_loop(trace, views)
    assert len(probes.state_N) < step_BK.numel()  # steps after a row retired ask nothing
    assert torch.equal(probes.unit_N.unique(), probes.unit_N) and probes.visited
    for n, m in enumerate(probes.unit_N.tolist()):
        assert probes.trace_M[m] == m // 3 and probes.weight_M[m] == weight_BK[m // 3, m % 3]
        assert torch.equal(probes.states_SL[n], state_before(trace, int(step_BK[m // 3, m % 3]))[m // 3])


def test_choice_adds_the_positions_of_the_block_that_were_passed_over():
    _, (trace, _) = rollout(order=low_confidence, steps=6, ends=3.0)
    probes, passed = every_step(trace, generator(), choice=True), 0
    for n in range(len(probes.state_N)):
        b, row = probes.trace_N[n], probes.asked_NL[n].nonzero().flatten().tolist()
        step, block = trace.step_BL[b, row[0]], trace.block_BL[b, row[0]]
        for i in range(10):
            expected = bool(trace.block_BL[b, i] == block and trace.step_BL[b, i] > step)
            assert probes.passed_NL[n, i] == expected
            passed += expected and trace.step_BL[b, i] == NEVER
    assert passed > 0  # also positions the row never filled


def test_one_shot_asks_siblings_at_one_shared_state():
    _, (_, branches) = rollout(branch=Branch(3, 1.0))
    order_B = torch.randperm(len(branches), generator=generator())
    probes = one_shot(branches := select_traces(branches, order_B))
    assert len(probes.states_SL) == len(branches) // 3 > 3
    assert torch.equal(probes.states_SL[probes.state_N], state_before(branches, 0))
    assert torch.equal(probes.attended_SL[probes.state_N], branches.attended_BL)
    assert torch.equal(probes.asked_NL, branches.step_BL == 0)
    assert torch.equal(probes.trace_N, torch.arange(len(branches)))


@given(st.integers(0, 10**6))
@bounded(max_examples=15)
def test_unit_likelihood_and_unit_asked_are_their_loops(seed):
    probes = random_probes(seed)
    value_NL = torch.randn(probes.asked_NL.shape, generator=generator(seed), dtype=torch.float64) * probes.asked_NL
    shape = len(probes.trace_M), value_NL.shape[1]
    total_ML, asked_ML = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    for n, i in probes.asked_NL.nonzero().tolist():
        total_ML[probes.unit_N[n], i] += probes.share_NL[n, i] * value_NL[n, i]
        asked_ML[probes.unit_N[n], i] = True
    assert_close(unit_likelihood(value_NL, probes), total_ML)
    assert torch.equal(unit_asked(probes), asked_ML)


def test_ranks_are_places_in_sorted_rows_with_the_prompt_last():
    key_BL = torch.tensor([[3.0, 1.0, 3.0, 0.0], [0.0, 0.0, 0.0, -1.0]])
    assert rank(key_BL).tolist() == [[2, 1, 3, 0], [1, 2, 3, 0]]
    _, (trace, _) = rollout()
    rank_BL = random_rank(trace, generator())
    assert rank_BL[:, 4:].sort(-1).values.tolist() == [list(range(6))] * len(trace)
    assert not torch.equal(rank_BL, random_rank(trace, generator(1)))


@pytest.mark.parametrize("segments", [0, -1, 5])
def test_segments_that_do_not_fit_are_refused(segments):
    _, (trace, _) = rollout()
    with pytest.raises(ValueError, match=f"{segments} .*1 and the 4 "):
        segmented(trace, generator(), segments)


class Hard(Net):
    """Writes token 3 only where the number of masked positions is a multiple of three: elsewhere its logit is -inf."""

    def hidden(self, tokens_SL, attended_SL, at_Q):
        logits_QV = super().hidden(tokens_SL, attended_SL, at_Q)
        masked_Q = (tokens_SL == MASK).sum(-1)[at_Q // tokens_SL.shape[1]]
        return logits_QV.masked_fill((masked_Q % 3 != 0)[:, None] & (torch.arange(len(logits_QV[0])) == 3), -torch.inf)


@pytest.mark.parametrize("cut", [TokenSampling(), TokenSampling(temperature=0.7), TokenSampling(top_k=2)])
@pytest.mark.parametrize("name", [*ON_ROLLOUTS, "sml"])
def test_a_token_that_the_policy_cannot_write_has_a_floor_and_no_gradient(name, cut):
    """A token is drawn where it is possible and asked where its logit is -inf: nothing becomes NaN, and the gradient is
    that of the other answers alone."""
    options = {"segments": 2} if name == "step_merge" else {}
    method = sml(diffu_grpo()) if name == "sml" else BASES[name](**options)
    method = replace(method, kl=0.1, reward_kl=0.0)
    policy, reference = Hard(1), Hard(2)
    rollouts = rolled(policy, length=6, steps=2, sampling=cut, record=Record(entropy=True), counted=all_tokens)
    (term,) = parts_of(method, rollouts, generator(), reference=reference)
    logp_NL = ask(policy, term.probes)
    floored_NL = logp_NL == FLOOR
    if name in ("sml", "espo", "agrpo"):  # the last asks at the states that the tokens were drawn at
        assert floored_NL.any() == (name not in ("agrpo", "trace_rl"))
    loss, _ = term_loss(term, logp_NL)
    slope = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
    others, _ = term_loss(term, torch.where(floored_NL, logp_NL.detach(), logp_NL))
    expected = torch.autograd.grad(others, list(policy.parameters()))
    assert loss.isfinite() and all(each.isfinite().all() for each in slope)
    for one, other in zip(slope, expected, strict=True):
        assert_close(one, other, 1e-12)
