"""fork and vine on block-causal models: their steps, states and values are those that the sampler saw."""

from dataclasses import replace
from functools import partial
from math import log, sqrt

import pytest
import torch
from test_causal import PROMPTS, by_hand, model, rollouts
from torch import Tensor

from helpers import assert_close, generator, rewards, sample
from naive import decoder
from unmask.core.order import left_to_right, low_confidence, random
from unmask.core.probes import ask, every_step
from unmask.core.shapes import GIVEN
from unmask.core.specs import StepValues
from unmask.core.steps import uniform_steps, weighted_steps
from unmask.core.trace import Trace, select_traces, state_before
from unmask.methods import fork, vine
from unmask.methods.fork import fallback_steps, fallbacks
from unmask.methods.vine import valued_steps
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import row_seeds
from unmask.rollout.step_values import continue_steps, with_state_values

SHIFTS = pytest.mark.parametrize("shift", [False, True])


@torch.no_grad()
def confidence(policy, trace: Trace, b: int, step: int) -> dict[int, float]:
    """The log-probability of what a rollout wrote at a step: alone, without padding, after what was written before."""
    first, columns = int((~trace.attended_BL[b]).sum()), (trace.step_BL[b] == step).nonzero().flatten()
    state_L = state_before(trace, step)[b, first:]
    logits_MV = policy(state_L[None], None, columns - first).clone()
    logits_MV[:, policy.mask_id] = -torch.inf
    logp_M = logits_MV.log_softmax(-1).gather(1, trace.tokens_BL[b, columns][:, None]).squeeze(1)
    return dict(zip(columns.tolist(), logp_M.tolist(), strict=True))


@SHIFTS
def test_forks_fallbacks_are_the_unsure_steps_of_each_block(shift):
    threshold, policy = 0.2, model(shift=shift)
    trace = rollouts(policy, record=fork().record, order=left_to_right, threshold=threshold).trace
    fallback_BT = fallbacks(trace)
    sure = 0
    for b in range(len(trace)):
        for step in range(trace.steps):
            written = confidence(policy, trace, b, step)
            if not fallback_BT[b, step]:
                sure += len(written)
                assert all(logp >= log(threshold) for logp in written.values())
                continue
            ((column, logp),) = written.items()
            open_L = (trace.block_BL[b] == trace.block_BL[b, column]) & (trace.step_BL[b] >= step)
            assert logp < log(threshold) and column == int(open_L.nonzero()[0])
    assert fallback_BT.any(0).sum() > 2 and sure > 2


@SHIFTS
def test_fork_asks_with_the_context_of_the_sampler(shift):
    policy = model(shift=shift)
    trace = rollouts(policy, record=fork().record, order=left_to_right, threshold=0.3).trace
    probes = fallback_steps(trace, generator())
    logp_NL = ask(policy, probes)
    assert probes.clean_SL is not None  # steps of different blocks share a pass
    assert not torch.allclose(ask(policy, replace(probes, clean_SL=None)), logp_NL, atol=1e-3)
    assert_close(logp_NL.masked_fill(~probes.asked_NL, 0.0), by_hand(policy, probes), 1e-9)
    assert_close(logp_NL[probes.asked_NL], trace.logp_BL[probes.trace_N][probes.asked_NL], 1e-9)


def every_state(trace: Trace, completions: int) -> StepValues:
    return StepValues(partial(weighted_steps, steps=uniform_steps, spread=True), trace.steps, completions)


