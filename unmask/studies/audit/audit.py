"""How good is each likelihood estimator on a given model? Its value is compared with the exact one, its gradient with
the exact policy gradient, on rollouts of the model itself.

    value       the method's estimate of the log-likelihood of a completion (`likelihoods`), draw by draw, against
                log pi(o | q) summed over all orders (exact.py), or the log-probability of the trajectory
    gradient    d loss / d parameters of the method's own surrogate at ratio one, draw by draw, against
                sum over traces of advantage * d log P(trajectory): the exact policy gradient of these rollouts. It has
                the noise of the orders they took. With d log pi(o | q) instead, that noise is averaged out, and both
                have the same expectation; so the second is measured against the first like an estimator.

Every number is stored per problem (figures.py), since problems are the independent units; report.py makes tables and a
conclusion from them. A gradient is one vector over all trained weights. Host memory has one vector for each problem
(the reference) and two for the current problem.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.core.advantage import group_mean
from unmask.core.method import Method
from unmask.core.objective import step_clip
from unmask.core.order import order_name
from unmask.core.policy import Policy
from unmask.core.probes import Probes, every_step, unit_asked, unit_likelihood
from unmask.core.shapes import Metrics
from unmask.core.trace import Trace, all_tokens, select_traces
from unmask.methods import agrpo
from unmask.models import Model
from unmask.models.lora import trainable_parameters
from unmask.rollout.decoding import Decoding
from unmask.studies.audit.exact import TooManyStates, can_sum_orders, sum_over_orders
from unmask.studies.audit.figures import Audit, EstimatorFigures, GradientFigures, ValueFigures
from unmask.training.update import LossTerm, accumulate, logprobs
from unmask.util.micro_batch import MicroBatch

OnProgress = Callable[[str, float], None]
"""(stage, its finished share); called with 0 when a stage begins."""


@dataclass(frozen=True)
class AuditSettings:
    decoding: Decoding
    """How the rollouts were sampled."""
    micro_batch: MicroBatch
    draws: int
    """Draws of each estimator on each completion."""
    states: int
    """The most passes that the sum over orders may take."""
    on_progress: OnProgress = lambda stage, share: None


# --- the exact value -----------------------------------------------------------------------------------------------


class ExactValues(NamedTuple):
    logp_B: Tensor
    description: str
    slack: float
    """The most by which a value may be too low, in nats."""
    summed: bool
    """Whether the values are sums over all orders."""


def scores_choice(decoding: Decoding) -> bool:
    """Whether `probes.ask` can score the choice of positions."""
    return agrpo(choice=True).scores_order(order_name(decoding.order), decoding.threshold)


def exact_values(policy: Policy, trace: Trace, settings: AuditSettings) -> ExactValues:
    """log pi(o | q) if that takes at most `states` passes; otherwise the log-probability of each trajectory."""
    can_sum = can_sum_orders(settings.decoding.for_policy(policy))
    if can_sum and (sums := _sums_over_orders(policy, trace, settings)) is not None:
        return sums
    choice = scores_choice(settings.decoding)
    probes = every_step(trace, torch.Generator(), choice)
    step_N = logprobs(policy, probes, settings.micro_batch).double().sum(-1)
    logp_B = torch.zeros(len(trace), dtype=torch.float64, device=step_N.device).index_add(0, probes.trace_N, step_N)
    description = "log P(trajectory), " + ("choice of positions included" if choice else "tokens only")
    return ExactValues(logp_B, description, 0.0, summed=False)


@torch.no_grad()
def _sums_over_orders(policy: Policy, trace: Trace, settings: AuditSettings) -> ExactValues | None:
    """The sum over orders, group by group; None if it takes too many states, or if rounding has swapped two ranks of
    the rollout, so that the order a trace took has probability zero."""
    groups = trace.group_B.unique()
    logp_B, slack = torch.zeros(len(trace), dtype=torch.float64, device=trace.group_B.device), 0.0
    for number, group in enumerate(groups):
        settings.on_progress("exact values", number / len(groups))
        mine_B = trace.group_B == group
        some, most = select_traces(trace, mine_B), settings.states / len(groups)
        try:
            total = sum_over_orders(policy, some, settings.decoding, settings.micro_batch, most)
        except TooManyStates:
            return None
        if not total.logp_B.isfinite().all():
            return None
        logp_B[mine_B], slack = total.logp_B, max(slack, total.slack)
    return ExactValues(logp_B, "log pi(o | q), summed over all orders", slack, summed=True)


# --- the likelihood that a method estimates -------------------------------------------------------------------------


def likelihoods(method: Method, probes: Probes, logp_NL: Tensor) -> dict[str, Tensor]:
    """The method's estimate of the log-likelihood of each trace, (B,), nan if it asked nothing; all sampled tokens
    count.

    With a ratio: the sum over units of weight times unit_likelihood, from which the ratio is computed. A trajectory
    method's units are a mean over steps, so T times that. For tokens that were not asked, the mean of the others is
    used. Without a ratio the objective is linear in a log-likelihood, which `_advantage_slope` computes; there are two
    if traces with a negative advantage have a different one.
    """
    probes = replace(probes, trace=replace(probes.trace, counted_BL=all_tokens(probes.trace)))
    logp_NL, tokens_B = logp_NL.double(), probes.trace.counted_BL.sum(-1).double()
    asked_BL = torch.zeros_like(probes.trace.logp_BL).index_add(0, probes.trace_M, unit_asked(probes).double()) > 0
    asked_B = torch.where(asked_BL.any(-1), asked_BL.sum(-1).double(), torch.nan)
    if method.uses_old_logprobs:
        sum_M = probes.weight_M * unit_likelihood(logp_NL, probes).sum(-1)
        total_B = torch.zeros_like(tokens_B).index_add(0, probes.trace_M, sum_M)
        return {"": total_B * (probes.trace.steps if method.trajectory else tokens_B / asked_B)}
    unit_B = _advantage_slope(method, probes, -probes.asked_NL.double(), 1.0)
    good_B, bad_B = (-tokens_B * _advantage_slope(method, probes, logp_NL, sign) / unit_B for sign in (1.0, -1.0))
    if torch.allclose(good_B, bad_B, rtol=1e-9, equal_nan=True):
        return {"": good_B}
    return {"A > 0": good_B, "A < 0": bad_B}


def _advantage_slope(method: Method, probes: Probes, logp_NL: Tensor, sign: float) -> Tensor:
    """- d loss / d advantage of each trace, (B,): the log-likelihood that an objective without a ratio multiplies by
    the advantage, up to a factor. Log-probabilities of -1 everywhere give that factor."""
    advantage_B = torch.full((len(probes.trace),), sign, dtype=torch.float64, device=logp_NL.device)
    credit_BL = torch.ones_like(probes.trace.logp_BL)
    with torch.enable_grad():
        loss, _ = method.objective(logp_NL, logp_NL, probes, advantage_B.requires_grad_(), credit_BL)
        (slope_B,) = torch.autograd.grad(loss, advantage_B)
    return torch.where(slope_B == 0, torch.nan, -slope_B)


# --- statistics of one problem --------------------------------------------------------------------------------------


def value_figures(estimate_DB: Tensor, exact_B: Tensor, tokens: float) -> ValueFigures:
    """Statistics of draws (rows) against exact values; an estimate is nan if a draw has none for a completion."""
    count_B = (~estimate_DB.isnan()).sum(0)
    estimated_B = count_B > 0
    mean_B = estimate_DB[:, estimated_B].nanmean(0)
    spare_B = (count_B[estimated_B] - 1).clamp(min=1)
    noise_B = (estimate_DB[:, estimated_B] - mean_B).square().nansum(0) / spare_B
    centred_B = exact_B[estimated_B] - exact_B[estimated_B].mean()
    freedom = max(1, len(mean_B) - 1)
    straight = [r for draw_B in estimate_DB if (r := _correlation(draw_B, exact_B)) is not None]
    ranked = [r for draw_B in estimate_DB if (r := _correlation(draw_B, exact_B, _ranks)) is not None]
    return ValueFigures(
        bias=float((mean_B - exact_B[estimated_B]).mean()),
        noise=float(noise_B.mean()),
        pearson=math.fsum(straight) / len(straight) if straight else None,
        spearman=math.fsum(ranked) / len(ranked) if ranked else None,
        covariance=float((mean_B * centred_B).sum() / freedom),
        spread=float(((mean_B - mean_B.mean()) ** 2).sum() / freedom - (noise_B / count_B[estimated_B]).mean()),
        exact_spread=float((centred_B**2).sum() / freedom),
        tokens=tokens,
    )


def _correlation(
    estimate_B: Tensor, exact_B: Tensor, scale: Callable[[Tensor], Tensor] = lambda x_B: x_B
) -> float | None:
    """Pearson's r over the defined estimates; None if either does not vary (up to rounding)."""
    defined_B = ~estimate_B.isnan()
    if int(defined_B.sum()) < 2:
        return None
    x_B, y_B = (scale(v_B[defined_B]) - scale(v_B[defined_B]).mean() for v_B in (estimate_B, exact_B))
    if min(float(x_B.abs().max()), float(y_B.abs().max())) < 1e-9:
        return None
    return float((x_B @ y_B) / (x_B.norm() * y_B.norm()))


