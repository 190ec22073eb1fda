"""Method: the terms of a loss. All methods share the form of a term.

    loss = sum over terms:  weight * ( - sum over traces, tokens of
               credit * surrogate( log pi(token | masked state), log pi_old(...), advantage )
               +  kl * divergence  +  distillation * cross_entropy )

A base is a Method; a plug-in is a function Method -> Method that changes the first term or adds one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage
from unmask.core.objective import CrossEntropy, Divergence, Objective, token_cross_entropy, token_divergence
from unmask.core.order import Order, low_confidence, order_name
from unmask.core.probes import Probes
from unmask.core.specs import Branch, Record, RolloutRequest, StepValues
from unmask.core.trace import TokenRule, Trace, until_eos

Estimator = Callable[[Trace, torch.Generator], Probes]
ProbeSampler = Callable[[Trace, torch.Generator, int], list[Probes]]


MOST = 2**12
"""Bound of a number of draws, branches or completions: far more than helps, and less than fills a machine."""


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


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term of the loss: where to ask, how good each trace was, what each token is worth, and the surrogate."""

    probe: ProbeSampler
    """Where do we ask? One Probes for each inner step, all drawn before the first."""
    advantage: Advantage
    """How good was each trace?"""
    objective: Objective
    """The surrogate."""
    credit: Callable[[Trace], Tensor] = uniform_credit
    """What is each token worth? (B, L). A weight has mean one over the counted tokens of a trace; vine puts the
    advantages of its steps here."""
    weight: float = 1.0
    """Multiplies objective, KL and distillation."""
    kl: float = 0.0
    """The weight of `divergence` to the reference in the loss."""
    divergence: Divergence = token_divergence
    distillation: float = 0.0
    """The weight of `cross_entropy` to the teacher, an earlier policy, in the loss: over the whole vocabulary."""
    cross_entropy: CrossEntropy = token_cross_entropy
    uses_old_logprobs: bool = True
    """The objective uses the old policy's log-probabilities."""
    skip_zero_advantage: bool = False
    """On-policy, without a KL and a teacher, traces with zero advantage are not asked. Set it only if their part of the
    objective is zero for all log-probabilities: true of the clipped ratios, false of a bonus on the likelihood."""
    branch: Branch | None = None
    """None: the term is about the rollouts. Otherwise it is about one-shot fillings of visited states, which are
    sampled and rewarded in addition."""
    label: str = ""
    """The prefix of its metrics, different for every term of a method."""
    priced: bool = True
    """Its rewards are those after the price of `Method.reward_kl`."""

    def __post_init__(self) -> None:
        check_range(0, inf, weight=self.weight, kl=self.kl, distillation=self.distillation)
        check_functions(advantage=self.advantage, objective=self.objective, credit=self.credit)


@dataclass(frozen=True, kw_only=True)
class Method(Term):
    """The terms of a loss, and what they need of the sampler. A Method is its own first term."""

    name: str
    further: tuple[Term, ...] = ()
    """Terms that are added to the first."""
    record: Record = Record()
    """What must the sampler remember?"""
    counted: TokenRule = until_eos
    """Which tokens count?"""
    values: StepValues | None = None
    """Which values of states must be estimated by completing them?"""
    reward_kl: float = 0.0
    """The price on the reward of each nat between old and reference policy, at the probes of the first term."""
    teacher_every: int = 1
    """After how many updates the policy becomes the teacher, if a term has `distillation`."""
    trajectory: bool = False
    """The method is defined by its states, such as those of the trajectory: SML may not replace them."""
    order: Order | None = None
    """The order of rollouts that the likelihood is defined for; None: any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(0, inf, reward_kl=self.reward_kl)
        check_range(1, inf, teacher_every=self.teacher_every)
        labels = [term.label for term in self.terms]
        if len(set(labels)) < len(labels) or sum(term.branch is not None for term in self.terms) > 1:
            raise ValueError(f"{self.name} has two terms of the same kind: apply a plug-in once")

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self, *self.further)

    def check_order(self, trace: Trace) -> None:
        """ValueError for rollouts in an order that the likelihood is not defined for."""
        if self.order is None or self.scores_order(trace.order, trace.threshold):
            return
        scores, wanted = f"{self.name} scores the choice of", order_name(self.order)
        made = f"the rollouts were made in the order {trace.order}: sample with Decoding(order={wanted})"
        or_threshold = " or with a threshold" if self.scores_order(trace.order, 0.9) else ""
        raise ValueError(f"{scores} positions of {wanted}, and {made}{or_threshold}")

    def scores_order(self, order: str, threshold: float | None) -> bool:
        """Whether the likelihood is defined for rollouts in an order. By threshold that of low_confidence is also
        defined for left_to_right, which commits the same positions and another one if no draw reaches the threshold."""
        leftmost = order == "left_to_right" and threshold is not None and self.order is low_confidence
        return self.order is None or leftmost or order in ("", order_name(self.order))

    @property
    def request(self) -> RolloutRequest:
        """What this method needs of the sampler: sample(..., request=method.request)."""
        branches = [term.branch for term in self.terms if term.branch is not None]
        return RolloutRequest(self.counted, self.record, branches[0] if branches else None)

    @property
    def needs_reference(self) -> bool:
        return self.reward_kl > 0 or any(term.kl > 0 for term in self.terms)

    @property
    def needs_teacher(self) -> bool:
        return any(term.distillation > 0 for term in self.terms)

    @property
    def uses_equal_rewards(self) -> bool:
        """Groups of rollouts with equal rewards carry a signal: there is a teacher, or some advantage is not zero in a
        batch with a group of correct and a group of wrong rollouts. (Branches have their own groups.)"""
        reward_B, group_B = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
        terms = [term for term in self.terms if term.branch is None]
        return self.needs_teacher or any(bool(term.advantage(reward_B, group_B).any()) for term in terms)

    @property
    def counts_ones(self) -> bool:
        """A reward of 1 means correct to some advantage: a group of such rollouts only carries a signal, and a group
        with equal smaller rewards does not. True of `correct_only` and `best_of_group`."""
        group_B, right_B = torch.zeros(2, dtype=torch.long), torch.ones(2)
        return any(
            bool(term.advantage(right_B, group_B).any()) and not term.advantage(right_B / 2, group_B).any()
            for term in self.terms
        )
