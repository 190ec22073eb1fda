"""The value of every state along rollouts, estimated by completing it with the same sampler.

    V(s_t) = E[reward of s_t completed in the steps T - t that remain, same order, temperature and blocks]
    V(s_T) = the reward of the rollout, so sum over t of V(s_{t+1}) - V(s_t) = r - V(s_0)

Two independent halves of n completions give V_a and V_b. Completion k of a rollout has the same seed at all its states:
a completion of s_t that writes at step t what the rollout wrote is then the completion of s_{t+1}, so that the
difference of two values has much less noise than either. Its expectation does not change.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.core.policy import Policy
from unmask.core.trace import Trace, select_traces, state_before
from unmask.rollout.branches import fill_states
from unmask.rollout.continuation import continue_from
from unmask.rollout.decoding import Decoding
from unmask.rollout.engine import Engine
from unmask.rollout.sample import row_seeds
from unmask.tasks.scoring import Scores
from unmask.util.metering import Meter, count_passes
from unmask.util.micro_batch import MicroBatch

HALVES = 2
VALUES, FILLINGS = -1, -2  # the numbers of their seeds, apart from those of rollouts

Score = Callable[[Trace, Tensor], Scores]
"""(completions, the rollout that each one belongs to) -> their scores."""
OnShare = Callable[[float], None]
"""Called with the finished share of the work."""


@dataclass(frozen=True)
class ValueSettings:
    decoding: Decoding
    """How the rollouts were sampled."""
    micro_batch: MicroBatch
    draws: int = 16
    """Completions of each state in each half, and one-shot fillings of each state."""
    seed: int = 0
    on_share: OnShare = lambda share: None


@dataclass(frozen=True)
class StateValues:
    value_HBT: Tensor
    """The mean reward of a half's completions of the state before each step, (2, B, T + 1); the last is the reward."""
    shown_BTN: Tensor
    """The share of all completions that show each behaviour, (B, T + 1, N)."""
    behaviours: tuple[str, ...]
    forwards: float
    """Forward passes for each rollout."""

    @property
    def change_HBT(self) -> Tensor:
        """V(s_{t+1}) - V(s_t) by each half, (2, B, T)."""
        return self.value_HBT.diff(dim=-1)


def state_values(policy: Policy, trace: Trace, score: Score, settings: ValueSettings) -> StateValues:
    """Values of all states of all rollouts, on the host; the states before one step are completed together."""
    batch, steps, draws = len(trace), trace.steps, HALVES * settings.draws
    trace, device = replace(trace, seen={}), trace.step_BL.device
    final = score(trace, torch.arange(batch))
    final_BN = torch.stack([*final.behaviours.values()], -1) if final.behaviours else final.reward_B.new_zeros(batch, 0)
    value_HBT = final.reward_B[None, :, None].repeat(HALVES, 1, steps + 1)
    shown_BTN = final_BN[:, None].repeat(1, steps + 1, 1)
    seed_BZ = _seeds(VALUES, settings.seed, batch * draws).view(batch, draws)
    open_BT = _open_states(trace)
    total, done, meter = int((open_BT * torch.arange(steps, 0, -1)).sum()), 0, Meter()
    for step in range(steps):
        settings.on_share(done / max(1, total))
        row_R = open_BT[:, step].nonzero().squeeze(1)
        if not len(row_R):
            continue
        source_N = row_R.repeat_interleave(draws)
        with count_passes(meter, policy):
            completed = continue_from(
                policy,
                select_traces(trace, source_N.to(device)),
                torch.full_like(source_N, step, device=device),
                seed_BZ[row_R].flatten().to(device),
                settings.decoding,
                settings.micro_batch,
            )
        scores = score(completed, source_N)
        value_HBT[:, row_R, step] = scores.reward_B.view(-1, HALVES, settings.draws).mean(-1).T
        for number, shown_N in enumerate(scores.behaviours.values()):
            shown_BTN[row_R, step, number] = shown_N.view(-1, draws).mean(-1)
        done += len(row_R) * (steps - step)
    return StateValues(value_HBT, shown_BTN, tuple(final.behaviours), meter.forwards / batch)


@torch.no_grad()
def one_shot_values(policy: Policy, trace: Trace, score: Score, settings: ValueSettings) -> tuple[Tensor, float]:
    """DiSPO's value of the state before each step, (B, T + 1): the mean reward of `draws` one-shot fillings; after the
    last step the reward. And the forward passes for each rollout."""
    batch, draws = len(trace), settings.draws
    trace, device = replace(trace, seen={}), trace.step_BL.device
    value_BT = score(trace, torch.arange(batch)).reward_B[:, None].repeat(1, trace.steps + 1)
    seed_B, open_BT = _seeds(FILLINGS, settings.seed, batch), _open_states(trace)
    start, size = trace.tokens_BL.shape[1] - settings.decoding.length, settings.micro_batch.size
    for step in range(trace.steps):
        for row_R in open_BT[:, step].nonzero().squeeze(1).split(size):
            some = select_traces(trace, row_R.to(device))
            engine = Engine(policy, some, start, settings.decoding.block)
            state_RL, ended_R = state_before(some, step), torch.zeros_like(some.group_B, dtype=torch.bool)
            filled = fill_states(engine, seed_B[row_R].to(device), state_RL, ended_R, draws)
            reward_N = score(filled, row_R.repeat_interleave(draws)).reward_B
            value_BT[row_R, step] = reward_N.view(-1, draws).mean(-1)
    return value_BT, float(open_BT.sum()) / batch


def _open_states(trace: Trace) -> Tensor:
    """The states (B, T) after which the rollout still wrote something; later ones have the value of the reward."""
    last_B1 = torch.where(trace.filled_BL, trace.step_BL, -1).max(-1, keepdim=True).values
    return torch.arange(trace.steps) <= last_B1.cpu()


def _seeds(stream: int, seed: int, rows: int) -> Tensor:
    """Seeds apart from those of rollouts, whose numbers are not negative."""
    return row_seeds(2 * -seed + stream, rows)
