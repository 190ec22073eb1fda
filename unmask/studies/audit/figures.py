"""The measurements of an audit, problem by problem, and the figures computed from them, with intervals.

Problems are the independent units: every interval is 95 %, by the jackknife over problems with Student's t; differences
of two estimators are paired over the problems. At a budget of F forward passes a completion, an estimator that takes
f of them is drawn F / f times and averaged, which divides its noise by F / f. Every problem's vectors are divided by
the root mean square length of one draw (and the reference by its own), so that problems have equal weight. With
a = scalar product, s = expected, n = noise, s + n = 1, and P problems:

    cosine = sum a / sqrt( P * sum (s + n f / F) )        relative variance v = sum n / sum s

For one draw (F = f) this is the mean over problems of the cosine, for F to infinity that of the mean draw: a little
less than the mean of the problems' own if v differs much between them, but less noisy. r is the same for the values of
a group's completions, minus their mean.

The mean of D draws has a cosine that is too small by the factor 1 / sqrt(1 + v / D), since its length contains the rest
of the noise. An estimate of that noise is subtracted, which works for a small correction only. So the cosine of the
mean draw is reported only if v / D is at most 1/8, a correction of 6 %. A budget of more draws than were made,
F / f > D, subtracts the noise between them, v / D - v f / F of 1 + v f / F, by the same rule; one of fewer subtracts
nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unmask.util.statistics import (
    STILL,
    Interval,
    Statistic,
    jackknife_interval,
    jackknife_log_interval,
    mapped_interval,
    t_interval,
)

TINY = 1e-18
"""Squared lengths that are rounding."""
MOST_LEFT = 1 / 8
"""A cosine of the mean is reported up to this noise over signal in the mean of all draws (squared lengths)."""


# --- data ----------------------------------------------------------------------------------------------------------


class ValueFigures(NamedTuple):
    """An estimator's values on the completions of one problem, against the exact ones. None: not defined."""

    bias: float
    """Mean of estimate minus exact, in nats."""
    noise: float
    """Variance over draws at a fixed completion, mean over completions."""
    pearson: float | None
    """Correlation with the exact value over the completions, one draw, mean over draws."""
    spearman: float | None
    covariance: float
    """Of the mean draw with the exact value, over the completions."""
    spread: float
    """Variance over completions of the estimator's expectation."""
    exact_spread: float
    tokens: float
    """Tokens of a completion."""


class GradientFigures(NamedTuple):
    """An estimator's gradient on one problem, against the reference."""

    along: float
    """Scalar product of the expected gradient with the reference."""
    reference: float
    """Squared length of the reference."""
    signal: float
    """Squared length of the expected gradient, noise subtracted."""
    noise: float
    """Expected squared distance of one draw's gradient from the expected one."""


@dataclass(frozen=True)
class EstimatorFigures:
    """The measurements of one method; `values` has one reading, or two if the sign of the advantage matters."""

    name: str
    forwards: float
    """Masked states per completion and draw."""
    values: dict[str, list[ValueFigures]]
    slopes: list[GradientFigures | None]
    """None for a problem whose rewards are identical."""


@dataclass(frozen=True)
class Audit:
    """All measurements, problem by problem."""

    truth: str
    """What the values are compared with."""
    reference: str
    """What the gradients are compared with."""
    estimators: list[EstimatorFigures]
    draws: int
    """Of every estimator on every completion; one if nothing is drawn."""
    slack: float = 0.0
    """The most by which an exact value may be too low, in nats."""
    marginal: EstimatorFigures | None = None
    """The gradient of log pi(o | q) as an estimator, if the sum over orders is possible."""


@dataclass(frozen=True)
class Reading:
    """One column of values: an estimator's, or one of its two."""

    name: str
    forwards: float
    values: list[ValueFigures]


def readings(audit: Audit) -> list[Reading]:
    return [
        Reading(f"{one.name} ({label})" if label else one.name, one.forwards, values)
        for one in audit.estimators
        for label, values in one.values.items()
    ]


# --- figures -------------------------------------------------------------------------------------------------------


class ShareEstimates(NamedTuple):
    """A problem's part in a cosine, all lengths divided by those of one draw and of what it is compared with."""

    along: float
    signal: float
    noise: float
    """signal + noise = 1."""


Shares = Sequence[ShareEstimates | None]


def value_shares(values: Sequence[ValueFigures]) -> list[ShareEstimates | None]:
    return [_shares(v.covariance, v.exact_spread, v.spread, v.noise) for v in values]


def slope_shares(slopes: Sequence[GradientFigures | None]) -> list[ShareEstimates | None]:
    return [None if s is None else _shares(s.along, s.reference, s.signal, s.noise) for s in slopes]


def _shares(along: float, other: float, signal: float, noise: float) -> ShareEstimates | None:
    """None if nothing varies, or there is no gradient."""
    whole = signal + noise
    if min(whole, other) < TINY:
        return None
    return ShareEstimates(along / math.sqrt(other * whole), signal / whole, noise / whole)


def defined_problems(*columns: Sequence[object]) -> list[int]:
    """The problems on which all columns are defined."""
    return [i for i, cells in enumerate(zip(*columns, strict=True)) if None not in cells]


def cosine(shares: Shares, thinned: float) -> Statistic:
    """The cosine (or r) when the noise is multiplied by `thinned`: 1 for one draw, 0 for the mean draw."""

    def figure(problems: Sequence[int]) -> float | None:
        some = [share for i in problems if (share := shares[i]) is not None]
        squared = math.fsum(s.signal + thinned * s.noise for s in some)
        if squared <= 0:  # nothing is left once the noise is subtracted
            return None
        return math.fsum(s.along for s in some) / math.sqrt(len(some) * squared)

    return figure


