"""How many positions each step commits, block by block, the same for every row."""

from collections.abc import Callable
from itertools import pairwise

import torch

CommitCounts = list[list[int]]
Schedule = Callable[[int, int, int], CommitCounts]
"""(length, steps, block) -> the number of positions committed by each step of each block."""


def even(length: int, steps: int, block: int) -> CommitCounts:
    """The same number at every step; the first steps of a block take the remainder (LLaDA)."""
    blocks = _blocks(length, block)
    if steps % blocks or not blocks <= steps <= length:
        raise ValueError(
            f"steps={steps} must be a multiple of the number of blocks ({blocks}) and at most the length {length}"
        )
    share, rest = divmod(block, steps // blocks)
    return [[share + (i < rest) for i in range(steps // blocks)] for _ in range(blocks)]


def timestep(length: int, steps: int, block: int, eps: float = 1e-3) -> CommitCounts:
    """Dream's: time falls linearly from 1 to eps, and a step from t to s commits the share 1 - s/t of what is masked,
    rounded down; the last step commits the rest. A step may commit nothing."""
    if block != length:
        raise ValueError(f"the timestep schedule has no blocks: leave block={block} out")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    time_T = torch.linspace(1, eps, steps + 1)
    left, sizes = length, []
    for step in range(steps - 1):
        sizes.append(int(left * (1 - time_T[step + 1] / time_T[step])))
        left -= sizes[-1]
    return [[*sizes, left]]


def at_least(length: int, least: int, block: int) -> CommitCounts:
    """`least` at every step, for decoding by a threshold, which can commit more; the last step takes the rest."""
    if not 1 <= least <= block:
        raise ValueError(f"min_per_step={least} must lie between 1 and the {block} positions of a block")
    return [[min(least, block - done) for done in range(0, block, least)] for _ in range(_blocks(length, block))]


def fewer_steps(counts: CommitCounts, start: int, most: int) -> CommitCounts:
    """The schedule with the steps of each block from step `start` on merged into at most `most`: the first of merged
    steps commits what all of them commit, and the others commit nothing."""
    merged, first = [], 0
    for sizes in counts:
        done = min(max(start - first, 0), len(sizes))
        edges = [done + (len(sizes) - done) * i // most for i in range(most + 1)]
        kept = {low: sum(sizes[low:high]) for low, high in pairwise(edges) if low < high}
        merged.append([*sizes[:done], *(kept.get(place, 0) for place in range(done, len(sizes)))])
        first += len(sizes)
    return merged


SCHEDULES: dict[str, Schedule] = {"even": even, "timestep": timestep}


def _blocks(length: int, block: int) -> int:
    if length < 1 or block < 1 or length % block:
        raise ValueError(f"block={block} must divide the completion length {length}")
    return length // block
