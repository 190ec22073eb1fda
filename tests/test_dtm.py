"""DTM: its loss against loops over the vocabulary, its minimum and its gradient by enumeration, its limits, and the
teacher through training."""

import copy
import math
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
import torch
from test_resume import config_for, run, told
from torch import Tensor

import unmask.core.answers
from helpers import MASK, Net, assert_close, assert_identical, cut_at, generator, moved, rolled, sample
from unmask.config import parse_config
from unmask.core.advantage import every_sample
from unmask.core.method import Term
from unmask.core.objective import policy_gradient, token_divergence, unit_mean
from unmask.core.probes import Probes, ask_with_teacher, fully_masked
from unmask.core.states import block_views
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, all_tokens
from unmask.methods import dtm, raft
from unmask.models.lora import trainable_parameters
from unmask.rollout.sample import Rollouts
from unmask.training.loop import resume
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms
from unmask.training.run.state import newest_state
from unmask.training.setup import set_up
from unmask.training.update import LossTerm, accumulate, answers, term_loss
from world import NetPolicy, World, enumerated, gradient, joint_policy, noise, reward_of, table_of, traced


def rollout(sampling: TokenSampling = TokenSampling()) -> tuple[Net, Rollouts]:
    """Two blocks; some rows retire."""
    policy = Net(1, ends=1.0)
    return policy, rolled(policy, steps=4, block=3, sampling=sampling, counted=all_tokens)


def graded(trace: Trace) -> Tensor:
    return torch.linspace(-0.5, 1.5, len(trace), dtype=torch.float64)


def term_of(method, rollouts: Rollouts, teacher: Net, reward_B: Tensor | None = None) -> LossTerm:
    reward_B = graded(rollouts.trace) if reward_B is None else reward_B
    scorer = Scorer(teacher, teacher=teacher)
    ((term,),) = loss_terms(method, ScoredRollouts(rollouts, reward_B), scorer, generator(1))
    return term


def loss_and_slopes(policy: Net, term: LossTerm) -> tuple[Tensor, tuple[Tensor, ...]]:
    found = answers(policy, term, term.probes)
    loss, _ = term_loss(term, found[0], found[1] if len(found) > 1 else None)
    return loss.detach(), torch.autograd.grad(loss, list(policy.parameters()))


# The equation


def logprobs_at(policy: Net, probes: Probes, n: int, i: int) -> Tensor:
    """One state at a time; MASK is not a word."""
    s = probes.state_N[n : n + 1]
    logits_V = policy(probes.states_SL[s], probes.attended_SL[s], torch.tensor([i]))[0]
    words = [v for v in range(len(logits_V)) if v != MASK]
    logp = (logits_V[words] / probes.trace.sampling.temperature).log_softmax(0)
    return torch.zeros_like(logits_V).index_put((torch.tensor(words),), logp)


@pytest.mark.parametrize(("h", "c", "sampling"), [(2.0, 1.0, TokenSampling()), (1.0, 0.3, TokenSampling(0.7, top_k=3))])
def test_the_loss_is_its_loop_over_the_vocabulary_however_it_is_cut(h, c, sampling, monkeypatch):
    policy, rollouts = rollout(sampling)
    teacher, trace, parameters = moved(policy, 0.5), rollouts.trace, list(policy.parameters())
    term = term_of(dtm(h, c, draws=2), rollouts, teacher)
    rows, reward_B, total = len(term.probes.state_N), graded(trace), torch.zeros((), dtype=torch.float64)
    for n, b in enumerate(term.probes.trace_N.tolist()):
        asked = term.probes.asked_NL[n].nonzero().flatten().tolist()
        for i in asked:
            logp_V, taught_V = (logprobs_at(each, term.probes, n, i) for each in (policy, teacher))
            token, tilted = int(trace.tokens_BL[b, i]), math.exp(h * max(0.0, float(reward_B[b])))
            for v in range(len(logp_V)):
                p = float(taught_V[v].detach().exp()) if v != MASK else 0.0
                total = total - (c * p + (tilted - c) * (v == token)) * logp_V[v] / len(asked) / rows
    assert rows > len(trace) and c * float(total.detach()) > 0.1
    expected = torch.autograd.grad(total, parameters)
    for size, piece in ((1000, 2**27), (1, 2**27), (4, 3 * 2 * 7)):  # the last: logits of three positions at a time
        monkeypatch.setattr(unmask.core.answers, "PIECE", piece)
        for weight in parameters:
            weight.grad = None
        assert_close(accumulate(policy, term, size)["loss"], total.detach(), 1e-9)
        assert_close(tuple(weight.grad for weight in parameters), expected, 1e-9)


