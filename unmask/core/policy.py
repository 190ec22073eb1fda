"""The interface of a model: all that the library needs of it."""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from unmask.util.turns import Turns

PIECE = 2**27
"""Logits in memory at a time, positions times vocabulary: half a gibibyte in fp32."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """The text alone, without a conversation format."""

    def prompt(self, prompt: str | Turns, system: str = "") -> list[int]:
        """A text as a user turn, or a conversation, after a system turn if there is one, in the model's own format."""

    def decode(self, ids: list[int]) -> str:
        """The text up to the first end token."""

    def raw(self, ids: list[int]) -> str:
        """The whole text, special tokens written out."""

    def show(self, ids: list[int]) -> str:
        """A canvas with masks and end tokens visible."""


@runtime_checkable
class Policy(Protocol):
    """A masked diffusion model: the distribution of every token given the whole canvas. A trunk and a head.

    tokens_SL   (S, L) long: canvases, MASK where unknown
    attended_SL (S, L) bool: False at padding, which is never attended to and never changes a row's result; None if
                nothing is padded
    at_Q        (Q,) long: positions of the flattened canvases, row * L + position
    hidden      (Q, D): what the head needs to predict the token at position at_Q[q] itself, also for models whose own
                convention is shifted by one
    head        (Q, V) logits, fp32 or better; inside `CachingPolicy.rollout` maybe in the dtype of the model, for
                `token_logprobs` to cast
    call        head(hidden(...)), if there is memory for all logits at once
    """

    @property
    def mask_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def max_length(self) -> int: ...

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor: ...

    def head(self, hidden_QD: Tensor) -> Tensor: ...

    def __call__(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Memory:
    """Keys and values of every layer over whole canvases, (S, heads, L, channels) each."""

    keys: list[Tensor]
    values: list[Tensor]
    attended_SL: Tensor | None

    def __len__(self) -> int:
        return len(self.keys[0])

    def rows(self, index: Tensor | slice) -> "Memory":
        attended_SL = None if self.attended_SL is None else self.attended_SL[index]
        return Memory([key[index] for key in self.keys], [value[index] for value in self.values], attended_SL)

    def concat(self, others: list["Memory"], order: Tensor | slice = slice(None)) -> "Memory":
        """The rows of this memory and then of the others, sorted by `order`."""
        every = [self, *others]
        attended = [memory.attended_SL for memory in every if memory.attended_SL is not None]
        return Memory(
            keys=[torch.cat(layer)[order] for layer in zip(*(memory.keys for memory in every), strict=True)],
            values=[torch.cat(layer)[order] for layer in zip(*(memory.values for memory in every), strict=True)],
            attended_SL=torch.cat(attended)[order] if attended else None,
        )

    def replace_rows(self, place_R: Tensor, new: "Memory") -> None:
        """Overwrite these rows in the first columns, those that `new` has."""
        width = new.keys[0].shape[2]
        for mine, other in zip((*self.keys, *self.values), (*new.keys, *new.values), strict=True):
            mine[place_R, :, :width] = other
        if self.attended_SL is not None:
            assert new.attended_SL is not None
            self.attended_SL[place_R, :width] = new.attended_SL


@runtime_checkable
class CachingPolicy(Policy, Protocol):
    """A policy that can recompute some columns of a canvas and take the rest from memory.

    If attention is block-causal (`causal_block` is its block length), the memory of finished blocks is exact. If it is
    bidirectional (None), a column's memory is from the last time it was computed.
    """

    @property
    def causal_block(self) -> int | None: ...

    def rollout(self, even: bool = False) -> AbstractContextManager[None]:
        """Inside it, passes without gradient may use faster kernels that round differently. `even`: every canvas is
        asked about the same number of positions, and `at_Q` has them in the order of the canvases."""

    def remember(
        self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor, last: int | None = None
    ) -> tuple[Tensor, Memory]:
        """`hidden`, and the memory of the pass. `last`: columns from it on are not computed (block-causal)."""

    def hidden_window(self, memory: Memory, tokens_SL: Tensor, first: int, last: int, at_Q: Tensor) -> Tensor:
        """`hidden` at positions in columns first..last - 1; only these are computed, and written to the memory."""

    def hidden_blocks(self, memory: Memory, tokens_SL: Tensor, column_SW: Tensor, reach: int, at_Q: Tensor) -> Tensor:
        """The same for a block-causal model, each row with its own consecutive columns. Columns outside the canvas are
        allowed; no row attends to columns from `reach` on."""


@runtime_checkable
class StaticPolicy(CachingPolicy, Protocol):
    """A policy whose passes can be captured as a CUDA graph: nothing in them waits for the device."""

    @property
    def compiled(self) -> bool:
        """Its layers are compiled."""

    def hidden_columns(self, memory: Memory, tokens_SL: Tensor, column_W: Tensor, at_Q: Tensor) -> Tensor:
        """`hidden_window` with its consecutive columns as a tensor, so that one graph serves every block."""

    def capture_obstacle(self) -> str | None:
        """Why its passes cannot be captured; None if they can."""

    def addresses(self) -> Hashable:
        """Equal as long as a captured pass computes what the model computes: weights may change in place only."""


@runtime_checkable
class ShiftedPolicy(Policy, Protocol):
    """A policy that says where it predicts a token."""

    @property
    def shift(self) -> bool:
        """Token i is predicted at position i - 1, so nothing predicts the first token: a prompt cannot be empty."""


@runtime_checkable
class BlockCausalPolicy(Policy, Protocol):
    """A policy with block-causal attention: it can see a masked block and the finished text before it in one pass."""

    def hidden_two_streams(
        self, states_SL: Tensor, clean_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor, block: int
    ) -> Tensor:
        """`hidden` of states in which a token sees its own block of `block` positions as in `states_SL`, and earlier
        blocks as in `clean_SL`. Blocks count from the first real token; `block` is a multiple of the model's own."""
