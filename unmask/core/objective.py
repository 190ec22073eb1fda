"""Objectives and divergences: log-probabilities in, (loss, metrics) out. Pure; gradients flow through logp_NL.

    loss = - sum over units, tokens:  weight_M * scale_ML * surrogate(logp, old, advantage * credit)

Log-likelihood first, ratio second: rows of a unit are added up (probes.unit_likelihood), then there is one
ratio, one clip and one KL for each token, sequence or step, depending on the objective.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.core.probes import Probes, unit_asked, unit_likelihood
from unmask.core.shapes import GIVEN, Metrics

Objective = Callable[[Tensor, Tensor, Probes, Tensor, Tensor], tuple[Tensor, Metrics]]
"""(logp_NL, old_NL, probes, advantage_B, credit_BL) -> loss, metrics.

The loss is a sum over traces: the part of one trace may depend on all answers about it, and on no other trace's.
"""

Divergence = Callable[[Tensor, Tensor, Probes], Tensor]
"""(logp_NL, reference_NL, probes) -> the divergence that a method's `kl` multiplies."""

CrossEntropy = Callable[[Tensor, Probes], Tensor]
"""(cross_NL, probes) -> the cross-entropy to the teacher that a method's `distillation` multiplies."""

Normaliser = Callable[[Tensor, Probes], Tensor]
"""(counted_ML, probes) -> the weight of every token in the loss, (M, L), zero where not counted."""


# Normalisers: the choice changes the weight of a token as much as credit does, so every method names its own.


def token_mean(counted_ML: Tensor, probes: Probes) -> Tensor:
    """Every counted token of the batch weighs the same: 1 / (tokens of the batch)."""
    return counted_ML.double() / counted_ML.sum().clamp(min=1)


def sequence_mean(counted_ML: Tensor, probes: Probes) -> Tensor:
    """Every trace weighs the same, divided among its tokens: 1 / (B * tokens of the trace)."""
    tokens_B = torch.zeros(len(probes.trace), dtype=torch.float64, device=counted_ML.device)
    tokens_B = tokens_B.index_add(0, probes.trace_M, counted_ML.sum(-1).double()).clamp(min=1)
    return counted_ML / tokens_B[probes.trace_M, None] / len(probes.trace)


def canvas_mean(counted_ML: Tensor, probes: Probes) -> Tensor:
    """Every position of the completion weighs the same, written or not: 1 / (B * its length). No length bias."""
    length_B = (probes.trace.block_BL != GIVEN).sum(-1).double()
    return counted_ML / length_B[probes.trace_M, None] / len(probes.trace)


def trace_sum(counted_ML: Tensor, probes: Probes) -> Tensor:
    """Tokens are added up, traces averaged: 1 / B."""
    return counted_ML.double() / len(probes.trace)


def step_mean(counted_ML: Tensor, probes: Probes) -> Tensor:
    """Every unit of a trace weighs the same, divided among its tokens (TraceRL, CJ-GRPO)."""
    units_B = torch.zeros(len(probes.trace), dtype=torch.float64, device=counted_ML.device)
    units_B = units_B.index_add(0, probes.trace_M, counted_ML.any(-1).double()).clamp(min=1)
    share_ML = counted_ML.double() / counted_ML.sum(-1, keepdim=True).clamp(min=1)
    return share_ML / units_B[probes.trace_M, None] / len(probes.trace)


def unit_mean(counted_ML: Tensor, probes: Probes) -> Tensor:
    """Every unit of the batch weighs the same, divided among its tokens: a trace with more units weighs more."""
    share_ML = counted_ML.double() / counted_ML.sum(-1, keepdim=True).clamp(min=1)
    return share_ML / counted_ML.any(-1).sum().clamp(min=1)


NORMALISERS: dict[str, Normaliser] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "canvas_mean": canvas_mean,
    "trace_sum": trace_sum,
    "step_mean": step_mean,
    "unit_mean": unit_mean,
}


def counted_units(probes: Probes) -> Tensor:
    """Tokens that are asked in a unit and count in its trace, (M, L)."""
    return unit_asked(probes) & probes.trace.counted_BL[probes.trace_M]