def test_logits_of_policy_and_teacher_exist_for_a_piece_at_a_time(monkeypatch):
    policy, rollouts = rollout()
    teacher, seen = moved(policy), []
    probes = fully_masked(rollouts.trace, generator())
    for each in (policy, teacher):
        plain = each.head
        monkeypatch.setattr(each, "head", lambda hidden, head=plain: seen.append(len(hidden)) or head(hidden))
    whole = ask_with_teacher(policy, teacher, probes)
    assert seen == 2 * [int(probes.asked_NL.sum())]
    seen.clear()
    monkeypatch.setattr(unmask.core.answers, "PIECE", 4 * 2 * policy.vocabulary)
    pieces = ask_with_teacher(policy, teacher, probes)
    assert max(seen) == 4
    assert_close(pieces, whole, 1e-12)
    seen.clear()
    sum(each.sum() for each in pieces).backward()  # which computes them again
    assert max(seen) == 4 and len(seen) > 8
    assert all(weight.grad is None for weight in teacher.parameters())


# By enumeration


def every_mask(trace: Trace, length: int) -> Probes:
    """All semi-autoregressive states of each trace, as often as they are drawn: every number of masks, every order."""
    orders = torch.tensor([*permutations(range(length))], dtype=torch.float64) / length
    level_K = (torch.arange(length, dtype=torch.float64) + 0.5) / length
    views, width = len(orders) * length, trace.tokens_BL.shape[1]
    noise_KL = torch.cat([torch.zeros(views, width - length, dtype=torch.float64), orders.repeat(length, 1)], -1)
    level_KB = level_K.repeat_interleave(len(orders))[:, None].expand(-1, len(trace))
    return block_views(trace, level_KB, noise_KL[:, None].expand(-1, len(trace), -1))


def expected_slope(policy, teacher, trace: Trace, chance_B: Tensor, reward_B: Tensor, h: float, c: float) -> Tensor:
    """The gradient of DTM's loss, over all rollouts with their probability and all masks."""
    probes = every_mask(trace, policy.length)
    units = len(probes.trace_M)
    weight_M = chance_B.detach()[probes.trace_M] * len(trace)
    method = dtm(h, c)
    term = LossTerm(
        replace(probes, weight_M=weight_M),
        method.advantage(reward_B, trace.group_B),
        method.credit(trace),
        method.objective,
        teacher=teacher,
        distillation=c,
        cross_entropy=method.cross_entropy,
    )
    assert units == len(trace) * policy.length * math.factorial(policy.length)
    found = answers(policy, term, term.probes)
    return gradient(policy, term_loss(term, found[0], found[1])[0])


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0])
def test_the_minimum_is_the_tilted_posterior_for_every_c_if_the_teacher_wrote_the_rollouts(c):
    h, words, length = 1.5, 2, 4
    teacher, joint_X = joint_policy(words, length, seed=5)
    tokens_XC = torch.cartesian_prod(*[torch.arange(words)] * length)
    trace = traced(World(teacher, block=2), tokens_XC, torch.arange(length).expand_as(tokens_XC))
    reward_X = noise(3, len(tokens_XC)).clamp(min=0)
    tilted_X = joint_X * (h * reward_X).exp()
    best = table_of((tilted_X / tilted_X.sum()).view([words] * length))
    # The table has MASK as a word, whose logit has no effect.
    slope = partial(expected_slope, teacher=teacher, trace=trace, chance_B=joint_X, reward_B=reward_X, h=h, c=c)
    assert slope(policy=best).abs().max() < 1e-12
    assert slope(policy=teacher).abs().max() > 1e-3


@pytest.mark.parametrize("c", [0.0, 1.0])
def test_with_blocks_of_one_token_it_climbs_the_mean_of_exp_h_r_exactly(c):
    """On-policy, from left to right. The teacher and c cancel on average."""
    h, policy = 1.5, NetPolicy(2, 3, seed=44)
    world = World(policy, "left_to_right", block=1, prompt=(1,))
    paths = enumerated(world)
    reward_B = reward_of(world, paths.trace)
    found = expected_slope(policy, policy, paths.trace, paths.probability_B, reward_B, h, c)
    truth = gradient(policy, (paths.probability_B * (h * reward_B.clamp(min=0)).exp()).sum())
    assert truth.norm() > 0.1
    assert_close(found, -truth / policy.length, 1e-9)


# Limits


def test_without_c_and_h_it_is_fine_tuning_on_own_samples_bit_for_bit():
    policy, rollouts = rollout()
    own = dtm(h=0.0, c=0.0)
    control = replace(raft(advantage=every_sample, normaliser=unit_mean), probe=own.probe, counted=own.counted)
    terms = [term_of(method, rollouts, policy) for method in (own, control)]
    assert terms[0].teacher is None and not own.needs_teacher
    assert_identical(loss_and_slopes(policy, terms[0]), loss_and_slopes(policy, terms[1]))


