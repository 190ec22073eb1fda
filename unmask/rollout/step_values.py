"""Values of the states before and after drawn steps of rollouts, from completions by the same sampler.

    V(s_t) = mean reward of completions of s_t in the steps that remain;   V(s_T) = the reward of the rollout
    gain of step t = V(s_{t+1}) - V(s_t)

    trace, continued = continue_steps(policy, trace, seed_B, values, decoding)
    trace = with_state_values(trace, continued, reward_B, rewards of `continued`)

Completion j of a rollout has the same seed at all its states: a completion of s_t that writes at step t what the
rollout wrote is then the completion of s_{t+1}, so a step that decides nothing has a gain of exactly 0. The seeds are
not those of the rollout, so the completions of s_t know nothing of what the rollout wrote at t.
"""

from dataclasses import replace

import torch
from torch import Tensor

from unmask.core.policy import Policy
from unmask.core.specs import StepValues
from unmask.core.token_sampling import splitmix64, uniforms
from unmask.core.trace import Trace, select_traces
from unmask.rollout.continuation import continue_from
from unmask.rollout.decoding import Decoding
from unmask.util.micro_batch import MicroBatch


def continue_steps(
    policy: Policy,
    trace: Trace,
    seed_B: Tensor,
    values: StepValues,
    decoding: Decoding,
    micro_batch: int | MicroBatch = 512,
) -> tuple[Trace, Trace]:
    """The traces with their drawn steps and weights recorded, and completions of the states before and after each.

    A completion has the row of its trace as its group, and the step it started from as `seen["from_step"]`.
    """
    place_K = torch.arange(values.draws, device=seed_B.device)
    step_BK, weight_BK = values.steps(trace, uniforms(seed_B[:, None], place_K).double())
    wanted_BT = torch.zeros(len(trace), trace.steps + 2, dtype=torch.bool, device=step_BK.device)
    for state_BK in (step_BK, step_BK + 1):
        wanted_BT = wanted_BT.scatter(1, state_BK, True)
    row_N, from_N = wanted_BT[:, : trace.steps].nonzero(as_tuple=True)
    row_N, from_N = (value_N.repeat_interleave(values.completions) for value_N in (row_N, from_N))
    number_N = torch.arange(len(row_N), device=row_N.device) % values.completions
    seed_N = splitmix64(seed_B)[row_N] + number_N
    chosen = select_traces(replace(trace, seen={}), row_N)
    continued = continue_from(policy, chosen, from_N, seed_N, decoding, micro_batch, values.most_steps)
    trace = replace(trace, seen=trace.seen | {"value_step": step_BK, "value_weight": weight_BK})
    return trace, replace(continued, group_B=row_N, seen={"from_step": from_N})


def with_state_values(trace: Trace, continued: Trace, reward_B: Tensor, continued_reward_N: Tensor) -> Trace:
    """The traces with `seen["state_value"]`, (B, T + 1): the mean reward of the completions of each state; nan for a
    state that was not completed."""
    width, reward_B = trace.steps + 1, reward_B.double()
    place_N = continued.group_B * width + continued.seen["from_step"]
    total_BT, count_BT = (
        torch.zeros(len(trace) * width, dtype=torch.float64, device=reward_B.device)
        .index_add(0, place_N, value_N.double())
        .view(len(trace), width)
        for value_N in (continued_reward_N, torch.ones_like(continued_reward_N))
    )
    value_BT = torch.where(count_BT > 0, total_BT / count_BT.clamp(min=1), torch.nan)
    value_BT[:, -1] = reward_B
    return replace(trace, seen=trace.seen | {"state_value": value_BT})
