"""One gradient, however it is cut: micro-batches, permutations and padding change nothing, for every method."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

import unmask
from helpers import ON_ROLLOUTS, Net, assert_close, generator, moved, padded, parts_of, permuted, rolled, slopes
from unmask.core.advantage import group_mean
from unmask.core.method import Method, each_inner_step
from unmask.core.objective import token_clip
from unmask.core.order import left_to_right, low_confidence
from unmask.core.probes import ask, at_states, fully_masked, microbatches, unit_likelihood
from unmask.core.specs import Record
from unmask.methods import BASES, agrpo, daca, diffu_grpo, dispo
from unmask.rollout.sample import Rollouts
from unmask.training.update import LossTerm, accumulate, term_loss, update


def credited(base, **strata):
    """DACA with a strong DPS; on AGRPO, which knows no strata, DPS alone."""
    return daca(base, strength=0.8) if base.trajectory else daca(base, strength=0.8, **strata)


PLUGGED = {
    "none": lambda base: base,
    "daca": lambda base: credited(base, strata=3, anchor=0.2),
    "dispo": lambda base: dispo(base, weight=0.6, kl=0.1),
    "both": lambda base: dispo(credited(base, strata=3, anchor=0.0), weight=0.6),
}
ALL = [(name, plug) for name in ON_ROLLOUTS for plug in PLUGGED] + [("fork", "none"), ("fork", "both")]


def rollout(method, **settings):
    """Five traces of two prompts."""
    policy = Net(1, ends=0.5)
    branch = method.request.branch
    record = method.record | Record(entropy=True)
    settings = {"block": 3, "sizes": (2, 3), "counted": method.counted} | settings
    if method.record.confidence:
        settings |= {"order": left_to_right, "threshold": 0.5}
    return policy, rolled(policy, record=record, branch=branch, **settings)


def built(name, plug):
    """The method with a KL whether its paper has one or not."""
    method = PLUGGED[plug](BASES[name]())
    return replace(method, kl=max(method.kl, 0.1))


def off_policy_parts(method, change=lambda probes: probes, **settings):
    policy, rollouts = rollout(method, **settings)
    reference = moved(policy, 0.3, seed=3)
    return policy, parts_of(method, rollouts, generator(4), moved(policy, 0.2), reference, change)


def gradient(policy, parts, rows):
    policy.zero_grad()
    losses = [accumulate(policy, part, rows)["loss"] for part in parts]
    return sum(losses), tuple(p.grad.clone() for p in policy.parameters())


@cache
def in_one_pass(name, plug):
    """A method's parts and their gradient; no test changes them."""
    policy, parts = off_policy_parts(built(name, plug))
    return policy, parts, gradient(policy, parts, 10**6)


def assert_same_gradient(found, expected, tolerance=1e-10):
    assert_close(found[0], expected[0], tolerance)
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a - b).norm() <= tolerance * b.norm()
    assert max(b.norm() for b in expected[1]) > 1e-4


@pytest.mark.parametrize(("name", "plug"), ALL)
def test_micro_batches_add_up_to_the_same_gradient(name, plug):
    policy, parts, whole = in_one_pass(name, plug)
    loss = sum(term_loss(part, ask(policy, part.probes))[0] for part in parts)
    assert_same_gradient(whole, (loss.detach(), torch.autograd.grad(loss, list(policy.parameters()))))
    for rows in (1, 2, 3, 5):
        policy.calls.clear()
        assert_same_gradient(gradient(policy, parts, rows), whole)
        assert max(len(call) for call in policy.calls) <= rows
        bundles = [bundle_S for p in parts for bundle_S in microbatches(p.probes, rows)]
        once = sum(len(bundle_S) * (1 if len(bundle_S) <= rows else 2) for bundle_S in bundles)
        assert sum(len(call) for call in policy.calls) <= once  # a bundle that learns nothing is not asked again


