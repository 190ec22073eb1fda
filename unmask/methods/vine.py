"""Vine: the policy gradient with the true advantage of each step. A method of this project.

    A_t  = V(s_{t+1}) - V(s_t),   V(s) = mean reward of n completions of s by the same sampler (rollout/step_values.py)
    loss = - mean_g 1/k sum_{j=1..k} v_{g,j} sum over i committed at step t = t_j of Clip(p(o_i|s_t) / p_old(...), A_t)
    t_j ~ P_g(t),   v_{g,j} = (1/T) / P_g(t_j)                                           as in AGRPO (methods/agrpo.py)

A trace has no advantage of its own: the advantage of a step is the credit of its tokens. Two rollouts of a group with
the same reward can have different steps, so every group carries a signal. VinePPO (arXiv 2410.01679) estimates values
in this way for autoregressive models.

    final = True      the control: A_t = r - V(s_t), the reward with the same baseline
    value_steps = m   states are completed in at most m steps of each block, 1 in one shot: cheaper, and biased

Exact when value_steps = 0, the update is on-policy and the order is random, left_to_right or surest_position, or
low_confidence with choice = True: the expectation is grad J / T. V(s_t) is a baseline that does not know the step, and
E[V(s_{t+1})] given the step is what the reward would be in expectation. Reduces to AGRPO's gradient without a group
baseline if A_t is replaced by r.
"""

from functools import partial
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import every_sample
from unmask.core.method import MOST, Method, check_functions, check_range
from unmask.core.objective import step_clip, token_clip, trace_sum
from unmask.core.order import low_confidence
from unmask.core.probes import Probes, visited
from unmask.core.specs import Record, StepValues
from unmask.core.steps import StepDistribution, entropy_steps, weighted_steps
from unmask.core.trace import Trace, all_tokens


def step_advantages(trace: Trace, final: bool = False) -> Tensor:
    """A_t of every step, (B, T); 0 where the values are not known."""
    if "state_value" not in trace.seen:
        raise ValueError("vine reads values of states: call continue_steps and with_state_values after sampling")
    value_BT = trace.seen["state_value"]
    after_BT = value_BT[:, -1:] if final else value_BT[:, 1:]
    return (after_BT - value_BT[:, :-1]).nan_to_num(0.0)


def step_credit(trace: Trace, final: bool = False) -> Tensor:
    """The advantage of the step that wrote each token."""
    step_BL = torch.where(trace.filled_BL, trace.step_BL, 0)
    return step_advantages(trace, final).gather(1, step_BL) * trace.filled_BL


def valued_steps(trace: Trace, choice: bool = False, final: bool = False) -> Probes:
    """The drawn steps with their weights; a step without an advantage is not asked."""
    advantage_BT = torch.nn.functional.pad(step_advantages(trace, final), (0, 1))
    step_BK, weight_BK = trace.seen["value_step"], trace.seen["value_weight"]
    silent_BK = advantage_BT.gather(1, step_BK) == 0
    return visited(trace, step_BK.masked_fill(silent_BK, trace.steps), weight_BK.masked_fill(silent_BK, 0.0), choice)


def vine(
    draws: int = 4,
    completions: int = 4,
    value_steps: int = 0,
    steps: StepDistribution = entropy_steps,
    choice: bool = False,
    final: bool = False,
    low: float = 0.2,
    high: float = 0.2,
) -> Method:
    """The policy gradient with the advantage of each step, from completions of the states before and after it."""
    check_range(1, MOST + 1, draws=draws, completions=completions)
    check_range(0, inf, value_steps=value_steps, low=low, high=high)
    check_functions(steps=steps)
    objective = step_clip if choice else partial(token_clip, normaliser=trace_sum)
    return Method(
        name="vine",
        probe=lambda trace, rng, inner_steps: [valued_steps(trace, choice, final)] * inner_steps,
        advantage=every_sample,
        objective=partial(objective, low=low, high=high),
        credit=partial(step_credit, final=final),
        values=StepValues(partial(weighted_steps, steps=steps, spread=True), draws, completions, value_steps or None),
        record=Record(entropy=steps is entropy_steps, choice=choice),
        counted=all_tokens,
        trajectory=True,
        order=low_confidence if choice else None,
    )
