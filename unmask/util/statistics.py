"""Means over seeds with their uncertainty: Student's t, and the bootstrap of paired differences.

Standard library only. Both intervals are over training seeds, not over other sets of problems.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

EXACT = 9
"""Up to this many values all resamples are enumerated instead of drawn."""
DRAWS = 20_000


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
