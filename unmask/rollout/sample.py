"""sample: prompts -> Trace. Semi-autoregressive blocks; a schedule gives the number of positions a step commits.

Each step looks at the masked positions of the current block, draws a token at each of them by inverse CDF,
ranks the positions by `order`, and commits the first k. All noise is a function of (row seed, step, position),
so a row's result does not depend on the batch it is in.

Inside a step nothing waits for the device: the schedule gives the number of masked positions, a row that has ended is
marked and commits nothing, and the batch is compacted when a block begins and every 16 steps. (On the CPU waiting costs
nothing, so there at every step. Cuts by top_p wait for the device to learn how many tokens they kept.)

Decoding by threshold waits before each step to learn how many positions every row has left. A row that has finished
the block is set aside until the next begins, so that it passes through the model only to write something.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.order import Order, StepLogits, order_name
from unmask.core.policy import CachingPolicy, Policy
from unmask.core.schedule import CommitCounts
from unmask.core.shapes import GIVEN, NEVER, NO_TOKEN
from unmask.core.specs import RolloutRequest
from unmask.core.token_sampling import (
    draw_tokens,
    pad_ids,
    sampling_logprobs,
    splitmix64,
    token_logprobs,
    uniforms,
)
from unmask.core.trace import Trace, concat_traces
from unmask.rollout.branches import branch_steps, fill_states
from unmask.rollout.decoding import Decoding
from unmask.rollout.engine import Engine, aligned
from unmask.rollout.recorder import RolloutRecorder, StepPositions
from unmask.util.micro_batch import MicroBatch, as_micro_batch

_TOKEN, _PLACE = 0, 1  # the streams of a row's noise
COMPACTED = 16
"""Steps of a block between which a batch on a GPU is compacted, which waits for the device."""


def canvas(
    prompts: Sequence[Sequence[int]], length: int, policy: Policy, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, then `length` masks: tokens_BL and attended_BL."""
    if not prompts:
        raise ValueError("no prompts: the list to sample from is empty")
    width = max(len(p) for p in prompts)
    if width + length > policy.max_length:
        room = policy.max_length - width
        advice = f"set rollout.length={room} or less (your own task: length = {room})"
        raise ValueError(
            f"the longest prompt has {width} tokens; with a completion of {length} this is more than the model's limit "
            f"of {policy.max_length}: {advice if room > 0 else 'shorten the prompt'}"
        )
    padded = [[policy.pad_id] * (width - len(p)) + list(p) + [policy.mask_id] * length for p in prompts]
    real = [[False] * (width - len(p)) + [True] * (len(p) + length) for p in prompts]
    return torch.tensor(padded, device=device), torch.tensor(real, device=device)


def row_seeds(seed: int, rows: int) -> Tensor:
    """Seeds for the `rows` rollouts of one batch; all noise of a row is a function of its seed."""
    return splitmix64(torch.tensor(seed)) + torch.arange(rows)


class Rollouts(NamedTuple):
    trace: Trace
    branches: Trace | None
    """One-step traces that start at a visited state; group = the row of `trace` they started from."""


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seed_B: Tensor,
    decoding: Decoding,
    *,
    group_B: Tensor | None = None,
    request: RolloutRequest = RolloutRequest(),
    micro_batch: int | MicroBatch | None = None,
) -> Rollouts:
    """Denoise `decoding.length` positions after every prompt, at most `micro_batch` prompts at a time.

    A row retires once it has an end token with nothing masked before it; what it never filled stays MASK. `request` is
    what a method needs of the rollouts (`method.request`). Without `group_B` every prompt is a group.
    """
    if len(seed_B) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need {len(prompts)} row seeds, got {len(seed_B)}")
    group_B = torch.arange(len(prompts), device=seed_B.device) if group_B is None else group_B
    if micro_batch is None:
        return _sample_batch(policy, prompts, seed_B, decoding, group_B, request)
    micro_batch, done, start = as_micro_batch(micro_batch), list[Rollouts](), 0
    while start < len(prompts):
        part = slice(start, start + micro_batch.size)
        try:
            trace, branches = _sample_batch(policy, prompts[part], seed_B[part], decoding, group_B[part], request)
        except torch.OutOfMemoryError as error:
            micro_batch.halve(error, len(prompts[part]))
            continue
        if branches is not None:
            branches = replace(branches, group_B=branches.group_B + start)
        done.append(Rollouts(trace, branches))
        start += len(trace)
    if len(done) == 1:
        return done[0]
    some = [branches for _, branches in done if branches is not None and len(branches)]
    return Rollouts(concat_traces([trace for trace, _ in done]), concat_traces(some) if some else done[0].branches)


