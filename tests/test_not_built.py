"""What methods that are not built reduce to (docs/methods/not_built.md): equations against the library's objects."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import Net, assert_close, generator, moved, objective_and_slope, random_answers, rolled
from unmask.core.advantage import correct_only, group_mean, group_sum, leave_one_out, z_score
from unmask.core.method import uniform_credit
from unmask.core.objective import (
    clipped_surrogate,
    counted_units,
    k2,
    policy_gradient,
    sequence_clip,
    sequence_divergence,
    sequence_mean,
    trace_sum,
)
from unmask.core.probes import Probes, ask, unit_likelihood
from unmask.core.states import elbo
from unmask.core.trace import Trace, all_tokens
from unmask.methods.spg import block_random, sandwiched_policy_gradient
from unmask.methods.step_merge import step_merge
from unmask.methods.wd1 import group_softmax, preference_weight

LENGTH = 6
GROUP_B = torch.tensor([0, 0, 0, 1, 1, 1, 1])
RIGHT_B = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
"""Right or wrong; both groups have both."""


def asked(new: float = 0.0) -> tuple[Probes, Tensor, Tensor]:
    """ELBO probes of rollouts whose every position counts, the policy's log-probabilities and the old policy's."""
    policy = Net(1, ends=-50.0)
    trace = rolled(policy, length=LENGTH, counted=all_tokens).trace
    probes = elbo(trace, generator())
    with torch.no_grad():
        old_NL = ask(policy, probes)
        logp_NL = ask(moved(policy, new), probes)
    return probes, logp_NL.requires_grad_(), old_NL


def gain_of(logp_NL: Tensor, old_NL: Tensor, probes: Probes) -> Tensor:
    """log pi(o) - log pi_old(o) by the estimator, (B,)."""
    gain_ML = unit_likelihood(logp_NL - old_NL, probes).masked_fill(~counted_units(probes), 0.0)
    return torch.zeros(len(probes.trace), dtype=gain_ML.dtype).index_add(0, probes.trace_M, gain_ML.sum(-1))


def slope(loss: Tensor, at: Tensor, probes: Probes | None = None) -> Tensor:
    """The gradient; if `at` has log-probabilities, that of the tokens that are asked."""
    (found,) = torch.autograd.grad(loss, at, retain_graph=True)
    return found if probes is None else found * probes.asked_NL


def advantage_of(trace: Trace) -> Tensor:
    return leave_one_out(torch.sin(torch.arange(len(trace), dtype=torch.float64)), trace.group_B)


# DMPO


def test_the_weights_of_dmpo_are_those_of_wd1_with_psi_one_over_alpha_if_the_reference_is_the_old_policy():
    alpha, drift_B = 0.5, torch.linspace(-1, 1, len(GROUP_B), dtype=torch.float64)
    size_B = group_sum(torch.ones_like(RIGHT_B), GROUP_B)

    def dmpo(log_ratio_B: Tensor) -> Tensor:
        up_B, down_B = (group_softmax(log_ratio_B + sign * RIGHT_B / alpha, GROUP_B) for sign in (1, -1))
        return size_B * (up_B - down_B)

    assert_close(dmpo(0 * drift_B), preference_weight(RIGHT_B, GROUP_B, psi=1 / alpha))
    up_B = group_softmax((RIGHT_B - alpha * drift_B) / alpha, GROUP_B)  # the reward after its price
    down_B = group_softmax(-(RIGHT_B + alpha * drift_B) / alpha, GROUP_B)  # the price with the other sign
    assert_close(dmpo(-drift_B), size_B * (up_B - down_B))
    priced_B = preference_weight(RIGHT_B - alpha * drift_B, GROUP_B, psi=1 / alpha)
    assert float((dmpo(-drift_B) - priced_B).abs().max()) > 0.1


def test_with_a_small_alpha_the_positive_half_is_raft_and_the_other_half_pushes_down_the_wrong():
    weight_B = preference_weight(RIGHT_B, GROUP_B, psi=1 / 0.04)
    assert_close(weight_B.clamp(min=0), correct_only(RIGHT_B, GROUP_B))
    assert_close(weight_B.clamp(max=0), -correct_only(1 - RIGHT_B, GROUP_B))
    equal_B = torch.ones_like(RIGHT_B)
    assert not preference_weight(equal_B, GROUP_B, psi=25.0).any() and correct_only(equal_B, GROUP_B).all()


# GDSD and RSPO


def squared(gain_B: Tensor, target_B: Tensor) -> Tensor:
    return ((gain_B / LENGTH - target_B) ** 2).mean()


def test_gdsd_on_policy_is_reinforce_and_so_is_espo():
    """The squared log-ratio at zero: 2 psi / L times REINFORCE, and 2 psi times ESPO."""
    psi = 3.0
    probes, logp_NL, old_NL = asked()
    advantage_B, credit_BL = advantage_of(probes.trace), uniform_credit(probes.trace)
    found_NL = slope(squared(gain_of(logp_NL, old_NL, probes), psi * advantage_B), logp_NL, probes)
    reinforce, espo = (
        objective_and_slope(objective, logp_NL, old_NL, probes, advantage_B, credit_BL)[1]
        for objective in (policy_gradient, sequence_clip)
    )
    assert found_NL.abs().max() > 0.1
    assert_close(found_NL, 2 * psi / LENGTH * reinforce)
    assert_close(found_NL, 2 * psi * espo)


def test_off_policy_a_square_without_the_clamp_is_reinforce_plus_k2():
    """GDSD with the old policy, RSPO with the reference: the same identity."""
    psi = 3.0
    probes, logp_NL, old_NL = asked(new=0.1)
    advantage_B, credit_BL = advantage_of(probes.trace), uniform_credit(probes.trace)
    found_NL = slope(squared(gain_of(logp_NL, old_NL, probes), psi * advantage_B), logp_NL, probes)
    objective = partial(policy_gradient, normaliser=sequence_mean)
    reinforce = objective_and_slope(objective, logp_NL, old_NL, probes, advantage_B, credit_BL)[1]
    pull = slope(sequence_divergence(logp_NL, old_NL, probes, kl=k2), logp_NL, probes)
    assert pull.abs().max() > 1e-3
    assert_close(found_NL, 2 * psi * reinforce + 2 / LENGTH * pull)


def test_the_clamp_of_gdsd_stops_a_rollout_once_its_likelihood_has_moved():
    clip = 4e-4
    probes, _, old_NL = asked()
    still_B = torch.arange(len(probes.trace)) % 2 == 0  # the others: 0.001 nats for each token
    logp_NL = (old_NL + 1e-3 * ~still_B[probes.trace_N, None]).requires_grad_()
    gain_B = gain_of(logp_NL, old_NL, probes)
    clamped_B = gain_B.clamp(torch.tensor(1 - clip).log(), torch.tensor(1 + clip).log())
    found_NL = slope(squared(clamped_B, advantage_of(probes.trace)), logp_NL, probes)
    pushed_B = torch.zeros(len(probes.trace), dtype=torch.bool)
    pushed_B[probes.trace_N[found_NL.abs().sum(-1) > 0]] = True
    assert torch.equal(pushed_B, still_B)


def test_centring_the_log_ratio_of_rspo_changes_its_pull_only():
    """The advantages of a group add up to zero, so they do not see the group's mean log-ratio."""
    gain_B = torch.randn(len(GROUP_B), generator=generator(), dtype=torch.float64)
    advantage_B = group_mean(RIGHT_B, GROUP_B)
    centred_B = group_mean(gain_B, GROUP_B)
    assert_close((advantage_B * centred_B).sum(), (advantage_B * gain_B).sum())
    assert (centred_B**2).sum() < (gain_B**2).sum()


