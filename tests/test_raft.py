"""RAFT against a loop, and against diffu_grpo with SML and correct answers only."""

from dataclasses import replace

import pytest
import torch

from helpers import Net, assert_identical, generator, rolled, slopes
from unmask.config import parse_config
from unmask.core.advantage import correct_only
from unmask.core.probes import ask, unit_likelihood
from unmask.methods import agrpo, diffu_grpo, keep_correct, raft, sml
from unmask.methods.daca import stratified
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms
from unmask.training.update import term_loss


def right_or_wrong(trace) -> torch.Tensor:
    return (torch.arange(len(trace)) % 3 == 0).double()


def test_it_is_diffu_grpo_with_sml_and_correct_answers_only_bit_for_bit():
    policy = Net(1)
    rollouts = rolled(policy)
    clipped = sml(diffu_grpo(advantage=correct_only))
    batch, none = ScoredRollouts(rollouts, right_or_wrong(rollouts.trace)), torch.zeros(())
    (terms,), (others,) = (loss_terms(method, batch, Scorer(policy), generator()) for method in (raft(), clipped))
    assert_identical((none, slopes(policy, terms)[1]), (none, slopes(policy, others)[1]))


def test_the_loss_is_its_loop_over_correct_rollouts():
    policy = Net(1)
    rollouts = rolled(policy)
    trace = rollouts.trace
    batch = ScoredRollouts(rollouts, right_or_wrong(trace))
    ((term,),) = loss_terms(raft(), batch, Scorer(policy), generator(2))
    probes = stratified(trace, generator(2), 3)
    likelihood_BL = unit_likelihood(ask(policy, probes), probes).detach()
    reward_B, total = right_or_wrong(trace), 0.0
    for b in range(len(trace)):
        mates = [c for c in range(len(trace)) if trace.group_B[c] == trace.group_B[b]]
        correct = sum(float(reward_B[c]) for c in mates)
        if reward_B[b]:
            total += len(mates) / correct * float(likelihood_BL[b][trace.counted_BL[b]].sum())
    loss, _ = term_loss(term, ask(policy, term.probes))
    assert float(loss.detach()) == pytest.approx(-total / int(trace.counted_BL.sum()), abs=1e-12)


def test_keep_correct_adds_the_gradient_of_raft_to_that_of_the_base():
    policy = Net(1)
    rollouts = rolled(policy)
    batch = ScoredRollouts(rollouts, right_or_wrong(rollouts.trace))
    for base in (agrpo(), diffu_grpo()):
        rng = generator(4)
        (alone,), (kept,) = (loss_terms(method, batch, Scorer(policy, policy), rng) for method in (base, raft()))
        ((first, second),) = loss_terms(keep_correct(base, 0.3), batch, Scorer(policy, policy), generator(4))
        assert_identical(slopes(policy, [first]), slopes(policy, alone))
        assert_identical(slopes(policy, [second]), slopes(policy, [replace(kept[0], weight=0.3)]))
        assert keep_correct(base).uses_equal_rewards and second.label == "correct_"


def test_groups_with_equal_rewards_are_not_dropped():
    assert raft().uses_equal_rewards and not diffu_grpo().uses_equal_rewards
    for choice in ("skip", "resample"):
        with pytest.raises(ValueError, match="idle_groups: raft learns from groups with equal rewards"):
            parse_config({"method": "raft", "idle_groups": choice})