def _ranks(x_B: Tensor) -> Tensor:
    """Ranks in ascending order, averaged over equal values (up to rounding): Spearman's."""
    near_BB = (x_B[:, None] - x_B).abs() < 1e-9
    below_BB = (x_B < x_B[:, None]) & ~near_BB
    return below_BB.sum(-1).double() + (near_BB.sum(-1).double() - 1) / 2


class _RunningMoments:
    """Mean of vectors and their mean squared distance from it, one vector at a time (Welford)."""

    def __init__(self) -> None:
        self.count, self.squares = 0, 0.0
        self.mean_P = torch.zeros(0)

    def add(self, vector_P: Tensor) -> None:
        self.count += 1
        if self.count == 1:
            self.mean_P = vector_P.clone()
            return
        before_P = vector_P - self.mean_P
        self.mean_P += before_P / self.count
        self.squares += float(before_P @ (vector_P - self.mean_P))

    def figures(self, reference_P: Tensor) -> GradientFigures:
        noise = max(0.0, self.squares / max(1, self.count - 1))
        signal = float(self.mean_P @ self.mean_P) - noise / self.count
        return GradientFigures(float(self.mean_P @ reference_P), float(reference_P @ reference_P), signal, noise)


# --- gradients ------------------------------------------------------------------------------------------------------


