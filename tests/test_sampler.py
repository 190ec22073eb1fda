"""The sampler: what it draws has the probabilities of the enumeration, and what it records is what happened."""

from dataclasses import replace
from functools import partial
from math import inf

import pytest
import torch
from torch import Tensor

from helpers import PROMPTS, Net, assert_close, sample
from unmask.core.order import ORDERS
from unmask.core.probes import ask, every_step, fully_masked
from unmask.core.shapes import NEVER
from unmask.core.specs import Branch, Record
from unmask.core.token_sampling import TokenSampling, uniforms
from unmask.core.trace import Trace
from unmask.methods.trace_rl import merged_steps
from unmask.rollout.cache import Cache
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import canvas, row_seeds
from world import (
    NO_EOS,
    NetPolicy,
    TablePolicy,
    World,
    chance_of_worse,
    ended,
    enumerated,
    kept_by_id,
    laws,
    number,
    traced,
)

SHAPES = {
    "one a step": {},
    "two a step": {"steps": 2},
    "blocks": {"steps": 4, "block": 2},
    "blocks, two a step": {"steps": 2, "block": 2, "sampling": TokenSampling(temperature=0.7)},
    "hot top k": {"sampling": TokenSampling(temperature=1.5, top_k=2)},
    "cold top p": {"sampling": TokenSampling(temperature=0.8, top_p=0.8)},
}


def rolled(world: World, rows: int, seed: int = 0, **more) -> Trace:
    shape = {"steps": world.steps or None, "block": world.block or None, "sampling": world.sampling}
    prompts, seed_B = [list(world.prompt)] * rows, row_seeds(seed, rows)
    shape |= {"order": ORDERS[world.order], "threshold": None if world.threshold == inf else world.threshold}
    shape |= {"min_per_step": world.min_per_step}
    return sample(world.policy, prompts, seed_B, length=world.length, **shape, **more).trace


def path_number(trace: Trace, length: int) -> Tensor:
    """Tokens and step map as one integer."""
    step_BC = trace.step_BL[:, -length:]
    return number(torch.cat([trace.tokens_BL[:, -length:], torch.where(step_BC == NEVER, 7, step_BC)], 1), 8)


DRAWN = {
    "one a step": (2, 4, NO_EOS),
    "two a step": (2, 4, NO_EOS),
    "blocks": (2, 4, 0),
    "blocks, two a step": (3, 4, 0),
    "hot top k": (3, 3, NO_EOS),
    "cold top p": (3, 3, 0),
}


SURE = ("surest_position", "low_confidence", "left_to_right")
BY_THRESHOLD = [(order, shape) for order in SURE for shape in ("one a step", "blocks")]
BY_THRESHOLD += [(order, "two a step") for order in SURE if order != "left_to_right"]
CASES = [(order, shape, inf) for order in ORDERS for shape in DRAWN] + [(*case, 0.6) for case in BY_THRESHOLD]


@pytest.mark.parametrize(("order", "shape", "threshold"), CASES)
def test_tokens_and_steps_have_the_enumerated_probabilities(order, shape, threshold):
    """20,000 rows in one batch, chi-square over whole trajectories (tokens and step map)."""
    words, length, eos = DRAWN[shape]
    policy = NetPolicy(words, length, seed=20, scale=1.0, eos=eos)
    world = World(policy, order, threshold=threshold, **SHAPES[shape])
    paths = enumerated(world)
    cell_X, index_B = path_number(paths.trace, length).sort()
    found_B = path_number(rolled(world, 20_000, seed=2), length)
    place_B = torch.searchsorted(cell_X, found_B).clamp(max=len(cell_X) - 1)
    assert torch.equal(cell_X[place_B], found_B)  # nothing but enumerated trajectories
    count_X = place_B.bincount(minlength=len(cell_X))
    assert chance_of_worse(count_X, paths.probability_B[index_B]) > 1e-4


