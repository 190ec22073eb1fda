"""fork: which steps are fallbacks, its loss as a loop, its limit, and how far it is from the policy gradient."""

from dataclasses import replace
from math import log

import pytest
import torch
from test_exact_agrpo import expected_update
from torch import Tensor

from helpers import Net, assert_close, generator, moved, parts_of, rewards, rolled
from unmask.core.advantage import z_score
from unmask.core.objective import step_clip
from unmask.core.order import left_to_right, low_confidence
from unmask.core.probes import ask, every_step
from unmask.core.shapes import NEVER
from unmask.core.specs import Record
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, all_tokens, state_before
from unmask.methods import agrpo, fork
from unmask.methods.fork import fallback_steps, fallbacks
from unmask.training.update import accumulate, term_loss
from world import NetPolicy, World, cosine, enumerated, laws, number, relative_error, value_gradient

WORLDS = {
    "one block": World(NetPolicy(3, 3, seed=20), "left_to_right", threshold=0.5),
    "blocks, end tokens": World(NetPolicy(3, 4, seed=13, eos=0), "left_to_right", block=2, threshold=0.5),
    "tempered": World(NetPolicy(3, 3, seed=8), "left_to_right", sampling=TokenSampling(0.7, top_k=2), threshold=0.6),
}


def by_hand(world: World, trace: Trace) -> list[list[int]]:
    """The steps of each rollout that wrote one token, below the threshold."""
    plain_SCV, found = laws(world)[0].detach(), []
    for tokens, steps in zip(trace.tokens_BL.tolist(), trace.step_BL.tolist(), strict=True):
        found.append([])
        for t in sorted({*steps} - {NEVER}):
            state = [world.policy.mask_id if step >= t else token for token, step in zip(tokens, steps, strict=True)]
            table_CV = plain_SCV[number(torch.tensor(state), world.policy.words + 1)]
            score = [float(table_CV[i, tokens[i]]) for i, step in enumerate(steps) if step == t]
            if min(score) < log(world.threshold):
                inside = [i for i in range(len(steps)) if i // world.width == steps.index(t) // world.width]
                assert len(score) == 1 and steps.index(t) == min(i for i in inside if steps[i] >= t)
                found[-1].append(t)
    return found


@pytest.mark.parametrize("name", WORLDS)
def test_fallbacks_are_the_steps_at_which_no_draw_reached_the_threshold(name: str) -> None:
    """In every trajectory that the sampler can take. The other steps wrote sure tokens only."""
    world = WORLDS[name]
    trace = enumerated(world).trace
    expected = by_hand(world, trace)
    assert [row.nonzero().flatten().tolist() for row in fallbacks(trace)] == expected
    wrote = [len({*row} - {NEVER}) for row in trace.step_BL.tolist()]
    assert any(map(len, expected)) and any(len(some) < steps for some, steps in zip(expected, wrote, strict=True))


def rollout(method, threshold: float = 0.5, **settings):
    policy = Net(1, ends=0.5)
    settings = {"block": 3, "order": left_to_right, "counted": all_tokens} | settings
    return policy, rolled(policy, threshold=threshold, record=method.record, **settings)


def slope(policy: Net, parts) -> list[Tensor]:
    policy.zero_grad()
    for part in parts:
        accumulate(policy, part, 512)
    return [parameter.grad.clone() for parameter in policy.parameters()]


@pytest.mark.parametrize("sampling", [TokenSampling(), TokenSampling(0.7, top_k=4)])
def test_the_loss_is_its_loop_over_rollouts_and_fallback_steps(sampling: TokenSampling) -> None:
    method = fork(low=0.05, high=0.1)
    policy, rollouts = rollout(method, sampling=sampling)
    trace, advantage_B = rollouts.trace, z_score(rewards(rollouts.trace), rollouts.trace.group_B)
    old = moved(policy, 0.2)
    (part,) = parts_of(method, rollouts, generator(), old)
    new_NL, old_NL = (ask(each, every_step(trace, generator())) for each in (policy, old))
    probes, total = every_step(trace, generator()), torch.zeros((), dtype=torch.float64)
    for b, steps in enumerate(fallbacks(trace)):
        ratios = []
        for t in steps.nonzero().flatten().tolist():
            (row,) = (
                n for n in range(len(new_NL)) if probes.trace_N[n] == b and trace.step_BL[b, probes.asked_NL[n]][0] == t
            )
            ratios.append((new_NL[row] - old_NL[row].detach()).sum().exp())
        for ratio in ratios:
            free, bound = ratio * advantage_B[b], ratio.clamp(0.95, 1.1) * advantage_B[b]
            total = total - torch.minimum(free, bound) / len(ratios) / len(trace)
    loss, metrics = term_loss(part, ask(policy, part.probes))
    assert_close(loss, total)
    assert 0 < metrics["clipped"] < 1
    found, expected = (torch.autograd.grad(each, list(policy.parameters())) for each in (loss, total))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def test_if_nothing_reaches_the_threshold_it_is_agrpo_from_left_to_right_bit_for_bit() -> None:
    alone, steps = fork(), agrpo(draws=6, advantage=z_score)
    policy = Net(1, ends=-50.0)
    settings = {"block": 3, "order": left_to_right, "counted": all_tokens}
    forked = rolled(policy, threshold=1.0, record=alone.record, **settings)
    single = rolled(policy, record=steps.record, **settings)
    for name in ("tokens_BL", "step_BL", "logp_BL"):
        assert torch.equal(getattr(forked.trace, name), getattr(single.trace, name))
    assert (fallbacks(forked.trace) == 1).all()
    found, expected = (
        slope(policy, parts_of(method, rollouts, generator()))
        for method, rollouts in ((alone, forked), (steps, single))
    )
    assert all(map(torch.equal, found, expected)) and max(float(each.abs().max()) for each in found) > 1e-4


def test_a_rollout_without_a_fallback_adds_nothing() -> None:
    policy, rollouts = rollout(fork(), threshold=1e-300)
    assert not fallbacks(rollouts.trace).any() and not len(fallback_steps(rollouts.trace, generator()).states_SL)
    (part,) = parts_of(fork(), rollouts, generator())
    assert accumulate(policy, part, 512)["loss"] == 0 and all(each.grad is None for each in policy.parameters())


@pytest.mark.parametrize("name", WORLDS)
def test_its_expected_update_goes_uphill_and_is_not_the_policy_gradient(name: str) -> None:
    """agrpo with the choice of positions is, on the same rollouts."""
    world = WORLDS[name]
    paths = enumerated(world)
    truth, trace = value_gradient(world, paths), paths.trace
    exact = expected_update(world, paths, [(every_step(trace, generator(), choice=True), 1.0)], step_clip)
    found = expected_update(world, paths, [(fallback_steps(trace, generator()), 1.0)], fork().objective)
    assert relative_error(exact, truth / 2) < 1e-9
    assert 0.5 < cosine(found, truth) < 0.995


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"threshold": None}, "rollout.threshold"),
        ({"order": low_confidence}, "rollout.order=left_to_right"),
        ({"record": Record()}, "request=method.request"),
    ],
)
def test_other_rollouts_are_refused_with_the_reason(settings: dict, reason: str) -> None:
    settings = {"order": left_to_right, "threshold": 0.5, "record": fork().record} | settings
    with pytest.raises(ValueError, match=f"fork .*{reason}"):
        parts_of(fork(), rolled(Net(1), **settings), generator())


def test_choice_is_scored_from_left_to_right_by_threshold_only() -> None:
    trace = enumerated(WORLDS["one block"]).trace
    agrpo(choice=True).check_order(trace)
    with pytest.raises(ValueError, match=r"left_to_right.* or with a threshold"):
        agrpo(choice=True).check_order(replace(trace, threshold=None))


def test_a_fallback_is_asked_at_the_state_that_the_sampler_saw() -> None:
    policy, rollouts = rollout(fork())
    trace, probes = rollouts.trace, fallback_steps(rollouts.trace, generator())
    with torch.no_grad():
        logp_NL = ask(policy, probes)
    assert_close(logp_NL[probes.asked_NL], trace.logp_BL[probes.trace_N][probes.asked_NL])
    for state_L, b, asked_L in zip(probes.states_SL, probes.trace_N, probes.asked_NL, strict=True):
        assert torch.equal(state_L, state_before(trace, int(trace.step_BL[b, asked_L]))[b])
