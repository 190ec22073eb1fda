"""DiSPO: the branch term against loops; weight 0 and equal fillings are the base."""

import pytest
import torch

from helpers import (
    MASK,
    ON_ROLLOUTS,
    Net,
    assert_close,
    assert_identical,
    generator,
    loss_and_slope,
    moved,
    parts_of,
    rewards,
    rolled,
    sample,
    slopes,
)
from unmask.core.advantage import group_mean, leave_one_out
from unmask.core.objective import canvas_mean, counted_units
from unmask.core.probes import ask, one_shot
from unmask.core.shapes import NEVER
from unmask.core.specs import Branch, Record
from unmask.core.trace import state_before
from unmask.methods import BASES, agrpo, daca, diffu_grpo, dispo
from unmask.training.update import term_loss


def rollout(method, ends=1.0, **settings):
    policy = Net(1, ends=ends)
    branch = method.request.branch
    record = method.record | Record(entropy=True)
    return policy, rolled(policy, block=3, counted=method.counted, record=record, branch=branch, **settings)


@pytest.mark.parametrize("branches", [2, 3])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_the_branch_term_is_its_loop_over_states_fillings_and_newly_filled_tokens(branches, kl):
    method = dispo(diffu_grpo(), branches, weight=0.7, lateness=0.5, low=0.05, high=0.1, kl=kl)
    policy, rollouts = rollout(method)
    part = parts_of(method, rollouts, generator(), moved(policy, 0.2), moved(policy, seed=3))[1]
    twigs, reward = rollouts.branches, rewards(rollouts.branches).tolist()
    logp_NL = ask(policy, part.probes).detach().requires_grad_()
    loss, cases, source = 0.0, set(), twigs.group_B.tolist()
    states = sorted(set(source))
    for state in states:
        siblings = [z for z, s in enumerate(source) if s == state]
        assert len(siblings) == branches
        mean = sum(reward[z] for z in siblings) / branches
        for z in siblings:
            for i in range(4, 10):
                if twigs.step_BL[z, i] != 0 or not twigs.counted_BL[z, i]:
                    continue
                ratio, a = (logp_NL[z, i] - part.old_NL[z, i]).exp(), reward[z] - mean
                bound = min(max(ratio.item(), 0.95), 1.1) * a
                active = bound < ratio.item() * a
                cases.add((a > 0, active))
                term = -(bound if active else ratio * a)
                if kl:
                    d = part.reference_NL[z, i] - logp_NL[z, i]
                    term = term + kl * (d.exp() - d - 1)
                loss = loss + 0.7 * term / (len(states) * branches * 6)
    assert len(states) > 4 and len(cases) == 4
    found = term_loss(part, logp_NL)[0]
    assert_close(loss_and_slope(found, logp_NL, part.probes), loss_and_slope(loss, logp_NL, part.probes))


def test_only_newly_filled_tokens_are_asked_and_siblings_share_their_state():
    method = dispo(diffu_grpo(), branches=3, lateness=1.0)
    _, (trace, twigs) = rollout(method)
    probes = one_shot(twigs)
    for z in range(len(twigs)):
        state_L = probes.states_SL[probes.state_N[z]]
        assert torch.equal(probes.asked_NL[z], state_L == MASK)
        source = int(twigs.group_B[z])
        assert any(torch.equal(state_L, state_before(trace, t)[source]) for t in range(trace.steps))
        assert torch.equal(twigs.tokens_BL[z][state_L != MASK], state_L[state_L != MASK])
    assert len(probes.states_SL) * 3 == len(twigs)


def test_the_normaliser_is_one_over_states_times_fillings_times_length():
    _, (_, twigs) = rollout(dispo(diffu_grpo(), branches=2))
    probes = one_shot(twigs)
    counted_ML = counted_units(probes)
    assert_close(canvas_mean(counted_ML, probes), counted_ML.double() / (len(probes.states_SL) * 2 * 6), 1e-12)
    assert counted_ML.any() and not counted_ML.all()


@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_weight_zero_is_the_base_bit_for_bit(name):
    base = BASES[name]()
    policy, with_branches = rollout(dispo(base, weight=0.0))
    _, without = rollout(base)
    assert torch.equal(with_branches.trace.tokens_BL, without.trace.tokens_BL)
    assert torch.equal(with_branches.trace.logp_BL, without.trace.logp_BL)
    both, alone = (
        parts_of(method, rollouts, generator(), moved(policy), moved(policy, seed=3))
        for method, rollouts in ((dispo(base, weight=0.0), with_branches), (base, without))
    )
    assert_identical(slopes(policy, both), slopes(policy, alone))
    heavy = parts_of(dispo(base), with_branches, generator(), moved(policy), moved(policy, seed=3))
    assert not torch.equal(slopes(policy, heavy)[1][0], slopes(policy, alone)[1][0])


