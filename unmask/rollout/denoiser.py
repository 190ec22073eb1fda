"""The steps of a rollout: each looks at the masked positions of the current block, draws a token at each of them by
inverse CDF, ranks the positions by the order, and commits the first k.

Inside a step nothing waits for the device: the schedule gives the number of masked positions, a row that has ended is
marked and commits nothing, and the batch is compacted when a block begins and every 16 steps. (On the CPU waiting costs
nothing, so there at every step. Cuts by top_p wait for the device to learn how many tokens they kept.)

With `Graphs` a step has static shapes, and is captured: block, step and commits are tensors then, and rows that have
nothing to do stay live to fill a round number. If rows begin later than others, what they are late by is a tensor too.

Decoding by threshold waits before each step to learn how many positions every row has left. A row that has finished
the block is set aside until the next begins, so that it passes through the model only to write something.
"""

from functools import partial

import torch
from torch import Tensor

from unmask.core.choice import cut, outranking
from unmask.core.order import Order
from unmask.core.schedule import CommitCounts
from unmask.core.token_sampling import pad_ids, token_logprobs, uniforms
from unmask.core.trace import Trace
from unmask.rollout.draws import DrawSettings, Places, compiled_draws, compiled_uniforms, draws
from unmask.rollout.engine import Engine, StaticPass
from unmask.rollout.graphs import positions_of, rows_of
from unmask.rollout.recorder import RolloutRecorder, StepPositions, write

COMPACTED = 16
"""Steps of a block between which a batch on a GPU is compacted, which waits for the device."""


def denoise(denoiser: "Denoiser", commits: CommitCounts, branch_step_B: Tensor) -> tuple[Tensor, Tensor]:
    """Denoise the denoiser's trace in place, all blocks and steps.

    Returns the canvas of every row as it was before its branch step, and whether the row had ended by then.
    """
    state_BL, ended_B, step = denoiser.trace.tokens_BL.clone(), denoiser.ended_B.clone(), 0
    for number, sizes in enumerate(commits):
        denoiser.begin(number)
        denoiser.compact()
        left = denoiser.engine.block
        for number_in_block, size in enumerate(sizes):
            leaving_B = branch_step_B == step
            state_BL = torch.where(leaving_B[:, None], denoiser.trace.tokens_BL, state_BL)
            ended_B = torch.where(leaving_B, denoiser.ended_B, ended_B)
            denoiser.join(step)
            if size and (most := denoiser.open_positions(number_in_block, left)):
                denoiser.step(number, step, size, most)
            left, step = left - size, step + 1
    return state_BL, ended_B


def denoise_continuously(denoiser: "Denoiser", sizes: list[int], slots: int) -> None:
    """Denoise a trace of a block-causal model in place, at most `slots` rows at a time.

    When a block begins, rows that have ended are replaced by the next ones: rows of a batch are at different blocks.
    `sizes`: how many positions each step of a block commits.
    """
    number, taken = 0, 0
    while True:
        denoiser.begin(number)
        taken += denoiser.admit(taken, slots, number, len(sizes))
        if not len(denoiser.live_R):
            return
        left = denoiser.engine.block
        for number_in_block, size in enumerate(sizes):
            if most := denoiser.open_positions(number_in_block, left):
                denoiser.step(number, number * len(sizes) + number_in_block, size, most)
            left -= size
        number += 1


