"""From rewarded rollouts to the terms of the loss: what a trainer of one's own calls instead of putting Parts together.

for parts in parts_of(method, policy, reference, rollouts, reward_B, branch_reward_B, rng, turns=mu):
    optimizer.zero_grad(); [accumulate(policy, part, rows) for part in parts]; optimizer.step()
"""

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


def loss_terms(
    method: Method,
    policy: Policy,
    reference: Policy | None,
    rollouts: Rollouts,
    reward_B: Tensor,
    branch_reward_B: Tensor | None,
    rng: torch.Generator,
    turns: int = 1,
    rows: int | MicroBatch = 512,
    ranks: Ranks = ALONE,
    weight_BL: Tensor | None = None,
) -> list[list[LossTerm]]:
    """The parts of every inner update, all questions drawn and the old policy asked before the first of them.

    `reference` is needed where `method.needs_reference`, `branch_reward_B` where the rollouts have branches. Traces
    that were left out (idle groups) are simply not there. `rows` bounds the states in one pass. `weight_BL` multiplies
    the credit: importance weights of a rollout that was not quite the policy's own (mismatch.truncated_weights).
    """
    rows = rows if isinstance(rows, MicroBatch) else MicroBatch(rows)
    if method.needs_reference and reference is None:
        raise ValueError(f"{method.name} has a KL to a reference: give the policy it started from")
    lists: list[list[LossTerm]] = [[] for _ in range(turns)]
    if len(rollouts.trace):
        probes = method.probe(rollouts.trace, rng, turns)
        found = _base_parts(method, policy, reference, rollouts.trace, reward_B, weight_BL, probes, rows, ranks)
        for parts, part in zip(lists, found, strict=True):
            parts.append(part)
    if method.branch is not None and rollouts.branches is not None and len(rollouts.branches):
        if branch_reward_B is None:
            raise ValueError(f"{method.name} branches: give the rewards of the branches too")
        part = _branch_part(method, policy, reference, rollouts.branches, branch_reward_B, turns, rows, ranks)
        for parts in lists:
            parts.append(part)
    return lists


def _base_parts(
    method: Method,
    policy: Policy,
    reference: Policy | None,
    trace: Trace,
    reward_B: Tensor,
    weight_BL: Tensor | None,
    probes: list[Probes],
    rows: MicroBatch,
    ranks: Ranks,
) -> list[LossTerm]:
    # On the first turn the answer itself is the old one, unless the reward has to be priced before it.
    old = [
        logprobs(policy, p, rows, ranks) if (turn and method.uses_old_logprobs) or method.reward_kl else None
        for turn, p in enumerate(probes)
    ]
    known = [
        logprobs(reference, p, rows, ranks) if reference is not None and (method.kl or method.reward_kl) else None
        for p in probes
    ]
    if method.reward_kl:
        assert old[0] is not None and known[0] is not None
        price_B = reward_divergence(old[0], known[0], probes[0])
        reward_B = reward_B - method.reward_kl * price_B.to(reward_B)
    advantage_B, credit_BL = method.advantage(reward_B, trace.group_B), method.credit(trace)
    _check_shape(method, "advantage", advantage_B, reward_B, "traces")
    _check_shape(method, "credit", credit_BL, trace.tokens_BL, "traces x columns of the canvas")
    credit_BL = credit_BL if weight_BL is None else credit_BL * weight_BL
    return [
        LossTerm(
            probes=asked,
            advantage_B=advantage_B,
            credit_BL=credit_BL,
            objective=method.objective,
            old_NL=old_NL,
            reference_NL=known_NL if method.kl else None,
            kl=method.kl,
            divergence=method.divergence,
            skip_zero_advantage=method.uses_old_logprobs,
        )
        for asked, old_NL, known_NL in zip(probes, old, known, strict=True)
    ]


def _check_shape(method: Method, name: str, found: Tensor, like: Tensor, what: str) -> None:
    """A method may be someone's own; what it gives in another shape fails far from here, or is broadcast."""
    if found.shape != like.shape:
        was, wanted = ("x".join(map(str, part.shape)) or "one number" for part in (found, like))
        raise ValueError(f"{method.name}: {name} must give {wanted} ({what}), and gave {was}")


def _branch_part(
    method: Method,
    policy: Policy,
    reference: Policy | None,
    branches: Trace,
    reward_B: Tensor,
    turns: int,
    rows: MicroBatch,
    ranks: Ranks,
) -> LossTerm:
    """One question at the shared state, the same on every turn."""
    term, probes = method.branch, one_shot(branches)
    assert term is not None
    return LossTerm(
        probes=probes,
        advantage_B=term.advantage(reward_B, branches.group_B),
        credit_BL=uniform_credit(branches),
        objective=term.objective,
        old_NL=logprobs(policy, probes, rows, ranks) if turns > 1 else None,
        reference_NL=logprobs(reference, probes, rows, ranks) if reference is not None and term.kl else None,
        kl=term.kl,
        divergence=term.divergence,
        weight=term.weight,
        label="branch_",
        skip_zero_advantage=True,
    )
