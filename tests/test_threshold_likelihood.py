"""The exact likelihood of threshold steps: tokens, and which positions reached the threshold, by enumeration."""

import pytest
import torch
from test_exact_agrpo import expected_update

from helpers import generator, sample
from unmask.core.objective import step_clip
from unmask.core.order import left_to_right, low_confidence
from unmask.core.probes import ask, every_step
from unmask.core.shapes import NEVER
from unmask.core.token_sampling import TokenSampling
from unmask.methods import agrpo
from unmask.rollout.sample import row_seeds
from wording import naming
from world import NetPolicy, TablePolicy, World, enumerated, laws, number, relative_error, value_gradient

WORLDS = {
    "a low threshold": World(NetPolicy(3, 3, seed=20), "low_confidence", threshold=0.35),
    "a middle one": World(NetPolicy(3, 3, seed=20), "low_confidence", threshold=0.5),
    "one that hardly anything reaches": World(NetPolicy(2, 3, seed=4), "low_confidence", threshold=0.95),
    "blocks": World(NetPolicy(2, 4, seed=15), "low_confidence", block=2, threshold=0.6),
    "end tokens": World(NetPolicy(3, 4, seed=13, eos=0), "low_confidence", block=2, threshold=0.5),
    "tempered": World(NetPolicy(3, 3, seed=7), "low_confidence", sampling=TokenSampling(0.6), threshold=0.5),
    "top k": World(NetPolicy(3, 3, seed=8), "low_confidence", sampling=TokenSampling(top_k=2), threshold=0.5),
    "leftmost": World(NetPolicy(3, 3, seed=20), "left_to_right", threshold=0.5),
    "leftmost, blocks, end tokens": World(NetPolicy(3, 4, seed=13, eos=0), "left_to_right", block=2, threshold=0.5),
    "leftmost, top k": World(
        NetPolicy(3, 3, seed=8), "left_to_right", sampling=TokenSampling(0.7, top_k=2), threshold=0.6
    ),
    "at least two": World(NetPolicy(2, 4, seed=20), "low_confidence", steps=2, threshold=0.6),
    "at least two, low": World(NetPolicy(2, 4, seed=15), "low_confidence", steps=2, threshold=0.35),
    "at least two, top k": World(
        NetPolicy(3, 4, seed=8), "low_confidence", steps=2, sampling=TokenSampling(0.7, top_k=2), threshold=0.4
    ),
    "at least two, end tokens": World(NetPolicy(2, 4, seed=13, eos=0), "low_confidence", steps=2, threshold=0.5),
    "at least two, ties": World(TablePolicy(2, 4, scale=0.0), "low_confidence", steps=2, threshold=0.5),
    "ties, at the threshold": World(TablePolicy(2, 3, scale=0.0), "low_confidence", threshold=0.5),
    "ties, below it": World(TablePolicy(2, 3, scale=0.0), "low_confidence", threshold=0.6),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_likelihood_of_a_step_is_its_enumerated_probability(name: str) -> None:
    """So the steps of a state have probability one together. Some steps keep one position, some several."""
    world = WORLDS[name]
    paths = enumerated(world)
    probes = every_step(paths.trace, generator(), choice=True)
    with torch.no_grad():
        total_N = ask(world.policy, probes).sum(-1)
    step_N = torch.where(probes.asked_NL, paths.trace.step_BL[probes.trace_N], -1).max(-1).values
    wanted_N = paths.step_BT[probes.trace_N, step_N].log()
    torch.testing.assert_close(total_N, wanted_N.detach(), rtol=0, atol=1e-12)
    kept_N = probes.asked_NL.sum(-1)
    assert kept_N.max() > world.min_per_step or "below" in name or "hardly" in name


def test_steps_by_threshold_that_commit_at_least_two_are_of_four_kinds() -> None:
    """Both kept draws reach the threshold, one does, none does, or more than two are kept, which all do."""
    world, kinds = WORLDS["at least two"], set()
    trace = enumerated(world).trace
    for steps, score in zip(trace.step_BL.tolist(), trace.seen["confidence"].exp().tolist(), strict=True):
        for t in {*steps} - {NEVER}:
            kept = [score[i] >= world.threshold for i in range(len(steps)) if steps[i] == t]
            kinds.add((len(kept), sum(kept)))
            assert len(kept) >= min(2, sum(step >= t for step in steps)) and (len(kept) <= 2 or all(kept))
    assert {(2, 2), (2, 1), (2, 0)} < kinds and max(kinds) >= (3, 3)


def test_as_many_at_least_as_there_are_is_a_block_in_one_step() -> None:
    """And a threshold that nothing reaches is the schedule with that many a step."""
    policy = NetPolicy(3, 4, seed=3)
    shape = {"length": 4, "order": low_confidence}
    for least, steps in ((4, 1), (2, 2), (1, 4)):
        never = sample(policy, [[]] * 50, row_seeds(0, 50), threshold=1.0, min_per_step=least, **shape).trace
        even = sample(policy, [[]] * 50, row_seeds(0, 50), steps=steps, **shape).trace
        assert never.steps == even.steps == steps
        assert torch.equal(never.tokens_BL, even.tokens_BL) and torch.equal(never.step_BL, even.step_BL)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_per_step": 2}, ["min_per_step", 2, "threshold"]),
        ({"min_per_step": 2, "threshold": 0.9, "order": left_to_right}, ["min_per_step", "left_to_right"]),
        ({"min_per_step": 5, "threshold": 0.9}, ["min_per_step", 5, 4]),
        ({"min_per_step": 0, "threshold": 0.9}, ["min_per_step", 0, 4]),
    ],
)
def test_a_smallest_number_that_means_nothing_is_refused(settings: dict, words: list) -> None:
    with pytest.raises(ValueError, match=naming(*words)):
        sample(NetPolicy(3, 4), [[]], row_seeds(0, 1), length=4, **settings)


