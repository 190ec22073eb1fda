"""From a rewarded batch to the terms of the loss: advantage, credit, probes, old and reference log-probabilities.

for terms in loss_terms(method, batch, scorer, rng, inner_steps):
    optimizer.zero_grad(); [accumulate(policy, term, scorer.micro_batch) for term in terms]; optimizer.step()
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unmask.core.method import Method, uniform_credit
from unmask.core.objective import reward_divergence
from unmask.core.policy import Policy
from unmask.core.probes import Probes, one_shot
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
    method.check_order(batch.trace)
    _check_shape(method, "the rewards", batch.reward_B, batch.trace.group_B, "rollouts")
    steps: list[list[LossTerm]] = [[] for _ in range(inner_steps)]
    if len(batch.trace):
        for terms, term in zip(steps, _base_terms(method, batch, scorer, rng, inner_steps), strict=True):
            terms.append(term)
    if method.branch is not None and batch.branches is not None and len(batch.branches):
        if batch.branch_reward_B is None:
            raise ValueError(f"{method.name} samples branches: pass branch_reward_B too")
        _check_shape(method, "the branch rewards", batch.branch_reward_B, batch.branches.group_B, "branches")
        term = _branch_term(method, batch.branches, batch.branch_reward_B, scorer, inner_steps)
        for terms in steps:
            terms.append(term)
    return steps


def _base_terms(
    method: Method, batch: ScoredRollouts, scorer: Scorer, rng: torch.Generator, inner_steps: int
) -> list[LossTerm]:
    trace, reward_B = batch.trace, batch.reward_B
    reward_B = reward_B if reward_B.is_floating_point() else reward_B.double()  # right or wrong, or points
    probes = method.probe(trace, rng, inner_steps)
    # On the first inner step the policy is the old one, so it is asked in advance only if the reward needs a KL term.
    old = [
        scorer.policy_logprobs(p) if (step and method.uses_old_logprobs) or method.reward_kl else None
        for step, p in enumerate(probes)
    ]
    with_reference = scorer.reference is not None and (method.kl or method.reward_kl)
    reference = [scorer.reference_logprobs(p) if with_reference else None for p in probes]
    if method.reward_kl:
        assert old[0] is not None and reference[0] is not None
        reward_B = reward_B - method.reward_kl * reward_divergence(old[0], reference[0], probes[0]).to(reward_B)
    advantage_B, credit_BL = method.advantage(reward_B, trace.group_B), method.credit(trace)
    _check_shape(method, "advantage", advantage_B, reward_B, "traces")
    _check_shape(method, "credit", credit_BL, trace.tokens_BL, "traces x canvas columns")
    credit_BL = credit_BL if batch.weight_BL is None else credit_BL * batch.weight_BL
    return [
        LossTerm(
            probes=asked,
            advantage_B=advantage_B,
            credit_BL=credit_BL,
            objective=method.objective,
            old_NL=old_NL,
            reference_NL=reference_NL if method.kl else None,
            kl=method.kl,
            divergence=method.divergence,
            skip_zero_advantage=method.skip_zero_advantage,
        )
        for asked, old_NL, reference_NL in zip(probes, old, reference, strict=True)
    ]


def _check_shape(method: Method, name: str, value: Tensor, like: Tensor, what: str) -> None:
    """Rewards and methods can come from users: a wrong shape would be broadcast, or fail far from here."""
    if value.shape != like.shape:
        actual, expected = ("x".join(map(str, each.shape)) or "one number" for each in (value, like))
        raise ValueError(f"{method.name}: {name} must have the shape {expected} ({what}), got {actual}")


def _branch_term(method: Method, branches: Trace, reward_B: Tensor, scorer: Scorer, inner_steps: int) -> LossTerm:
    """One probe at the shared state, the same on every inner step."""
    term, probes = method.branch, one_shot(branches)
    assert term is not None
    return LossTerm(
        probes=probes,
        advantage_B=term.advantage(reward_B, branches.group_B),
        credit_BL=uniform_credit(branches),
        objective=term.objective,
        old_NL=scorer.policy_logprobs(probes) if inner_steps > 1 else None,
        reference_NL=scorer.reference_logprobs(probes) if scorer.reference is not None and term.kl else None,
        kl=term.kl,
        divergence=term.divergence,
        weight=term.weight,
        label="branch_",
        skip_zero_advantage=term.skip_zero_advantage,
    )
