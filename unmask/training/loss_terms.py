"""From a rewarded batch to the terms of the loss: advantage, credit, probes, old and reference log-probabilities.

for terms in loss_terms(method, batch, scorer, rng, inner_steps):
    optimizer.zero_grad(); [accumulate(policy, term, scorer.micro_batch) for term in terms]; optimizer.step()
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unmask.core.method import Method, Term
from unmask.core.objective import reward_divergence
from unmask.core.policy import Policy
from unmask.core.probes import Probes
from unmask.core.trace import Trace
from unmask.distributed.processes import ALONE, Ranks
from unmask.rollout.sample import Rollouts
from unmask.training.update import LossTerm, logprobs
from unmask.util.micro_batch import MicroBatch


@dataclass(frozen=True)
class ScoredRollouts:
    """Rollouts with their rewards, without the traces that are left out of training (idle groups)."""

    rollouts: Rollouts
    reward_B: Tensor
    branch_reward_B: Tensor | None = None
    """Required if the rollouts have branches."""
    weight_BL: Tensor | None = None
    """Multiplies the credit: importance weights of a cached rollout (mismatch.truncated_weights)."""

    @property
    def trace(self) -> Trace:
        return self.rollouts.trace

    @property
    def branches(self) -> Trace | None:
        return self.rollouts.branches


@dataclass(frozen=True)
class Scorer:
    """The policies that give log-probabilities, and how many masked states a forward pass has at most."""

    policy: Policy
    reference: Policy | None = None
    """The policy before training. Required if `method.needs_reference`."""
    micro_batch: int | MicroBatch = field(default_factory=lambda: MicroBatch(512))
    ranks: Ranks = ALONE
    teacher: Policy | None = None
    """An earlier policy. Required if `method.needs_teacher`."""

    def policy_logprobs(self, probes: Probes) -> Tensor:
        return logprobs(self.policy, probes, self.micro_batch, self.ranks)

    def reference_logprobs(self, probes: Probes) -> Tensor:
        assert self.reference is not None
        return logprobs(self.reference, probes, self.micro_batch, self.ranks)


def loss_terms(
    method: Method, batch: ScoredRollouts, scorer: Scorer, rng: torch.Generator, inner_steps: int = 1
) -> list[list[LossTerm]]:
    """The terms of every inner step. All probes are drawn, and the old policy is asked, before the first inner step."""
    if method.needs_reference and scorer.reference is None:
        raise ValueError(f"{method.name} has a KL to a reference policy: pass reference= the policy before training")
    if method.needs_teacher and scorer.teacher is None:
        raise ValueError(f"{method.name} follows a teacher: pass teacher= an earlier policy")
    method.check_order(batch.trace)
    _check_shape(method, "the rewards", batch.reward_B, batch.trace.group_B, "rollouts")
    reward_B = batch.reward_B if batch.reward_B.is_floating_point() else batch.reward_B.double()
    batch = priced = replace(batch, reward_B=reward_B)  # right or wrong, or points
    steps: list[list[LossTerm]] = [[] for _ in range(inner_steps)]
    for term in method.terms:
        trace = batch.trace if term.branch is None else batch.branches
        if trace is None or not len(trace):
            continue
        probes = term.probe(trace, rng, inner_steps)
        old, reference = _known_logprobs(method, term, probes, scorer)
        if term is method and method.reward_kl:
            assert old[0] is not None and reference[0] is not None
            price_B = method.reward_kl * reward_divergence(old[0], reference[0], probes[0])
            priced = replace(batch, reward_B=batch.reward_B - price_B.to(batch.reward_B))
        advantage_B, credit_BL = _values(method, term, trace, priced if term.priced else batch)
        for terms, asked, old_NL, reference_NL in zip(steps, probes, old, reference, strict=True):
            terms.append(
                LossTerm(
                    probes=asked,
                    advantage_B=advantage_B,
                    credit_BL=credit_BL,
                    objective=term.objective,
                    old_NL=old_NL,
                    reference_NL=reference_NL if term.kl else None,
                    kl=term.kl,
                    divergence=term.divergence,
                    teacher=scorer.teacher if term.distillation else None,
                    distillation=term.distillation,
                    cross_entropy=term.cross_entropy,
                    weight=term.weight,
                    label=term.label,
                    skip_zero_advantage=term.skip_zero_advantage,
                )
            )
    return steps


def _known_logprobs(
    method: Method, term: Term, probes: list[Probes], scorer: Scorer
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The log-probabilities of the old and the reference policy at the probes of every inner step. On the first inner
    step the policy is the old one, so it is asked in advance only if the reward needs a KL term."""
    priced = term is method and method.reward_kl > 0
    old: dict[int, Tensor] = {}  # inner steps can share their probes
    reference: dict[int, Tensor] = {}
    for step, asked in enumerate(probes):
        if ((step and term.uses_old_logprobs) or priced) and id(asked) not in old:
            old[id(asked)] = scorer.policy_logprobs(asked)
        if (term.kl or priced) and id(asked) not in reference:
            reference[id(asked)] = scorer.reference_logprobs(asked)
    old_of_steps = [old.get(id(asked)) if step or priced else None for step, asked in enumerate(probes)]
    return old_of_steps, [reference.get(id(asked)) for asked in probes]


def _values(method: Method, term: Term, trace: Trace, batch: ScoredRollouts) -> tuple[Tensor, Tensor]:
    """The advantage of every trace and the credit of every token."""
    reward_B, weight_BL = batch.reward_B, batch.weight_BL
    if term.branch is not None:
        if batch.branch_reward_B is None:
            raise ValueError(f"{method.name} samples branches: pass branch_reward_B too")
        reward_B, weight_BL = batch.branch_reward_B, None
        _check_shape(method, "the branch rewards", reward_B, trace.group_B, "branches")
    advantage_B, credit_BL = term.advantage(reward_B, trace.group_B), term.credit(trace)
    _check_shape(method, "advantage", advantage_B, reward_B, "traces")
    _check_shape(method, "credit", credit_BL, trace.tokens_BL, "traces x canvas columns")
    return advantage_B, credit_BL if weight_BL is None else credit_BL * weight_BL


def _check_shape(method: Method, name: str, value: Tensor, like: Tensor, what: str) -> None:
    """Rewards and methods can come from users: a wrong shape would be broadcast, or fail far from here."""
    if value.shape != like.shape:
        actual, expected = ("x".join(map(str, each.shape)) or "one number" for each in (value, like))
        raise ValueError(f"{method.name}: {name} must have the shape {expected} ({what}), got {actual}")
