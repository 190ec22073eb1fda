"""AGRPO (arXiv 2510.04019): the policy gradient of the denoising process itself.

    loss = - mean_g 1/k sum_{j=1..k} v_{g,j} sum over i committed at step t_j of Clip(p(o_i|s_{t_j}) / p_old(...), A_g)
    t_j ~ P_g(t),   v_{g,j} = (1/m_g) / P_g(t_j),   A_g = r_g - mean,   m_g = T

Its expectation is (G - 1) / (G T) grad J: a mean over steps, a sum over the tokens of a step. A step at which a row
wrote nothing (it had ended, or a threshold let it skip the step) adds zero to this and is never drawn.

    uniform_steps  P(t) = 1/n_g over the n_g steps at which the row wrote something
    entropy_steps  P(t) in proportion to the entropy of the distributions drawn from at t
    spread = True  t_j from u_j = (j + rand) / k, fresh for every row and j: stratified within each row. (The
                   authors' code stratifies over the batch, which gains almost nothing once rows differ in advantage.)
                   A row with n_g < T steps to draw from and n_g <= k draws is asked at each of them once.
    truncate       m_g = the last step that wrote a word, + 1, as in the authors' code; rows of end tokens only
                   then have weight 0. The result is not the gradient of an objective: m_g depends on the future.
    choice         adds the choice of positions (probes.ask, log F), one ratio a step; for low_confidence rollouts,
                   also by threshold; other orders choose differently. Mask-Aware Policy Gradients (2607.15200)
                   and DCoLT (2505.10446) score positions too, by Plackett-Luce; log F is exact for low_confidence.

Exact when the update is on-policy and the order is random, left_to_right or surest_position (whose choice does
not depend on the draws and is piecewise constant in the weights); under low_confidence only with choice = True.
Not exact with truncate. Reduces to all steps, each of weight 1/T, with k = T spread uniform draws (TraceRL and
CJ-GRPO take the mean over a step's tokens, not the sum).
"""

from collections.abc import Callable
from functools import partial
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage, group_mean
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, k3, step_clip, token_clip, token_divergence, trace_sum
from unmask.core.order import low_confidence
from unmask.core.probes import Probes, visited
from unmask.core.specs import Record
from unmask.core.trace import Trace, all_tokens

StepDistribution = Callable[[Trace], Tensor]
"""Trace -> the unnormalised probability of each step, (B, T)."""


def uniform_steps(trace: Trace) -> Tensor:
    """The same probability for every step at which a row wrote something."""
    mass_BT = torch.zeros(len(trace), trace.steps, dtype=torch.float64, device=trace.step_BL.device)
    return mass_BT.scatter_reduce(1, trace.step_BL * trace.filled_BL, trace.filled_BL.double(), "amax")


def entropy_steps(trace: Trace) -> Tensor:
    """Steps in proportion to the entropy of the distributions their tokens were drawn from."""
    if "entropy" not in trace.seen:
        raise ValueError("entropy_steps reads the entropies of the rollout: sample with request=method.request")
    entropy_BC = trace.seen["entropy"].double()
    step_BC, filled_BC = (value_BL[:, -entropy_BC.shape[1] :] for value_BL in (trace.step_BL, trace.filled_BL))
    mass_BT = torch.zeros(len(trace), trace.steps, dtype=torch.float64, device=entropy_BC.device)
    return mass_BT.scatter_add(1, step_BC * filled_BC, (entropy_BC + 1e-8) * filled_BC)


STEP_DISTRIBUTIONS: dict[str, StepDistribution] = {"uniform": uniform_steps, "entropy": entropy_steps}


def last_word(trace: Trace) -> Tensor:
    """m: the last step at which something other than an end token was written, plus one; 0 for none."""
    word_BL = trace.filled_BL & (trace.tokens_BL != trace.eos_id)
    return torch.where(word_BL, trace.step_BL + 1, 0).max(-1).values