def ratio_of(gain: Tensor) -> Tensor:
    """exp of a log-ratio, at most e^20: a rank swap or a token that became impossible must not make it inf."""
    return gain.clamp(max=20.0).exp()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), and where the clip decides."""
    free, bound = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    return torch.minimum(free, bound), (bound < free).detach()


def _mean(value_ML: Tensor, counted_ML: Tensor) -> Tensor:
    return (value_ML.detach() * counted_ML).sum() / counted_ML.sum().clamp(min=1)


def _unit_clip(
    ratio_M: Tensor, value_M: Tensor, live_M: Tensor, probes: Probes, low: float, high: float
) -> tuple[Tensor, Metrics]:
    """One ratio a unit; traces averaged, units added by weight."""
    surrogate_M, active_M = clipped_surrogate(ratio_M, value_M, low, high)
    scale_M = (probes.weight_M / len(probes.trace)).to(ratio_M.dtype) * live_M
    metrics = {"ratio": _mean(ratio_M, live_M), "clipped": _mean(active_M.to(ratio_M.dtype), live_M)}
    return -(scale_M * surrogate_M).sum(), metrics


def _length(probes: Probes) -> Tensor:
    """The written tokens that count in the trace of each unit, (M,); at least 1."""
    return (probes.trace.counted_BL & probes.trace.filled_BL).sum(-1).clamp(min=1)[probes.trace_M]


# Objectives


def token_clip(
    logp_NL: Tensor,
    old_NL: Tensor,
    probes: Probes,
    advantage_B: Tensor,
    credit_BL: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    normaliser: Normaliser = token_mean,
) -> tuple[Tensor, Metrics]:
    """One ratio a token: rho_i = exp(l_i - l_i_old), - sum of scale * Clip(rho_i, w_i A)."""
    counted_ML = counted_units(probes)
    ratio_ML = ratio_of(unit_likelihood(logp_NL - old_NL, probes))
    value_ML = (advantage_B[:, None] * credit_BL)[probes.trace_M].to(ratio_ML.dtype)
    surrogate_ML, active_ML = clipped_surrogate(ratio_ML, value_ML, low, high)
    scale_ML = (normaliser(counted_ML, probes) * probes.weight_M[:, None]).to(ratio_ML.dtype)
    metrics = {"ratio": _mean(ratio_ML, counted_ML), "clipped": _mean(active_ML.to(ratio_ML.dtype), counted_ML)}
    return -(scale_ML * surrogate_ML.masked_fill(~counted_ML, 0.0)).sum(), metrics


def step_clip(
    logp_NL: Tensor,
    old_NL: Tensor,
    probes: Probes,
    advantage_B: Tensor,
    credit_BL: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """One ratio a unit, tokens and choice of positions together; traces averaged, units added by weight.

    A step is weighed by the mean credit of the tokens it committed. Tokens that do not count are left out of
    the ratio; the choice of positions stays in as long as any token of the step counts.
    """
    counted_ML = counted_units(probes)
    in_ratio_NL = counted_ML[probes.unit_N] & probes.asked_NL
    if probes.passed_NL is not None:
        in_ratio_NL = in_ratio_NL | (probes.passed_NL & counted_ML.any(-1)[probes.unit_N, None])
    gain_NL = (logp_NL - old_NL).masked_fill(~in_ratio_NL, 0.0)
    ratio_M = ratio_of(unit_likelihood(gain_NL, probes).sum(-1))
    credit_ML = credit_BL[probes.trace_M].masked_fill(~counted_ML, 0.0)
    credit_M = credit_ML.sum(-1) / counted_ML.sum(-1).clamp(min=1)
    value_M = (advantage_B[probes.trace_M] * credit_M).to(ratio_M.dtype)
    loss, metrics = _unit_clip(ratio_M, value_M, counted_ML.any(-1), probes, low, high)
    if probes.passed_NL is not None:
        choice_M = unit_likelihood(logp_NL.detach() * probes.passed_NL, probes).sum(-1)
        metrics["choice_logp"] = _mean(choice_M, counted_ML.any(-1) & (value_M != 0))
    return loss, metrics


def sequence_clip(
    logp_NL: Tensor,
    old_NL: Tensor,
    probes: Probes,
    advantage_B: Tensor,
    credit_BL: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """One ratio a unit: rho = exp((1 / |o|) sum_i w_i (l_i - l_i_old)); traces averaged, units added by weight.

    |o| is the number of tokens of the trace that count, asked or not. Credit is in the exponent: our choice, no paper
    defines it.
    """
    counted_ML = counted_units(probes)
    length_M = _length(probes)
    gain_ML = unit_likelihood(logp_NL - old_NL, probes).masked_fill(~counted_ML, 0.0)
    weighed_ML = credit_BL[probes.trace_M].to(gain_ML.dtype) * gain_ML
    ratio_M = ratio_of(weighed_ML.sum(-1) / length_M)
    value_M = advantage_B[probes.trace_M].to(ratio_M.dtype)
    return _unit_clip(ratio_M, value_M, counted_ML.any(-1), probes, low, high)


def policy_gradient(
    logp_NL: Tensor,
    old_NL: Tensor,
    probes: Probes,
    advantage_B: Tensor,
    credit_BL: Tensor,
    *,
    normaliser: Normaliser = trace_sum,
) -> tuple[Tensor, Metrics]:
    """No ratio: - sum of scale * w_i A * l_i. On-policy its gradient is token_clip's.

    The metric `logp` is over traces with an advantage: the others need not be asked.
    """
    counted_ML = counted_units(probes)
    likelihood_ML = unit_likelihood(logp_NL, probes).masked_fill(~counted_ML, 0.0)
    value_ML = (advantage_B[:, None] * credit_BL)[probes.trace_M].to(likelihood_ML.dtype)
    scale_ML = (normaliser(counted_ML, probes) * probes.weight_M[:, None]).to(likelihood_ML.dtype)
    used_ML = counted_ML & (advantage_B != 0)[probes.trace_M, None]
    return -(scale_ML * value_ML * likelihood_ML).sum(), {"logp": _mean(likelihood_ML, used_ML)}


# Divergences to a reference. With d = log p_ref - log p and samples from p: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1.


def k1(d: Tensor) -> Tensor:
    """Unbiased for KL(p || ref) in value; its gradient on-policy is zero in expectation."""
    return -d


def k2(d: Tensor) -> Tensor:
    """Biased in value; its gradient on-policy is that of KL(p || ref)."""
    return d**2 / 2


def k3(d: Tensor) -> Tensor:
    """Unbiased and never negative (Schulman); its gradient on-policy is that of KL(ref || p)."""
    return torch.expm1(d) - d


KL = Callable[[Tensor], Tensor]
KLS: dict[str, KL] = {"k1": k1, "k2": k2, "k3": k3}


def token_divergence(
    logp_NL: Tensor, reference_NL: Tensor, probes: Probes, *, kl: KL = k3, normaliser: Normaliser = token_mean
) -> Tensor:
    """sum of scale * kl(l_i_ref - l_i) over counted tokens."""
    counted_ML = counted_units(probes)
    d_ML = unit_likelihood(reference_NL - logp_NL, probes).masked_fill(~counted_ML, 0.0)
    scale_ML = (normaliser(counted_ML, probes) * probes.weight_M[:, None]).to(d_ML.dtype)
    return (scale_ML * kl(d_ML)).sum()


def sequence_divergence(logp_NL: Tensor, reference_NL: Tensor, probes: Probes, *, kl: KL = k2) -> Tensor:
    """mean over traces of kl(sum_i (l_i_ref - l_i)) / |o|."""
    counted_ML = counted_units(probes)
    d_M = unit_likelihood(reference_NL - logp_NL, probes).masked_fill(~counted_ML, 0.0).sum(-1)
    length_M = _length(probes)
    return (probes.weight_M.to(d_M.dtype) * kl(d_M) / length_M).sum() / len(probes.trace)


def token_cross_entropy(cross_NL: Tensor, probes: Probes, *, normaliser: Normaliser = token_mean) -> Tensor:
    """sum of scale * H(teacher, policy) over counted tokens."""
    counted_ML = counted_units(probes)
    cross_ML = unit_likelihood(cross_NL, probes).masked_fill(~counted_ML, 0.0)
    scale_ML = (normaliser(counted_ML, probes) * probes.weight_M[:, None]).to(cross_ML.dtype)
    return (scale_ML * cross_ML).sum()


def reward_divergence(old_NL: Tensor, reference_NL: Tensor, probes: Probes) -> Tensor:
    """sum_i (l_i_old - l_i_ref) over the counted tokens of each trace, (B,): k1 as a price on the reward."""
    counted_ML = counted_units(probes)
    d_ML = unit_likelihood(old_NL - reference_NL, probes).masked_fill(~counted_ML, 0.0)
    total_B = torch.zeros(len(probes.trace), dtype=d_ML.dtype, device=d_ML.device)
    return total_B.index_add(0, probes.trace_M, probes.weight_M.to(d_ML.dtype) * d_ML.sum(-1))