def sample_in_turn(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seed_B: Tensor,
    decoding: Decoding,
    micro_batch: MicroBatch | None = None,
) -> Iterator[Trace]:
    """The traces of all prompts in order, yielded in batches of at most `micro_batch`."""
    micro_batch, start = micro_batch or MicroBatch(512), 0
    while start < len(prompts):
        part = slice(start, start + micro_batch.size)
        yield sample(policy, prompts[part], seed_B[part], decoding, micro_batch=micro_batch).trace
        start = part.stop


def completions(policy: Policy, trace: Trace, length: int) -> list[str]:
    """The text that each trace wrote: up to its end token, or all of it if no token ends a row."""
    read = policy.tokenizer.raw if trace.eos_id == NO_TOKEN else policy.tokenizer.decode
    return [read(ids) for ids in trace.tokens_BL[:, -length:].tolist()]


def _sample_batch(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seed_B: Tensor,
    decoding: Decoding,
    group_B: Tensor,
    request: RolloutRequest,
) -> Rollouts:
    commits, sure_score, block = decoding.commit_counts(), decoding.sure_score(), decoding.block
    steps = sum(len(sizes) for sizes in commits)
    trace = _blank(policy, prompts, decoding, steps, group_B, seed_B.device)
    branch_step_B = branch_steps(request.branch, trace.steps, seed_B)
    engine = Engine(
        policy=policy,
        trace=trace,
        start=trace.tokens_BL.shape[1] - decoding.length,
        block=block,
        cache=decoding.cache,
        aligned=aligned(policy, [len(prompt) for prompt in prompts], block),
        padded=not decoding.attend_padding and len({len(prompt) for prompt in prompts}) > 1,
    )
    recorder = RolloutRecorder(
        request.record, commits, len(trace), decoding.length, decoding.sampling, adaptive=sure_score is not None
    )
    denoiser = _Denoiser(engine, seed_B, decoding.order, sure_score, recorder)
    with policy.rollout() if isinstance(policy, CachingPolicy) else nullcontext():
        state_BL, ended_B = _denoise(denoiser, commits, branch_step_B)
        branches = None
        if request.branch is not None:
            branches = fill_states(engine, seed_B, state_BL, ended_B, request.branch.fillings)

    trace = replace(trace, seen=denoiser.recorder.tensors())
    trace = replace(trace, counted_BL=request.counted(trace))
    return Rollouts(trace, None if branches is None else replace(branches, counted_BL=request.counted(branches)))


def _denoise(denoiser: "_Denoiser", commits: CommitCounts, branch_step_B: Tensor) -> tuple[Tensor, Tensor]:
    """Denoise the denoiser's trace in place, all blocks and steps.

    Returns the canvas of every row as it was before its branch step, and whether the row had ended by then.
    """
    state_BL, ended_B, step = denoiser.trace.tokens_BL.clone(), denoiser.ended_B.clone(), 0
    for number, sizes in enumerate(commits):
        denoiser.begin(number)
        left = denoiser.engine.block
        for number_in_block, size in enumerate(sizes):
            leaving_B = branch_step_B == step
            state_BL = torch.where(leaving_B[:, None], denoiser.trace.tokens_BL, state_BL)
            ended_B = torch.where(leaving_B, denoiser.ended_B, ended_B)
            if size and (most := denoiser.open_positions(number_in_block, left)):
                denoiser.step(number, step, size, most)
            left, step = left - size, step + 1
    return state_BL, ended_B


