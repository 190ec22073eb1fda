"""The manner in which a protocol has answers made, of which `benchmark.decoding_by` makes a Decoding at a length."""

from collections.abc import Callable
from dataclasses import dataclass


def halves(length: int) -> int:
    return max(1, length // 2)


@dataclass(frozen=True)
class Manner:
    """Greedy, the surest draws first, in blocks: what the field has in common. The rest is the protocol's."""

    steps: Callable[[int], int] = halves
    """Of a length."""
    block: int = 32
    batch: Callable[[int], int] | None = None
    """Problems in a batch at a length; None: as many as fit, because nothing depends on it."""
    attend_padding: bool = False
    """The model sees the padding of shorter prompts, so that an answer depends on its batch."""
    stops: bool = True
    """An answer ends at its end token; else all of it is decoded, and read with its special tokens."""


FIELD = Manner()
D1 = Manner(batch=lambda length: 4 if length >= 512 else 8, attend_padding=True, stops=False)
JUSTGRPO = Manner(steps=lambda length: length, batch=lambda length: 1)
