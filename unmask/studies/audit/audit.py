"""How good is each likelihood estimator on a given model? Its value against the exact one, its gradient against the
exact policy gradient, on rollouts the model itself has made.

    value       what a method takes for the log-likelihood of a completion (`likelihoods`), draw by draw, against
                log pi(o | q) summed over all orders (exact.py), or the log-probability of the trajectory
    gradient    d loss / d parameters of the method's own surrogate at ratio one, draw by draw, against
                sum over traces of advantage * d log P(trajectory): the exact policy gradient of these rollouts. It has
                the noise of the orders they took; with d log pi(o | q) in its place that is averaged out, and both have
                the same expectation. So the second is measured against the first as the estimators are.

Every number is kept problem by problem (audit_figures.py): problems are the independent units, and audit_report.py
makes tables and a conclusion from them. Gradients are compared as they stand, one vector over all that is
trained; in memory there are a vector for each problem (the reference's, on the host) and two for the one at hand.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.core.advantage import group_mean
from unmask.core.method import Method
from unmask.core.objective import step_clip
from unmask.core.order import low_confidence
from unmask.core.policy import Policy
from unmask.core.probes import Probes, every_step, unit_asked, unit_likelihood
from unmask.core.shapes import Metrics
from unmask.core.trace import Trace, all_tokens, select_traces
from unmask.models import Model
from unmask.models.lora import trainable_parameters
from unmask.rollout.decoding import Decoding
from unmask.studies.audit.exact import TooMany, summable, summed_orders
from unmask.studies.audit.figures import Audit, EstimatorFigures, Slope, Value
from unmask.training.update import LossTerm, accumulate, logprobs
from unmask.util.micro_batch import MicroBatch

Report = Callable[[str, float], None]
"""(what is being done, the share of it that is done); it is called with 0 where something new begins."""


def silent(what: str, done: float) -> None:
    """Reports nothing."""


# --- the exact value -----------------------------------------------------------------------------------------------


class Truth(NamedTuple):
    logp_B: Tensor
    told: str
    slack: float
    summed: bool
    """Over all orders."""


def scores_choice(decoding: Decoding) -> bool:
    """Whether the choice of positions depends on the policy's draws, by the law that `probes.ask` knows."""
    return decoding.order is low_confidence and decoding.threshold is None


def truth_of(
    policy: Policy, trace: Trace, decoding: Decoding, rows: MicroBatch, states: int, report: Report = silent
) -> Truth:
    """log pi(o | q), where that takes no more than `states` passes; else the log-probability of each trajectory."""
    if summable(decoding) and (found := _summed_groups(policy, trace, decoding, rows, states, report)) is not None:
        return found
    choice = scores_choice(decoding)
    probes = every_step(trace, torch.Generator(), choice)
    step_N = logprobs(policy, probes, rows).double().sum(-1)
    logp_B = torch.zeros(len(trace), dtype=torch.float64, device=step_N.device).index_add(0, probes.trace_N, step_N)
    told = "log P(trajectory), " + ("choice of positions included" if choice else "tokens only")
    return Truth(logp_B, told, 0.0, summed=False)


@torch.no_grad()
def _summed_groups(
    policy: Policy, trace: Trace, decoding: Decoding, rows: MicroBatch, states: int, report: Report
) -> Truth | None:
    """The sum over orders, group by group; None where it takes too many states, or where rounding has turned a rank of
    the rollout over, so that the way a trace took is impossible."""
    groups = trace.group_B.unique()
    logp_B, slack = torch.zeros(len(trace), dtype=torch.float64, device=trace.group_B.device), 0.0
    for number, group in enumerate(groups):
        report("exact values", number / len(groups))
        mine_B = trace.group_B == group
        try:
            found = summed_orders(policy, select_traces(trace, mine_B), decoding, rows, states / len(groups))
        except TooMany:
            return None
        if not found.logp_B.isfinite().all():
            return None
        logp_B[mine_B], slack = found.logp_B, max(slack, found.slack)
    return Truth(logp_B, "log pi(o | q), summed over all orders", slack, summed=True)


# --- what a method takes for the likelihood -------------------------------------------------------------------------


