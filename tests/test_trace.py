"""Trace: states derived from the step map are the states the policy saw; rules, selection, joining."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st

from helpers import EOS, MASK, PAD, PROMPTS, SIZES, Net, generator, random_trace, rolled, sample
from unmask.core.order import ORDERS
from unmask.core.probes import ask, every_step, fully_masked
from unmask.core.shapes import GIVEN, NEVER
from unmask.core.specs import Branch, Record
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import all_tokens, concat_traces, select_traces, state_before, until_eos
from wording import naming


def ending_rollout(**settings):
    """Rollouts of which some rows retire early and some do not."""
    policy = Net(1)
    trace = rolled(policy, block=3, order=ORDERS["left_to_right"], **settings).trace
    retired_B = (trace.step_BL == NEVER).any(-1)
    assert retired_B.any() and not retired_B.all()
    policy.calls.clear()
    return policy, trace


def test_the_state_before_step_zero_is_all_masked_and_before_step_t_the_finished_canvas():
    _, trace = ending_rollout()
    first_BL = state_before(trace, 0)
    for b, prompt in enumerate(p for p, size in zip(PROMPTS, SIZES, strict=True) for _ in range(size)):
        assert first_BL[b].tolist() == [PAD] * (4 - len(prompt)) + prompt + [MASK] * 6
    assert torch.equal(state_before(trace, trace.steps), trace.tokens_BL)


@given(st.integers(0, 10**6))
@bounded(max_examples=25)
def test_a_state_is_the_canvas_with_later_steps_put_back_to_mask(seed):
    trace = random_trace(seed)
    for t in range(trace.steps + 1):
        expected = [
            [MASK if step >= t else token for token, step in zip(tokens, steps, strict=True)]
            for tokens, steps in zip(trace.tokens_BL.tolist(), trace.step_BL.tolist(), strict=True)
        ]
        assert state_before(trace, t).tolist() == expected
    step_B = torch.randint(0, trace.steps + 1, (len(trace),), generator=generator(seed))
    rows = torch.stack([state_before(trace, int(t))[b] for b, t in enumerate(step_B)])
    assert torch.equal(state_before(trace, step_B), rows)


def test_states_only_ever_lose_masks_and_what_is_written_stays():
    _, trace = ending_rollout()
    states = [state_before(trace, t) for t in range(trace.steps + 1)]
    for before_BL, after_BL in pairwise(states):
        assert torch.equal(after_BL[before_BL != MASK], before_BL[before_BL != MASK])
        assert (after_BL == MASK).sum() < (before_BL == MASK).sum()


@pytest.mark.parametrize("order", ORDERS)
def test_derived_states_are_the_states_the_policy_was_shown(order):
    policy = Net(1, ends=1.0)
    trace = rolled(policy, steps=4, block=3, order=ORDERS[order]).trace
    live_B = torch.ones(len(trace), dtype=torch.bool)
    for step, shown_RL in enumerate(policy.calls):
        state_BL = state_before(trace, step)
        assert torch.equal(shown_RL, state_BL[live_B])
        completion_BC = state_before(trace, step + 1)[:, -6:]
        for b in range(len(trace)):
            open_prefix = completion_BC[b].tolist()
            open_prefix = open_prefix[: open_prefix.index(MASK)] if MASK in open_prefix else open_prefix
            live_B[b] &= EOS not in open_prefix and MASK in completion_BC[b]
    assert not live_B.any()


def test_a_position_never_filled_is_mask_in_every_state():
    _, trace = ending_rollout()
    never_BL = trace.step_BL == NEVER
    for t in range(trace.steps + 1):
        assert (state_before(trace, t)[never_BL] == MASK).all()
    assert torch.equal(trace.canvas_BL, trace.step_BL != GIVEN)
    assert torch.equal(trace.filled_BL, trace.canvas_BL & (trace.tokens_BL != MASK))


def test_until_eos_counts_the_completion_to_its_first_end_token():
    """One prompt holds an end token, which must not count as the completion's."""
    trace = rolled(Net(1, ends=1.5)).trace
    cut = 0
    for b in range(len(trace)):
        counting = True
        for i in range(trace.tokens_BL.shape[1]):
            written = trace.step_BL[b, i].item() not in (GIVEN, NEVER)
            assert until_eos(trace)[b, i].item() == (written and counting)
            cut += written and not counting
            counting &= not (i >= 4 and trace.tokens_BL[b, i] == EOS)
    assert cut > 3
    assert torch.equal(all_tokens(trace), trace.filled_BL)
    assert (until_eos(trace).sum() + cut) == all_tokens(trace).sum()


def test_until_eos_of_a_branch_sees_an_end_token_that_its_state_already_held():
    trace = random_trace(0)
    step_BL, tokens_BL = trace.step_BL.clone(), trace.tokens_BL.clone()
    step_BL[:, 2:] = torch.tensor([0, GIVEN, 0, GIVEN, 0])
    tokens_BL[:, 2:] = torch.tensor([4, 5, 3, EOS, 6])
    branch = replace(trace, step_BL=step_BL, tokens_BL=tokens_BL)
    assert until_eos(branch)[:, 2:].tolist() == [[True, False, True, False, False]] * len(trace)


# What cannot be sampled