@pytest.mark.parametrize(("name", "plug"), [("diffu_grpo", "daca"), ("spg", "dispo"), ("espo", "none")])
def test_micro_batches_of_a_policy_that_has_not_moved_add_up_too(name, plug):
    """No old answers at all: the answer itself is the old one, also where it is taken in pieces."""
    method = built(name, plug)
    policy, rollouts = rollout(method)
    parts = [replace(p, kl=0.0, reference_NL=None) for p in parts_of(method, rollouts, generator(), None, policy)]
    assert all(part.old_NL is None for part in parts)
    whole = gradient(policy, parts, 10**6)
    assert_same_gradient(gradient(policy, parts, 2), whole)
    told = [replace(part, old_NL=ask(policy, part.probes).detach()) for part in parts]
    assert_same_gradient(gradient(policy, told, 10**6), whole)


@pytest.mark.parametrize("rows", [1, 3])
def test_micro_batches_of_steps_with_their_choice_of_positions_add_up(rows):
    policy, parts = off_policy_parts(agrpo(draws=5, choice=True), order=low_confidence, length=6, steps=4)
    assert parts[0].probes.passed_NL.any()
    assert_same_gradient(gradient(policy, parts, rows), gradient(policy, parts, 10**6))


@pytest.mark.parametrize(("name", "plug"), ALL)
def test_the_order_of_traces_units_states_and_rows_changes_nothing(name, plug):
    policy, parts, whole = in_one_pass(name, plug)
    _, shuffled = off_policy_parts(built(name, plug), lambda probes: permuted(probes, generator(7)))
    assert not torch.equal(shuffled[0].probes.trace.tokens_BL, parts[0].probes.trace.tokens_BL)
    assert_same_gradient(gradient(policy, shuffled, 10**6), whole)


@pytest.mark.parametrize(("name", "plug"), ALL)
def test_padding_changes_nothing(name, plug):
    policy, parts, whole = in_one_pass(name, plug)
    _, wider = off_policy_parts(built(name, plug), lambda probes: padded(probes, 3))
    assert wider[0].probes.trace.tokens_BL.shape[1] == parts[0].probes.trace.tokens_BL.shape[1] + 3
    assert_same_gradient(gradient(policy, wider, 10**6), whole)


@pytest.mark.parametrize("plug", PLUGGED)
def test_micro_batches_of_a_single_precision_policy_agree_with_each_other_and_with_double(plug):
    policy, parts = off_policy_parts(built("coupled_grpo", plug))
    exact = gradient(policy, parts, 10**6)
    policy.float()
    for rows in (3, 10**6):
        loss, slopes = gradient(policy, parts, rows)
        assert slopes[0].dtype == torch.float32
        assert_same_gradient((loss.double(), tuple(s.double() for s in slopes)), exact, 1e-4)


# One optimiser step


def test_an_update_is_one_step_along_the_clipped_sum_of_the_parts():
    method = built("diffu_grpo", "dispo")
    for max_grad_norm in (1e-3, 1e9):
        policy, parts = off_policy_parts(method)
        _, slope = gradient(policy, parts, 10**6)
        before = [p.detach().clone() for p in policy.parameters()]
        norm = torch.cat([s.flatten() for s in slope]).norm()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
        for p in policy.parameters():
            p.grad = torch.full_like(p, 99.0)  # left over from elsewhere: must be cleared
        metrics = update(policy, optimizer, parts, 2, max_grad_norm)
        scale = min(1.0, max_grad_norm / (norm.item() + 1e-6))
        for p, old, s in zip(policy.parameters(), before, slope, strict=True):
            assert_close(p.detach(), old - 0.5 * scale * s)
        assert metrics["grad_norm"].item() == pytest.approx(norm.item())
        assert {"loss", "ratio", "clipped", "kl", "branch_loss", "branch_ratio", "branch_kl"} <= set(metrics)


def test_metrics_do_not_depend_on_the_micro_batch():
    policy, parts = off_policy_parts(built("coupled_grpo", "dispo"))
    for part in parts:
        whole, cut = accumulate(policy, part, 10**6), accumulate(policy, part, 2)
        assert whole.keys() == cut.keys() and "kl" in whole
        for name in whole:
            assert_close(cut[name].detach(), whole[name].detach())


def test_a_part_that_asks_nothing_is_skipped_and_the_other_keeps_its_name():
    policy, parts = off_policy_parts(built("diffu_grpo", "dispo"))
    nothing = at_states(parts[0].probes, torch.zeros(len(parts[0].probes.states_SL), dtype=torch.bool))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    metrics = update(policy, optimizer, [replace(parts[0], probes=nothing), parts[1]], 4, 1.0)
    assert "branch_loss" in metrics and "loss" not in metrics


