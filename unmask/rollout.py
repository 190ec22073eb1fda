"""sample: prompts -> Trace. Semi-autoregressive blocks; every step commits a fixed number of positions.

Each step looks at the masked positions of the current block, draws a token at each of them by inverse CDF,
ranks the positions by `order`, and commits the first k. All noise is a function of (row seed, step, position),
so a row's result does not depend on the batch it is in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.law import Law, drawn, entropy, kept_ids, law_of, mixed, plain_law, uniforms, widened
from unmask.models.policy import Policy
from unmask.shapes import GIVEN, NEVER
from unmask.trace import Rule, Trace, everything, joined, selected

_TOKEN, _PLACE, _BRANCH = 0, 1, 2  # the streams of a row's noise


class Look(NamedTuple):
    """What the sampler has before it at one step: W positions (the current block) of its live rows."""

    plain_BWV: Tensor
    """Log-probabilities at temperature 1."""
    logq_BWV: Tensor
    """The law the tokens are drawn from."""
    kept_BWV: Tensor | None
    """Which tokens the truncation kept; None where the law cuts nothing."""
    token_BW: Tensor
    """A token drawn at every position."""
    noise_BW: Tensor
    """A uniform for every position, independent of the draws."""
    masked_BW: Tensor
    """Positions still to be filled."""


Order = Callable[[Look], Tensor]
"""An order scores positions, (B, W); the largest are committed first, ties to the left."""


def random(look: Look) -> Tensor:
    """Positions in uniformly random order, whatever the policy says."""
    return look.noise_BW


def left_to_right(look: Look) -> Tensor:
    """The leftmost masked position of the block first."""
    return -torch.arange(look.token_BW.shape[1], device=look.token_BW.device).expand_as(look.noise_BW).float()


def surest_position(look: Look) -> Tensor:
    """Positions of largest maximal probability first; what is drawn there does not matter."""
    return look.plain_BWV.max(-1).values


def low_confidence(look: Look) -> Tensor:
    """The field's default ("low-confidence remasking"): draw everywhere, keep the draws of largest probability.

    A kept token is then not distributed as the policy's law at its position: see probes.visited.
    """
    return look.plain_BWV.gather(-1, look.token_BW[..., None]).squeeze(-1)


ORDERS: dict[str, Order] = {
    "random": random,
    "left_to_right": left_to_right,
    "surest_position": surest_position,
    "low_confidence": low_confidence,
}


@dataclass(frozen=True)
class Record:
    """What a method wants remembered beside tokens, steps and their log-probabilities.

    `top` > 0: `step_top_id`, `step_top_logp` (T, B, W, top): the likeliest tokens at temperature 1 of every
    position of the block looked at, id -1 where the position was not masked.
    `entropy`: (B, C) entropy of the law each token was drawn from.
    """

    top: int = 0
    entropy: bool = False

    def __or__(self, other: "Record") -> "Record":
        return Record(max(self.top, other.top), self.entropy or other.entropy)


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


def schedule(length: int, steps: int, block: int) -> list[list[int]]:
    """How many positions each step commits, block by block; the first steps of a block take the remainder."""
    if length < 1 or block < 1 or length % block:
        raise ValueError(f"block={block} must divide the completion length {length}")
    blocks = length // block
    if steps % blocks or not blocks <= steps <= length:
        raise ValueError(
            f"steps={steps} must be a multiple of the number of blocks ({blocks}) and at most the length {length}"
        )
    share, rest = divmod(block, steps // blocks)
    return [[share + (i < rest) for i in range(steps // blocks)] for _ in range(blocks)]


def canvas(
    prompts: Sequence[Sequence[int]], length: int, policy: Policy, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, then `length` masks: tokens_BL and attended_BL."""
    if not prompts:
        raise ValueError("no prompts: the list to sample from is empty")
    width = max(len(p) for p in prompts)
    if width + length > policy.max_length:
        raise ValueError(
            f"the longest prompt has {width} tokens; with {length} more the model's limit of "
            f"{policy.max_length} is passed: shorten the prompt or the completion"
        )
    padded = [[policy.pad_id] * (width - len(p)) + list(p) + [policy.mask_id] * length for p in prompts]
    real = [[False] * (width - len(p)) + [True] * (len(p) + length) for p in prompts]
    return torch.tensor(padded, device=device), torch.tensor(real, device=device)


