"""What an audit measured, problem by problem, and the figures made of it, with their intervals.

Problems are the independent units: every interval is 95 %, by the jackknife over problems with Student's t; what two
estimators differ by is paired over the problems. At a budget of F forward passes a completion, an estimator that takes
f of them is drawn F / f times and averaged, which divides its noise by F / f. With every problem's vectors divided by
the root mean square length of one draw (and the reference by its own), so that problems count alike, a = scalar
product, s = expected, n = noise, s + n = 1, and P problems:

    cosine = sum a / sqrt( P * sum (s + n f / F) )        relative variance v = sum n / sum s

which for one draw (F = f) is the mean over problems of the cosine, for F without end that of the mean draw: a little
less than the mean of the problems' own where v differs much between them, but steadier. r is the same thing for the
values of a group's completions, less their mean.

The mean of D draws has a cosine that is too small by the factor 1 / sqrt(1 + v / D), for its length holds the rest of
the noise. That noise is taken off by its estimate, which is good for a small correction and not for a large one. So the
cosine of the mean draw is told where v / D is at most 1/8, a correction of 6 %, and not elsewhere. A budget of more
draws than were made, F / f > D, takes off the noise between them, v / D - v f / F of 1 + v f / F, by the same rule; one
of fewer takes nothing off.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unmask.util.statistics import Interval, t_interval, t_quantile

TINY = 1e-18
"""Squared lengths that are rounding."""
STILL = 1e-9
"""A variance that is rounding, over what it is relative to."""
MOST_LEFT = 1 / 8
"""Noise over signal in the mean of all draws, squared lengths, up to which a cosine of the mean is told."""

Statistic = Callable[[Sequence[int]], float | None]
"""Numbers of problems -> a figure, None where it is not defined."""


# --- data ----------------------------------------------------------------------------------------------------------


class Value(NamedTuple):
    """An estimator's values on the completions of one problem, against the exact ones. None: not defined there."""

    bias: float
    """Mean of estimate less exact, in nats."""
    noise: float
    """Variance over draws at a fixed completion, mean over completions."""
    pearson: float | None
    """Correlation with the exact value over the completions, one draw, mean over draws."""
    spearman: float | None
    covariance: float
    """Of the mean over draws with the exact value, over the completions."""
    spread: float
    """Variance over completions of the estimator's expectation."""
    exact_spread: float
    tokens: float
    """Tokens of a completion."""


class Slope(NamedTuple):
    """An estimator's gradient on one problem, against the reference."""

    along: float
    """Scalar product of the expected gradient with the reference."""
    reference: float
    """Squared length of the reference."""
    signal: float
    """Squared length of the expected gradient, noise taken off."""
    noise: float
    """Expected squared distance of one draw's gradient from the expected one."""


@dataclass(frozen=True)
class EstimatorFigures:
    """What was found about one method; `values` has one reading, or two where the sign of the advantage matters."""

    name: str
    forwards: float
    """Masked states asked for a completion and draw."""
    values: dict[str, list[Value]]
    slopes: list[Slope | None]
    """None for a problem whose rewards are all alike."""


@dataclass(frozen=True)
class Audit:
    """All that was measured, problem by problem."""

    truth: str
    """What the values are compared with."""
    reference: str
    """What the gradients are compared with."""
    estimators: list[EstimatorFigures]
    draws: int
    """Of every estimator on every completion; one where nothing is drawn."""
    slack: float = 0.0
    """The most by which an exact value may be too low, in nats."""
    marginal: EstimatorFigures | None = None
    """The gradient of log pi(o | q) in an estimator's place, where the sum over orders can be done."""


@dataclass(frozen=True)
class Reading:
    """One column of values: an estimator's, or one of its two."""

    name: str
    forwards: float
    values: list[Value]


def readings(audit: Audit) -> list[Reading]:
    return [
        Reading(f"{one.name} ({label})" if label else one.name, one.forwards, values)
        for one in audit.estimators
        for label, values in one.values.items()
    ]


# --- figures -------------------------------------------------------------------------------------------------------


