"""How much goes through the model at a time."""

from dataclasses import dataclass

import torch


@dataclass
class Rows:
    """How many canvases go through the model at a time. Halved when memory runs out; no result depends on it."""

    most: int
    halved: int = 0
    """How often it had to be."""

    def halve(self, error: torch.OutOfMemoryError) -> None:
        if self.most == 1:
            raise error
        self.most, self.halved = self.most // 2, self.halved + 1
        torch.cuda.empty_cache()