# StableDRL


def test_stabledrl_is_spg_while_the_policy_is_the_old_one_and_nearly_so_for_means_per_token():
    trace = rolled(Net(1, ends=-50.0), length=LENGTH, counted=all_tokens).trace
    probes, batch = block_random(trace, generator()), len(trace)
    logp_NL, _, _ = random_answers(probes, 0)
    advantage_B, credit_BL, one_B = advantage_of(trace), uniform_credit(probes.trace), torch.zeros_like(trace.group_B)

    def stable(gain_B: Tensor) -> Tensor:
        weight_B = group_softmax(gain_B.clamp(max=torch.tensor(5.0).log()), one_B)
        arguments = probes, batch * weight_B * advantage_B, credit_BL
        return objective_and_slope(sandwiched_policy_gradient, logp_NL, logp_NL.detach(), *arguments)[1]

    spg = objective_and_slope(sandwiched_policy_gradient, logp_NL, logp_NL.detach(), probes, advantage_B, credit_BL)[1]
    assert spg.abs().max() > 1e-3
    assert_close(stable(torch.zeros(batch, dtype=torch.float64)), spg)
    gain_B = 0.02 * (2 * torch.rand(batch, generator=generator(), dtype=torch.float64) - 1)  # nats a token
    ratio_NL = stable(gain_B)[spg != 0] / spg[spg != 0]
    assert 0.96 < float(ratio_NL.min()) < float(ratio_NL.max()) < 1.041  # exp(-0.04), exp(0.04)


