"""All intervals of the library, at 95 % unless a level is given. Standard library only; docs/architecture.md says why.

    t_interval, bootstrap      a mean over seeds (or problems)
    jackknife_interval         any statistic of several problems
    wilson_interval            a share of independent trials
    mean_proportion            a mean of scores in [0, 1]
    ratio_proportion           points over possible points
    paired_proportion_change   the change of that on the same problems

An interval over training seeds says nothing about other sets of problems, and the other way round.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

EXACT = 9
"""Up to this many values all resamples are enumerated instead of drawn."""
DRAWS = 20_000
Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
STILL = 1e-9
"""A positive figure below this is rounding."""

Statistic = Callable[[Sequence[int]], float | None]
"""Indices of problems -> a figure, None if it is not defined."""


class Interval(NamedTuple):
    """A mean with its interval; None for a single value, which has no spread."""

    mean: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def t_within(t: float, freedom: int) -> float:
    """P(|T| < t) of Student's t with `freedom` degrees: the finite series in cos(atan(t / sqrt(freedom)))."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (power - 1) / power * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """The t with P(|T| < t) = level."""
    if freedom < 1 or not 0 < level < 1:
        raise ValueError(f"freedom={freedom} must be at least 1 and level={level} within 0 to 1")
    low, high = 0.0, 1.0
    while t_within(high, freedom) < level:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_within(middle, freedom) < level else (low, middle)
    return high


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The mean and Student's interval, exact if the values are normal."""
    mean, count = _mean(values), len(values)
    if count == 1:
        return Interval(mean, None, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = t_quantile(count - 1, level) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def bootstrap(values: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """The mean and the percentile interval of the means of resamples.

    Up to EXACT values the distribution of those means is computed exactly; for more values DRAWS resamples are drawn.
    """
    mean, count = _mean(values), len(values)
    if count == 1:
        return Interval(mean, None, None)
    if count <= EXACT:
        distribution = sorted(_resample_means(values))
    else:
        rng = random.Random(seed)
        distribution = sorted((_mean(rng.choices(values, k=count)), 1 / DRAWS) for _ in range(DRAWS))
    tail = (1 - level) / 2
    return Interval(mean, _quantile(distribution, tail), _quantile(distribution, 1 - tail))


def jackknife_interval(statistic: Statistic, problems: Sequence[int]) -> Interval | None:
    """A figure of these problems with its interval, from the spread of the figures with one problem left out.

    None if it is not defined, or not without one of several problems.
    """
    whole, count = statistic(problems), len(problems)
    if whole is None or count == 1:
        return None if whole is None else Interval(whole, None, None)
    others = [value for i in problems if (value := statistic([j for j in problems if j != i])) is not None]
    if len(others) < count:
        return None
    mean = math.fsum(others) / count
    error = math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in others))
    half = t_quantile(count - 1) * error
    return Interval(whole, whole - half, whole + half)


def jackknife_log_interval(statistic: Statistic, problems: Sequence[int]) -> Interval | None:
    """The same for a positive figure, by its logarithm. Zero, up to rounding, has no interval."""
    whole = statistic(problems)
    if whole is not None and abs(whole) < STILL:
        return Interval(0.0, None, None)

    def logarithm(some: Sequence[int]) -> float | None:
        value = statistic(some)
        return math.log(value) if value is not None and value > 0 else None

    return mapped_interval(jackknife_interval(logarithm, problems), math.exp)


def mapped_interval(interval: Interval | None, function: Callable[[float], float]) -> Interval | None:
    """The interval of an increasing function of the figure."""
    if interval is None:
        return None
    low, high = (None if value is None else function(value) for value in (interval.low, interval.high))
    return Interval(function(interval.mean), low, high)


class Proportion(NamedTuple):
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class Difference(NamedTuple):
    """The difference of two scores on the same problems, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


def wilson_interval(hits: float, total: float) -> Proportion:
    """A share of independent trials with Wilson's interval."""
    p, z2 = hits / total, Z_95**2
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    return Proportion(p, centre - half, centre + half)


def mean_proportion(values: Sequence[float]) -> Proportion:
    """The mean of per-problem scores in [0, 1], with problems as the independent units.

    Wilson's interval with an effective number of trials, p (1 - p) / (variance of the mean). If every score is 0 or 1
    that is the number of problems, which is also used if all scores are equal.
    """
    count, mean = len(values), _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / count
    trials = count * mean * (1 - mean) / variance if variance > 1e-12 else float(count)  # rounding
    low, high = wilson_interval(mean * trials, trials)[1:]
    return Proportion(mean, min(low, mean), max(high, mean))


def ratio_proportion(points: Sequence[float], out_of: Sequence[float]) -> Proportion:
    """The sum of points over the sum of possible points, with rows as the independent units.

    Wilson's interval if every row gives one point or none, otherwise the normal interval of a ratio.
    """
    total, count = math.fsum(out_of), len(points)
    if total == 0:
        raise ValueError("no row has anything to score")
    if set(out_of) == {1.0} and set(points) <= {0.0, 1.0}:
        return wilson_interval(round(sum(points)), count)
    ratio = math.fsum(points) / total
    spread = math.fsum((p - ratio * o) ** 2 for p, o in zip(points, out_of, strict=True))
    if spread == 0 or count == 1:
        return mean_proportion([ratio] * count)
    half = Z_95 * math.sqrt(spread * count / (count - 1)) / total
    return Proportion(ratio, max(0.0, ratio - half), min(1.0, ratio + half))


def paired_proportion_change(before: Sequence[float], after: Sequence[float], out_of: Sequence[float]) -> Difference:
    """The change of the sum of points over the sum of possible points, problem by problem, with Agresti and Min's
    interval: the normal interval after adding half a problem of each of the four outcomes (neither, both, only one,
    only the other)."""
    change = [(b - a, possible) for a, b, possible in zip(before, after, out_of, strict=True)]
    total = math.fsum(out_of)
    mean = total / len(change)
    weighted = [(gain, possible, 1.0) for gain, possible in change]
    weighted += [(mean, mean, 0.5), (-mean, mean, 0.5), (0.0, mean, 1.0)]
    value = math.fsum(gain for gain, _ in change) / total
    total += 2 * mean
    centre = math.fsum(weight * gain for gain, _, weight in weighted) / total
    spread = math.fsum(weight * (gain - centre * possible) ** 2 for gain, possible, weight in weighted)
    half = Z_95 * math.sqrt(spread) / total
    return Difference(value, max(-1.0, centre - half), min(1.0, centre + half))


def paired_differences(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Each value minus its partner."""
    return [value - other for value, other in zip(values, base, strict=True)]


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("there are no values to average")
    return math.fsum(values) / len(values)


def _resample_means(values: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Every mean of len(values) draws with replacement, and its probability: one for each way to count the draws."""
    count = len(values)
    for times in _compositions(count, count):
        ways = math.factorial(count)
        for drawn in times:
            ways //= math.factorial(drawn)
        total = math.fsum(value * drawn for value, drawn in zip(values, times, strict=True))
        yield total / count, ways / count**count


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a sum of `parts` counts."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in _compositions(total - first, parts - 1))


def _quantile(distribution: Sequence[tuple[float, float]], level: float) -> float:
    """The smallest value whose cumulative probability reaches the level; pairs (value, probability) are sorted."""
    reached = 0.0
    for value, probability in distribution:
        reached += probability
        if reached >= level - 1e-12:
            return value
    return distribution[-1][0]