def test_fillings_that_score_alike_teach_nothing():
    method = dispo(diffu_grpo())
    policy, rollouts = rollout(method)
    part = parts_of(method, rollouts, generator())[1]
    reward_B = part.probes.trace.group_B.double()  # one reward for all the siblings of a state
    dull = part.__class__(**{**vars(part), "advantage_B": group_mean(reward_B, part.probes.trace.group_B)})
    assert all((slope == 0).all() for slope in slopes(policy, [dull])[1])
    assert any((slope != 0).any() for slope in slopes(policy, [part])[1])


def test_a_leave_one_out_baseline_is_z_over_z_minus_one_of_the_mean_baseline():
    methods = [dispo(diffu_grpo(), branches=3, advantage=a) for a in (group_mean, leave_one_out)]
    policy, rollouts = rollout(methods[0])
    mean, loo = (slopes(policy, parts_of(m, rollouts, generator())[1:])[1] for m in methods)
    assert_close(loo, tuple(1.5 * slope for slope in mean))


@pytest.mark.parametrize("name", ["diffu_grpo", "spg", "espo", "agrpo"])
def test_daca_and_dispo_commute(name):
    base = BASES[name]()
    one, other = daca(dispo(base, weight=0.4), strength=0.8), dispo(daca(base, strength=0.8), weight=0.4)
    policy, rollouts = rollout(one)
    found, same = (
        parts_of(method, rollouts, generator(), moved(policy), moved(policy, seed=3)) for method in (one, other)
    )
    assert_identical(slopes(policy, found), slopes(policy, same))
    assert one.record == other.record and one.kl == other.kl
    assert torch.equal(found[1].credit_BL, torch.ones_like(found[1].credit_BL))


@pytest.mark.parametrize("lateness", [-4.0, 0.0, 1.0, 4.0])
def test_a_branch_step_is_drawn_in_proportion_to_a_power_of_its_place(lateness):
    law_T, weight = Branch(2, lateness).step_probabilities(5), [((t + 1) / 5) ** lateness for t in range(5)]
    assert law_T.tolist() == pytest.approx([w / sum(weight) for w in weight])
    rows, never_ends = 3000, Net(1, ends=-99.0)
    _, twigs = sample(never_ends, [[3]] * rows, torch.arange(rows), length=5, branch=Branch(2, lateness))
    step_B = 5 - (twigs.step_BL == 0).sum(-1)[::2]
    share_T = torch.bincount(step_B, minlength=5) / rows
    assert len(twigs) == 2 * rows and (share_T - law_T).abs().max() < 0.03


def test_a_branch_step_after_its_row_retired_is_dropped():
    policy, (trace, twigs) = rollout(dispo(diffu_grpo(), lateness=50.0), ends=2.0)  # always before the last step
    retired_B = (trace.step_BL == NEVER).any(-1)
    sources = twigs.group_B.unique().tolist()
    assert sources == (~retired_B).nonzero().flatten().tolist()
    assert 0 < len(sources) < len(trace)
    assert len(twigs) == 2 * len(sources) and policy.calls


def test_what_cannot_be_compared_is_refused():
    for branches in (1, 0):
        with pytest.raises(ValueError, match=f"branches={branches} must be at least 2"):
            dispo(agrpo(), branches=branches)
    with pytest.raises(ValueError, match=r"weight=-0.5 must be at least 0"):
        dispo(agrpo(), weight=-0.5)


def test_what_siblings_share_cancels_so_updating_all_tokens_is_updating_what_was_filled():
    """On-policy, with the siblings' mean as baseline: the claim docs/results.md makes of "action only"."""
    policy, (_, twigs) = rollout(dispo(diffu_grpo(), branches=3, lateness=0.5))
    probes, width = one_shot(twigs), twigs.tokens_BL.shape[1]
    advantage_B = group_mean(rewards(twigs), twigs.group_B)
    states_BL, whole = probes.states_SL[probes.state_N], torch.arange(len(twigs) * width)
    logits_BLV = policy(states_BL, probes.attended_SL[probes.state_N], whole).view(len(twigs), width, -1)
    logp_BL = logits_BLV.log_softmax(-1).gather(-1, twigs.tokens_BL[..., None])[..., 0]
    weighted_BL = advantage_B[:, None] * logp_BL
    seen_BL = states_BL != MASK
    assert (seen_BL & (logp_BL < -1e-3)).any() and (advantage_B != 0).any()
    weights = list(policy.parameters())
    every = torch.autograd.grad(weighted_BL[:, 4:].sum(), weights, retain_graph=True)
    filled = torch.autograd.grad((weighted_BL * ~seen_BL)[:, 4:].sum(), weights)
    for one, other in zip(every, filled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert max(slope.abs().max() for slope in filled) > 1e-3