@pytest.mark.parametrize("c", [0.5, 1.0])
def test_while_the_teacher_is_the_policy_it_does_not_move_it(c):
    """So with one inner step and a teacher that is refreshed after every update it has no effect on the gradient."""
    policy, rollouts = rollout()
    term = term_of(dtm(2.0, c), rollouts, policy)
    alone = replace(term, teacher=None, distillation=0.0)
    assert term.distillation == c and term.objective.func is policy_gradient
    assert_close(term.advantage_B, (2 * graded(rollouts.trace).clamp(min=0)).exp() - c)
    found, expected = (loss_and_slopes(policy, each)[1] for each in (term, alone))
    assert max(slope.abs().max() for slope in expected) > 0.1
    assert_close(found, expected, 1e-12)
    away = loss_and_slopes(moved(policy, 0.3), term)[1], loss_and_slopes(moved(policy, 0.3), alone)[1]
    assert max((a - b).abs().max() for a, b in zip(*away, strict=True)) > 1e-3


def test_with_c_1_a_reward_of_0_says_stay_and_right_or_wrong_is_raft():
    policy, rollouts = rollout()
    nothing = term_of(dtm(), rollouts, policy, torch.zeros(len(rollouts.trace), dtype=torch.float64))
    assert max(slope.abs().max() for slope in loss_and_slopes(policy, nothing)[1]) < 1e-15
    right_B = (torch.arange(len(rollouts.trace)) % 2).double()
    tilted = term_of(dtm(h=3.0), rollouts, policy, right_B)
    kept = replace(tilted, teacher=None, distillation=0.0, advantage_B=right_B)  # RAFT, each rollout weighed alike
    for found, expected in zip(loss_and_slopes(policy, tilted)[1], loss_and_slopes(policy, kept)[1], strict=True):
        assert_close(found, math.expm1(3.0) * expected, 1e-12)


def test_a_term_says_what_it_needs():
    method = dtm()
    assert method.needs_teacher and method.uses_equal_rewards and not method.needs_reference
    assert dtm(h=0.0).uses_equal_rewards  # every advantage is zero, and the teacher still counts
    assert not raft().needs_teacher
    policy, rollouts = rollout()
    batch = ScoredRollouts(rollouts, graded(rollouts.trace))
    with pytest.raises(ValueError, match="dtm follows a teacher: pass teacher="):
        loss_terms(method, batch, Scorer(policy), generator())
    term = term_of(method, rollouts, policy)
    with pytest.raises(ValueError, match=r"distillation=1\.0 needs its cross-entropies"):
        term_loss(term, answers(policy, term, term.probes)[0])
    with pytest.raises(ValueError, match="distillation=-1"):
        Term(probe=method.probe, advantage=method.advantage, objective=method.objective, distillation=-1.0)


def test_a_kl_to_the_reference_is_added_to_the_teachers():
    policy, rollouts = rollout()
    both = replace(dtm(2.0), kl=0.3, divergence=token_divergence)
    reference, teacher = moved(policy, 0.2), moved(policy, 0.4, seed=3)
    batch = ScoredRollouts(rollouts, graded(rollouts.trace))
    ((term,),) = loss_terms(both, batch, Scorer(policy, reference, teacher=teacher), generator(1))
    total, _ = loss_and_slopes(policy, term)
    parts = [replace(term, kl=0.0, reference_NL=None), replace(term, teacher=None, distillation=0.0)]
    likelihood = replace(parts[1], kl=0.0, reference_NL=None)
    found = sum(loss_and_slopes(policy, part)[0] for part in parts) - loss_and_slopes(policy, likelihood)[0]
    assert_close(found, total, 1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"c": -0.1}, r"c=-0\.1 must lie in \[0, 1\]"),
        ({"c": 1.1}, r"c=1\.1 must lie in \[0, 1\]"),
        ({"c": math.nan}, r"c=nan must lie in \[0, 1\]"),
        ({"h": -1.0}, r"h=-1\.0 must be at least 0"),
        ({"h": math.inf}, "h=inf must be"),
        ({"draws": 0}, "draws=0 must be at least 1"),
        ({"teacher_every": 0}, "teacher_every=0 must be at least 1"),
    ],
)
def test_an_option_outside_its_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        dtm(**options)


def test_a_reward_that_is_nan_is_named_and_not_called_an_overflow():
    with pytest.raises(ValueError, match="dtm: a reward is nan"):
        dtm().advantage(torch.tensor([0.0, math.nan]), torch.zeros(2, dtype=torch.long))