def jackknifed(statistic: Statistic, problems: Sequence[int]) -> Interval | None:
    """A figure of these problems with its interval: the spread of the figures with one problem left out.

    None where it is not defined, or hangs on a single one of several problems.
    """
    whole, count = statistic(problems), len(problems)
    if whole is None or count == 1:
        return None if whole is None else Interval(whole, None, None)
    known = [value for i in problems if (value := statistic([j for j in problems if j != i])) is not None]
    if len(known) < count:
        return None
    mean = math.fsum(known) / count
    error = math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in known))
    half = t_quantile(count - 1) * error
    return Interval(whole, whole - half, whole + half)


def jackknifed_size(statistic: Statistic, problems: Sequence[int]) -> Interval | None:
    """The same for a positive figure, by its logarithm. Zero, up to rounding, has no interval."""
    whole = statistic(problems)
    if whole is not None and abs(whole) < STILL:
        return Interval(0.0, None, None)

    def logarithm(some: Sequence[int]) -> float | None:
        value = statistic(some)
        return math.log(value) if value is not None and value > 0 else None

    found = jackknifed(logarithm, problems)
    if found is None or found.low is None or found.high is None:
        return None if found is None else Interval(math.exp(found.mean), None, None)
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high))


class ShareEstimates(NamedTuple):
    """A problem's part in a cosine, all lengths divided by those of one draw and of what it is compared with."""

    along: float
    signal: float
    noise: float
    """With `signal` this makes 1."""


def value_shares(values: Sequence[Value]) -> list[ShareEstimates | None]:
    return [_shares(v.covariance, v.exact_spread, v.spread, v.noise) for v in values]


def slope_shares(slopes: Sequence[Slope | None]) -> list[ShareEstimates | None]:
    return [None if s is None else _shares(s.along, s.reference, s.signal, s.noise) for s in slopes]


def _shares(along: float, other: float, signal: float, noise: float) -> ShareEstimates | None:
    """None where nothing varies, or there is no gradient."""
    whole = signal + noise
    if min(whole, other) < TINY:
        return None
    return ShareEstimates(along / math.sqrt(other * whole), signal / whole, noise / whole)


def defined(*columns: Sequence[object]) -> list[int]:
    """The problems on which all have a say."""
    return [i for i, cells in enumerate(zip(*columns, strict=True)) if None not in cells]


def cosine(shares: Sequence[ShareEstimates | None], thinned: float) -> Statistic:
    """The cosine (or r) when the noise is multiplied by `thinned`: 1 for one draw, 0 for the mean draw."""

    def figure(problems: Sequence[int]) -> float | None:
        some = [share for i in problems if (share := shares[i]) is not None]
        squared = math.fsum(s.signal + thinned * s.noise for s in some)
        if squared <= 0:  # noise taken off has left nothing
            return None
        return math.fsum(s.along for s in some) / math.sqrt(len(some) * squared)

    return figure


def relative_noise(shares: Sequence[ShareEstimates | None]) -> Statistic:
    """Expected squared error of one draw over the squared length of the mean draw."""

    def figure(problems: Sequence[int]) -> float | None:
        some = [share for i in problems if (share := shares[i]) is not None]
        signal = math.fsum(s.signal for s in some)
        return math.fsum(s.noise for s in some) / signal if signal > 0 else None

    return figure


def mean_cosine(shares: Sequence[ShareEstimates | None], draws: int) -> Statistic:
    """The cosine of the mean draw; None where too much noise is left in it after so many draws."""
    return _trusted_cosine(shares, 0.0, draws)


def budget_cosine(shares: Sequence[ShareEstimates | None], forwards: float, budget: float, draws: int) -> Statistic:
    """The cosine at a budget; None for an estimator of which one draw costs more, or of which so many draws say too
    little about the budget's."""
    if forwards > budget + 1e-9:
        return lambda problems: None
    return _trusted_cosine(shares, forwards / budget, draws)