def steps_at(level_BK: Tensor, mass_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF: the step at each level in [0, 1), and its probability. A row without mass has uniform steps."""
    mass_BT = torch.where(mass_BT.sum(-1, keepdim=True) > 0, mass_BT, 1.0)
    probability_BT = mass_BT / mass_BT.sum(-1, keepdim=True)
    edge_BT = probability_BT.cumsum(-1).contiguous()
    step_BK = torch.searchsorted(edge_BT, level_BK * edge_BT[:, -1:], right=True)
    last_B1 = (mass_BT > 0).long().cumsum(-1).argmax(-1, keepdim=True)  # rounding must not pass the last step
    step_BK = torch.minimum(step_BK, last_B1)
    return step_BK, probability_BT.gather(1, step_BK)


def sampled_steps(
    trace: Trace,
    rng: torch.Generator,
    draws: int = 4,
    steps: StepDistribution = uniform_steps,
    spread: bool = True,
    truncate: bool = False,
    choice: bool = False,
) -> Probes:
    """Visited states at sampled steps, with exact importance weights (1/m) / (k P(t))."""
    check_range(1, inf, draws=draws)
    level_BK = torch.rand(len(trace), draws, generator=rng, dtype=torch.float64, device=rng.device)
    step_BK, weight_BK = weighted_steps(trace, level_BK, steps, truncate, spread)
    return visited(trace, step_BK, weight_BK, choice)


def weighted_steps(
    trace: Trace,
    level_BK: Tensor,
    steps: StepDistribution = uniform_steps,
    truncate: bool = False,
    spread: bool = False,
) -> tuple[Tensor, Tensor]:
    """The steps at the levels of each row and their weights (1/m) / (k P(t)).

    With `spread` the levels are first put one into each of K parts of [0, 1). A row with empty steps and at most K
    others then gets each of these once, with weight 1/m, and for the remaining draws step T, which asks nothing.
    """
    mass_BT, draws = steps(trace), level_BK.shape[1]
    if truncate:
        reach_B1 = last_word(trace)[:, None]
        mass_BT = mass_BT * (torch.arange(trace.steps, device=mass_BT.device) < reach_B1)
        live_B1 = (reach_B1 > 0).double() / reach_B1.clamp(min=1)
    else:
        live_B1 = torch.full((len(trace), 1), 1 / trace.steps, dtype=torch.float64, device=mass_BT.device)
    level_BK = level_BK.to(mass_BT.device)
    if not spread:
        step_BK, probability_BK = steps_at(level_BK, mass_BT)
        return step_BK, live_B1 / probability_BK / draws
    place_K, count_B1 = torch.arange(draws, device=mass_BT.device), (mass_BT > 0).sum(-1, keepdim=True)
    few_B1 = (count_B1 <= draws) & (count_B1 < trace.steps)
    beyond_BK = few_B1 & (place_K >= count_B1)
    mass_BT = torch.where(few_B1, (mass_BT > 0).double(), mass_BT)
    level_BK = torch.where(few_B1, (place_K + 0.5) / count_B1, (place_K + level_BK) / draws)
    step_BK, probability_BK = steps_at(level_BK, mass_BT)
    weight_BK = torch.where(few_B1, live_B1, live_B1 / probability_BK / draws)
    return step_BK.masked_fill(beyond_BK, trace.steps), weight_BK.masked_fill(beyond_BK, 0.0)


def agrpo(
    draws: int = 4,
    steps: StepDistribution = uniform_steps,
    spread: bool = True,
    truncate: bool = False,
    choice: bool = False,
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 0.0,
    kl_kind: KL = k3,
    advantage: Advantage = group_mean,
) -> Method:
    """Exact per-step policy gradients at sampled denoising steps. (The paper takes 24 draws of 128 steps.)"""
    check_range(0, inf, low=low, high=high)
    check_functions(steps=steps, kl_kind=kl_kind)
    objective = step_clip if choice else partial(token_clip, normaliser=trace_sum)
    return Method(
        name="agrpo",
        probe=each_inner_step(
            partial(sampled_steps, draws=draws, steps=steps, spread=spread, truncate=truncate, choice=choice)
        ),
        advantage=advantage,
        objective=partial(objective, low=low, high=high),
        record=Record(entropy=steps is entropy_steps),
        counted=all_tokens,
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=trace_sum),
        trajectory=True,
        order=low_confidence if choice else None,
        skip_zero_advantage=True,
    )
