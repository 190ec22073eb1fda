"""Method: the parts of the one loss that all methods share.

    loss = - sum over traces, tokens:  credit * surrogate( log pi(token | masked state), log pi_old(...), advantage )

A base is a Method; a plug-in is a function Method -> Method.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage
from unmask.core.objective import Divergence, Objective, token_divergence
from unmask.core.order import Order, order_name
from unmask.core.probes import Probes
from unmask.core.specs import Branch, Record, RolloutRequest
from unmask.core.trace import TokenRule, Trace, until_eos

Estimator = Callable[[Trace, torch.Generator], Probes]
ProbeSampler = Callable[[Trace, torch.Generator, int], list[Probes]]


def check_range(least: float, limit: float, /, **options: float) -> None:
    """ValueError for an option outside [least, limit); nan is outside."""
    for name, value in options.items():
        if not least <= value < limit:
            above = f" and below {limit}" if limit < inf else ""
            raise ValueError(f"{name}={value} must be at least {least}{above}")


def check_functions(**options: object) -> None:
    """ValueError for an option that is the name of a formula: only the command line takes names."""
    for name, value in options.items():
        if not callable(value):
            raise ValueError(f"{name}={value!r} must be a function, not its name: docs/python.md lists them")


def uniform_credit(trace: Trace) -> Tensor:
    """Every token is worth the same."""
    return torch.ones_like(trace.logp_BL)


def each_inner_step(estimator: Estimator) -> ProbeSampler:
    """Fresh, independent Probes for every inner step."""
    return lambda trace, rng, inner_steps: [estimator(trace, rng) for _ in range(inner_steps)]


@dataclass(frozen=True)
class BranchTerm:
    """A second loss term on one-shot fillings of visited states (methods/dispo.py)."""

    branch: Branch
    weight: float
    advantage: Advantage
    objective: Objective
    kl: float
    """Multiplied by `weight`, as the objective is."""
    divergence: Divergence
    skip_zero_advantage: bool = False
    """The same as Method.skip_zero_advantage."""


@dataclass(frozen=True)
class Method:
    name: str
    probe: ProbeSampler
    """Where do we ask? One Probes for each inner step, all drawn before the first."""
    advantage: Advantage
    """How good was each trace?"""
    objective: Objective
    """The surrogate."""
    credit: Callable[[Trace], Tensor] = uniform_credit
    """What is each token worth? (B, L), mean one over the counted tokens of a trace."""
    branch: BranchTerm | None = None
    """Which further fillings deserve a reward?"""
    record: Record = Record()
    """What must the sampler remember?"""
    counted: TokenRule = until_eos
    """Which tokens count?"""
    kl: float = 0.0
    """The weight of `divergence` to the reference in the loss."""
    divergence: Divergence = token_divergence
    reward_kl: float = 0.0
    """The price on the reward of each nat between old and reference policy."""
    trajectory: bool = False
    """The estimator is the trajectory itself: replacing it (SML) would leave nothing of the method."""
    uses_old_logprobs: bool = True
    """The objective uses the old policy's log-probabilities."""
    skip_zero_advantage: bool = False
    """On-policy and without a KL, traces with zero advantage are not asked. Set it only if their part of the objective
    is zero for all log-probabilities: true of the clipped ratios, false of a bonus on the likelihood."""
    order: Order | None = None
    """The order of rollouts that the likelihood is defined for; None: any."""

    def __post_init__(self) -> None:
        check_range(0, inf, kl=self.kl, reward_kl=self.reward_kl)
        check_functions(advantage=self.advantage, objective=self.objective, credit=self.credit)

    def check_order(self, trace: Trace) -> None:
        """ValueError for rollouts in an order that the likelihood is not defined for."""
        if self.order is None:
            return
        scores, wanted = f"{self.name} scores the choice of", order_name(self.order)
        if trace.order not in ("", wanted):
            made = f"the rollouts were made in the order {trace.order}: sample with Decoding(order={wanted})"
            raise ValueError(f"{scores} positions of {wanted}, and {made}")
        if trace.threshold is not None:
            made = f"the rollouts were made with threshold={trace.threshold}: sample without one"
            raise ValueError(f"{scores} a fixed number of positions a step, and {made}")

    @property
    def request(self) -> RolloutRequest:
        """What this method needs of the sampler: sample(..., request=method.request)."""
        return RolloutRequest(self.counted, self.record, None if self.branch is None else self.branch.branch)

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0 or self.reward_kl > 0 or (self.branch is not None and self.branch.kl > 0)
