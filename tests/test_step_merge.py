"""d2-StepMerge and TraceRL against the methods they reduce to, a loop, and the policy gradient by enumeration."""

import pytest
import torch
from test_exact_agrpo import expected_update

from helpers import Net, assert_close, assert_identical, generator, moved, parts_of, rewards, rolled, slopes
from unmask.core.advantage import group_mean
from unmask.core.objective import step_mean
from unmask.core.probes import ask, every_step, fully_masked, unit_likelihood
from unmask.core.trace import state_before
from unmask.methods import diffu_grpo, step_merge, trace_rl
from unmask.methods.trace_rl import merged_steps
from unmask.training.update import term_loss
from world import NetPolicy, World, enumerated, relative_error, value_gradient


def rollout(**settings):
    policy = Net(1)
    return policy, rolled(policy, block=6, **settings)


@pytest.mark.parametrize("prompt_masking", [0.0, 0.4])
def test_one_segment_is_diffu_grpo_bit_for_bit(prompt_masking):
    policy, rollouts = rollout()
    old, reference = moved(policy), moved(policy, seed=3)
    one, other = (
        parts_of(method, rollouts, generator(4), old, reference)
        for method in (step_merge(1, prompt_masking), diffu_grpo(prompt_masking))
    )
    assert_identical(slopes(policy, one), slopes(policy, other))


def test_a_token_is_asked_at_the_first_state_of_its_segment_with_the_same_part_of_the_prompt_hidden():
    _, (trace, _) = rollout()
    probes = step_merge(3, 0.4).probe(trace, generator(4), 1)[0]
    hidden_BL = fully_masked(trace, generator(4), 0.4).states_SL == trace.mask_id
    for n in range(len(probes.state_N)):
        b = int(probes.trace_N[n])
        steps = trace.step_BL[b][probes.asked_NL[n]]
        start = int(steps.min()) // 2 * 2  # six steps, three segments
        assert int(steps.max()) < start + 2
        wanted_L = state_before(trace, start)[b]
        wanted_L = torch.where(hidden_BL[b] & ~trace.canvas_BL[b], trace.mask_id, wanted_L)
        assert torch.equal(probes.states_SL[probes.state_N[n]], wanted_L)


@pytest.mark.parametrize("merge", [1, 2, 4, 9])
def test_trace_rl_is_its_loop_over_merged_steps(merge):
    policy, rollouts = rollout()
    trace = rollouts.trace
    (term,) = parts_of(trace_rl(merge, advantage=group_mean), rollouts, generator())
    advantage_B, losses = group_mean(rewards(trace), trace.group_B), []
    for b in range(len(trace)):
        written = sorted({int(step) for step in trace.step_BL[b][trace.filled_BL[b]]})
        for start in range(0, len(written), merge):
            steps = written[start : start + merge]
            places = [i for i in range(trace.step_BL.shape[1]) if int(trace.step_BL[b, i]) in steps]
            if any(trace.counted_BL[b, i] for i in places):
                losses.append(-float(advantage_B[b]))  # every ratio is one
    loss, _ = term_loss(term, ask(policy, term.probes))
    assert float(loss.detach()) == pytest.approx(sum(losses) / len(losses), abs=1e-12)


def test_merged_steps_ask_between_every_step_and_the_fully_masked_canvas():
    policy, (trace, _) = rollout()
    every, all_at_once = merged_steps(trace, generator(), 1), merged_steps(trace, generator(), 99)
    assert torch.equal(every.states_SL, every_step(trace, generator()).states_SL)
    fully = fully_masked(trace, generator())
    assert_close(
        unit_likelihood(ask(policy, all_at_once), all_at_once), unit_likelihood(ask(policy, fully), fully), 1e-12
    )
    two = merged_steps(trace, generator(), 2)
    for n in range(len(two.state_N)):
        b, first = int(two.trace_N[n]), int(trace.step_BL[int(two.trace_N[n])][two.asked_NL[n]].min())
        assert torch.equal(two.states_SL[two.state_N[n]], state_before(trace, first)[b])


@pytest.mark.parametrize("order", ["random", "left_to_right"])
def test_cj_grpo_is_the_policy_gradient_if_a_step_writes_one_token(order):
    world = World(NetPolicy(2, 3, seed=1), order)
    paths = enumerated(world)
    method = trace_rl(advantage=group_mean, normaliser=step_mean)
    probes = method.probe(paths.trace, generator(), 1)[0]
    update = expected_update(world, paths, [(probes, 1.0)], objective=method.objective)
    assert relative_error(update, value_gradient(world, paths) / 2 / paths.trace.steps) < 1e-9  # (G - 1) / (G T), G = 2


def test_options_out_of_range_are_refused():
    for wrong in (lambda: step_merge(0), lambda: trace_rl(merge=0)):
        with pytest.raises(ValueError, match=r"(segments|merge)=0 must be at least 1"):
            wrong()
    with pytest.raises(ValueError, match="segments=7 must lie between 1 and the 6 denoising steps"):
        step_merge(7).probe(rollout()[1].trace, generator(), 1)