def test_a_batch_without_questions_leaves_the_policy_alone():
    policy, parts = off_policy_parts(diffu_grpo())
    nothing = at_states(parts[0].probes, torch.zeros(len(parts[0].probes.states_SL), dtype=torch.bool))
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    assert update(policy, optimizer, [replace(parts[0], probes=nothing)], 4, 1.0)["grad_norm"] == 0
    assert all(map(torch.equal, policy.parameters(), before))


def test_a_parts_loss_is_its_weight_times_objective_plus_kl_times_divergence():
    policy, (part,) = off_policy_parts(built("unigrpo", "none"))
    logp_NL = ask(policy, part.probes)
    objective, _ = part.objective(logp_NL, part.old_NL, part.probes, part.advantage_B, part.credit_BL)
    divergence = part.divergence(logp_NL, part.reference_NL, part.probes)
    loss, metrics = term_loss(replace(part, weight=0.3), logp_NL)
    assert_close(loss, 0.3 * (objective + part.kl * divergence), 1e-12)
    assert_close(metrics["kl"], divergence.detach(), 1e-12)
    free, metrics = term_loss(LossTerm(part.probes, part.advantage_B, part.credit_BL, part.objective), logp_NL)
    assert_close(metrics["ratio"], torch.ones_like(free), 1e-12)
    assert "kl" not in metrics


@pytest.mark.parametrize("name", ["wd1", "spg", "gspo", "agrpo"])
def test_metrics_are_of_all_traces_also_where_a_group_is_idle(name):
    """Some methods report likelihoods, so idle traces are asked; the others' ratios are one without asking."""
    method = replace(BASES[name](), kl=0.0)
    policy, rollouts = rollout(method)
    group_B = rollouts.trace.group_B
    reward_B = torch.where(group_B == group_B[0], 0.5, torch.arange(len(group_B)) ** 2 / 8).double()
    ((part,),) = unmask.loss_terms(
        method, unmask.ScoredRollouts(rollouts, reward_B), unmask.Scorer(policy), generator(1)
    )
    assert (part.advantage_B == 0).sum() == 2 and part.advantage_B.any()
    policy.zero_grad()
    found = accumulate(policy, part, 2)
    answer_NL = ask(policy, part.probes)
    loss, expected = term_loss(part, answer_NL)
    assert found.keys() == expected.keys()
    for key in found:
        assert_close(found[key], expected[key].detach(), 1e-10)
    slopes = torch.autograd.grad(loss, list(policy.parameters()))
    for p, slope in zip(policy.parameters(), slopes, strict=True):
        assert (p.grad - slope).norm() <= 1e-10 * slope.norm()


WRONG = {
    "credit must have the shape 5x8 (traces x canvas columns), got 5": {"credit": lambda trace: trace.group_B},
    "advantage must have the shape 5 (traces), got one number": {"advantage": lambda reward_B, group_B: reward_B.sum()},
}


@pytest.mark.parametrize("told", WRONG)
def test_a_shape_that_does_not_fit_is_told_where_it_comes_from(told):
    method = replace(diffu_grpo(kl=0.0), name="mine", **WRONG[told])
    policy, rollouts = rollout(method)
    with pytest.raises(ValueError, match=re.escape(f"mine: {told}")):
        unmask.loss_terms(method, unmask.ScoredRollouts(rollouts, torch.ones(5)), unmask.Scorer(policy), generator(4))


def likelihood_bonus(logp_NL, old_NL, probes, advantage_B, credit_BL):
    """Clipped ratios, and a bonus on the log-likelihood that no advantage multiplies."""
    loss, metrics = token_clip(logp_NL, old_NL, probes, advantage_B, credit_BL)
    return loss - 0.3 * unit_likelihood(logp_NL, probes).sum(), metrics


