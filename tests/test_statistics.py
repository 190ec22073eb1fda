"""Intervals: against closed forms, printed tables, brute force, scipy, and the coverage they promise."""

import itertools
import math
import random
import statistics

import pytest

from unmask.util.statistics import (
    EXACT,
    Z_95,
    Interval,
    bootstrap,
    mean_proportion,
    paired_differences,
    t_interval,
    t_quantile,
    t_within,
    wilson_interval,
)


@pytest.mark.parametrize("t", [0.1, 0.7, 1.0, 2.5, 40.0])
def test_small_freedoms_have_closed_forms(t: float) -> None:
    closed = {
        1: 2 / math.pi * math.atan(t),
        2: t / math.sqrt(2 + t * t),
        3: 2 / math.pi * (math.atan(t / math.sqrt(3)) + t / math.sqrt(3) / (1 + t * t / 3)),
        4: t * (t * t + 6) / (t * t + 4) ** 1.5,
    }
    for freedom, value in closed.items():
        assert t_within(t, freedom) == pytest.approx(value, abs=1e-13)


@pytest.mark.parametrize("freedom", [1, 2, 5, 8, 19, 60])
def test_the_law_is_the_integral_of_the_density(freedom: int) -> None:
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def density(x: float) -> float:
        return scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    end, pieces = 2.3, 2000
    width = end / pieces
    inner = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, pieces))
    simpson = width / 3 * (density(0) + inner + density(end))
    assert t_within(end, freedom) == pytest.approx(2 * simpson, abs=1e-11)


def test_quantiles_are_those_of_the_printed_tables() -> None:
    # two-sided 95 %: Student's table to six decimals
    table = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 9: 2.262157, 10: 2.228139, 29: 2.045230}
    for freedom, value in table.items():
        assert t_quantile(freedom) == pytest.approx(value, abs=1e-6)
    assert t_quantile(4, 0.99) == pytest.approx(4.604095, abs=1e-6)
    assert t_quantile(10**5) == pytest.approx(1.959988, abs=1e-6)  # close to the normal's 1.959964
    assert t_quantile(2, 0.5) == pytest.approx(math.sqrt(2 / 3), abs=1e-12)


def test_a_t_interval_by_hand() -> None:
    found = t_interval([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * math.sqrt(5 / 3) / 2
    assert found.mean == 2.5
    assert found.low == pytest.approx(2.5 - half, abs=1e-6) and found.high == pytest.approx(2.5 + half, abs=1e-6)
    assert t_interval([7.0]) == bootstrap([7.0]) == Interval(7.0, None, None)
    assert t_interval([0.25] * 4) == Interval(0.25, 0.25, 0.25)


def test_a_bootstrap_is_the_quantile_of_all_resamples() -> None:
    values = [0.3, -1.2, 2.0, 0.9, 0.05]
    means = sorted(math.fsum(drawn) / 5 for drawn in itertools.product(values, repeat=5))
    found = bootstrap(values)
    # 3,125 equally likely means: the 79th (ceil of 2.5 %) and the 3,047th
    assert found.low == pytest.approx(means[78], abs=1e-12)
    assert found.high == pytest.approx(means[3046], abs=1e-12)
    assert bootstrap([1.0, 3.0]) == Interval(2.0, 1.0, 3.0)  # each extreme has a quarter of the mass
    assert bootstrap([1.0, 3.0], level=0.4) == Interval(2.0, 2.0, 2.0)  # the middle has half of it


def test_drawn_resamples_agree_with_counted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    values = [rng.gauss(1.0, 2.0) for _ in range(8)]
    counted = bootstrap(values)
    monkeypatch.setattr("unmask.util.statistics.EXACT", 1)
    drawn = bootstrap(values, seed=3)
    assert drawn == bootstrap(values, seed=3) != bootstrap(values, seed=4)
    spread = (counted.high - counted.low) / 4
    assert abs(drawn.low - counted.low) < 0.05 * spread and abs(drawn.high - counted.high) < 0.05 * spread


def test_many_values_bootstrap_like_the_normal() -> None:
    values = [math.sin(i) for i in range(200)]
    count, mean = len(values), sum(values) / len(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values)) / count
    found = bootstrap(values)
    assert count > EXACT
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.06 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.06 * error)


