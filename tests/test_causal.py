"""Block-causal models: a question shows what the sampler saw, its own block and the finished text before it."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from helpers import ON_ROLLOUTS, assert_close, generator, sample
from naive import MASK, decoder
from unmask.core.causal import causal_blocks
from unmask.core.order import low_confidence, random
from unmask.core.probes import Probes, ask, every_step, fully_masked, left_to_right_views, one_shot, segmented, visited
from unmask.core.shapes import GIVEN
from unmask.core.specs import Branch, Record
from unmask.core.states import STATES
from unmask.core.steps import sampled_steps
from unmask.core.strata import stratified
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace
from unmask.methods import BASES, PLUGINS
from unmask.methods.trace_rl import merged_steps
from unmask.rollout.cache import Cache, cache_name
from unmask.rollout.continuation import continue_from
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import row_seeds

PROMPTS = [[3, 4, 5], [5], [3, 1, 6, 4, 2], [9] * 8]  # with blocks of 4: each ends at another place of a block


def model(block: int = 4, **facts):
    return decoder("qwen3", dtype=torch.float64, causal_block=block, **facts)


def rollouts(policy, length: int = 8, **settings):
    settings = {"steps": length // 2, "order": random} | settings
    return sample(policy, PROMPTS, row_seeds(3, len(PROMPTS)), length=length, **settings)


@torch.no_grad()
def by_hand(policy, probes: Probes) -> Tensor:
    """Every asked token on a canvas of its own: its block as in the state, and before it what the rollout wrote."""
    trace, block_BL = probes.trace, causal_blocks(probes.trace)
    out_NL = torch.zeros_like(probes.share_NL)
    for n, column in probes.asked_NL.nonzero().tolist():
        b, state_L = int(probes.trace_N[n]), probes.states_SL[probes.state_N[n]]
        first = int((~trace.attended_BL[b]).sum())
        written_L = (block_BL[b] < block_BL[b, column]) & trace.canvas_BL[b]
        canvas_L = torch.where(written_L, trace.tokens_BL[b], state_L)[first:]
        logits_V = policy(canvas_L[None], None, torch.tensor([column - first]))[0].clone()
        logits_V[MASK] = -torch.inf
        logq_V = (logits_V / trace.sampling.temperature).log_softmax(-1)
        if probes.visited and "kept" in trace.seen:
            kept = trace.seen["kept"][b, column - len(state_L)]
            logq_V = logq_V - logq_V[kept[kept >= 0]].logsumexp(0)
        out_NL[n, column] = logq_V[trace.tokens_BL[b, column]]
    return out_NL


ESTIMATORS = {
    "fully masked": fully_masked,
    "segments": partial(segmented, segments=2),
    "left to right": left_to_right_views,
    "strata": partial(stratified, strata=2, anchor=0.3),
    "every step": every_step,
    "sampled steps": partial(sampled_steps, draws=3),
    "merged steps": partial(merged_steps, merge=3),
    **{name: STATES[name] for name in ("pairs", "uniform", "semi_autoregressive")},
}


@pytest.mark.parametrize(("block", "shift"), [(None, False), (2, True)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_tokens_are_asked_after_the_finished_text_that_the_sampler_saw(name, block, shift):
    policy = model(shift=shift)
    trace = rollouts(policy, block=block, sampling=TokenSampling(0.8, top_k=7)).trace
    probes = ESTIMATORS[name](trace, generator())
    assert_close(ask(policy, probes, 3), by_hand(policy, probes), 1e-9)
    shown = replace(probes, clean_SL=None)
    differ = not torch.allclose(ask(policy, shown), ask(policy, probes), atol=1e-3)
    assert differ == (probes.clean_SL is not None)


@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_so_does_every_method(name):
    policy, method = model(), BASES[name]()
    trace = rollouts(policy, record=method.record, order=method.order or random).trace
    for term in method.terms:
        probes = term.probe(trace, generator(), 1)[0]
        asked_NL = ask(policy, probes).masked_fill(~probes.asked_NL, 0.0)
        assert_close(asked_NL, by_hand(policy, probes), 1e-9)


def test_and_strata_and_branches_of_plugins():
    policy = model()
    for method in (PLUGINS["sml"](BASES["diffu_grpo"]()), PLUGINS["daca"](BASES["agrpo"]())):
        trace = rollouts(policy, record=method.record).trace
        for term in method.terms:
            probes = term.probe(trace, generator(), 1)[0]
            assert_close(ask(policy, probes), by_hand(policy, probes), 1e-9)
            assert term.credit(trace).isfinite().all()
    branches = rollouts(policy, branch=Branch(2, 0.0)).branches
    probes = one_shot(branches)
    assert probes.clean_SL is None  # a filling is drawn in one pass, each block without what it writes in others
    assert_close(ask(policy, probes)[probes.asked_NL], branches.logp_BL[branches.filled_BL], 1e-9)


@pytest.mark.parametrize("choice", [False, True])
def test_steps_of_different_blocks_share_a_pass(choice):
    policy = model()
    trace = rollouts(policy, length=16, steps=8, order=low_confidence).trace
    shared = every_step(trace, generator(), choice=choice)
    assert len(shared.states_SL) == 2 * len(trace)  # two steps a block, four or five blocks a row
    step_BT = torch.arange(trace.steps).expand(len(trace), -1)
    alone = visited(replace(trace, causal_block=None), step_BT, torch.ones_like(step_BT), choice)
    assert len(alone.states_SL) == len(shared.asked_NL) > 4 * len(trace)
    assert_close(ask(policy, shared), ask(policy, alone), 1e-9)
    token_BL = torch.zeros_like(trace.logp_BL).index_add(0, shared.trace_N, ask(policy, shared) * shared.asked_NL)
    assert_close(token_BL, trace.logp_BL, 1e-9)


@pytest.mark.parametrize("prompt", [[0, 1], [1], [0, 1, 1]])
def test_the_probability_of_every_step_of_every_trajectory(prompt):
    """All trajectories of a world of two words and four positions, blocks of 2, in random order."""
    policy = decoder("qwen3", dtype=torch.float64, causal_block=2, vocabulary=4, mask_id=3, eos_id=-1, pad_id=2)
    words, length, first = (0, 1, 2), 3, len(prompt)
    paths = [((), 1.0)]  # (position, word, probability of the step) ...
    for _ in range(length):
        longer = []
        for path, total in paths:
            canvas = [*prompt] + [3] * length
            for place, word, _ in path:
                canvas[place] = word
            left = [i for i in range(first, first + length) if canvas[i] == 3]
            now = [i for i in left if i // 2 == left[0] // 2]
            with torch.no_grad():
                logits_MV = policy(torch.tensor([canvas]), None, torch.tensor(now))[:, :3]
            for (row, place), word in product(enumerate(now), words):
                chance = float(logits_MV[row].softmax(0)[word]) / len(now)
                longer.append(((*path, (place, word, chance)), total * chance))
        paths = longer
    assert abs(sum(total for _, total in paths) - 1) < 1e-12
    trace = listed(policy, prompt, [path for path, _ in paths], length)
    probes = every_step(trace, generator())
    said_N = ask(policy, probes).sum(-1)
    step_N = torch.where(probes.asked_NL, trace.step_BL[probes.trace_N], 0).sum(-1)
    for n, (b, step) in enumerate(zip(probes.trace_N.tolist(), step_N.tolist(), strict=True)):
        path, _ = paths[b]
        open_now = {place for place, *_ in path[step:] if place // 2 == path[step][0] // 2}
        assert abs(said_N[n].exp() / len(open_now) - path[step][2]) < 1e-9
    total_B = torch.zeros(len(trace), dtype=torch.float64).index_add(0, probes.trace_N, said_N)
    sampled = sample(policy, [prompt] * 64, torch.arange(64), length=length, order=random).trace
    known = {(tuple(row), tuple(when)): i for i, (row, when) in enumerate(zip(*cells(trace), strict=True))}
    for b, (row, when) in enumerate(zip(*cells(sampled), strict=True)):
        order = torch.tensor(when).argsort().argsort().tolist()  # a step that had nothing to do has a number too
        assert abs(sampled.logp_BL[b].sum() - total_B[known[tuple(row), tuple(order)]]) < 1e-9


def listed(policy, prompt: list[int], paths: list, length: int) -> Trace:
    first, width = len(prompt), len(prompt) + length
    tokens_BL = torch.tensor([prompt + [0] * length for _ in paths])
    step_BL = torch.full_like(tokens_BL, GIVEN)
    for b, path in enumerate(paths):
        for step, (place, word, _) in enumerate(path):
            tokens_BL[b, place], step_BL[b, place] = word, step
    place_L = torch.arange(width)
    block_L = torch.where(place_L < first, GIVEN, place_L // 2 - first // 2)
    return Trace(
        tokens_BL=tokens_BL,
        step_BL=step_BL,
        block_BL=block_L.repeat(len(paths), 1),
        attended_BL=torch.ones_like(tokens_BL).bool(),
        counted_BL=step_BL >= 0,
        logp_BL=torch.zeros(tokens_BL.shape, dtype=torch.float64),
        group_B=torch.zeros(len(paths), dtype=torch.long),
        mask_id=policy.mask_id,
        eos_id=policy.eos_id,
        steps=length,
        causal_block=2,
    )


def cells(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    return trace.tokens_BL[:, -3:].tolist(), trace.step_BL[:, -3:].tolist()


def test_progress_of_dps_is_read_at_the_columns_of_each_row():
    """The first block of a row is shorter where its prompt ends inside a block: rows alone, after whole blocks."""
    policy, dps = model(), PLUGINS["dps"](BASES["diffu_grpo"]())
    request = {"record": Record(5), "order": low_confidence}
    trace = rollouts(policy, **request).trace
    credit_BL = dps.credit(trace)
    for b, prompt in enumerate(PROMPTS):
        alone = sample(policy, [prompt], row_seeds(3, len(PROMPTS))[[b]], length=8, steps=4, **request).trace
        assert_close(credit_BL[b, -8:], dps.credit(alone)[0, -8:], 1e-9)


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"threshold": 0.2, "order": low_confidence}, {"attend_padding": True}])
def test_by_default_a_block_causal_model_has_its_exact_cache_and_others_have_none(settings):
    plain, cached, default = (
        rollouts(model(), **settings, **more).trace for more in ({"cache": None}, {"cache": Cache()}, {})
    )
    for name in ("tokens_BL", "step_BL"):
        assert torch.equal(getattr(default, name), getattr(plain, name))
    assert torch.equal(default.logp_BL, cached.logp_BL)  # the same passes
    assert_close(default.logp_BL, plain.logp_BL, 1e-9)
    assert cache_name(Decoding(8).for_policy(model()).cache) == "dual"
    assert cache_name(Decoding(8, cache=None).for_policy(model()).cache) == "none"
    assert cache_name(Decoding(8).for_policy(decoder("qwen3")).cache) == "none"


def test_rollouts_with_the_exact_cache_are_continued_without_it():
    policy, decoding, seed_B = model(), Decoding(8, 4), row_seeds(3, len(PROMPTS))
    trace = sample(policy, PROMPTS, seed_B, length=8, steps=4).trace
    step_B = torch.arange(len(PROMPTS)) % trace.steps
    again = continue_from(policy, trace, step_B, seed_B, decoding)
    assert torch.equal(again.tokens_BL, trace.tokens_BL) and torch.equal(again.step_BL, trace.step_BL)


@pytest.mark.parametrize("block", [None, 4])
def test_a_shifted_model_refuses_an_empty_prompt(block):
    """Position 0 has no position before it that could predict it."""
    policy = decoder("qwen3", dtype=torch.float64, causal_block=block, shift=True)
    with pytest.raises(ValueError, match="prompt is empty"):
        sample(policy, [[3], []], row_seeds(3, 2), length=8, steps=4)
    sample(decoder("qwen3", dtype=torch.float64, causal_block=block), [[3], []], row_seeds(3, 2), length=8, steps=4)
