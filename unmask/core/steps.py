"""Steps of a trace drawn from a distribution, with exact importance weights: the estimator of AGRPO, and of what builds
on it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.core.method import MOST, check_range
from unmask.core.probes import Probes, visited
from unmask.core.trace import Trace

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
    check_range(1, MOST + 1, draws=draws)
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
