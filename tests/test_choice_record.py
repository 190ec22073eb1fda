"""What the sampler records about the choice of positions, and what it does for a scorer that rounds differently."""

from dataclasses import replace
from math import inf, log

import pytest
import torch
from test_exact_agrpo import expected_update
from test_sampler import rolled
from torch import Tensor, nn

from unmask.core.choice import log_mass_outside
from unmask.core.objective import step_clip
from unmask.core.probes import ask, every_step
from unmask.core.shapes import NEVER
from unmask.core.specs import Record
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace
from unmask.methods import agrpo, vine
from world import NetPolicy, TablePolicy, World, enumerated, gradient, laws, noise, number, relative_error

WORLDS = {
    "one a step": World(NetPolicy(4, 3, seed=22), "low_confidence"),
    "two a step, cold, top k": World(
        NetPolicy(3, 4, seed=5), "low_confidence", steps=2, sampling=TokenSampling(0.7, top_k=2)
    ),
    "blocks, end tokens": World(NetPolicy(3, 4, seed=13, eos=0), "low_confidence", steps=4, block=2),
    "nothing but ties": World(TablePolicy(2, 4, scale=0.0), "low_confidence", steps=2),
    "by threshold": World(NetPolicy(3, 3, seed=20), "low_confidence", threshold=0.5),
    "at least two": World(NetPolicy(3, 4, seed=20), "low_confidence", steps=2, threshold=0.5),
    "leftmost": World(NetPolicy(3, 4, seed=20), "left_to_right", block=2, threshold=0.5),
}


def above(world: World, trace: Trace) -> Tensor:
    """By hand: how many tokens of each position that a step passed over rank above what it kept, (T, B, C)."""
    plain_SCV, mask = laws(world)[0].detach(), world.policy.mask_id
    found = torch.zeros(trace.steps, len(trace), world.length, dtype=torch.int32)
    for b, (tokens, steps) in enumerate(zip(trace.tokens_BL.tolist(), trace.step_BL.tolist(), strict=True)):
        for t in {*steps} - {NEVER}:
            state = [mask if step >= t else token for token, step in zip(tokens, steps, strict=True)]
            score = plain_SCV[number(torch.tensor(state), world.policy.words + 1)].tolist()
            kept = min((score[i][tokens[i]], -i) for i, step in enumerate(steps) if step == t)
            if world.threshold < inf and (kept[0] >= log(world.threshold) or world.order == "left_to_right"):
                kept = (log(world.threshold), -inf)
            block = steps.index(t) // world.width
            for j in range(block * world.width, (block + 1) * world.width):
                if steps[j] > t:
                    found[t, b, j] = sum((score[j][v], -j) > kept for v in range(world.policy.words))
    return found


def with_record(world: World, trace: Trace) -> Trace:
    return replace(trace, seen=trace.seen | {"step_above": above(world, trace)})


@pytest.mark.parametrize("name", WORLDS)
def test_the_sampler_records_how_many_tokens_rank_above_what_it_kept(name: str) -> None:
    world = WORLDS[name]
    trace = rolled(world, 60, record=Record(choice=True))
    assert torch.equal(trace.seen["step_above"], above(world, trace))
    assert trace.seen["step_above"].any() or "ties" in name


@pytest.mark.parametrize("name", WORLDS)
def test_a_scorer_that_agrees_with_the_sampler_gives_the_same_likelihood_and_gradient(name: str) -> None:
    world = WORLDS[name]
    trace = enumerated(world).trace
    plain, recorded = (
        ask(world.policy, every_step(each, torch.Generator(), choice=True))
        for each in (trace, with_record(world, trace))
    )
    assert (plain - recorded).abs().max() < 1e-12
    weight_NL = noise(0, *plain.shape)
    slopes = [gradient(world.policy, (weight_NL * answer_NL).sum()) for answer_NL in (plain, recorded)]
    assert (slopes[0] - slopes[1]).abs().max() < 1e-12


class Rounded(nn.Module):
    """A policy whose logits are off by noise, the same at every call."""

    def __init__(self, policy: nn.Module, scale: float, seed: int) -> None:
        super().__init__()
        self.policy, self.words, self.length = policy, policy.words, policy.length
        self.vocabulary, self.mask_id, self.eos_id = policy.vocabulary, policy.mask_id, policy.eos_id
        self.off = scale * noise(seed, (self.words + 1) ** self.length, self.length, self.words + 1)

    def head(self, logits_QV: Tensor) -> Tensor:
        return logits_QV

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        state_S = number(tokens_SL, self.words + 1)
        off_QV = self.off[state_S[at_Q // self.length], at_Q % self.length]
        return self.policy.hidden(tokens_SL, attended_SL, at_Q) + off_QV


@pytest.mark.parametrize(
    "world",
    [
        World(TablePolicy(3, 3, scale=0.05), "low_confidence"),
        World(NetPolicy(3, 3, seed=20, scale=4.0), "low_confidence"),
        World(TablePolicy(2, 4, scale=0.0), "low_confidence", steps=2),
    ],
    ids=["flat", "sharp", "ties"],
)
def test_noise_in_the_scorer_hardly_moves_the_gradient_if_the_choice_was_recorded(world: World) -> None:
    """Logits off by 1e-3 move tokens across the last kept draw; recorded counts keep them on their side."""
    paths = enumerated(world)
    trace = with_record(world, paths.trace)

    def change(scored: Trace) -> float:
        probed = [(every_step(scored, torch.Generator(), choice=True), 1.0)]
        exact = expected_update(world, paths, probed, step_clip)
        off = (replace(world, policy=Rounded(world.policy, 1e-3, seed)) for seed in range(5))
        return max(relative_error(expected_update(each, paths, probed, step_clip), exact) for each in off)

    assert change(trace) < 1e-3 < 8e-3 < change(paths.trace)


def test_the_recorded_number_of_tokens_ranks_above_also_if_the_scorer_rounds_them_to_equal_scores() -> None:
    """Of two equal tokens one ranked above for the sampler, whose logits had more digits or were rounded otherwise."""
    world = World(TablePolicy(3, 2, scale=0.0), "low_confidence", steps=2)
    logits_QV = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [2.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    count_Q = torch.tensor([1, 1, 2], dtype=torch.int32)
    (found,) = log_mass_outside(logits_QV, enumerated(world).trace, count_Q)
    p_QV = logits_QV[:, :3].softmax(-1)
    assert torch.allclose(found.exp(), torch.stack([p_QV[0, 1:].sum(), p_QV[1, 1:].sum(), p_QV[2, 2]]))


def test_methods_that_score_the_choice_ask_for_the_record() -> None:
    for method in (agrpo, vine):
        assert method(choice=True).request.record.choice and not method().request.record.choice