def row_seeds(seed: int, rows: int) -> Tensor:
    """Seeds for the `rows` rollouts of one batch; every later use of a row's noise follows from its seed."""
    return mixed(torch.tensor(seed)) + torch.arange(rows)


class Rollouts(NamedTuple):
    trace: Trace
    branches: Trace | None
    """One-step traces that start at a visited state; group = the row of `trace` they left."""


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seed_B: Tensor,
    *,
    length: int,
    steps: int | None = None,
    block: int | None = None,
    law: Law = Law(),
    order: Order = low_confidence,
    group_B: Tensor | None = None,
    counted: Rule = everything,
    record: Record = Record(),
    branch: Branch | None = None,
) -> Rollouts:
    """Denoise `length` positions after every prompt. Defaults: one position a step, one block.

    A row retires once an end token stands with nothing masked before it; what it never filled stays MASK.
    """
    steps, block = length if steps is None else steps, length if block is None else block
    commits = schedule(length, steps, block)
    if len(seed_B) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many row seeds, got {len(seed_B)}")
    trace = _blank(policy, prompts, length, block, steps, law, group_B, seed_B.device)
    start = trace.tokens_BL.shape[1] - length
    live_R = torch.arange(len(trace), device=seed_B.device)
    branch_step_B = _branch_steps(branch, steps, seed_B)
    notes, fillings = _Notes(record, steps, len(trace)), []

    for step, (number, size) in enumerate((n, size) for n, sizes in enumerate(commits) for size in sizes):
        at_W = torch.arange(start + number * block, start + (number + 1) * block, device=seed_B.device)
        leaving_R = live_R[branch_step_B[live_R] == step]
        logits_RWV, rest_QV = _logits(policy, trace, live_R, at_W, leaving_R)
        if branch is not None and len(leaving_R):
            fillings.append(_fillings(rest_QV, trace, leaving_R, seed_B, branch.fillings))
        look = _look(logits_RWV, trace, live_R, at_W, seed_B, step)
        row, place = _ranked(order(look), look.masked_BW, size).nonzero(as_tuple=True)
        notes.take(look, step, live_R, row, place, at_W - start)
        _commit(trace, look, step, live_R[row], at_W[place], row, place)
        live_R = live_R[~_ended(trace.tokens_BL[live_R, start:], policy)]
        if not len(live_R):
            break

    trace = replace(trace, seen=notes.tensors(length))
    trace = replace(trace, counted_BL=counted(trace))
    return Rollouts(trace, _joined_fillings(trace, fillings, counted) if branch is not None else None)