def _blank(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    steps: int,
    group_B: Tensor,
    device: torch.device,
) -> Trace:
    """A trace with nothing filled yet; `sample` writes into its tensors."""
    tokens_BL, attended_BL = canvas(prompts, decoding.length, policy, device)
    column_L = torch.arange(tokens_BL.shape[1], device=device) - (tokens_BL.shape[1] - decoding.length)
    return Trace(
        tokens_BL=tokens_BL,
        step_BL=torch.where(column_L < 0, GIVEN, NEVER).repeat(len(prompts), 1),
        block_BL=torch.where(column_L < 0, GIVEN, column_L // decoding.block).repeat(len(prompts), 1),
        attended_BL=torch.ones_like(attended_BL) if decoding.attend_padding else attended_BL,
        counted_BL=torch.zeros_like(attended_BL),
        logp_BL=torch.zeros(tokens_BL.shape, dtype=torch.float64, device=device),
        group_B=group_B,
        mask_id=policy.mask_id,
        eos_id=policy.eos_id if decoding.stops else NO_TOKEN,
        steps=steps,
        sampling=decoding.sampling,
        order=order_name(decoding.order),
        threshold=decoding.threshold,
    )


class _Denoiser:
    """A trace while it is denoised. Rows that have ended are marked, and dropped when the batch is compacted."""

    def __init__(
        self, engine: Engine, seed_B: Tensor, order: Order, sure_score: float | None, recorder: RolloutRecorder
    ) -> None:
        self.engine, self.trace, self.seed_B, self.order = engine, engine.trace, seed_B, order
        self.sure_score, self.recorder = sure_score, recorder
        self.live_R = torch.arange(len(seed_B), device=seed_B.device)
        self.waiting = list[Tensor]()
        """Rows that have been set aside until the next block."""
        self.ended_B = torch.zeros_like(seed_B, dtype=torch.bool)
        self.last_block = -1
        """The block whose first step has been taken."""

    def begin(self, number: int) -> None:
        """Begin a block with all rows that have not ended."""
        self.engine.begin(number)
        if self.waiting:
            self.live_R, order_R = torch.cat([self.live_R, *self.waiting]).sort()
            self.waiting = []
            self.engine.rejoin(order_R)
        self.compact()

    def compact(self) -> None:
        """Drop the rows that have ended."""
        self._keep((~self.ended_B[self.live_R]).nonzero().squeeze(1))

    def open_positions(self, number: int, left: int) -> int:
        """The most masked positions of this block in a row (`left`, by the schedule); 0: there is nothing to do."""
        if number and self.sure_score is not None:
            return self._narrow()
        if number and (self.seed_B.device.type == "cpu" or number % COMPACTED == 0):
            self.compact()
        return left if len(self.live_R) else 0

    def _narrow(self) -> int:
        """Set aside rows that have finished the block, drop those that have ended; `open_positions` of the rest.

        Waits for the device once.
        """
        if not len(self.live_R):
            return 0
        left_R = self._masked(self._block_columns(self.last_block)).sum(1)
        left = left_R.masked_fill(self.ended_B[self.live_R], -1).tolist()
        if 0 in left:
            done_R = torch.tensor([row for row, count in enumerate(left) if count == 0], device=self.live_R.device)
            self.waiting.append(self.live_R[done_R])
            self.engine.set_aside(done_R)
        going = [row for row, count in enumerate(left) if count > 0]
        if len(going) < len(left):
            self._keep(torch.tensor(going, dtype=torch.long, device=self.live_R.device))
        return max(0, *left)

    def _keep(self, going_R: Tensor) -> None:
        if len(going_R) < len(self.live_R):
            self.live_R = self.live_R[going_R]
            self.engine.keep(going_R)

    def step(self, number: int, step: int, size: int, left: int) -> None:
        """Draw a token at the masked positions of the block, at most `left` a row, rank them and commit."""
        trace, live_R = self.trace, self.live_R
        column_W = self._block_columns(number)
        masked_RW = self._masked(column_W)
        place_RM = masked_RW.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :left]
        valid_RM = masked_RW.gather(1, place_RM) & ~self.ended_B[live_R, None]
        column_RM = column_W[place_RM]
        offset_R1 = torch.arange(len(live_R), device=live_R.device)[:, None] * trace.tokens_BL.shape[1]
        hidden = self.engine.hidden(live_R, (offset_R1 + column_RM).flatten(), number, self.last_block == number)
        self.last_block = number
        drawn = self._draw(hidden, column_RM, step)
        score_RM = drawn["score"].view_as(column_RM).masked_fill(~valid_RM, -torch.inf)
        chosen_RM = self._chosen(score_RM, size) & valid_RM
        completion_RM = column_RM - self.engine.start
        positions = StepPositions(step, live_R, completion_RM, place_RM, valid_RM, chosen_RM)
        self.recorder.record_step(drawn, positions, self.engine.block)
        for name, value in (("tokens_BL", drawn["token"]), ("logp_BL", drawn["logp"]), ("step_BL", step)):
            written = getattr(trace, name)
            value_RM = value.view_as(column_RM).to(written.dtype) if isinstance(value, Tensor) else value
            cell = (live_R[:, None], column_RM)
            written[cell] = torch.where(chosen_RM, value_RM, written[cell])
        self.ended_B[live_R] |= _ended(trace.tokens_BL[live_R, self.engine.start :], trace)

    def _block_columns(self, number: int) -> Tensor:
        first = self.engine.start + number * self.engine.block
        return torch.arange(first, first + self.engine.block, device=self.seed_B.device)

    def _masked(self, column_W: Tensor) -> Tensor:
        return self.trace.tokens_BL[self.live_R[:, None], column_W] == self.trace.mask_id

    def _chosen(self, score_RM: Tensor, size: int) -> Tensor:
        """The `size` positions of largest score, ties to the left; and all that are sure enough."""
        first_Rk = score_RM.sort(dim=-1, descending=True, stable=True).indices[:, :size]
        chosen_RM = torch.zeros_like(score_RM, dtype=torch.bool).scatter(1, first_Rk, True)
        return chosen_RM if self.sure_score is None else chosen_RM | (score_RM >= self.sure_score)

    def _draw(self, hidden: list[Tensor], column_RM: Tensor, step: int) -> dict[str, Tensor]:
        """A token at every position, with its log-probability and score; in pieces, since logits are large."""
        trace, width = self.trace, self.trace.tokens_BL.shape[1]
        # Columns are counted from the end of the canvas, so padding does not move a row's noise.
        seed_R1, away_RM = self.seed_B[self.live_R, None], width - column_RM
        uniform_Q = uniforms(seed_R1, _TOKEN, step, away_RM).flatten()
        noise_Q = uniforms(seed_R1, _PLACE, step, away_RM).flatten()
        column_Q, pieces = column_RM.flatten(), list[dict[str, Tensor]]()
        for piece in self.engine.pieces(len(column_Q)):
            plain_QV = token_logprobs(self.engine.logits([stream[piece] for stream in hidden]), trace.mask_id)
            logq_QV, kept_QV = sampling_logprobs(plain_QV, trace.sampling.untempered_if_greedy())
            if trace.sampling.temperature:
                token_Q = draw_tokens(logq_QV, uniform_Q[piece])
                logp_Q = logq_QV.gather(-1, token_Q[:, None]).squeeze(-1)
            else:
                token_Q = plain_QV.argmax(-1)
                logp_Q = torch.zeros_like(plain_QV[:, 0])
            logits = StepLogits(plain_QV, logq_QV, token_Q, noise_Q[piece], column_Q[piece])
            recorded = self.recorder.of_piece(logits, kept_QV)
            pieces.append({"token": token_Q, "logp": logp_Q, "score": self.order(logits), **recorded})
        if "kept" in pieces[0]:
            widest = max(piece["kept"].shape[-1] for piece in pieces)
            pieces = [piece | {"kept": pad_ids(piece["kept"], widest)} for piece in pieces]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _ended(completion_RC: Tensor, trace: Trace) -> Tensor:
    """Rows that have an end token with nothing masked before it, or nothing masked at all."""
    open_RC = (completion_RC == trace.mask_id).cumsum(-1) == 0
    return ((completion_RC == trace.eos_id) & open_RC).any(-1) | open_RC.all(-1)