def test_without_a_teacher_its_option_is_refused():
    assert not dtm(c=0).needs_teacher
    with pytest.raises(ValueError, match="teacher_every has no effect with c=0"):
        dtm(c=0, teacher_every=4)


def test_a_weight_that_overflows_is_refused():
    with pytest.raises(ValueError, match=r"h=60.0: exp\(h r\) overflows with a reward of 2; lower h"):
        dtm(h=60.0).advantage(torch.tensor([0.0, 2.0]), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("kind", ["skip", "resample"])
def test_groups_with_equal_rewards_are_not_left_out(kind):
    with pytest.raises(ValueError, match="idle_groups"):
        parse_config({"method": "dtm", "idle_groups": kind})


# The teacher in training

KINDS = {"adapter": {"full": False, "lora": {"rank": 2}}, "bf16": {"full": True, "dtype": "bfloat16", "inner_steps": 2}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_is_the_policy_as_it_was_when_it_was_refreshed(model: str, kind: str) -> None:
    with set_up(config_for(model, method="dtm", **KINDS[kind]), needs_reference=True, needs_teacher=True) as setup:
        tokens_SL, at_Q = torch.full((1, 6), setup.policy.mask_id), torch.arange(6)
        models = setup.policy, setup.teacher.model, setup.reference

        def logits() -> list[Tensor]:
            return [each(tokens_SL, None, at_Q).detach() for each in models]

        def move() -> None:
            with torch.no_grad():
                for weight in trainable_parameters(setup.policy):
                    weight += 0.1

        first, taught, _ = logits()
        assert torch.equal(first, taught)
        move()
        second, taught, _ = logits()
        assert torch.equal(taught, first) and not torch.allclose(second, first, atol=0.01)
        setup.teacher.refresh()
        move()
        third, taught, reference = logits()
        assert torch.equal(taught, second) and torch.equal(reference, first)
        assert not torch.allclose(third, second, atol=0.01)


def test_a_teacher_that_shares_the_frozen_weights_does_not_disturb_the_gradient(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It swaps the adapter in and out, also while the backward pass computes logits again."""
    with set_up(config_for(model, method="dtm", **KINDS["adapter"]), False, needs_teacher=True) as setup:
        policy, apart = setup.policy, copy.deepcopy(setup.policy)
        monkeypatch.setattr(unmask.core.answers, "PIECE", 3 * 2 * policy.vocabulary)  # three positions at a time
        weights = trainable_parameters(policy)
        with torch.no_grad():
            for weight in weights:
                weight += 0.05 * torch.randn(weight.shape, generator=generator())
        trace = sample(policy, [[5, 6], [7]] * 2, torch.arange(4), length=6, steps=3).trace
        found = []
        for teacher in (setup.teacher.model, apart):
            (term,) = loss_terms(
                dtm(1.0),
                ScoredRollouts(Rollouts(trace, None), graded(trace)),
                Scorer(policy, teacher=teacher),
                generator(),
            )[0]
            policy.zero_grad()
            accumulate(policy, term, 8)
            found.append([weight.grad.clone() for weight in weights])
        assert max(slope.abs().max() for slope in found[0]) > 1e-3
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_is_refreshed_after_its_updates_saved_and_restored(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Every third update, a state after each: the run that is cut off ends as one that never was."""
    more = {"dtm": {"h": 0.5, "teacher_every": 3}, "save_every": 1, "prompts": 2, "group": 2, **KINDS[kind]}
    config = config_for(model, method="dtm", **more)
    whole = told(run(config, tmp_path / "whole"))
    with cut_at("collect", 5):
        run(config, tmp_path / "cut")
    newest, _ = newest_state(tmp_path / "cut" / "state")
    assert newest.step == 4
    (tmp_path / "cut" / "state" / "4").rename(tmp_path / "aside")
    before, _ = newest_state(tmp_path / "cut" / "state")
    (tmp_path / "aside").rename(tmp_path / "cut" / "state" / "4")
    names = [name.partition(" ")[2] for name in newest.tensors if name.startswith("teacher ")]
    assert names and len(names) == sum(name.startswith("weight ") for name in newest.tensors)
    assert before.step == 3
    for name in names:  # refreshed before the fourth update
        taught = newest.tensors[f"teacher {name}"]
        assert torch.equal(taught, before.tensors[f"weight {name}"].to(taught.dtype))
    for what in ("teacher", "weight"):
        assert any(not torch.equal(newest.tensors[f"{what} {n}"], before.tensors[f"{what} {n}"]) for n in names)
    resume(tmp_path / "cut")
    assert told(tmp_path / "cut") == whole
