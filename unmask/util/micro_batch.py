"""How much goes through the model at a time."""

from dataclasses import dataclass

import torch


@dataclass
class MicroBatch:
    """How many canvases go through the model at a time. Halved when memory runs out; no result depends on it."""

    most: int
    halved: int = 0
    """How often it had to be."""

    def halve(self, error: torch.OutOfMemoryError, tried: int | None = None) -> None:
        """Half of what was tried, if that was less; the error itself where nothing is left to halve."""
        most = min(self.most, tried or self.most)
        if most == 1:
            raise error
        self.most, self.halved = most // 2, self.halved + 1
        torch.cuda.empty_cache()
