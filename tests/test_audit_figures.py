"""From what was measured on each problem to figures, their intervals and the comparison of two estimators."""

import math

import pytest
import torch

from unmask.studies.audit.figures import (
    MOST_LEFT,
    Audit,
    EstimatorFigures,
    GradientFigures,
    ShareEstimates,
    ValueFigures,
    budget_cosine,
    cosine,
    defined_problems,
    estimator_comparison,
    mean_cosine,
    relative_noise,
    slope_shares,
    value_shares,
)
from unmask.studies.audit.report import slope_rows
from unmask.util.statistics import jackknife_interval, jackknife_log_interval, t_interval
from world import noise


def slope(cos: float, relative: float, scale: float = 1.0) -> GradientFigures:
    """A gradient of length `scale` whose expectation has this cosine with a reference of length 2."""
    return GradientFigures(along=2 * scale * cos, reference=4.0, signal=scale**2, noise=relative * scale**2)


def value(r: float, relative: float = 0.0, bias: float = -1.0) -> ValueFigures:
    return ValueFigures(bias, relative, r, r, covariance=3 * r, spread=1.0, exact_spread=9.0, tokens=4.0)


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    values = noise(1, 7).tolist()
    found = jackknife_interval(lambda some: math.fsum(values[i] for i in some) / len(some), range(7))
    assert found == pytest.approx(t_interval(values))
    assert jackknife_interval(lambda some: values[some[0]], [0]) == (values[0], None, None)
    assert jackknife_interval(lambda some: None, range(5)) is None
    assert jackknife_interval(lambda some: 1.0 if 3 in some else None, range(5)) is None  # hangs on one of them


def test_one_draw_is_the_mean_of_the_cosines_and_problems_count_alike() -> None:
    parts = [(0.9, 0.5, 1.0), (0.2, 3.0, 100.0), (-0.4, 0.0, 1e-3)]
    shares = slope_shares([slope(*part) for part in parts])
    ones = [cos / math.sqrt(1 + relative) for cos, relative, _ in parts]
    assert cosine(shares, 1.0)(range(3)) == pytest.approx(sum(ones) / 3)
    assert cosine(shares, 1.0)([2]) == pytest.approx(-0.4)


def test_cosine_of_one_draw_cosine_of_the_mean_and_relative_noise_belong_together() -> None:
    shares = slope_shares([slope(0.9, 0.5), None, slope(0.2, 3.0, 7.0)])
    one, mean, relative = cosine(shares, 1.0)(range(3)), cosine(shares, 0.0)(range(3)), relative_noise(shares)(range(3))
    assert one is not None and mean is not None and relative is not None
    assert one == pytest.approx(mean / math.sqrt(1 + relative))


def test_averaging_draws_thins_the_noise_as_the_budget_says() -> None:
    """Vectors with noise, four draws averaged: their mean cosine is what the shares of single draws foretell."""
    expected_P, reference_P, level = noise(0, 60), noise(1, 60) + noise(0, 60), 3.0
    draw_DP = expected_P + level * noise(2, 20_000, 60)
    foretold = cosine(
        [
            ShareEstimates(
                float(expected_P @ reference_P)
                / math.sqrt(float(reference_P @ reference_P) * (float(expected_P @ expected_P) + 60 * level**2)),
                float(expected_P @ expected_P) / (float(expected_P @ expected_P) + 60 * level**2),
                60 * level**2 / (float(expected_P @ expected_P) + 60 * level**2),
            )
        ],
        1 / 4,
    )([0])
    mean_DP = draw_DP.view(-1, 4, 60).mean(1)
    cosines = (mean_DP @ reference_P) / (mean_DP.norm(dim=-1) * reference_P.norm())
    assert foretold == pytest.approx(float(cosines.mean()), abs=0.01)


def test_values_that_do_not_vary_and_gradients_that_vanish_have_no_say() -> None:
    still = value(0.5)._replace(exact_spread=0.0)
    assert value_shares([still, value(0.5)])[0] is None
    assert slope_shares([GradientFigures(0.0, 4.0, 0.0, 0.0)]) == [None]
    assert cosine([None, None], 1.0)(range(2)) is None