class Denoiser:
    """A trace while it is denoised. Rows that have ended are marked, and dropped when the batch is compacted."""

    def __init__(
        self,
        engine: Engine,
        seed_B: Tensor,
        order: Order,
        sure_score: float | None,
        recorder: RolloutRecorder,
        starts: dict[int, Tensor],
    ) -> None:
        self.engine, self.trace, self.graphs = engine, engine.trace, engine.graphs
        self.sure_score, self.recorder = sure_score, recorder
        self.draw_settings = DrawSettings(
            engine.trace.mask_id, engine.trace.sampling, order, recorder.record, sure_score is not None
        )
        self.draws = compiled_draws() if engine.compiles_draws else draws
        self.uniforms = compiled_uniforms() if engine.compiles_draws else uniforms
        self.seed_B = self._held("seeds", seed_B)
        self.starts = starts
        """The rows that begin at a step, by step; a row in none of them stays as it is."""
        self.live_R = torch.zeros(0, dtype=torch.long, device=seed_B.device)
        self.waiting = list[Tensor]()
        """Rows that have been set aside until the next block."""
        self.ended_B = self._held("ended", torch.zeros_like(seed_B, dtype=torch.bool))
        self.block, self.last_block = -1, -1
        """The present block, and the last one in which a step has been taken."""
        self.late_B: Tensor | None = None
        """Of rows that begin later than others: by how many blocks."""
        self.steps_in_block = 0
        self.replaces = False
        """Rows that end are replaced when the next block begins."""
        self.clock = self._held("clock", seed_B.new_zeros(3, 1, 1))
        """Of static steps: the number of the block, the step, and how many positions it commits."""

    def begin(self, number: int) -> None:
        """Begin a block, with the rows that were set aside."""
        self.block = number
        self.engine.begin(number)
        if self.waiting:
            self.live_R, order_R = torch.cat([self.live_R, *self.waiting]).sort()
            self.waiting = []
            self.engine.rejoin(order_R)

    def join(self, step: int) -> None:
        """Add the rows that begin at this step."""
        if step in self.starts:
            self.live_R = torch.cat([self.live_R, self.starts[step]]).sort().values

    def admit(self, taken: int, slots: int, number: int, steps_in_block: int) -> int:
        """Put rows after the first `taken` in the free slots: the places of rows that have ended, and then new ones.
        Rows that have ended and are not replaced are dropped. Returns how many begin; this block is their first."""
        self.late_B = self._held("late", torch.zeros_like(self.seed_B)) if self.late_B is None else self.late_B
        self.steps_in_block, live = steps_in_block, len(self.live_R)
        ended = self.ended_B[self.live_R].tolist()
        free = [place for place, end in enumerate(ended) if end] + [*range(live, slots)]
        next_R = torch.arange(taken, min(len(self.trace), taken + slots), device=self.seed_B.device)
        new_R, ahead_R = next_R[: len(free)], next_R[len(free) :]
        if len(new_R):
            places = free[: len(new_R)]
            if all(ended):
                self.engine.forget()
            else:
                self.engine.admit(new_R, places, live, ahead_R)
            self.live_R = torch.cat([self.live_R, new_R])[: max(live, places[-1] + 1)]
            self.live_R[places] = new_R
            self.late_B[new_R] = number
        self.compact()
        self.replaces = taken + len(new_R) < len(self.trace)
        if len(self.live_R):
            self.engine.furthest = number - int(self.late_B[self.live_R].min())
        return len(new_R)

    def _own_number(self, number: int | Tensor) -> int | Tensor:
        """The number of a block in each live row; (R, 1) if they differ."""
        return number if self.late_B is None else number - self.late_B[self.live_R, None]

    def _own_step(self, step: int | Tensor) -> int | Tensor:
        """The same for a step. A row that has ended and stays live has no step after the last."""
        if self.late_B is None:
            return step
        return (step - self.late_B[self.live_R, None] * self.steps_in_block).clamp(max=self.trace.steps - 1)

    def _held(self, name: str, value: Tensor) -> Tensor:
        return value if self.graphs is None else self.graphs.hold(name, value)

    def compact(self) -> None:
        """Drop the rows that have ended."""
        self._keep(self._kept([row for row, end in enumerate(self.ended_B[self.live_R].tolist()) if not end]))

    def open_positions(self, number: int, left: int) -> int:
        """The most masked positions of this block in a row (`left`, by the schedule); 0: there is nothing to do."""
        if number and self.sure_score is not None:
            return self._narrow()
        static_slots = self.replaces and self.graphs is not None
        if number and not static_slots and (self.seed_B.device.type == "cpu" or number % COMPACTED == 0):
            self.compact()
        return left if len(self.live_R) else 0

    def _narrow(self) -> int:
        """Set aside rows that have finished the block, drop those that have ended; `open_positions` of the rest.

        Waits for the device once.
        """
        if not len(self.live_R):
            return 0
        number = self._own_number(self.block)
        left_R = self._masked(self.engine.block_columns(self.live_R, number), number).sum(1)
        left = left_R.masked_fill(self.ended_B[self.live_R], -1).tolist()
        kept = self._kept([row for row, count in enumerate(left) if count > 0])
        done = [row for row, count in enumerate(left) if count == 0 and row not in kept]
        if done:
            done_R = torch.tensor(done, device=self.live_R.device)
            self.waiting.append(self.live_R[done_R])
            self.engine.set_aside(done_R)
        self._keep(kept)
        return max(0, *left)

    def _kept(self, going: list[int]) -> list[int]:
        """The live rows that stay: those that go on and, in static steps, others up to a round number."""
        if self.graphs is None:
            return going
        idle = sorted({*range(len(self.live_R))}.difference(going))
        return sorted(going + idle[: rows_of(len(going)) - len(going)])

    def _keep(self, kept: list[int]) -> None:
        if len(kept) < len(self.live_R):
            kept_R = torch.tensor(kept, dtype=torch.long, device=self.live_R.device)
            self.live_R = self.live_R[kept_R]
            self.engine.keep(kept_R)

    def step(self, number: int, step: int, size: int, left: int) -> None:
        """Draw a token at the masked positions of the block, at most `left` a row, rank them and commit."""
        started, self.last_block = self.last_block == number, number
        if self.graphs is None:
            self._step(number, step, size, left, started)
            return
        for place, value in zip(self.clock, (number, step, size), strict=True):
            place.fill_(value)
        self.live_R = self._held("live", self.live_R)
        static, left = self.engine.static_pass(self.live_R, number, started), positions_of(left, self.engine.block)
        shape = (*self.trace.tokens_BL.shape, self.engine.padded, self.recorder.record, self.late_B is None)
        shape = (*shape, len(self.live_R), left, static)
        block, turn, commits = self.clock
        self.graphs.run(shape, self.engine.policy, partial(self._step, block, turn, commits, left, started, static))

    def _step(
        self,
        number: int | Tensor,
        step: int | Tensor,
        size: int | Tensor,
        left: int,
        started: bool,
        static: StaticPass | None = None,
    ) -> None:
        """In a static step (`static`) the number of the block, the step and `size` are (1, 1)."""
        trace, live_R = self.trace, self.live_R
        own, own_step = self._own_number(number), self._own_step(step)
        column_RW = self.engine.block_columns(live_R, own)
        masked_RW = self._masked(column_RW, own)
        place_RM = masked_RW.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :left]
        valid_RM = masked_RW.gather(1, place_RM) & ~self.ended_B[live_R, None]
        column_RM = column_RW.gather(1, place_RM)
        offset_R1 = torch.arange(len(live_R), device=live_R.device)[:, None] * trace.tokens_BL.shape[1]
        hidden = self.engine.hidden(live_R, (offset_R1 + column_RM).flatten(), own, started, static)
        drawn = self._draw(hidden, column_RM, own_step)
        score_RM = drawn["score"].view_as(column_RM).masked_fill(~valid_RM, -torch.inf)
        sure_RM = drawn["sure"].view_as(column_RM).masked_fill(~valid_RM, -torch.inf) if "sure" in drawn else score_RM
        chosen_RM = self._chosen(score_RM, sure_RM, size) & valid_RM
        completion_RM = column_RM - self.engine.start
        positions = StepPositions(own_step, live_R, completion_RM, place_RM, valid_RM, chosen_RM)
        if self.recorder.record.choice:
            kept_RM = sure_RM.masked_fill(~chosen_RM, torch.inf)
            drawn["step_above"] = self._above(hidden, kept_RM, column_RM)
        self.recorder.record_step(drawn, positions)
        written = {"tokens_BL": drawn["token"].view_as(column_RM), "logp_BL": drawn["logp"].view_as(column_RM)}
        for name, value_RM in (written | {"step_BL": own_step}).items():
            write(getattr(trace, name), (live_R[:, None], column_RM), value_RM, chosen_RM)
        self.ended_B[live_R] |= ended(trace.tokens_BL[live_R, self.engine.start :], trace)

    def _masked(self, column_RW: Tensor, number: int | Tensor) -> Tensor:
        """Which of these columns are masked positions of block `number`."""
        cell = (self.live_R[:, None], column_RW)
        masked_RW = self.trace.tokens_BL[cell] == self.trace.mask_id
        if self.engine.causal is None:
            return masked_RW
        return masked_RW & (self.trace.block_BL[cell] == number)

    def _chosen(self, score_RM: Tensor, sure_RM: Tensor, size: int | Tensor) -> Tensor:
        """The positions that are sure enough; if they are fewer than `size`, the `size` positions of largest score,
        ties to the left."""
        order_RM = score_RM.sort(dim=-1, descending=True, stable=True).indices
        first_RM = (torch.arange(score_RM.shape[1], device=score_RM.device) < size).expand_as(order_RM)
        chosen_RM = torch.zeros_like(first_RM).scatter(1, order_RM, first_RM)
        if self.sure_score is None:
            return chosen_RM
        reached_RM = sure_RM >= self.sure_score
        return torch.where(reached_RM.sum(-1, keepdim=True) >= size, reached_RM, chosen_RM)

    def _draw(self, hidden: list[Tensor], column_RM: Tensor, step: int | Tensor) -> dict[str, Tensor]:
        """A token at every position, with its log-probability and score; in pieces, since logits are large."""
        width = self.trace.tokens_BL.shape[1]
        # Columns are counted from the end of the canvas, so padding does not move a row's noise.
        seed_R1, away_RM = self.seed_B[self.live_R, None], width - column_RM
        stream_S11 = torch.arange(2, device=column_RM.device)[:, None, None]  # of tokens, and of places
        uniform_Q, noise_Q = self.uniforms(seed_R1, stream_S11, step, away_RM).flatten(1)
        places, pieces = Places(uniform_Q, noise_Q, column_RM.flatten()), list[dict[str, Tensor]]()
        for piece in self.engine.pieces(column_RM.numel()):
            logits_QV = self.engine.logits([stream[piece] for stream in hidden])
            pieces.append(self.draws(logits_QV, Places(*(each[piece] for each in places)), self.draw_settings))
        if "kept" in pieces[0]:
            widest = max(piece["kept"].shape[-1] for piece in pieces)
            pieces = [piece | {"kept": pad_ids(piece["kept"], widest)} for piece in pieces]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def _above(self, hidden: list[Tensor], kept_RM: Tensor, column_RM: Tensor) -> Tensor:
        """How many tokens of each position rank above the kept draws. The head runs again: what is kept was not known
        when the logits were there."""
        least_R, place_R = cut(kept_RM, column_RM, self.trace)
        least_Q, level_Q = least_R.repeat_interleave(column_RM.shape[1]), (column_RM < place_R[:, None]).flatten()
        counts = []
        for piece in self.engine.pieces(column_RM.numel()):
            plain_QV = token_logprobs(self.engine.logits([stream[piece] for stream in hidden]), self.trace.mask_id)
            counts.append(outranking(plain_QV, least_Q[piece], level_Q[piece]).sum(-1, dtype=torch.int32))
        return torch.cat(counts)


def ended(completion_RC: Tensor, trace: Trace) -> Tensor:
    """Rows that have an end token with nothing masked before it, or nothing masked at all."""
    open_RC = (completion_RC == trace.mask_id).cumsum(-1) == 0
    return ((completion_RC == trace.eos_id) & open_RC).any(-1) | open_RC.all(-1)
