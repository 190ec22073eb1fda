"""Examples as canvases of few widths, and batches of them. There is no padding, so attention needs no mask.

A canvas is a prompt, its completion, and end tokens up to the width. End tokens are masked and predicted like other
tokens, so the model learns to stop. A batch has canvases of one width. If the examples have too many different widths
to fill batches, widths are rounded up to multiples of a few tokens.
"""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = (1, 4, 16, 64)
"""Widths are multiples of one of these."""


class Example(NamedTuple):
    prompt: list[int]
    completion: list[int]
    """Without an end token."""
    canvas: int
    """The least number of positions of the completion, end tokens included."""


class Bucket(NamedTuple):
    """The canvases of one width."""

    tokens_NW: Tensor
    """int32, to save memory."""
    given_N: Tensor
    """Tokens of the prompt."""
    number_N: Tensor
    """The index of each example in the data."""

    @property
    def width(self) -> int:
        return self.tokens_NW.shape[1]


def next_multiple(length: int, step: int = 16) -> int:
    return -(-length // step) * step


def width_of(example: Example, max_width: int, step: int = 1) -> int | None:
    """The width of an example's canvas; None if prompt, completion and end token do not fit into `max_width`."""
    needed = len(example.prompt) + len(example.completion) + 1
    width = next_multiple(len(example.prompt) + max(example.canvas, len(example.completion) + 1), step)
    return None if needed > max_width else min(width, max_width)


def width_step(examples: Sequence[Example], max_width: int, tokens: int) -> int:
    """The smallest of STEPS with which an average width has enough tokens for a batch; the largest if none does."""
    for step in STEPS[:-1]:
        widths = [width for example in examples if (width := width_of(example, max_width, step)) is not None]
        if sum(widths) >= tokens * len(set(widths)):
            return step
    return STEPS[-1]


def width_buckets(examples: Sequence[Example], eos_id: int, max_width: int, step: int = 1) -> list[Bucket]:
    """All examples that fit, by width."""
    rows: dict[int, list[int]] = {}
    for number, example in enumerate(examples):
        if (width := width_of(example, max_width, step)) is not None:
            rows.setdefault(width, []).append(number)
    return [_bucket(examples, numbers, width, eos_id) for width, numbers in sorted(rows.items())]


def _bucket(examples: Sequence[Example], numbers: list[int], width: int, eos_id: int) -> Bucket:
    tokens_NW = torch.full((len(numbers), width), eos_id, dtype=torch.int32)
    for row, number in enumerate(numbers):
        ids = examples[number].prompt + examples[number].completion
        tokens_NW[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    given_N = torch.tensor([len(examples[number].prompt) for number in numbers])
    return Bucket(tokens_NW, given_N, torch.tensor(numbers))


class PackedBatch(NamedTuple):
    tokens_BW: Tensor
    given_B: Tensor
    full: int
    """Rows of a full batch of this width. Sums over rows are divided by it, so that a row has the same weight in the
    last, smaller batch of its width."""

    @property
    def width(self) -> int:
        return self.tokens_BW.shape[1]

    @property
    def canvas_BW(self) -> Tensor:
        """The positions after the prompt: those that may be masked."""
        return torch.arange(self.width) >= self.given_B[:, None]


class Batches:
    """Every example once an epoch, in an order drawn from the seed. The number of an update determines its batch."""

    def __init__(self, buckets: Iterable[Bucket], tokens: int, seed: int) -> None:
        self.buckets, self.tokens, self.seed = list(buckets), tokens, seed
        self.count = sum(-(-len(bucket.given_N) // self.rows(bucket)) for bucket in self.buckets)
        self.epoch: tuple[int, list[tuple[Bucket, Tensor]]] = (-1, [])

    def rows(self, bucket: Bucket) -> int:
        """Rows of a full batch: about `tokens` tokens."""
        return max(1, self.tokens // bucket.width)

    def batch(self, update: int) -> PackedBatch:
        """The batch of an update, counted from 1."""
        epoch, place = divmod(update - 1, self.count)
        if self.epoch[0] != epoch:
            self.epoch = epoch, self._shuffle(epoch)
        bucket, row_B = self.epoch[1][place]
        return PackedBatch(bucket.tokens_NW[row_B].long(), bucket.given_N[row_B], self.rows(bucket))

    def _shuffle(self, number: int) -> list[tuple[Bucket, Tensor]]:
        rng = random.Random(f"unmask batches {self.seed} {number}")
        batches = []
        for bucket in self.buckets:
            order = list(range(len(bucket.given_N)))
            rng.shuffle(order)
            batches += [(bucket, row_B) for row_B in torch.tensor(order).split(self.rows(bucket))]
        rng.shuffle(batches)
        return batches