def test_problems_without_a_signal_do_not_narrow_an_interval() -> None:
    rows = [slope(0.9, 0.5), slope(0.4, 1.0), slope(0.7, 0.1)]
    one = Audit("", "", [EstimatorFigures("a", 1.0, {}, [*rows])], 16)
    other = Audit("", "", [EstimatorFigures("a", 1.0, {}, [rows[0], None, None, rows[1], None, rows[2]])], 16)
    assert slope_rows(one, 4.0) == slope_rows(other, 4.0)
    assert defined_problems(
        [None, ShareEstimates(1, 1, 0), ShareEstimates(1, 1, 0)],
        [ShareEstimates(1, 1, 0), None, ShareEstimates(1, 1, 0)],
    ) == [2]


def test_an_expectation_lost_in_noise_has_no_cosine() -> None:
    shares = slope_shares([GradientFigures(0.1, 4.0, -0.01, 1.0)])
    assert cosine(shares, 0.0)([0]) is None and relative_noise(shares)([0]) is None
    assert mean_cosine(shares, 10**9)([0]) is None
    assert cosine(shares, 1.0)([0]) == pytest.approx(0.1 / math.sqrt(4 * 0.99))


def test_the_interval_of_a_size_is_that_of_its_logarithm() -> None:
    values = noise(1, 7).exp().tolist()

    def middle(some: list[int]) -> float:  # the geometric mean
        return math.prod(values[i] for i in some) ** (1 / len(some))

    found = jackknife_log_interval(middle, range(7))
    assert found == pytest.approx([math.exp(x) for x in t_interval([math.log(v) for v in values])])
    assert jackknife_log_interval(lambda some: 1e-12, range(3)) == (0.0, None, None)
    assert jackknife_log_interval(lambda some: -0.5, range(3)) is None


# --- the cosine of the mean draw -------------------------------------------------------------------------------------


def sampled(cos: float, relative: float, draws: int, problems: int, seed: int) -> list[tuple[GradientFigures, float]]:
    """Draws round an expectation of length 1, and the cosine of their mean as it stands."""
    found, size = list[tuple[GradientFigures, float]](), 40
    reference_P, expected_P = torch.eye(size, dtype=torch.float64)[0], torch.zeros(size, dtype=torch.float64)
    expected_P[0], expected_P[1] = cos, math.sqrt(1 - cos**2)
    for draw_DP in expected_P + math.sqrt(relative / size) * noise(seed, problems, draws, size):
        mean_P = draw_DP.mean(0)
        left = float((draw_DP - mean_P).square().sum() / (draws - 1))
        one = GradientFigures(float(mean_P @ reference_P), 1.0, float(mean_P @ mean_P) - left / draws, left)
        found.append((one, float(mean_P[0] / mean_P.norm())))
    return found


def test_the_mean_of_some_draws_is_too_low_by_the_noise_that_is_left_and_is_put_right() -> None:
    cos, relative, draws = 0.7, 2.0, 16
    found = sampled(cos, relative, draws, 600, seed=0)
    raw = math.fsum(one for _, one in found) / len(found)
    assert raw == pytest.approx(cos / math.sqrt(1 + relative / draws), abs=0.006) and raw < cos - 0.03
    shares = slope_shares([one for one, _ in found])
    assert cosine(shares, 0.0)(range(600)) == pytest.approx(cos, abs=0.006)


def test_the_intervals_hold_the_truth_up_to_the_bound() -> None:
    """Seven problems, noise a little below the bound: about 95 of 100 intervals, for a cosine of one as well."""
    draws, repeats = 16, 200
    for cos in (0.5, 1.0):
        held = 0
        for seed in range(repeats):
            shares = slope_shares([one for one, _ in sampled(cos, 0.8 * MOST_LEFT * draws, draws, 7, seed)])
            found = jackknife_interval(mean_cosine(shares, draws), range(7))
            assert found is not None and found.low is not None and found.high is not None
            held += found.low <= cos <= found.high
        assert 0.90 * repeats <= held <= 0.99 * repeats


