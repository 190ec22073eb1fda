"""How well a rule agrees with the true credit of steps: correlation, ranking within a rollout, the committing step; and
the variance that a distribution over steps leaves. Intervals are bootstraps over groups.

Every figure is a function of sums, so a group is a row of sums and a resample a sum of rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.studies.credit.rules import StepCredit
from unmask.studies.credit.values import StateValues
from unmask.util.statistics import Interval

LARGE = 0.2
"""A step is decisive if it changes the expected reward by more than this, by both halves and with the same sign."""
COMMITTED = 0.95
"""A state is committed if this share of its completions show one behaviour."""
RESAMPLES = 4000
EQUAL = 1e-9
"""Scores that differ by less are ties."""

Figure = Callable[[Tensor], Tensor]
"""Sums of D resamples, (D, K) -> the figure of each, (D,), nan if it is not defined."""


def bootstrap_groups(sum_GK: Tensor, figure: Figure) -> Interval | None:
    """A figure of sums over groups, with the percentile interval of resampled groups; None if it is not defined."""
    whole = float(figure(sum_GK.sum(0, keepdim=True)))
    groups = len(sum_GK)
    if whole != whole or groups == 1:
        return None if whole != whole else Interval(whole, None, None)
    drawn_DG = torch.randint(groups, (RESAMPLES, groups), generator=torch.Generator().manual_seed(0))
    count_DG = torch.zeros(RESAMPLES, groups, dtype=torch.float64).scatter_add(
        1, drawn_DG, torch.ones_like(drawn_DG).double()
    )
    value_D = figure(count_DG @ sum_GK)
    value_D = value_D[~value_D.isnan()]
    low, high = value_D.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(whole, low, high)


def sums_by_group(value_BK: Tensor, group_B: Tensor) -> Tensor:
    groups, index_B = group_B.unique(return_inverse=True)
    return torch.zeros(len(groups), value_BK.shape[1], dtype=torch.float64).index_add(0, index_B, value_BK.double())


def ratio(sum_DK: Tensor) -> Tensor:
    """The first sum over the second."""
    return torch.where(sum_DK[:, 1] > 0, sum_DK[:, 0] / sum_DK[:, 1], torch.nan)


# --- correlation ---------------------------------------------------------------------------------------------------


def correlation_sums(gradient_BT: Tensor, change_HBT: Tensor, wrote_BT: Tensor, group_B: Tensor) -> Tensor:
    """For `corrected_correlation` and `reliability`, over the steps that wrote something."""
    x, (a, b) = gradient_BT, change_HBT
    mean = (a + b) / 2
    parts = (torch.ones_like(x), x, x * x, mean, mean * mean, x * mean, a, b, a * b)
    return sums_by_group(torch.stack([(part * wrote_BT).sum(-1) for part in parts], -1), group_B)


def corrected_correlation(sum_DK: Tensor) -> Tensor:
    """r of a rule's credit with the true difference: r with the mean of the halves over the root of its reliability.

    That is cov(x, mean) / sqrt(var(x) cov(a, b)): the covariance of independent halves is the variance of the truth.
    """
    n, x, xx, mean, _, xm, a, b, ab = sum_DK.unbind(-1)
    product = (xx / n - (x / n) ** 2) * (ab / n - a * b / n**2)
    return torch.where(product > 1e-15, (xm / n - x * mean / n**2) / product.clamp(min=1e-15).sqrt(), torch.nan)


def correlation_gain(sum_DK: Tensor) -> Tensor:
    """The corrected correlation of a rule minus that of another; the sums of the two side by side."""
    one_DK, other_DK = sum_DK.chunk(2, dim=-1)
    return corrected_correlation(one_DK) - corrected_correlation(other_DK)


def reliability(sum_DK: Tensor) -> Tensor:
    """The share of the variance of the mean of both halves that is not noise."""
    n, _, _, mean, square, _, a, b, ab = sum_DK.unbind(-1)
    variance = square / n - (mean / n) ** 2
    return torch.where(variance > 1e-15, (ab / n - a * b / n**2) / variance, torch.nan)


# --- decisive steps ------------------------------------------------------------------------------------------------


class DecisiveSteps(NamedTuple):
    """Steps (B, T) that both halves call decisive, and that neither does. Where they disagree it is neither."""

    decisive_BT: Tensor
    other_BT: Tensor

    @property
    def scored_B(self) -> Tensor:
        return self.decisive_BT.any(-1) & self.other_BT.any(-1)


def decisive_steps(change_HBT: Tensor, wrote_BT: Tensor, large: float = LARGE) -> DecisiveSteps:
    (a, b), big_HBT = change_HBT, change_HBT.abs() > large
    return DecisiveSteps(wrote_BT & big_HBT.all(0) & (a * b > 0), wrote_BT & ~big_HBT.any(0))


def rank_share(score_BT: Tensor, high_BT: Tensor, low_BT: Tensor) -> Tensor:
    """AUROC within each row: how often a score in `high` exceeds one in `low`, ties half; nan without both."""
    gap_BTT = score_BT[:, :, None] - score_BT[:, None, :]
    win_BTT = (gap_BTT > EQUAL).double() + 0.5 * (gap_BTT.abs() <= EQUAL)
    pair_BTT = high_BT[:, :, None] & low_BT[:, None, :]
    return torch.where(pair_BTT.any(-1).any(-1), (win_BTT * pair_BTT).sum((1, 2)) / pair_BTT.sum((1, 2)), torch.nan)


def mean_over_groups(value_B: Tensor, group_B: Tensor) -> Interval | None:
    """The mean over the rollouts that have the value, with its interval over groups."""
    defined_B = ~value_B.isnan()
    return bootstrap_groups(sums_by_group(torch.stack([value_B.nan_to_num(), defined_B.double()], -1), group_B), ratio)


# --- the committing step -------------------------------------------------------------------------------------------


def committing_step(values: StateValues) -> Tensor:
    """The first step after which 95 % of the completions show one behaviour, (B,); -1 if they do before any step."""
    committed_BT = values.shown_BTN.max(-1).values >= COMMITTED
    return committed_BT.double().argmax(-1) - 1


def weight_at(step_B: Tensor, credit: StepCredit, wrote_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The |weight| of a step over the mean of the steps of its rollout, and its rank among the others, 0 to 1; (B,)
    each, nan for step -1 and for rollouts without weight."""
    weight_BT = credit.weight_BT.abs() * wrote_BT
    here_BT = (torch.arange(wrote_BT.shape[1]) == step_B[:, None]) & wrote_BT
    mean_B = weight_BT.sum(-1) / wrote_BT.sum(-1).clamp(min=1)
    share_B = (weight_BT * here_BT).sum(-1) / mean_B
    defined_B = here_BT.any(-1) & (mean_B > 0)
    return torch.where(defined_B, share_B, torch.nan), rank_share(weight_BT, here_BT, wrote_BT & ~here_BT)


# --- distributions over steps --------------------------------------------------------------------------------------


def variance_left(mass_BT: Tensor, change_HBT: Tensor, wrote_BT: Tensor) -> Tensor:
    """The variance of an estimate of sum over t of V(s_{t+1}) - V(s_t) from one step, drawn by `mass_BT` and divided by
    its probability, (B,): sum of d_t^2 / P(t) - (sum of d_t)^2, with the product of the halves for a square."""
    probability_BT = mass_BT / mass_BT.sum(-1, keepdim=True)
    (a, b) = change_HBT
    square_BT = torch.where(wrote_BT & (probability_BT > 0), a * b / probability_BT, 0.0)
    return square_BT.sum(-1) - (a * wrote_BT).sum(-1) * (b * wrote_BT).sum(-1)
