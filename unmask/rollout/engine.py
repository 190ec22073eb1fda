"""The sampler's passes through the model: whole canvases, or some columns with the others from a cache.

For a bidirectional model a cache is an approximation (`mismatch.py` measures it); for a block-causal one it is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.policy import PIECE, CachingPolicy, Memory, Policy, StaticPolicy
from unmask.core.shapes import GIVEN
from unmask.core.token_sampling import wide_logits
from unmask.core.trace import Trace
from unmask.rollout.cache import Cache
from unmask.rollout.graphs import Graphs, reach_of
from unmask.util.metering import PassCounterMixin, count_passes


class StaticPass(NamedTuple):
    """The shape of a static pass."""

    columns: int
    """The number of columns that it computes."""
    reach: int
    """No row attends to columns from it on."""
    prompts: int | None = None
    """The number of distinct prompts. Set for the first pass of a rollout, if it computes one row for each."""


class EqualRows(NamedTuple):
    """Rows by canvas: one pass for the first of equal ones is enough."""

    first_S: Tensor
    """The first row of each canvas."""
    place_R: Tensor
    """The canvas of each row, as a place in `first_S`."""

    def asked(self, at_Q: Tensor, width: int) -> Tensor:
        """(S, M): the positions asked of each first row, in the flattened first rows. Equal rows ask the same."""
        at_SM = at_Q.view(len(self.place_R), -1)[self.first_S]
        return at_SM % width + width * torch.arange(len(at_SM), device=at_Q.device)[:, None]

    def expand(self, hidden_QD: Tensor) -> Tensor:
        """The hidden states of the first rows, for all rows."""
        return hidden_QD.unflatten(0, (len(self.first_S), -1))[self.place_R].flatten(0, 1)


def prompt_rows(prompts: Sequence[Sequence[int]], device: torch.device) -> EqualRows | None:
    """Rows by prompt: their canvases are equal until a token is committed. None if all prompts differ."""
    places: dict[tuple[int, ...], int] = {}
    place = [places.setdefault(tuple(ids), len(places)) for ids in prompts]
    if len(places) == len(place):
        return None
    first = [place.index(number) for number in range(len(places))]
    return EqualRows(torch.tensor(first, device=device), torch.tensor(place, device=device))


@dataclass
class Engine:
    """Hidden states for live rows of a trace, by full passes or with a memory; two streams if guided."""

    policy: Policy
    trace: Trace
    start: int
    """The first column of the completion."""
    block: int
    cache: Cache | None = None
    causal: int | None = None
    """The block of a block-causal model. Blocks then count from the first real token, so they begin in another column
    in rows whose prompts have another length."""
    append: bool = False
    """Later blocks are not on the canvas yet."""
    padded: bool = True
    """Some row of the trace is padded."""
    merges: bool = False
    """Equal canvases go through the model once. It waits for the device at every step."""
    prompt_groups: EqualRows | None = None
    """Set if all rows begin together and some share a prompt. The first pass that fills the memory of a bidirectional
    model then computes each prompt once."""
    graphs: Graphs | None = None
    """Steps have static shapes, and memories are held in buffers."""
    memories: dict[bool, Memory] = field(default_factory=dict)
    """Of the live rows, by stream."""
    waiting: list[dict[bool, Memory]] = field(default_factory=list)
    """Of the rows that have been set aside."""
    ready: dict[bool, Memory] = field(default_factory=dict)
    """Of the prompts of the rows that come next."""
    furthest: int = 0
    """The number of the present block; the largest one if rows are at different blocks."""

    def __post_init__(self) -> None:
        if self.cache is not None and not isinstance(self.policy, CachingPolicy):
            raise ValueError("this model cannot be rolled out with a cache: choose cache none")
        given_B = self.trace.attended_BL[:, : self.start].sum(1)
        self.given_B = given_B if self.graphs is None else self.graphs.hold("given", given_B)
        """Tokens of each prompt."""
        counted = isinstance(self.policy, PassCounterMixin)  # also the passes that are not computed
        if self.cache is None or self.causal is not None or not counted:
            self.prompt_groups = None
        if self.graphs is not None and self.prompt_groups is not None:
            first_S, place_R = self.prompt_groups
            first_R = torch.cat([first_S, torch.zeros_like(place_R[len(first_S) :])])  # of a size that does not change
            held_R = self.graphs.hold("first rows", first_R)
            self.prompt_groups = EqualRows(held_R[: len(first_S)], self.graphs.hold("places", place_R))

    def begin(self, number: int) -> None:
        """Begin a block. If a full pass is due, drop the memory first: two would not fit."""
        self.furthest = number
        if self.cache is not None and self.causal is None and number % self.cache.refresh == 0:
            self.memories, self.waiting = {}, []

    def forget(self) -> None:
        """Drop all memory: the first pass of the next block makes it again."""
        self.memories, self.ready = {}, {}

    def admit(self, new_R: Tensor, places: list[int], live: int, ahead_R: Tensor) -> None:
        """Give rows whose first block begins a place in the memory, beside rows that go on. `places` are indices among
        the `live` rows, or follow them.

        Their prompts pass through the model together with those of `ahead_R`, the rows that come next.
        """
        place_R = torch.tensor(places, device=new_R.device)
        for unprompted, memory in self.memories.items():
            ready, row_R = self.ready.get(unprompted), torch.cat([new_R, ahead_R])
            if ready is None:
                ready = self._prompt_memory(unprompted, row_R)
            elif len(ready) < len(new_R):
                ready = ready.concat([self._prompt_memory(unprompted, row_R[len(ready) :])])
            if (more := places[-1] + 1 - live) > 0:
                room = memory.rows(place_R.new_zeros(more))  # what it holds is never attended to
                self.memories[unprompted] = memory = self._held(unprompted, memory.concat([room]))
            memory.replace_rows(place_R, ready.rows(slice(len(new_R))))
            self.ready[unprompted] = ready.rows(slice(len(new_R), None))

    def _prompt_memory(self, unprompted: bool, row_R: Tensor) -> Memory:
        """The memory of some rows in the columns of the prompts."""
        assert isinstance(self.policy, CachingPolicy)
        tokens_RL, attended_RL = self._canvas(unprompted, row_R)
        width = max(1, self.start)
        whole = self.policy.remember(tokens_RL, attended_RL, row_R[:0], last=width)[1]
        keys, values = ([part[:, :, :width].clone() for part in parts] for parts in (whole.keys, whole.values))
        return Memory(keys, values, None if whole.attended_SL is None else whole.attended_SL[:, :width])

    def block_columns(self, row_R: Tensor, number: int | Tensor) -> Tensor:
        """(R, W): columns of the completion that contain the block; under block-causal attention maybe others too.

        `number` is (R, 1) if rows are at different blocks.
        """
        width, size = self.trace.tokens_BL.shape[1], self.block
        first = self.start + number * size
        if self.causal is None:
            return (first + torch.arange(size, device=row_R.device)).expand(len(row_R), -1)
        size = min(size, width - self.start)
        first_R1 = (first - self.given_B[row_R, None] % self.block).clamp(self.start, width - size)
        return first_R1 + torch.arange(size, device=row_R.device)

    def keep(self, index_R: Tensor) -> None:
        """Drop the memory of rows that are not in `index_R`."""
        self.memories = {name: self._held(name, memory.rows(index_R)) for name, memory in self.memories.items()}

    def set_aside(self, index_R: Tensor) -> None:
        """Keep the memory of these rows, which have finished the block, until they `rejoin`; then `keep` the others.

        Their memory of this block may be out of date: its columns are computed again when the next block begins.
        """
        self.waiting.append({name: memory.rows(index_R) for name, memory in self.memories.items()})

    def rejoin(self, order_R: Tensor) -> None:
        """Append the rows that were set aside to the live ones, and sort all by `order_R`."""
        waiting, self.waiting = self.waiting, []
        self.memories = {
            name: self._held(name, memory.concat([rows[name] for rows in waiting], order_R))
            for name, memory in self.memories.items()
        }

    def static_pass(self, live_R: Tensor, number: int, started: bool) -> StaticPass:
        """The shape of the next static pass. If it is the first, provides its memory."""
        width = self.trace.tokens_BL.shape[1]
        if self.cache is None:
            return StaticPass(width, width)
        if self.memories:
            if self.causal is not None:
                reach = reach_of(self._reach, width)
                return StaticPass(min(reach, self.causal * (1 if started else 2)), reach)
            first, last = self._window(number, started)
            return StaticPass(last - first, width)
        assert self.graphs is not None
        self.memories = {
            unprompted: self.graphs.memory(unprompted, len(live_R), width, partial(self._new_memory, live_R))
            for unprompted in self._streams
        }
        if self.causal is None:
            groups = self.prompt_groups if number == 0 else None
            return StaticPass(width, width, None if groups is None else len(groups.first_S))
        for memory in self.memories.values():  # columns after the first block are attended to with weight 0
            torch._foreach_zero_([*memory.keys, *memory.values])
        return StaticPass(self._reach, self._reach)

    def _new_memory(self, live_R: Tensor) -> Memory:
        assert isinstance(self.policy, CachingPolicy)
        with count_passes(None, self.policy):
            tokens_RL, attended_RL = self._canvas(False, live_R)
            return self.policy.remember(tokens_RL, attended_RL, live_R[:0])[1]

    def _held(self, unprompted: bool, memory: Memory) -> Memory:
        """The memory; of static steps, in its buffers."""
        if self.graphs is None:
            return memory
        rows, _, width, _ = memory.keys[0].shape
        held = self.graphs.memory(unprompted, rows, width, lambda: memory)
        for mine, new in zip((*held.keys, *held.values), (*memory.keys, *memory.values), strict=True):
            mine.copy_(new)
        return held

    def hidden(
        self, live_R: Tensor, at_Q: Tensor, number: int | Tensor, started: bool, static: StaticPass | None = None
    ) -> list[Tensor]:
        """(Q, D) at positions of the flattened live canvases in block `number`, for each stream.

        `started`: an earlier step of this block has been done. `static`: the pass has this shape.
        """
        if static is not None:
            return [self._static_stream(unprompted, live_R, at_Q, number, static) for unprompted in self._streams]
        return [self._stream(unprompted, live_R, at_Q, number, started) for unprompted in self._streams]

    def exact(self, row_R: Tensor, at_Q: Tensor) -> list[Tensor]:
        """The same for some rows without a memory, at any positions."""
        canvases = [self._canvas(unprompted, row_R) for unprompted in self._streams]
        return [self.policy.hidden(tokens_RL, attended_RL, at_Q) for tokens_RL, attended_RL in canvases]

    @property
    def compiles_draws(self) -> bool:
        """Draws are compiled with the layers where steps are captured: their shapes are few."""
        if self.graphs is None or not self.graphs.on_gpu:
            return False
        return isinstance(self.policy, StaticPolicy) and self.policy.compiled

    @property
    def _streams(self) -> tuple[bool, ...]:
        """Whether the prompt is hidden: False, and with guidance also True."""
        return (False, True) if self.trace.sampling.guidance else (False,)

    def logits(self, hidden: list[Tensor]) -> Tensor:
        """(Q, V) as the head returns them; with two streams guided, uncond + (w + 1) (cond - uncond), in at least
        fp32."""
        if len(hidden) == 1:
            return self.policy.head(hidden[0])
        prompted_QV, unprompted_QV = (wide_logits(self.policy.head(stream)) for stream in hidden)
        return unprompted_QV + (self.trace.sampling.guidance + 1) * (prompted_QV - unprompted_QV)

    def pieces(self, count: int) -> list[slice]:
        """Positions 0..count - 1 in pieces whose logits fit."""
        size = max(1, PIECE // self.policy.vocabulary)
        return [slice(start, start + size) for start in range(0, count, size)]

    def _canvas(
        self, unprompted: bool, row_R: Tensor, number: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The canvases and what is attended to; in block `number`, if later blocks are not on the canvas yet."""
        tokens_RL = self.trace.tokens_BL[row_R]
        if unprompted:
            tokens_RL = tokens_RL.masked_fill(self.trace.step_BL[row_R] == GIVEN, self.trace.mask_id)
        if self.append and number is not None:
            return tokens_RL, self.trace.attended_BL[row_R] & (self.trace.block_BL[row_R] <= number)
        return tokens_RL, self.trace.attended_BL[row_R] if self.padded else None

    def _static_stream(
        self, unprompted: bool, live_R: Tensor, at_Q: Tensor, number: int | Tensor, static: StaticPass
    ) -> Tensor:
        """`_stream` with static shapes: `number` is a tensor, and the memory is held."""
        tokens_RL, attended_RL = self._canvas(unprompted, live_R, number)
        if self.cache is None:
            return self.policy.hidden(tokens_RL, attended_RL, at_Q)
        assert isinstance(self.policy, StaticPolicy) and isinstance(number, Tensor)
        memory, width = replace(self.memories[unprompted], attended_SL=attended_RL), tokens_RL.shape[1]
        columns, reach = static.columns, static.reach
        if self.causal is not None:
            column_RW = torch.arange(columns, device=live_R.device).expand(len(live_R), -1)
            if columns < reach:
                column_RW = self._first_column(live_R, number) + self.causal - columns + column_RW
            return self.policy.hidden_blocks(memory, tokens_RL, column_RW, reach, at_Q)
        if static.prompts is not None:
            equal = self.prompt_groups
            assert equal is not None
            tokens_SL, attended_SL = self._first_rows(equal, tokens_RL, attended_RL)
            some = replace(memory.rows(slice(static.prompts)), attended_SL=attended_SL)
            hidden_QD = self.policy.hidden_window(some, tokens_SL, 0, width, equal.asked(at_Q, width).flatten())
            for mine in (*memory.keys, *memory.values):
                mine.copy_(mine[: static.prompts][equal.place_R])
            return equal.expand(hidden_QD)
        if columns == width:
            return self.policy.hidden_window(memory, tokens_RL, 0, width, at_Q)
        last = self.start + (number.flatten() + 1) * self.block if self.cache.suffix else width
        column_W = last - columns + torch.arange(columns, device=live_R.device)
        return self.policy.hidden_columns(memory, tokens_RL, column_W, at_Q)

    def _stream(self, unprompted: bool, live_R: Tensor, at_Q: Tensor, number: int | Tensor, started: bool) -> Tensor:
        tokens_RL, attended_RL = self._canvas(unprompted, live_R, number)
        if self.cache is None and (self.merges or self._merges_for_free):
            return self._merged(tokens_RL, attended_RL, at_Q)
        if self.cache is None:
            return self.policy.hidden(tokens_RL, attended_RL, at_Q)
        assert isinstance(self.policy, CachingPolicy)
        if unprompted not in self.memories:
            if (equal := self.prompt_groups) is not None and self.furthest == 0:
                tokens_SL, attended_SL = self._first_rows(equal, tokens_RL, attended_RL)
                at_SM = equal.asked(at_Q, tokens_RL.shape[1])
                hidden_QD, memory = self.policy.remember(tokens_SL, attended_SL, at_SM.flatten())
                for parts in (memory.keys, memory.values):
                    for layer, part in enumerate(parts):
                        parts[layer] = part[equal.place_R]  # layer by layer: two whole memories may not fit
                self.memories[unprompted] = replace(memory, attended_SL=attended_RL)
                return equal.expand(hidden_QD)
            more = {} if self.causal is None else {"last": self.start + self.causal}
            hidden_QD, self.memories[unprompted] = self.policy.remember(tokens_RL, attended_RL, at_Q, **more)
            return hidden_QD
        if self.causal is not None:
            # Earlier blocks are finished: what is remembered of them is exact.
            column_W = torch.arange(0 if started else -self.causal, self.causal, device=live_R.device)
            column_RW = self._first_column(live_R, number) + column_W
            return self.policy.hidden_blocks(self.memories[unprompted], tokens_RL, column_RW, self._reach, at_Q)
        assert isinstance(number, int)
        first, last = self._window(number, started)
        return self.policy.hidden_window(self.memories[unprompted], tokens_RL, first, last, at_Q)

    def _first_rows(
        self, equal: EqualRows, tokens_RL: Tensor, attended_RL: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One canvas of each kind. The others count as passes too, so budgets do not depend on what is merged."""
        if not self.merges:
            assert isinstance(self.policy, PassCounterMixin)
            self.policy.record_pass(tokens_RL[len(equal.first_S) :], tokens_RL.shape[1])
        return tokens_RL[equal.first_S], None if attended_RL is None else attended_RL[equal.first_S]

    @property
    def _merges_for_free(self) -> bool:
        """On a CPU looking for equal canvases takes no time. The rows of a group are equal until their draws differ."""
        counted = isinstance(self.policy, PassCounterMixin)
        return counted and self.causal is None and self.trace.tokens_BL.device.type == "cpu"

    def _merged(self, tokens_RL: Tensor, attended_RL: Tensor | None, at_Q: Tensor) -> Tensor:
        """`hidden` with one pass for all equal canvases, which are asked at equal positions."""
        row_R = torch.arange(len(tokens_RL), device=tokens_RL.device)
        seen_RL = tokens_RL if attended_RL is None else torch.where(attended_RL, tokens_RL, -1)
        _, index_R = seen_RL.unique(dim=0, return_inverse=True)
        first_R = torch.full_like(row_R, len(row_R)).scatter_reduce(0, index_R, row_R, "amin")[index_R]
        equal = EqualRows(*first_R.unique(return_inverse=True))  # in the order of the rows
        tokens_SL, attended_SL = self._first_rows(equal, tokens_RL, attended_RL)
        return equal.expand(self.policy.hidden(tokens_SL, attended_SL, equal.asked(at_Q, tokens_RL.shape[1]).flatten()))

    def _window(self, number: int, started: bool) -> tuple[int, int]:
        """The columns to recompute: the block, and at its first step also the block before it, which was finished."""
        assert self.cache is not None
        first, last = self.start + number * self.block, self.start + (number + 1) * self.block
        if not started:
            first -= self.block
        return max(0, first), last if self.cache.suffix else self.trace.tokens_BL.shape[1]

    def _first_column(self, row_R: Tensor, number: int | Tensor) -> Tensor:
        """(R, 1): where the model's block that contains block `number` begins, under block-causal attention."""
        assert self.causal is not None
        given_R1 = self.given_B[row_R, None]
        place_R1 = (given_R1 // self.block + number) * self.block
        return self.start - given_R1 + place_R1 // self.causal * self.causal

    @property
    def _reach(self) -> int:
        """The end of the furthest block of a block-causal model."""
        assert self.causal is not None
        return min(self.start + self.furthest * self.block + self.causal, self.trace.tokens_BL.shape[1])
