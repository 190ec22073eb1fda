"""How much goes through the model at a time."""

from dataclasses import dataclass

import torch


@dataclass
class MicroBatch:
    """How many masked states go through the model in one pass. Halved when memory runs out; no result depends on it."""

    size: int
    halvings: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the micro-batch size must be at least 1, not {self.size}")

    def halve(self, error: torch.OutOfMemoryError, tried: int | None = None) -> None:
        """Halve the size, or the size that was tried if it is smaller; raise the error if that is 1."""
        size = min(self.size, tried or self.size)
        if size == 1:
            raise error
        self.size, self.halvings = size // 2, self.halvings + 1
        torch.cuda.empty_cache()


def as_micro_batch(size: int | MicroBatch) -> MicroBatch:
    return MicroBatch(size) if isinstance(size, int) else size