# NFT


def nft(logp_NL: Tensor, old_NL: Tensor, probes: Probes, reward_B: Tensor, value_B: Tensor) -> Tensor:
    """- log rho for correct rollouts, - log((1 - v rho) / (1 - v)) for the others; tokens added up, traces averaged."""
    counted_ML = counted_units(probes)
    gain_ML = unit_likelihood(logp_NL - old_NL, probes).masked_fill(~counted_ML, 0.0)
    value_M1 = value_B[probes.trace_M, None]
    wrong_ML = ((1 - value_M1 * gain_ML.exp()) / (1 - value_M1)).log()
    right_M1 = reward_B[probes.trace_M, None] > 0
    return -(trace_sum(counted_ML, probes) * torch.where(right_M1, gain_ML, wrong_ML)).sum()


def right_or_wrong(trace: Trace) -> tuple[Tensor, Tensor]:
    """Rewards, one rollout of each group correct; and the mean of each group."""
    first_B = torch.cat([torch.tensor([True]), trace.group_B[1:] != trace.group_B[:-1]]).double()
    return first_B, first_B - group_mean(first_B, trace.group_B)


def test_nft_on_policy_is_reinforce_with_the_advantage_over_one_minus_the_mean_reward():
    probes, logp_NL, old_NL = asked()
    reward_B, mean_B = right_or_wrong(probes.trace)
    found_NL = slope(nft(logp_NL, old_NL, probes, reward_B, mean_B), logp_NL, probes)
    advantage_B = (reward_B - mean_B) / (1 - mean_B)
    reinforce = objective_and_slope(
        policy_gradient, logp_NL, old_NL, probes, advantage_B, uniform_credit(probes.trace)
    )[1]
    assert found_NL.abs().max() > 0.1
    assert_close(found_NL, reinforce)
    assert_close(advantage_B * ((1 - mean_B) / mean_B).sqrt(), z_score(reward_B, probes.trace.group_B), 1e-5)


@pytest.mark.parametrize(("ratio", "factor"), [(0.5, 1 / 3), (1.0, 1.0), (1.5, 3.0)])
def test_off_policy_nft_pushes_less_on_wrong_tokens_that_are_already_unlikely(ratio: float, factor: float):
    """The weight v rho / (1 - v rho), at v = 1/2 relative to rho = 1."""
    gain = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    (found,) = torch.autograd.grad(-((1 - 0.5 * gain.exp()) / 0.5).log(), gain)
    assert float(found) == pytest.approx(factor)


# d-TreeRPO


def test_a_tree_of_one_level_is_step_merge_with_one_segment_and_its_histogram_term_is_a_likelihood():
    method = step_merge(1, prompt_masking=0, low=0.4, high=0.4, advantage=leave_one_out, normaliser=sequence_mean)
    policy = Net(1)
    trace = rolled(policy).trace
    (probes,) = method.probe(trace, generator(), 1)
    logp_NL = ask(policy, probes).detach().requires_grad_()
    advantage_B = method.advantage(torch.arange(len(trace)).double().sin(), trace.group_B)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(len(trace)):
        ratio_L = (logp_NL[b] - logp_NL[b].detach()).exp()[trace.counted_BL[b]]
        total = total - clipped_surrogate(ratio_L, advantage_B[b], 0.4, 0.4)[0].mean() / len(trace)
    credit_BL = uniform_credit(trace)
    found = objective_and_slope(method.objective, logp_NL, logp_NL.detach(), probes, advantage_B, credit_BL)
    assert_close(found, (total.detach(), slope(total, logp_NL, probes)))

    logits_V = torch.randn(5, generator=generator(), dtype=torch.float64).requires_grad_()
    token_K, weight_K = torch.tensor([1, 3, 1]), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)  # of good siblings
    share_V = torch.zeros(5, dtype=torch.float64).index_add(0, token_K, weight_K)
    logp_V = logits_V.log_softmax(0)
    histogram = torch.nn.functional.kl_div(logp_V, share_V, reduction="sum")
    assert_close(slope(histogram, logits_V), slope(-(weight_K * logits_V.log_softmax(0)[token_K]).sum(), logits_V))


def test_the_page_names_every_check():
    page = (Path(__file__).parent.parent / "docs" / "methods" / "not_built.md").read_text()
    checks = {name for name in globals() if name.startswith("test_")} - {"test_the_page_names_every_check"}
    assert set(re.findall(r"`(test_\w+)`", page)) == checks