def gradient_of(policy: Model, term: LossTerm, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The gradient of one loss term as a vector on the host, and the log-probabilities it was computed from, (N, L)."""
    recorded = list[Tensor]()

    def recording(logp_NL: Tensor, *rest: Any) -> tuple[Tensor, Metrics]:
        recorded.append(logp_NL.detach())
        return term.objective(logp_NL, *rest)

    weights = trainable_parameters(policy)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    accumulate(policy, replace(term, objective=recording), micro_batch)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    for weight in weights:
        weight.grad = None
    return _vector(gradients), recorded[-1]  # accumulate computes the loss of the whole term last


def _vector(pieces: Sequence[Tensor]) -> Tensor:
    """One vector on the host, in at least fp32."""
    flat = [piece.flatten() for piece in pieces]
    return torch.cat([piece if piece.dtype == torch.float64 else piece.float() for piece in flat]).cpu()


def reference_term(trace: Trace, advantage_B: Tensor, choice: bool) -> LossTerm:
    """- mean over traces of advantage * log P(trajectory), every step of it."""
    trace = replace(trace, counted_BL=all_tokens(trace))
    probes = every_step(trace, torch.Generator(), choice)
    return LossTerm(probes, advantage_B, torch.ones_like(trace.logp_BL), step_clip)


def marginal_gradient(
    policy: Model, trace: Trace, advantage_B: Tensor, decoding: Decoding, micro_batch: MicroBatch
) -> tuple[Tensor, float]:
    """The gradient of - mean over traces of advantage * log pi(o | q), and the number of states per trace."""
    total = sum_over_orders(policy, trace, decoding, micro_batch)
    loss = -(advantage_B * total.logp_B).mean()
    pieces = torch.autograd.grad(loss, trainable_parameters(policy), materialize_grads=True)
    return _vector(pieces), total.states / len(trace)


# --- the audit ------------------------------------------------------------------------------------------------------


def audit(
    policy: Model,
    trace: Trace,
    reward_B: Tensor,
    methods: Mapping[str, Method],
    rng: torch.Generator,
    settings: AuditSettings,
) -> Audit:
    """Measure every method on these rollouts, `draws` times each (once if nothing in it is drawn).

    The trace must contain what the methods record. The advantages are r - mean of the group for all methods, so that
    only the estimator differs.
    """
    exact = exact_values(policy, trace, settings)
    problems = list[_Problem]()
    for number, group in enumerate(groups := trace.group_B.unique()):
        settings.on_progress("exact gradients", number / len(groups))
        mine_B = trace.group_B == group
        some = select_traces(trace, mine_B)
        problems.append(_Problem(policy, some, exact.logp_B[mine_B], reward_B[mine_B], exact.summed, settings))
    figures, done, cost = [], 0, dict[str, int]()  # masked states of one draw, for the progress
    for name, method in methods.items():
        cost[name] = len(method.probe(problems[0].trace, torch.Generator().manual_seed(0), 1)[0].states_SL)
    total = sum(cost.values()) * len(problems)
    for name, method in methods.items():
        values, gradients, forwards = dict[str, list[ValueFigures]](), list[GradientFigures | None](), list[float]()
        for problem in problems:
            settings.on_progress("estimators", done / total)
            measured = problem.measure(method, rng)
            for label, value in measured.values.items():
                values.setdefault(label, []).append(value)
            gradients.append(measured.gradient)
            forwards.append(measured.forwards)
            done += cost[name]
        figures.append(EstimatorFigures(name, math.fsum(forwards) / len(forwards), values, gradients))
    choice = ", choice of positions included" if scores_choice(settings.decoding) else ""
    marginal = _marginal(problems) if exact.summed else None
    reference = f"every step of the trajectory{choice}"
    return Audit(exact.description, reference, figures, settings.draws, exact.slack, marginal)


def _marginal(problems: Sequence["_Problem"]) -> EstimatorFigures | None:
    """None if no problem has a gradient."""
    forwards = [problem.marginal.forwards for problem in problems if problem.marginal is not None]
    gradients = [None if problem.marginal is None else problem.marginal.gradient for problem in problems]
    return EstimatorFigures("sum over orders", math.fsum(forwards) / len(forwards), {}, gradients) if forwards else None


class _Measurement(NamedTuple):
    values: dict[str, ValueFigures]
    gradient: GradientFigures | None
    forwards: float


class _Problem:
    """The completions of one prompt, with their exact values and gradients."""

    def __init__(
        self,
        policy: Model,
        trace: Trace,
        exact_B: Tensor,
        reward_B: Tensor,
        summed: bool,
        settings: AuditSettings,
    ) -> None:
        self.policy, self.trace, self.exact_B, self.settings = policy, trace, exact_B, settings
        self.advantage_B = group_mean(reward_B, trace.group_B)
        self.reference_P: Tensor | None = None
        self.marginal: _Measurement | None = None
        if not (self.advantage_B.abs() > 1e-9).any():
            return
        decoding, micro_batch = settings.decoding, settings.micro_batch
        term = reference_term(trace, self.advantage_B, scores_choice(decoding))
        self.reference_P, _ = gradient_of(policy, term, micro_batch)
        if summed:
            vector_P, forwards = marginal_gradient(policy, trace, self.advantage_B, decoding, micro_batch)
            moments = _RunningMoments()
            moments.add(vector_P)
            self.marginal = _Measurement({}, moments.figures(self.reference_P), forwards)

    def measure(self, method: Method, rng: torch.Generator) -> _Measurement:
        """Values and gradients of all draws; of one draw if a second would be the same."""
        trace = replace(self.trace, counted_BL=method.counted(self.trace))
        estimates, moments, states = list[dict[str, Tensor]](), _RunningMoments(), 0
        probes = method.probe(trace, rng, 1)[0]
        for draw in range(self.settings.draws):
            if self.reference_P is None:
                logp_NL = logprobs(self.policy, probes, self.settings.micro_batch)
            else:
                term = LossTerm(probes, self.advantage_B, method.credit(trace), method.objective)
                vector_P, logp_NL = gradient_of(self.policy, term, self.settings.micro_batch)
                moments.add(vector_P)
            estimates.append(likelihoods(method, probes, logp_NL))
            states += len(probes.states_SL)
            before, probes = probes, method.probe(trace, rng, 1)[0]
            if draw == 0 and _same(before, probes):
                break
        tokens = float(trace.filled_BL.sum() / len(trace))
        stacked = {label: torch.stack([estimate[label] for estimate in estimates]) for label in estimates[0]}
        return _Measurement(
            values={label: value_figures(draws_DB, self.exact_B, tokens) for label, draws_DB in stacked.items()},
            gradient=None if self.reference_P is None else moments.figures(self.reference_P),
            forwards=states / len(estimates) / len(trace),
        )


def _same(one: Probes, other: Probes) -> bool:
    """Whether two draws ask the same questions."""
    names = ("states_SL", "asked_NL", "share_NL", "weight_M")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
