"""Branches: one-shot fillings of visited states, as one-step traces."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.law import uniforms, widened
from unmask.shapes import GIVEN
from unmask.trace import Rule, Trace, joined, selected

STREAM = 2
"""The stream of a row's noise that branches draw from; the sampler has 0 and 1."""


@dataclass(frozen=True)
class Branch:
    """Fill one visited state of every row `fillings` times in one shot.

    The state is the one before step t, drawn before the rollout with probability in proportion to
    ((t + 1) / T) ** lateness: 0 is uniform, 4 favours late states.
    """

    fillings: int = 2
    lateness: float = 4.0

    def step_law(self, steps: int) -> Tensor:
        """The probability of branching before each step, (T,)."""
        weight_T = (torch.arange(1, steps + 1, dtype=torch.float64) / steps) ** self.lateness
        return weight_T / weight_T.sum()


def branch_steps(branch: Branch | None, steps: int, seed_B: Tensor) -> Tensor:
    """The step before which each row branches, drawn before the rollout begins."""
    if branch is None:
        return torch.full_like(seed_B, -1)
    edges_T = branch.step_law(steps).cumsum(0).to(seed_B.device)
    step_B = torch.searchsorted(edges_T, uniforms(seed_B, STREAM).double(), right=True)
    return step_B.clamp(max=steps - 1)


def joined_fillings(trace: Trace, fillings: list[Trace], counted: Rule) -> Trace:
    """The branches in the order of their source rows, the rows that ended before their step left out."""
    if not fillings:
        nobody = selected(trace, torch.zeros_like(trace.group_B, dtype=torch.bool))
        seen = {name: value for name, value in nobody.seen.items() if name == "kept"}
        return replace(nobody, steps=1, seen=seen)
    branches = joined(fillings)
    branches = selected(branches, ~branches.seen["ended"])
    branches = selected(branches, branches.group_B.argsort(stable=True))
    seen = {name: value for name, value in branches.seen.items() if name != "ended"}
    branches = replace(branches, seen=seen)
    return replace(branches, counted_BL=counted(branches))


def by_filling(
    tokens: list[list[Tensor]], logps: list[list[Tensor]], kept: list[list[Tensor]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The pieces put together: (Z, Q) tokens and log-probabilities, (Q, K) kept ids."""
    token_ZQ, logp_ZQ = (
        torch.stack([torch.cat(parts) for parts in zip(*found, strict=True)]) for found in (tokens, logps)
    )
    if not kept[0]:
        return token_ZQ, logp_ZQ, None
    widest = max(ids.shape[-1] for (ids,) in kept)
    return token_ZQ, logp_ZQ, torch.cat([widened(ids, widest) for (ids,) in kept])


def one_shot_traces(
    trace: Trace,
    row_R: Tensor,
    ended_R: Tensor,
    column_C: Tensor,
    token_ZQ: Tensor,
    logp_ZQ: Tensor,
    kept_QK: Tensor | None,
) -> Trace:
    """Z one-step traces from the present state of each row, that fill all it has masked."""
    fillings, shape = len(token_ZQ), (len(row_R), len(column_C))
    source_R = row_R.repeat(fillings)
    masked_RC = trace.tokens_BL[row_R][:, column_C] == trace.mask_id
    masked_ZC = masked_RC.repeat(fillings, 1)
    twigs = selected(replace(trace, seen={}), source_R)
    step_BL = torch.full_like(twigs.step_BL, GIVEN)
    step_BL[:, column_C] = torch.where(masked_ZC, 0, GIVEN)
    tokens_BL, logp_BL = twigs.tokens_BL.clone(), torch.zeros_like(twigs.logp_BL)
    tokens_BL[:, column_C] = torch.where(masked_ZC, token_ZQ.reshape(-1, shape[1]), tokens_BL[:, column_C])
    logp_BL[:, column_C] = logp_ZQ.reshape(-1, shape[1]).to(logp_BL.dtype).masked_fill(~masked_ZC, 0.0)
    seen = {"ended": ended_R.repeat(fillings)}
    if kept_QK is not None:
        kept_RCK = kept_QK.view(*shape, -1).masked_fill(~masked_RC[..., None], -1)
        seen["kept"] = kept_RCK.repeat(fillings, 1, 1)
    return replace(twigs, tokens_BL=tokens_BL, step_BL=step_BL, logp_BL=logp_BL, group_B=source_R, steps=1, seen=seen)