def test_t_covers_as_promised_and_a_bootstrap_of_few_seeds_does_not() -> None:
    """Why few seeds are said to be unreliable: of normal values, t covers 95 % and a bootstrap of 3 far less."""
    rng, hits = random.Random(5), {"t": 0, "bootstrap": 0}
    for _ in range(1500):
        values = [rng.gauss(0.0, 1.0) for _ in range(3)]
        hits["t"] += not t_interval(values).excludes_zero
        hits["bootstrap"] += not bootstrap(values).excludes_zero
    assert 0.935 < hits["t"] / 1500 < 0.965
    assert 0.70 < hits["bootstrap"] / 1500 < 0.78  # 3/4: it misses where all three are of one sign


def test_pairs_and_zero() -> None:
    assert paired_differences([3.0, 5.0], [1.0, 6.0]) == [2.0, -1.0]
    with pytest.raises(ValueError, match="no values"):
        t_interval([])
    assert Interval(1.0, 0.5, 2.0).excludes_zero and Interval(-1.0, -2.0, -0.5).excludes_zero
    assert not Interval(0.5, 0.0, 1.0).excludes_zero and not Interval(0.5, None, None).excludes_zero


def test_wilson_contains_the_shares_that_a_score_test_does_not_reject() -> None:
    hits, total = 7, 20
    share = wilson_interval(hits, total)
    for edge in (share.low, share.high):
        assert abs(hits / total - edge) == pytest.approx(Z_95 * math.sqrt(edge * (1 - edge) / total), rel=1e-9)
    assert wilson_interval(0, 10).low == pytest.approx(0, abs=1e-12)
    assert wilson_interval(10, 10).high == pytest.approx(1)


def test_the_interval_of_a_mean_counts_problems_not_samples() -> None:
    values = [0.0, 0.5, 1.0, 0.5, 0.25]
    share = mean_proportion(values)
    # The normal score test, whose variance at another mean is scaled like that of a share.
    scale = statistics.pvariance(values) / (0.45 * 0.55) / 5
    for edge in share[1:]:
        assert abs(share.value - edge) == pytest.approx(Z_95 * math.sqrt(scale * edge * (1 - edge)), rel=1e-9)
    flat = mean_proportion([1.0] * 10)
    assert flat.high == pytest.approx(1) and 0.6 < flat.low < 0.8  # ten of ten does not prove certainty


@pytest.mark.parametrize(("hits", "total"), [(0, 1), (1, 1), (1, 2), (1, 50), (7, 20), (19, 20)])
def test_one_sample_a_problem_has_the_interval_of_a_share(hits: int, total: int) -> None:
    assert mean_proportion([1.0] * hits + [0.0] * (total - hits)) == pytest.approx(wilson_interval(hits, total))
    assert mean_proportion([1 / 3] * 9) == pytest.approx(wilson_interval(3, 9))


def test_the_intervals_are_scipys_to_nine_digits() -> None:
    """scipy is not a dependency (docs/architecture.md); where it is installed it checks ours."""
    scipy = pytest.importorskip("scipy.stats", reason="scipy is not installed (pip install scipy)")
    assert pytest.approx(scipy.norm.ppf(0.975), abs=1e-12) == Z_95
    for freedom, level in itertools.product((1, 2, 3, 4, 7, 30, 1000), (0.5, 0.9, 0.95, 0.99)):
        assert t_quantile(freedom, level) == pytest.approx(scipy.t.ppf((1 + level) / 2, freedom), rel=1e-11)
    for hits, total in ((0, 1), (1, 2), (7, 20), (1319, 1319), (600, 1319)):
        assert wilson_interval(hits, total)[1:] == pytest.approx(
            scipy.binomtest(hits, total).proportion_ci(method="wilson"), abs=1e-9
        )
    rng = random.Random(0)
    for count in (2, 5, 8, 30):
        values = [rng.gauss(0.5, 0.2) for _ in range(count)]
        expected = scipy.ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert t_interval(values)[1:] == pytest.approx(tuple(expected), abs=1e-9)
    many = scipy.bootstrap((values,), statistics.fmean, vectorized=False, method="percentile", n_resamples=4000, rng=1)
    error = statistics.stdev(values) / math.sqrt(30)
    assert bootstrap(values)[1:] == pytest.approx(tuple(many.confidence_interval), abs=0.15 * error)