def likelihoods(method: Method, probes: Probes, logp_NL: Tensor) -> dict[str, Tensor]:
    """What the method takes for the log-likelihood of each trace, (B,), nan where it asked nothing; all that was
    written counts.

    With a ratio: the sum over units of weight times unit_likelihood, the very thing the ratio is made of. A trajectory
    method's units are a mean over steps, so T times that. Where some tokens were not asked their mean stands for the
    rest. Without a ratio the objective is linear in a log-likelihood and says itself which: see `_weighed`; where it is
    another for bad traces than for good ones there are two.
    """
    probes = replace(probes, trace=replace(probes.trace, counted_BL=all_tokens(probes.trace)))
    logp_NL, tokens_B = logp_NL.double(), probes.trace.counted_BL.sum(-1).double()
    asked_BL = torch.zeros_like(probes.trace.logp_BL).index_add(0, probes.trace_M, unit_asked(probes).double()) > 0
    asked_B = torch.where(asked_BL.any(-1), asked_BL.sum(-1).double(), torch.nan)
    if method.uses_old_logprobs:
        sum_M = probes.weight_M * unit_likelihood(logp_NL, probes).sum(-1)
        total_B = torch.zeros_like(tokens_B).index_add(0, probes.trace_M, sum_M)
        return {"": total_B * (probes.trace.steps if method.trajectory else tokens_B / asked_B)}
    unit_B = _weighed(method, probes, -probes.asked_NL.double(), 1.0)
    good_B, bad_B = (-tokens_B * _weighed(method, probes, logp_NL, sign) / unit_B for sign in (1.0, -1.0))
    if torch.allclose(good_B, bad_B, rtol=1e-9, equal_nan=True):
        return {"": good_B}
    return {"A > 0": good_B, "A < 0": bad_B}


def _weighed(method: Method, probes: Probes, logp_NL: Tensor, sign: float) -> Tensor:
    """- d loss / d advantage of each trace, (B,): the log-likelihood that an objective without a ratio multiplies by
    the advantage, up to a factor, which answers of -1 everywhere give away."""
    advantage_B = torch.full((len(probes.trace),), sign, dtype=torch.float64, device=logp_NL.device)
    credit_BL = torch.ones_like(probes.trace.logp_BL)
    with torch.enable_grad():
        loss, _ = method.objective(logp_NL, logp_NL, probes, advantage_B.requires_grad_(), credit_BL)
        (slope_B,) = torch.autograd.grad(loss, advantage_B)
    return torch.where(slope_B == 0, torch.nan, -slope_B)


# --- statistics of one problem --------------------------------------------------------------------------------------


def value_of(estimate_DB: Tensor, exact_B: Tensor, tokens: float) -> Value:
    """Statistics of draws (rows) against exact values; nan where a draw said nothing of a completion."""
    count_B = (~estimate_DB.isnan()).sum(0)
    heard_B = count_B > 0
    mean_B = estimate_DB[:, heard_B].nanmean(0)
    spare_B = (count_B[heard_B] - 1).clamp(min=1)
    noise_B = (estimate_DB[:, heard_B] - mean_B).square().nansum(0) / spare_B
    centred_B = exact_B[heard_B] - exact_B[heard_B].mean()
    freedom = max(1, len(mean_B) - 1)
    straight = [r for draw_B in estimate_DB if (r := _correlation(draw_B, exact_B)) is not None]
    ranked = [r for draw_B in estimate_DB if (r := _correlation(draw_B, exact_B, _ranks)) is not None]
    return Value(
        bias=float((mean_B - exact_B[heard_B]).mean()),
        noise=float(noise_B.mean()),
        pearson=math.fsum(straight) / len(straight) if straight else None,
        spearman=math.fsum(ranked) / len(ranked) if ranked else None,
        covariance=float((mean_B * centred_B).sum() / freedom),
        spread=float(((mean_B - mean_B.mean()) ** 2).sum() / freedom - (noise_B / count_B[heard_B]).mean()),
        exact_spread=float((centred_B**2).sum() / freedom),
        tokens=tokens,
    )