def test_another_policy_scores_the_positions_passed_over_by_the_threshold_too() -> None:
    """Of several kept draws one can be below the threshold then. The others were passed over by the threshold still."""
    world, level = WORLDS["a low threshold"], 0.35
    other = World(NetPolicy(3, 3, seed=21), "low_confidence", threshold=level)
    probes = every_step(enumerated(world).trace, generator(), choice=True)
    plain_SCV, drawn_SCV = laws(other)
    with torch.no_grad():
        answer_NC = ask(other.policy, probes)
    below = 0
    for n in (probes.asked_NL.sum(-1) > 1).nonzero().flatten().tolist():
        state = number(probes.states_SL[probes.state_N[n]], other.policy.words + 1)
        token_C = probes.trace.tokens_BL[probes.trace_N[n]]
        least = min(plain_SCV[state, i, token_C[i]].exp() for i in probes.asked_NL[n].nonzero().flatten())
        for j in probes.passed_NL[n].nonzero().flatten().tolist():
            score_V, mass_V = plain_SCV[state, j].exp(), drawn_SCV[state, j]
            below += bool(mass_V[(score_V < level) & (score_V >= least)].sum() > 0.01)
            assert answer_NC[n, j].exp().item() == pytest.approx(mass_V[score_V < level].sum().item(), abs=1e-12)
    assert below > 0


@pytest.mark.parametrize("name", WORLDS)
def test_the_expected_update_is_the_policy_gradient_and_tokens_alone_are_not_enough(name: str) -> None:
    world = WORLDS[name]
    paths, truth = enumerated(world), value_gradient(world, enumerated(world))
    exact, tokens = (
        expected_update(world, paths, [(every_step(paths.trace, generator(), choice), 1.0)], step_clip)
        for choice in (True, False)
    )
    assert relative_error(exact, truth / 2) < 1e-9  # a group of two: (G - 1) / G
    assert "ties" in name or relative_error(tokens, truth / 2) > 1e-3


def test_agrpo_takes_rollouts_by_threshold() -> None:
    world = WORLDS["a middle one"]
    agrpo(choice=True).check_order(enumerated(world).trace)