def test_beyond_the_bound_nothing_is_told_and_more_draws_help() -> None:
    shares = slope_shares([slope(0.9, 2.1), slope(0.8, 2.1)])
    assert mean_cosine(shares, 16)(range(2)) is None
    assert mean_cosine(shares, 17)(range(2)) == pytest.approx(0.85)
    rows = Audit("", "", [EstimatorFigures("a", 1.0, {}, [slope(0.9, 2.1)])], 16), 4.0
    assert slope_rows(*rows)[0][3:5] == ("-", "2.1")


def test_a_budget_of_more_draws_than_were_made_is_told_by_the_same_rule() -> None:
    shares = slope_shares([slope(0.9, 2.1), slope(0.8, 2.1)])
    assert budget_cosine(shares, 1.0, 16.0, 16)(range(2)) == pytest.approx(0.85 / math.sqrt(1 + 2.1 / 16))
    assert budget_cosine(shares, 1.0, 64.0, 16)(range(2)) == pytest.approx(0.85 / math.sqrt(1 + 2.1 / 64))
    assert budget_cosine(shares, 1.0, 1e6, 16)(range(2)) is None and budget_cosine(shares, 2.0, 1.0, 16)([0]) is None
    told = list[float]()
    for relative in (0.1, 0.5, 1.0, 1.1, 2.0, 10.0):  # the mean of four draws points along the reference
        lucky = slope_shares([GradientFigures(math.sqrt(1 + relative / 4), 1.0, 1.0, relative)])
        told += [] if (found := budget_cosine(lucky, 1.0, 8.0, 4)([0])) is None else [found]
    assert cosine(lucky, 1 / 8)([0]) > 1.2 and len(told) == 4 and 1 < max(told) <= math.sqrt(1 + MOST_LEFT)


# --- two estimators --------------------------------------------------------------------------------------------------


def test_a_comparison_is_paired() -> None:
    """Without noise every figure is a mean over problems: Student's interval of the differences."""
    ours, theirs = [0.9, 0.5, 0.7, 0.3], [0.6, 0.4, 0.5, 0.1]
    one, other = (
        EstimatorFigures(name, 2.0, {"": [value(r, bias=-r) for r in rs]}, [None, *(slope(r, 0.0) for r in rs)])
        for name, rs in (("a", ours), ("b", theirs))
    )
    found = {row.figure: row for row in estimator_comparison(Audit("", "", [one, other], 16), one, other, 4.0)}
    apart = t_interval([a - b for a, b in zip(ours, theirs, strict=True)])
    for figure in ("|bias|, nats", "r", "rank r", "r at 4", "cosine", "cosine of mean", "cosine at 4"):
        assert found[figure].change == pytest.approx(apart)
        assert (found[figure].one, found[figure].other) == pytest.approx((0.6, 0.4))
    assert found["variance"].change is None is found["rel. variance"].change  # 0 over 0


def test_variances_are_compared_by_their_ratio() -> None:
    """Half the noise on every problem is half the variance, with nothing to doubt however the problems differ."""
    noises = [1.0, 3.0, 0.2]
    one, other = (
        EstimatorFigures("", 1.0, {"": [value(0.5, part * n) for n in noises]}, [slope(0.5, part * 3) for _ in noises])
        for part in (0.5, 1.0)
    )
    found = {row.figure: row for row in estimator_comparison(Audit("", "", [one, other], 64), one, other, 4.0)}
    for figure in ("variance", "rel. variance"):
        assert found[figure].ratio and found[figure].change == pytest.approx((0.5, 0.5, 0.5))
    assert found["rel. variance"].one == pytest.approx(1.5)


def test_readings_are_compared_with_their_likes_and_problems_without_a_say_are_left_out() -> None:
    rows = [value(0.5), value(0.8), value(0.2)]
    plain = EstimatorFigures("a", 1.0, {"": rows}, [slope(0.9, 0.0), None, slope(0.7, 0.0)])
    split = EstimatorFigures(
        "b", 1.0, {"A > 0": rows, "A < 0": rows}, [slope(0.4, 0.0), slope(0.0, 0.0), slope(0.2, 0.0)]
    )
    found = estimator_comparison(Audit("", "", [plain, split], 16), plain, split, 4.0)
    assert [row.figure for row in found] == ["cosine", "cosine of mean", "rel. variance", "cosine at 4"]
    assert found[0].change == pytest.approx((0.5, 0.5, 0.5)) and found[0].other == pytest.approx(0.3)