def test_a_method_of_ones_own_asks_traces_without_advantage_too():
    """Unless it says that zero advantage means zero loss."""
    method = Method(name="bonus", probe=each_inner_step(fully_masked), advantage=group_mean, objective=likelihood_bonus)
    policy, rollouts = rollout(method)
    group_B = rollouts.trace.group_B
    reward_B = torch.where(group_B == group_B[0], 0.5, torch.arange(len(group_B)) ** 2 / 8).double()
    ((term,),) = unmask.loss_terms(
        method, unmask.ScoredRollouts(rollouts, reward_B), unmask.Scorer(policy), generator(1)
    )
    assert (term.advantage_B == 0).any() and not term.skip_zero_advantage
    _, expected = slopes(policy, [term])
    policy.zero_grad()
    accumulate(policy, term, 2)
    for weight, slope in zip(policy.parameters(), expected, strict=True):
        assert_close(weight.grad, slope, 1e-10)


@pytest.mark.parametrize("name", [name for name in ON_ROLLOUTS if name not in ("wd1", "spg", "dtm")])
def test_where_zero_advantage_is_skipped_the_loss_of_such_a_trace_is_zero(name):
    """What `skip_zero_advantage` promises: on-policy a trace with zero advantage has neither loss nor gradient."""
    method = replace(BASES[name](), kl=0.0, reward_kl=0.0)
    assert method.skip_zero_advantage
    policy, rollouts = rollout(method)
    probes = method.probe(rollouts.trace, generator(2), 1)[0]
    logp_NL = ask(policy, probes).detach().requires_grad_()
    advantage_B = torch.zeros(len(rollouts.trace), dtype=torch.float64)
    loss, _ = method.objective(logp_NL, logp_NL.detach(), probes, advantage_B, method.credit(rollouts.trace))
    (slope_NL,) = torch.autograd.grad(loss, logp_NL)
    assert loss == 0 and not slope_NL.any()


@pytest.mark.parametrize("shape", [(4,), (5, 1), ()])
def test_rewards_of_another_shape_are_refused(shape):
    policy, rollouts = rollout(diffu_grpo(kl=0.0))
    with pytest.raises(ValueError, match=r"the rewards must have the shape 5 \(rollouts\)"):
        batch = unmask.ScoredRollouts(rollouts, torch.zeros(shape))
        unmask.loss_terms(diffu_grpo(kl=0.0), batch, unmask.Scorer(policy), generator())


@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_right_or_wrong_is_a_reward(name):
    method = replace(BASES[name](), kl=0.0, reward_kl=0.0)
    policy, rollouts = rollout(method)
    solved_B = torch.tensor([True, False, True, False, False])
    batches = [unmask.ScoredRollouts(rollouts, reward_B) for reward_B in (solved_B, solved_B.double())]
    scorer = unmask.Scorer(policy, teacher=policy)
    terms = [unmask.loss_terms(method, batch, scorer, generator())[0][0] for batch in batches]
    assert terms[0].advantage_B.any() and torch.equal(terms[0].advantage_B, terms[1].advantage_B)


def test_a_micro_batch_holds_at_least_one_state():
    part = parts_of(diffu_grpo(kl=0.0), rollout(diffu_grpo(kl=0.0))[1], generator())[0]
    for call in (accumulate, logprobs_of, lambda policy, part, size: ask(policy, part.probes, size)):
        with pytest.raises(ValueError, match="at least 1"):
            call(Net(1), part, 0)


def logprobs_of(policy, part, size):
    return unmask.logprobs(policy, part.probes, size)


def test_a_micro_batch_may_be_a_number_everywhere():
    policy, (trace, _) = rollout(diffu_grpo(kl=0.0))
    part = parts_of(diffu_grpo(kl=0.0), Rollouts(trace, None), generator())[0]
    assert_close(logprobs_of(policy, part, 2), ask(policy, part.probes).detach(), 1e-12)
    decoding, prompts = unmask.Decoding(length=6), [[3, 4], [5], [6, 6]]
    whole, pieces = (
        unmask.sample(policy, prompts, torch.arange(3), decoding, micro_batch=size).trace for size in (None, 2)
    )
    assert torch.equal(whole.tokens_BL, pieces.tokens_BL)
    method, reward_B = diffu_grpo(kl=0.0), torch.arange(len(trace)).double()
    batch = unmask.ScoredRollouts(Rollouts(trace, None), reward_B)
    assert len(unmask.loss_terms(method, batch, unmask.Scorer(policy, micro_batch=2), generator(), 2)) == 2