def test_a_wrong_law_would_be_noticed():
    """The chi-square has power: the same rows against a temperature of 1.2 instead of 1."""
    world = World(NetPolicy(2, 4, seed=20, scale=1.0), "low_confidence")
    paths = enumerated(replace(world, sampling=TokenSampling(temperature=1.2)))
    cell_X, index_B = path_number(paths.trace, 4).sort()
    count_X = torch.searchsorted(cell_X, path_number(rolled(world, 20_000, seed=2), 4)).bincount(minlength=len(cell_X))
    assert chance_of_worse(count_X, paths.probability_B[index_B]) < 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_ties_go_to_the_left_in_the_sampler_too(order):
    """A flat policy: every score is the same, so all orders but the random one go from left to right."""
    trace = rolled(World(TablePolicy(2, 4, scale=0.0), order, steps=2), 64)
    left_B = (trace.step_BL == torch.tensor([0, 0, 1, 1])).all(-1)
    assert left_B.all() if order != "random" else 0 < left_B.sum() < 64


@pytest.mark.parametrize("order", ["surest_position", "low_confidence"])
def test_positions_are_ranked_at_temperature_one(order):
    """0.50 against 0.48: at temperature 1/2 the second would be the surer, 0.51 against 0.63."""
    policy = TablePolicy(3, 2)
    with torch.no_grad():
        policy.table[:, 0, :3] = torch.tensor([0.50, 0.49, 0.01]).double().log()
        policy.table[:, 1, :3] = torch.tensor([0.48, 0.26, 0.26]).double().log()
    trace = rolled(World(policy, order, sampling=TokenSampling(temperature=0.5)), 200)
    likeliest_B = (trace.tokens_BL == 0).all(-1)
    assert likeliest_B.any() and (trace.step_BL[likeliest_B] == torch.tensor([0, 1])).all()


# A row is its own


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_does_not_depend_on_its_batch_its_place_in_it_or_the_padding_beside_it(order):
    policy = NetPolicy(3, 4, seed=21, eos=2)
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 3, (n,), generator=rng).tolist() for n in [1, 3, 2, 4, 1, 2] * 4]
    seed_B = row_seeds(5, len(prompts))
    shape = {"length": 4, "steps": 2, "block": 2, "sampling": TokenSampling(0.9, top_k=2), "order": ORDERS[order]}
    shape |= {"record": Record(2, True, True, True), "branch": Branch(2, 0.0)}

    def rows_of(picked: list[int]) -> dict[int, tuple[Tensor, ...]]:
        trace, branches = sample(policy, [prompts[i] for i in picked], seed_B[picked], **shape)
        found = {}
        for row, i in enumerate(picked):
            own = [trace.tokens_BL[row], trace.step_BL[row]]
            own += [value_BL.flatten() for value_BL in branches.tokens_BL[branches.group_B == row]]
            near = [trace.logp_BL[row], trace.seen["entropy"][row]]
            found[i] = ([x[-4:] for x in own], torch.stack([x[-4:] for x in near]))
        return found

    whole = rows_of(list(range(len(prompts))))
    shuffled = rows_of(torch.randperm(len(prompts), generator=rng).tolist())
    for i in range(len(prompts)):
        for exact, near in (shuffled[i], rows_of([i])[i], rows_of([i, 3])[i]):
            assert len(exact) == len(whole[i][0])
            assert all(torch.equal(a, b) for a, b in zip(exact, whole[i][0], strict=True))
            assert (near - whole[i][1]).abs().max() < 1e-12


def test_rows_with_the_same_seed_are_the_same_and_with_others_are_not():
    world = World(NetPolicy(3, 4, seed=22, scale=0.5))
    first, again, other = rolled(world, 50), rolled(world, 50), rolled(world, 50, seed=1)
    assert torch.equal(path_number(first, 4), path_number(again, 4))
    assert (path_number(first, 4) == path_number(other, 4)).sum() < 5


# What it records