@SHIFTS
@pytest.mark.parametrize("choice", [False, True])
def test_vine_completes_and_asks_with_the_context_of_the_sampler(shift, choice):
    policy, order, seed_B = model(shift=shift), low_confidence, row_seeds(3, len(PROMPTS))
    trace = rollouts(policy, order=order, record=vine(choice=choice).record).trace
    drawn, continued = continue_steps(policy, trace, seed_B, every_state(trace, 2), Decoding(8, 4, order=order))
    row_N, from_N = continued.group_B, continued.seen["from_step"]
    for n in range(len(continued)):  # what was written before stays
        step = int(from_N[n])
        kept_L = (trace.step_BL[row_N[n]] < step) & (trace.step_BL[row_N[n]] != GIVEN)
        assert torch.equal(continued.tokens_BL[n, kept_L], trace.tokens_BL[row_N[n], kept_L])
        assert torch.equal(continued.step_BL[n, kept_L], trace.step_BL[row_N[n], kept_L])
        assert (continued.step_BL[n, ~kept_L & continued.filled_BL[n]] >= step).all()
    steps = every_step(continued, generator())
    assert_close(ask(policy, steps).masked_fill(~steps.asked_NL, 0.0), by_hand(policy, steps), 1e-9)
    token_NL = torch.zeros_like(continued.logp_BL).index_add(0, steps.trace_N, ask(policy, steps) * steps.asked_NL)
    assert_close(token_NL, continued.logp_BL, 1e-9)  # the continuation saw the same
    valued = with_state_values(drawn, continued, rewards(trace), rewards(continued))
    probes = valued_steps(valued, choice)
    assert len(probes.trace_N) > len(trace)
    assert_close(ask(policy, probes).masked_fill(~probes.asked_NL, 0.0), by_hand(policy, probes), 1e-9)


WORDS, LENGTH, BLOCK = (0, 1, 2), 3, 2


def small(block: int | None = BLOCK, **facts):
    return decoder(
        "qwen3", dtype=torch.float64, causal_block=block, vocabulary=4, mask_id=3, eos_id=-1, pad_id=2, **facts
    )


def reward_of(tokens: tuple[int, ...]) -> float:
    return float(torch.sin(torch.tensor(sum(7.0**place * (word + 1) for place, word in enumerate(tokens)))))


def exact_value(policy, canvas: tuple[int, ...], known: dict[tuple[int, ...], float]) -> float:
    """The expected reward from a state, in random order, one token a step, block after block."""
    if canvas not in known:
        left = [i for i, token in enumerate(canvas) if token == 3]
        now = [i for i in left if i // BLOCK == left[0] // BLOCK]
        if not left:
            return reward_of(canvas[-LENGTH:])
        with torch.no_grad():
            chance_MV = policy(torch.tensor([canvas]), None, torch.tensor(now))[:, :3].softmax(-1)
        known[canvas] = sum(
            float(chance_MV[row, word])
            / len(now)
            * exact_value(policy, (*canvas[:place], word, *canvas[place + 1 :]), known)
            for row, place in enumerate(now)
            for word in WORDS
        )
    return known[canvas]


@SHIFTS
@pytest.mark.parametrize("prompt", [[0, 1], [1]])
def test_the_values_of_vine_are_the_enumerated_ones(prompt, shift):
    """A prompt that ends with a block, and one that ends inside a block."""
    policy, times, rows = small(shift=shift), 1000, 6
    trace = sample(policy, [prompt] * rows, row_seeds(1, rows), length=LENGTH, order=random).trace
    many = select_traces(trace, torch.arange(rows).repeat_interleave(times))
    decoding = Decoding(LENGTH, order=random)
    drawn, continued = continue_steps(policy, many, row_seeds(-1, len(many)), every_state(trace, 2), decoding, 10**6)
    found = with_state_values(drawn, continued, earned(many), earned(continued))
    mean_BT = found.seen["state_value"].view(rows, times, -1).mean(1)
    exact_BT, full_BT = (
        torch.tensor(
            [
                [exact_value(each, tuple(state_before(trace, step)[b].tolist()), known) for step in range(trace.steps)]
                for b in range(rows)
            ],
            dtype=torch.float64,
        )
        for each, known in ((policy, {}), (small(None, shift=shift), {}))
    )
    bound = 4.5 * float(earned(continued).std()) / sqrt(2 * times)
    assert (mean_BT[:, : trace.steps] - exact_BT).abs().max() < bound
    assert (full_BT - exact_BT).abs().max() > 2 * bound  # with another context it would fail


def earned(trace: Trace) -> Tensor:
    return torch.tensor([reward_of(tuple(row)) for row in trace.tokens_BL[:, -LENGTH:].tolist()]).double()