def _trusted_cosine(shares: Sequence[ShareEstimates | None], thinned: float, draws: int) -> Statistic:
    """None where much of the noise that so many draws have left would have to be taken off."""
    if thinned * draws >= 1:
        return cosine(shares, thinned)
    noise = relative_noise(shares)(defined(shares))
    if noise is None or noise * (1 / draws - thinned) > MOST_LEFT * (1 + noise * thinned):
        return lambda problems: None
    return cosine(shares, thinned)


def bounded(interval: Interval | None, most: float = 1.0) -> Interval | None:
    """The interval of a correlation, which does not reach beyond 1; of the difference of two, 2."""
    if interval is None:
        return None
    mean, low, high = (None if value is None else max(-most, min(most, value)) for value in interval)
    assert mean is not None
    return Interval(mean, low, high)


def mean_of(values: Sequence[float | None]) -> Interval | None:
    """The mean of what is defined."""
    known = [value for value in values if value is not None]
    return t_interval(known) if known else None


# --- two estimators ------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A figure of two estimators on the problems where both have it, and what lies between them."""

    figure: str
    one: float | None
    other: float | None
    change: Interval | None
    """The first less the second; of variances the first over the second."""
    ratio: bool


def compared(audit: Audit, one: EstimatorFigures, other: EstimatorFigures, budget: float) -> list[Compared]:
    """Every figure of both, the change paired over problems. Two readings (spg's) are compared with their likes."""

    def at_budget(
        us: Sequence[ShareEstimates | None], them: Sequence[ShareEstimates | None]
    ) -> tuple[Statistic, Statistic]:
        ours = budget_cosine(us, one.forwards, budget, audit.draws)
        return ours, budget_cosine(them, other.forwards, budget, audit.draws)

    found = list[Compared]()
    for label in (label for label in one.values if label in other.values):
        both = one.values[label], other.values[label]
        us, them = (value_shares(values) for values in both)
        found += [
            _less("|bias|, nats", *_means(*([abs(v.bias) for v in values] for values in both)), most=math.inf),
            _over("variance", *_means(*([v.noise for v in values] for values in both))),
            _less("r", *_means(*([v.pearson for v in values] for values in both))),
            _less("rank r", *_means(*([v.spearman for v in values] for values in both))),
            _less(f"r at {budget:g}", *at_budget(us, them), defined(us, them)),
        ]
    us, them = slope_shares(one.slopes), slope_shares(other.slopes)
    some = defined(us, them)
    return [
        *found,
        _less("cosine", cosine(us, 1.0), cosine(them, 1.0), some),
        _less("cosine of mean", mean_cosine(us, audit.draws), mean_cosine(them, audit.draws), some),
        _over("rel. variance", relative_noise(us), relative_noise(them), some),
        _less(f"cosine at {budget:g}", *at_budget(us, them), some),
    ]


def _means(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[Statistic, Statistic, list[int]]:
    """The means of both, and the problems on which both have a say."""

    def mean(values: Sequence[float | None]) -> Statistic:
        def figure(problems: Sequence[int]) -> float | None:
            some = [value for i in problems if (value := values[i]) is not None]
            return math.fsum(some) / len(some) if some else None

        return figure

    return mean(one), mean(other), defined(one, other)


def difference(one: Statistic, other: Statistic) -> Statistic:
    def figure(problems: Sequence[int]) -> float | None:
        ours, theirs = one(problems), other(problems)
        return None if ours is None or theirs is None else ours - theirs

    return figure


def _less(name: str, one: Statistic, other: Statistic, problems: Sequence[int], most: float = 2.0) -> Compared:
    """`most`: how large a difference can be; of correlations 2."""
    change = bounded(jackknifed(difference(one, other), problems), most)
    return Compared(name, one(problems), other(problems), change, False)


def _over(name: str, one: Statistic, other: Statistic, problems: Sequence[int]) -> Compared:
    def ratio(some: Sequence[int]) -> float | None:
        ours, theirs = one(some), other(some)
        return None if ours is None or theirs is None or theirs < STILL else ours / theirs

    return Compared(name, one(problems), other(problems), jackknifed_size(ratio, problems), True)