@pytest.mark.parametrize("eos", [NO_EOS, 0], ids=["", "end tokens"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_recorded_is_what_a_direct_computation_gives(order, shape, eos):
    """Log-probability, entropy, kept tokens and the top of every look; and `ask` agrees with all of it."""
    world = World(NetPolicy(3, 4, seed=23, scale=0.7, eos=eos), order, prompt=(1, 2), **SHAPES[shape])
    trace = rolled(world, 60, record=Record(top=32, entropy=True))
    truth = traced(world, trace.tokens_BL[:, 2:], trace.step_BL[:, 2:])
    for name in ("tokens_BL", "step_BL", "block_BL", "attended_BL", "counted_BL"):
        assert torch.equal(getattr(trace, name), getattr(truth, name)), name
    assert (trace.logp_BL - truth.logp_BL).abs().max() < 1e-12
    assert (trace.seen["entropy"] - truth.seen["entropy"]).abs().max() < 1e-12

    masked_TBWK = truth.seen["step_top_id"] >= 0
    assert torch.equal(trace.seen["step_top_id"], truth.seen["step_top_id"])
    top_logp = trace.seen["step_top_logp"] - truth.seen["step_top_logp"]
    assert top_logp.masked_fill(~masked_TBWK, 0.0).abs().max() < 1e-12

    assert ("kept" in trace.seen) == world.sampling.truncated
    if world.sampling.truncated:
        found, wanted = (t.seen["kept"].sort(-1, descending=True).values for t in (trace, truth))
        assert torch.equal(found, wanted[..., : found.shape[-1]]) and (wanted[..., found.shape[-1] :] < 0).all()

    answer_NL = ask(world.policy, probes := every_step(trace, torch.Generator()))
    total_BL = torch.zeros_like(trace.logp_BL).index_add(0, probes.trace_N, answer_NL.detach())
    assert (total_BL - trace.logp_BL).abs().max() < 1e-12


def test_the_top_is_cut_to_as_many_as_asked_for():
    world = World(NetPolicy(3, 4, seed=23), "low_confidence", block=2)
    wide, narrow = (rolled(world, 20, record=Record(top=top)).seen for top in (3, 2))
    assert torch.equal(narrow["step_top_id"], wide["step_top_id"][..., :2])
    assert torch.equal(narrow["step_top_logp"], wide["step_top_logp"][..., :2])


def test_a_truncated_law_draws_only_what_it_keeps():
    world = World(NetPolicy(3, 3, seed=24, scale=0.5), "random", sampling=TokenSampling(top_k=2))
    _, drawn_SCV = laws(world)
    kept_SCV = kept_by_id(drawn_SCV) >= 0
    assert (kept_SCV.sum(-1) == 2).all()
    trace = rolled(world, 500)
    for step in range(3):
        state_B = number(trace.tokens_BL.masked_fill(trace.step_BL >= step, world.policy.mask_id), 4)
        row_B, place_B = (trace.step_BL == step).nonzero(as_tuple=True)
        assert kept_SCV[state_B[row_B], place_B, trace.tokens_BL[row_B, place_B]].all()


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_retires_once_nothing_is_masked_before_an_end_token_and_not_earlier(order):
    world = World(NetPolicy(3, 4, seed=25, scale=0.7, eos=1), order)
    trace = rolled(world, 300)
    retired_B = (trace.step_BL == NEVER).any(-1)
    assert 0 < retired_B.sum() < 300
    assert torch.equal(trace.tokens_BL == world.policy.mask_id, trace.step_BL == NEVER)
    last_B = torch.where(trace.filled_BL, trace.step_BL, -1).max(-1).values
    for tokens, steps, last in zip(trace.tokens_BL.tolist(), trace.step_BL.tolist(), last_B.tolist(), strict=True):
        before = [world.policy.mask_id if step >= last else token for token, step in zip(tokens, steps, strict=True)]
        assert ended(tuple(tokens), world.policy) and not ended(tuple(before), world.policy)


# Noise


def test_the_noise_is_uniform():
    uniform = uniforms(torch.arange(2000)[:, None, None], 0, torch.arange(8)[:, None], torch.arange(16)).flatten()
    assert uniform.min() >= 0 and uniform.max() < 1
    count_X = (uniform * 256).long().bincount(minlength=256)
    assert chance_of_worse(count_X, torch.full((256,), 1 / 256)) > 1e-4
    low_bits = (uniform * 2**24).long() % 256
    assert chance_of_worse(low_bits.bincount(minlength=256), torch.full((256,), 1 / 256)) > 1e-4


SEED = torch.arange(60_000)
NEIGHBOURS = {
    "seeds": (uniforms(SEED, 0, 3, 4), uniforms(SEED + 1, 0, 3, 4)),
    "streams": (uniforms(SEED, 0, 3, 4), uniforms(SEED, 1, 3, 4)),
    "steps": (uniforms(SEED, 0, 3, 4), uniforms(SEED, 0, 4, 4)),
    "positions": (uniforms(SEED, 0, 3, 4), uniforms(SEED, 0, 3, 5)),
    "step and position swapped": (uniforms(SEED, 0, 3, 4), uniforms(SEED, 0, 4, 3)),
    "more counters": (uniforms(SEED, 2), uniforms(SEED, 2, 1, 4)),
    "seed against step": (uniforms(SEED, 0, 3, 4), uniforms(SEED + 1, 0, 2, 4)),
    "runs": (uniforms(row_seeds(0, 60_000), 0, 3, 4), uniforms(row_seeds(1, 60_000), 0, 3, 4)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbouring_noise_is_independent(name):
    """16 x 16 cells over 60,000 pairs."""
    first, second = ((uniform * 16).long() for uniform in NEIGHBOURS[name])
    count_X = (first * 16 + second).bincount(minlength=256)
    assert chance_of_worse(count_X, torch.full((256,), 1 / 256)) > 1e-4


# Blocks that are appended


@torch.no_grad()
@pytest.mark.parametrize("threshold", [None, 0.3])
def test_a_block_that_is_appended_is_decoded_on_the_canvas_up_to_it(threshold):
    """Block after block: the text so far is the prompt of the next, which is all there is to denoise."""
    policy, order = Net(seed=4), "low_confidence" if threshold else "random"
    shape = {"order": ORDERS[order], "threshold": threshold, "sampling": TokenSampling(0.8, top_k=4)}
    trace = sample(policy, PROMPTS, torch.arange(4), length=6, block=2, append=True, **shape).trace
    assert trace.appended
    for b, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for first in (0, 2, 4):
            written = [(int(t), int(s)) for t, s in zip(trace.tokens_BL[b, -6:], trace.step_BL[b, -6:], strict=True)]
            for step in sorted({s for _, s in written[first : first + 2] if s < NEVER}):
                canvas = text + [t if s < step else policy.mask_id for t, s in written[first : first + 2]]
                for place in range(2):
                    token, when = written[first + place]
                    if when == step:
                        logits_V = policy(torch.tensor([canvas]), None, torch.tensor([len(text) + place]))[0].clone()
                        logits_V[policy.mask_id] = -torch.inf
                        logq_V = (logits_V / 0.8).log_softmax(-1)
                        kept_V = logq_V >= logq_V.topk(4).values[-1]
                        found = float(logq_V[token] - logq_V[kept_V].logsumexp(0))
                        assert abs(found - float(trace.logp_BL[b, first + place - 6])) < 1e-9
            text += [t for t, _ in written[first : first + 2]]
    probes = every_step(trace, torch.Generator())
    token_BL = torch.zeros_like(trace.logp_BL).index_add(0, probes.trace_N, ask(policy, probes).detach())
    assert_close(token_BL, trace.logp_BL, 1e-9)
    for asked in (fully_masked, partial(merged_steps, merge=3)):
        with pytest.raises(ValueError, match=r"rollout\.append.*agrpo"):
            asked(trace, torch.Generator())
    with pytest.raises(ValueError, match="append"):
        sample(policy, PROMPTS, torch.arange(4), length=6, block=2, append=True, branch=Branch())
    with pytest.raises(ValueError, match=r"append.*cache"):
        Decoding(6, append=True, cache=Cache())


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"length": 0}, "length=0"), ({"length": -3}, "length=-3"), ({"length": 8, "threshold": 2.0}, "threshold=2.0")],
)
def test_settings_that_no_rollout_can_have_are_refused_at_once(settings, said):
    with pytest.raises(ValueError, match=said):
        Decoding(**settings)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=f"token id {token}"):
        canvas([[1], [0, token]], 4, Net(), "cpu")