def _correlation(
    estimate_B: Tensor, exact_B: Tensor, scale: Callable[[Tensor], Tensor] = lambda x_B: x_B
) -> float | None:
    """Pearson's r of what is there; None where either does not vary (up to rounding)."""
    there_B = ~estimate_B.isnan()
    if int(there_B.sum()) < 2:
        return None
    x_B, y_B = (scale(v_B[there_B]) - scale(v_B[there_B]).mean() for v_B in (estimate_B, exact_B))
    if min(float(x_B.abs().max()), float(y_B.abs().max())) < 1e-9:
        return None
    return float((x_B @ y_B) / (x_B.norm() * y_B.norm()))


def _ranks(x_B: Tensor) -> Tensor:
    """Places in ascending order, those of equal values (up to rounding) averaged: Spearman's."""
    near_BB = (x_B[:, None] - x_B).abs() < 1e-9
    below_BB = (x_B < x_B[:, None]) & ~near_BB
    return below_BB.sum(-1).double() + (near_BB.sum(-1).double() - 1) / 2


class _Spread:
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

    def slope(self, reference_P: Tensor) -> Slope:
        noise = max(0.0, self.squares / max(1, self.count - 1))
        signal = float(self.mean_P @ self.mean_P) - noise / self.count
        return Slope(float(self.mean_P @ reference_P), float(reference_P @ reference_P), signal, noise)


# --- gradients ------------------------------------------------------------------------------------------------------


def gradient_of(policy: Model, part: LossTerm, rows: MicroBatch) -> tuple[Tensor, Tensor]:
    """The gradient of one part as a vector on the host, and the answers it was made of, (N, L)."""
    heard = list[Tensor]()

    def listening(logp_NL: Tensor, *rest: Any) -> tuple[Tensor, Metrics]:
        heard.append(logp_NL.detach())
        return part.objective(logp_NL, *rest)

    weights = trainable_parameters(policy)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    accumulate(policy, replace(part, objective=listening), rows)
    found = [weight.grad for weight in weights if weight.grad is not None]
    for weight in weights:
        weight.grad = None
    return _vector(found), heard[-1]  # accumulate asks last for the loss of all answers together


def _vector(pieces: Sequence[Tensor]) -> Tensor:
    """One vector on the host, in at least fp32."""
    flat = [piece.flatten() for piece in pieces]
    return torch.cat([piece if piece.dtype == torch.float64 else piece.float() for piece in flat]).cpu()


def reference_part(trace: Trace, advantage_B: Tensor, choice: bool) -> LossTerm:
    """- mean over traces of advantage * log P(trajectory), every step of it."""
    trace = replace(trace, counted_BL=all_tokens(trace))
    probes = every_step(trace, torch.Generator(), choice)
    return LossTerm(probes, advantage_B, torch.ones_like(trace.logp_BL), step_clip)


def marginal_gradient(
    policy: Model, trace: Trace, advantage_B: Tensor, decoding: Decoding, rows: MicroBatch
) -> tuple[Tensor, float]:
    """The gradient of - mean over traces of advantage * log pi(o | q), and the states a trace took."""
    found = summed_orders(policy, trace, decoding, rows)
    loss = -(advantage_B * found.logp_B).mean()
    pieces = torch.autograd.grad(loss, trainable_parameters(policy), materialize_grads=True)
    return _vector(pieces), found.states / len(trace)


# --- the audit ------------------------------------------------------------------------------------------------------


def audit(
    policy: Model,
    trace: Trace,
    reward_B: Tensor,
    decoding: Decoding,
    methods: Mapping[str, Method],
    draws: int,
    rng: torch.Generator,
    rows: MicroBatch,
    states: int,
    report: Report = silent,
) -> Audit:
    """Measure every method on these rollouts, `draws` times each (once where nothing in it is drawn).

    The trace must hold what the methods record; the advantages are r - mean of the group for all of them, so that what
    differs is the estimator.
    """
    truth = truth_of(policy, trace, decoding, rows, states, report)
    problems = list[_Problem]()
    for number, group in enumerate(groups := trace.group_B.unique()):
        report("exact gradients", number / len(groups))
        mine_B = trace.group_B == group
        part = select_traces(trace, mine_B)
        problems.append(_Problem(policy, part, truth.logp_B[mine_B], reward_B[mine_B], decoding, truth.summed, rows))
    found, cost = [], {name: _states(method, problems[0].trace) for name, method in methods.items()}
    done, whole = 0.0, sum(cost.values()) * len(problems)
    for name, method in methods.items():
        values, slopes, forwards = dict[str, list[Value]](), list[Slope | None](), list[float]()
        for problem in problems:
            report("estimators", done / whole)
            seen = problem.examined(method, draws, rng)
            for label, value in seen.values.items():
                values.setdefault(label, []).append(value)
            slopes.append(seen.slope)
            forwards.append(seen.forwards)
            done += cost[name]
        found.append(EstimatorFigures(name, math.fsum(forwards) / len(forwards), values, slopes))
    told = "every step of the trajectory" + (", choice of positions included" if scores_choice(decoding) else "")
    return Audit(truth.told, told, found, draws, truth.slack, _marginal(problems) if truth.summed else None)