@pytest.mark.parametrize(
    ("prompts", "settings", "names"),
    [
        ([], {}, ["empty"]),
        ([[3] * 19], {}, [19, 6, 24]),
        ([[3]], {"block": 4}, ["block", 4, 6]),
        ([[3]], {"block": 0}, ["block", 0, 6]),
        ([[3]], {"length": 0}, ["length", 0]),
        ([[3]], {"steps": 7}, ["steps", 7, 1, 6]),
        ([[3]], {"steps": 0}, ["steps", 0]),
        ([[3]], {"steps": 3, "block": 3}, ["steps", 3, 2]),
        ([[3]], {"seed_B": torch.arange(2)}, ["seeds", 1, 2]),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(prompts, settings, names):
    given_here = {"seed_B": torch.arange(len(prompts)), "length": 6} | settings
    with pytest.raises(ValueError, match=naming(*names)):
        sample(Net(1), prompts, **given_here)


def test_the_longest_prompt_that_fits_is_taken():
    assert sample(Net(1), [[3] * 18], torch.arange(1), length=6).trace.tokens_BL.shape == (1, 24)


# Selection and joining


def assert_same_rows(found, expected, by=0):
    """Every tensor of two traces equal, the first behind `by` columns of padding."""
    for f in fields(expected):
        value, other = getattr(found, f.name), getattr(expected, f.name)
        if f.name.endswith("_BL"):
            assert torch.equal(value[:, by:], other), f.name
            assert not found.attended_BL[:, :by].any() and (found.step_BL[:, :by] == GIVEN).all()
            assert (found.block_BL[:, :by] == GIVEN).all() and not found.counted_BL[:, :by].any()
        elif f.name.endswith("_B"):
            assert torch.equal(value, other), f.name
    assert found.seen.keys() == expected.seen.keys()
    for name in expected.seen:
        assert torch.equal(found.seen[name], expected.seen[name]), name


def recorded(seed=0, prompts=slice(None), **settings):
    trace = rolled(Net(1), seed=seed, record=Record(3, True, True, True), **settings).trace
    index = torch.arange(len(trace))[prompts]
    return select_traces(trace, index)


def test_selected_rows_are_the_rows_by_numbers_or_booleans():
    trace = recorded(sampling=TokenSampling(0.8, top_k=3))
    index = torch.tensor([7, 2, 3])
    some = select_traces(trace, index)
    assert some.tokens_BL.tolist() == [trace.tokens_BL[b].tolist() for b in (7, 2, 3)]
    assert some.group_B.tolist() == [trace.group_B[b].item() for b in (7, 2, 3)]
    assert torch.equal(some.seen["step_top_id"], torch.stack([trace.seen["step_top_id"][:, b] for b in (7, 2, 3)], 1))
    assert torch.equal(some.seen["kept"], trace.seen["kept"][index])
    assert torch.equal(some.seen["entropy"], trace.seen["entropy"][index])
    yes_B = torch.zeros(len(trace), dtype=torch.bool)
    yes_B[index] = True
    assert_same_rows(select_traces(trace, yes_B), select_traces(trace, torch.tensor([2, 3, 7])))
    assert len(select_traces(trace, ~yes_B)) == len(trace) - 3


def test_joined_traces_are_their_rows_padded_to_the_widest():
    policy = Net(1)
    wide = recorded(0, slice(5, 9))  # the prompt of four tokens
    narrow = replace(
        recorded(1, slice(0, 5)),
        **{
            name: getattr(recorded(1, slice(0, 5)), name)[:, 2:]
            for name in ("tokens_BL", "step_BL", "block_BL", "attended_BL", "counted_BL", "logp_BL")
        },
    )
    both = concat_traces([narrow, wide])
    assert both.tokens_BL.shape == (9, 10)
    assert_same_rows(select_traces(both, torch.arange(5)), narrow, by=2)
    assert_same_rows(select_traces(both, torch.arange(5, 9)), wide)
    assert_same_rows(concat_traces([wide]), wide)
    alone_NL = ask(policy, fully_masked(narrow, generator()))
    together_NL = ask(policy, fully_masked(both, generator()))
    torch.testing.assert_close(together_NL[:5, 2:], alone_NL, rtol=1e-12, atol=1e-12)


def test_batches_that_kept_different_numbers_of_tokens_can_be_joined():
    policy, law = Net(1, sharp=3.0), TokenSampling(0.9, top_p=0.8)
    traces = [rolled(policy, seed=seed, sampling=law).trace for seed in (0, 1)]
    widths = [t.seen["kept"].shape[-1] for t in traces]
    both = concat_traces(traces)
    assert widths[0] != widths[1] and both.seen["kept"].shape[-1] == max(widths)
    alone_NL = ask(policy, every_step(traces[1], generator()))
    together = every_step(both, generator())
    rows_N = together.trace_N >= 11
    torch.testing.assert_close(ask(policy, together)[rows_N], alone_NL, rtol=1e-12, atol=1e-12)
    assert concat_traces(traces[::-1]).seen["kept"].shape[-1] == max(widths)


def test_branches_keep_what_their_source_was_and_start_at_a_visited_state():
    trace, branches = rolled(Net(1, ends=1.0), block=3, branch=Branch(3, 0.0), counted=until_eos)
    assert len(branches) % 3 == 0 and len(branches) > 12
    for b in range(len(branches)):
        source = int(branches.group_B[b])
        state_L = state_before(branches, 0)[b]
        visited = [state_before(trace, t)[source].tolist() for t in range(trace.steps)]
        assert state_L.tolist() in visited
        assert torch.equal(branches.attended_BL[b], trace.attended_BL[source])
        assert not (branches.tokens_BL[b] == MASK).any()