def relative_noise(shares: Shares) -> Statistic:
    """Expected squared error of one draw over the squared length of the mean draw."""

    def figure(problems: Sequence[int]) -> float | None:
        some = [share for i in problems if (share := shares[i]) is not None]
        signal = math.fsum(s.signal for s in some)
        return math.fsum(s.noise for s in some) / signal if signal > 0 else None

    return figure


def mean_cosine(shares: Shares, draws: int) -> Statistic:
    """The cosine of the mean draw; None if too much noise would have to be subtracted."""
    return budget_cosine(shares, forwards=0.0, budget=1.0, draws=draws)


def budget_cosine(shares: Shares, forwards: float, budget: float, draws: int) -> Statistic:
    """The cosine at a budget; None if a single draw costs more, or if too much noise would have to be subtracted."""
    if forwards > budget + 1e-9:
        return lambda problems: None
    thinned = forwards / budget
    if thinned * draws < 1:
        noise = relative_noise(shares)(defined_problems(shares))
        if noise is None or noise * (1 / draws - thinned) > MOST_LEFT * (1 + noise * thinned):
            return lambda problems: None
    return cosine(shares, thinned)


def clipped_interval(interval: Interval | None, most: float = 1.0) -> Interval | None:
    """The interval of a correlation, cut to -1 to 1; of the difference of two, to -2 to 2."""
    return mapped_interval(interval, lambda value: max(-most, min(most, value)))


def mean_of(values: Sequence[float | None]) -> Interval | None:
    """The mean of the defined values."""
    known = [value for value in values if value is not None]
    return t_interval(known) if known else None


# --- two estimators ------------------------------------------------------------------------------------------------


class FigureComparison(NamedTuple):
    """A figure of two estimators on the problems on which both have it, and their difference or ratio."""

    figure: str
    one: float | None
    other: float | None
    change: Interval | None
    """The first minus the second; for variances the first over the second."""
    ratio: bool


class _Pair(NamedTuple):
    """A figure of two estimators, and the problems on which both are defined."""

    one: Statistic
    other: Statistic
    problems: Sequence[int]


def estimator_comparison(
    audit: Audit, one: EstimatorFigures, other: EstimatorFigures, budget: float
) -> list[FigureComparison]:
    """Every figure of both, the change paired over problems. Estimators with two readings are compared by reading."""

    def at_budget(a: Shares, b: Shares) -> _Pair:
        first, second = (
            budget_cosine(shares, each.forwards, budget, audit.draws) for shares, each in ((a, one), (b, other))
        )
        return _Pair(first, second, defined_problems(a, b))

    rows = list[FigureComparison]()
    for label in (label for label in one.values if label in other.values):
        first, second = one.values[label], other.values[label]
        bias = _mean_pair([abs(v.bias) for v in first], [abs(v.bias) for v in second])
        rows += [
            _difference_row("|bias|, nats", bias, most=math.inf),
            _ratio_row("variance", _mean_pair([v.noise for v in first], [v.noise for v in second])),
            _difference_row("r", _mean_pair([v.pearson for v in first], [v.pearson for v in second])),
            _difference_row("rank r", _mean_pair([v.spearman for v in first], [v.spearman for v in second])),
            _difference_row(f"r at {budget:g}", at_budget(value_shares(first), value_shares(second))),
        ]
    a, b = slope_shares(one.slopes), slope_shares(other.slopes)
    both = defined_problems(a, b)
    return [
        *rows,
        _difference_row("cosine", _Pair(cosine(a, 1.0), cosine(b, 1.0), both)),
        _difference_row("cosine of mean", _Pair(mean_cosine(a, audit.draws), mean_cosine(b, audit.draws), both)),
        _ratio_row("rel. variance", _Pair(relative_noise(a), relative_noise(b), both)),
        _difference_row(f"cosine at {budget:g}", at_budget(a, b)),
    ]


def _mean_pair(one: Sequence[float | None], other: Sequence[float | None]) -> _Pair:
    def mean(values: Sequence[float | None]) -> Statistic:
        def figure(problems: Sequence[int]) -> float | None:
            defined = [value for i in problems if (value := values[i]) is not None]
            return math.fsum(defined) / len(defined) if defined else None

        return figure

    return _Pair(mean(one), mean(other), defined_problems(one, other))


def difference(one: Statistic, other: Statistic) -> Statistic:
    def figure(problems: Sequence[int]) -> float | None:
        first, second = one(problems), other(problems)
        return None if first is None or second is None else first - second

    return figure


def _difference_row(name: str, pair: _Pair, most: float = 2.0) -> FigureComparison:
    """`most`: how large a difference can be; 2 for correlations."""
    change = clipped_interval(jackknife_interval(difference(pair.one, pair.other), pair.problems), most)
    return FigureComparison(name, pair.one(pair.problems), pair.other(pair.problems), change, False)


def _ratio_row(name: str, pair: _Pair) -> FigureComparison:
    def ratio(some: Sequence[int]) -> float | None:
        first, second = pair.one(some), pair.other(some)
        return None if first is None or second is None or second < STILL else first / second

    change = jackknife_log_interval(ratio, pair.problems)
    return FigureComparison(name, pair.one(pair.problems), pair.other(pair.problems), change, True)