def _marginal(problems: Sequence["_Problem"]) -> EstimatorFigures | None:
    """None where no problem has a gradient."""
    asked = [problem.marginal.forwards for problem in problems if problem.marginal is not None]
    slopes = [None if problem.marginal is None else problem.marginal.slope for problem in problems]
    return EstimatorFigures("sum over orders", math.fsum(asked) / len(asked), {}, slopes) if asked else None


def _states(method: Method, trace: Trace) -> float:
    """How much there is to ask, to tell the time that is left."""
    return float(len(method.probe(trace, torch.Generator().manual_seed(0), 1)[0].states_SL))


class _Seen(NamedTuple):
    values: dict[str, Value]
    slope: Slope | None
    forwards: float


class _Problem:
    """The completions of one prompt, with their exact values and gradients."""

    def __init__(
        self,
        policy: Model,
        trace: Trace,
        exact_B: Tensor,
        reward_B: Tensor,
        decoding: Decoding,
        summed: bool,
        rows: MicroBatch,
    ) -> None:
        self.policy, self.trace, self.exact_B, self.rows = policy, trace, exact_B, rows
        self.advantage_B = group_mean(reward_B, trace.group_B)
        self.reference_P: Tensor | None = None
        self.marginal: _Seen | None = None
        if bool((self.advantage_B.abs() > 1e-9).any()):
            part = reference_part(trace, self.advantage_B, scores_choice(decoding))
            self.reference_P, _ = gradient_of(policy, part, rows)
        if self.reference_P is not None and summed:
            vector_P, forwards = marginal_gradient(policy, trace, self.advantage_B, decoding, rows)
            spread = _Spread()
            spread.add(vector_P)
            self.marginal = _Seen({}, spread.slope(self.reference_P), forwards)

    def examined(self, method: Method, draws: int, rng: torch.Generator) -> _Seen:
        """Values and gradients of so many draws; of one where a second would be the same."""
        trace = replace(self.trace, counted_BL=method.counted(self.trace))
        estimates, spread, states = list[dict[str, Tensor]](), _Spread(), 0
        probes = method.probe(trace, rng, 1)[0]
        for draw in range(draws):
            if self.reference_P is None:
                answer_NL = logprobs(self.policy, probes, self.rows)
            else:
                part = LossTerm(probes, self.advantage_B, method.credit(trace), method.objective)
                vector_P, answer_NL = gradient_of(self.policy, part, self.rows)
                spread.add(vector_P)
            estimates.append(likelihoods(method, probes, answer_NL))
            states += len(probes.states_SL)
            before, probes = probes, method.probe(trace, rng, 1)[0]
            if draw == 0 and _same(before, probes):
                break
        tokens = float(trace.filled_BL.sum() / len(trace))
        stacked = {label: torch.stack([found[label] for found in estimates]) for label in estimates[0]}
        return _Seen(
            values={label: value_of(found_DB, self.exact_B, tokens) for label, found_DB in stacked.items()},
            slope=None if self.reference_P is None else spread.slope(self.reference_P),
            forwards=states / len(estimates) / len(trace),
        )


def _same(one: Probes, other: Probes) -> bool:
    """Whether two draws ask the same."""
    pairs: Sequence[tuple[Tensor, Tensor]] = [
        (one.states_SL, other.states_SL),
        (one.asked_NL, other.asked_NL),
        (one.share_NL, other.share_NL),
        (one.weight_M, other.weight_M),
    ]
    return all(torch.equal(a, b) for a, b in pairs)