def _blank(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    length: int,
    block: int,
    steps: int,
    law: Law,
    group_B: Tensor | None,
    device: torch.device,
) -> Trace:
    """A trace of which nothing is filled yet; `sample` writes into its tensors."""
    tokens_BL, attended_BL = canvas(prompts, length, policy, device)
    column_L = torch.arange(tokens_BL.shape[1], device=device) - (tokens_BL.shape[1] - length)
    return Trace(
        tokens_BL=tokens_BL,
        step_BL=torch.where(column_L < 0, GIVEN, NEVER).repeat(len(prompts), 1),
        block_BL=torch.where(column_L < 0, GIVEN, column_L // block).repeat(len(prompts), 1),
        attended_BL=attended_BL,
        counted_BL=torch.zeros_like(attended_BL),
        logp_BL=torch.zeros(tokens_BL.shape, dtype=torch.float64, device=device),
        group_B=torch.arange(len(prompts), device=device) if group_B is None else group_B,
        mask_id=policy.mask_id,
        eos_id=policy.eos_id,
        steps=steps,
        law=law,
    )


def _logits(
    policy: Policy, trace: Trace, live_R: Tensor, at_W: Tensor, leaving_R: Tensor
) -> tuple[Tensor, Tensor]:
    """One forward: logits of the live rows at the block, and of the rows that branch at all they have masked."""
    width = trace.tokens_BL.shape[1]
    at_RW = torch.arange(len(live_R), device=at_W.device)[:, None] * width + at_W
    row, column = (trace.tokens_BL[leaving_R] == trace.mask_id).nonzero(as_tuple=True)
    rest_Q = torch.searchsorted(live_R, leaving_R)[row] * width + column
    at_Q = torch.cat([at_RW.flatten(), rest_Q])
    logits_QV = policy(trace.tokens_BL[live_R], trace.attended_BL[live_R], at_Q)
    return logits_QV[: at_RW.numel()].unflatten(0, at_RW.shape), logits_QV[at_RW.numel() :]


def _look(logits_RWV: Tensor, trace: Trace, live_R: Tensor, at_W: Tensor, seed_B: Tensor, step: int) -> Look:
    width = trace.tokens_BL.shape[1]
    plain_RWV = plain_law(logits_RWV, trace.mask_id)
    logq_RWV, kept_RWV = law_of(plain_RWV, trace.law)
    # Columns are counted from the end of the canvas, so padding does not move a row's noise.
    seed_R1, column_W = seed_B[live_R, None], width - at_W
    return Look(
        plain_RWV,
        logq_RWV,
        kept_RWV,
        token_BW=drawn(logq_RWV, uniforms(seed_R1, _TOKEN, step, column_W)),
        noise_BW=uniforms(seed_R1, _PLACE, step, column_W),
        masked_BW=trace.tokens_BL[live_R][:, at_W] == trace.mask_id,
    )


def _ranked(score_RW: Tensor, masked_RW: Tensor, size: int) -> Tensor:
    """The `size` masked positions of largest score, ties to the left."""
    score_RW = score_RW.masked_fill(~masked_RW, -torch.inf)
    first_Rk = score_RW.sort(dim=-1, descending=True, stable=True).indices[:, :size]
    return torch.zeros_like(masked_RW).scatter(1, first_Rk, True) & masked_RW


def _commit(
    trace: Trace, look: Look, step: int, row_Q: Tensor, column_Q: Tensor, row: Tensor, place: Tensor
) -> None:
    token_Q = look.token_BW[row, place]
    trace.tokens_BL[row_Q, column_Q] = token_Q
    trace.step_BL[row_Q, column_Q] = step
    logp_Q = look.logq_BWV[row, place].gather(-1, token_Q[:, None]).squeeze(-1)
    trace.logp_BL[row_Q, column_Q] = logp_Q.to(trace.logp_BL.dtype)


def _ended(completion_RC: Tensor, policy: Policy) -> Tensor:
    """Rows in which an end token stands with nothing masked before it, or nothing is masked at all."""
    open_RC = (completion_RC == policy.mask_id).cumsum(-1) == 0
    return ((completion_RC == policy.eos_id) & open_RC).any(-1) | open_RC.all(-1)


def _branch_steps(branch: Branch | None, steps: int, seed_B: Tensor) -> Tensor:
    """The step before which each row branches, drawn before the rollout begins."""
    if branch is None:
        return torch.full_like(seed_B, -1)
    edges_T = branch.step_law(steps).cumsum(0).to(seed_B.device)
    step_B = torch.searchsorted(edges_T, uniforms(seed_B, _BRANCH).double(), right=True)
    return step_B.clamp(max=steps - 1)


def _fillings(logits_QV: Tensor, trace: Trace, row_R: Tensor, seed_B: Tensor, fillings: int) -> Trace:
    """Every masked position of the rows drawn at once, `fillings` times: R * Z one-step traces."""
    tokens_RL, width = trace.tokens_BL[row_R], trace.tokens_BL.shape[1]
    masked_RL = tokens_RL == trace.mask_id
    row, column = masked_RL.nonzero(as_tuple=True)
    logq_QV, kept_QV = law_of(plain_law(logits_QV, trace.mask_id), trace.law)
    filled, logp = [], []
    for z in range(fillings):
        token_Q = drawn(logq_QV, uniforms(seed_B[row_R][row], _BRANCH, 1 + z, width - column))
        filled.append(tokens_RL.masked_scatter(masked_RL, token_Q))
        logp_Q = logq_QV.gather(-1, token_Q[:, None]).squeeze(-1).to(trace.logp_BL.dtype)
        logp.append(torch.zeros_like(trace.logp_BL[row_R]).masked_scatter(masked_RL, logp_Q))
    source_R = row_R.repeat(fillings)
    seen = {"source": source_R}
    if kept_QV is not None:
        kept_QK, length = kept_ids(kept_QV), int(trace.canvas_BL[0].sum())
        kept_RCK = kept_QK.new_full((len(row_R), length, kept_QK.shape[-1]), -1)
        kept_RCK[row, column - (width - length)] = kept_QK
        seen["kept"] = kept_RCK.repeat(fillings, 1, 1)
    return replace(
        selected(replace(trace, seen={}), source_R),
        tokens_BL=torch.cat(filled),
        step_BL=torch.where(masked_RL, 0, GIVEN).repeat(fillings, 1),
        logp_BL=torch.cat(logp),
        group_B=source_R,
        steps=1,
        seen=seen,
    )


def _joined_fillings(trace: Trace, fillings: list[Trace], counted: Rule) -> Trace:
    """The branches in the order of their source rows, the rows that retired before their step left out."""
    if not fillings:
        return selected(trace, torch.zeros_like(trace.group_B, dtype=torch.bool))
    branches = joined(fillings)
    branches = selected(branches, branches.seen["source"].argsort(stable=True))
    return replace(branches, counted_BL=counted(branches))


class _Notes:
    """What the recorders keep while a rollout runs."""

    def __init__(self, record: Record, steps: int, batch: int) -> None:
        self.record, self.steps, self.batch = record, steps, batch
        self.top: list[tuple[Tensor, Tensor]] = []
        self.single: dict[str, list[Tensor]] = {"entropy": [], "kept": []}
        self.where: list[tuple[Tensor, Tensor]] = []

    def take(
        self, look: Look, step: int, live_R: Tensor, row: Tensor, place: Tensor, column_W: Tensor
    ) -> None:
        self.where.append((live_R[row], column_W[place]))
        if self.record.entropy:
            self.single["entropy"].append(entropy(look.logq_BWV[row, place]))
        if look.kept_BWV is not None:
            self.single["kept"].append(kept_ids(look.kept_BWV[row, place]))
        if self.record.top:
            logp_RWK, id_RWK = look.plain_BWV.topk(min(self.record.top, look.plain_BWV.shape[-1] - 1))
            shape = (self.batch, *id_RWK.shape[1:])
            id_BWK = torch.full(shape, -1, device=live_R.device)
            id_BWK[live_R] = id_RWK.masked_fill(~look.masked_BW[..., None], -1)
            logp_BWK = torch.zeros(shape, dtype=logp_RWK.dtype, device=live_R.device)
            logp_BWK[live_R] = logp_RWK
            self.top.append((id_BWK, logp_BWK))

    def tensors(self, length: int) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        row_Q, column_Q = (torch.cat(parts) for parts in zip(*self.where, strict=True))
        widest = max((kept.shape[-1] for kept in self.single["kept"]), default=0)
        for name, parts in self.single.items():
            if parts:
                value_Q = torch.cat([widened(part, widest) for part in parts])
                blank = -1 if name == "kept" else 0
                full = value_Q.new_full((self.batch, length, *value_Q.shape[1:]), blank)
                full[row_Q, column_Q] = value_Q
                seen[name] = full
        if self.top:
            missing = self.steps - len(self.top)  # every row retired before the last step
            ids, logps = (list(column) for column in zip(*self.top, strict=True))
            seen["step_top_id"] = torch.stack(ids + [torch.full_like(ids[0], -1)] * missing)
            seen["step_top_logp"] = torch.stack(logps + [torch.zeros_like(logps[0])] * missing)
        return seen
