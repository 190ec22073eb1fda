"""Runs that were made more than once, in several comparisons: how often did they end alike?

    python benchmarks/repeats.py benchmarks/results/compare_*.json

A run is known by its task, label, learning rate, number of updates and seed. For each pair of devices: pairs of runs,
how many solved the same number of held-out problems, sampled and greedy, and the largest differences.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple


class End(NamedTuple):
    device: str
    sampled: float
    greedy: float


def runs(path: str) -> Iterator[tuple[tuple[object, ...], End]]:
    results = json.loads(Path(path).read_text())
    for cell in results["cells"]:
        config = cell["config"]
        made = (results["task"], cell["label"], config["optimizer"]["lr"], cell["planned_updates"], config["model"])
        for seed, run in cell["runs"].items():
            yield (*made, seed), End(config["device"], run["curve"][-1]["sampled"], run["curve"][-1]["greedy"])


def main(*paths: str) -> None:
    ends = defaultdict(list)
    for path in paths:
        for run, end in runs(path):
            ends[run].append(end)
    pairs = defaultdict(list)
    for found in ends.values():
        for one, other in combinations(found, 2):
            gap = abs(one.sampled - other.sampled), abs(one.greedy - other.greedy)
            pairs[" and ".join(sorted((one.device, other.device)))].append(gap)
    print("| devices | pairs of runs | alike | largest difference, sampled | greedy |")
    print("|---|---|---|---|---|")
    for devices, gaps in pairs.items():
        alike = sum(gap == (0, 0) for gap in gaps)
        sampled, greedy = (f"{100 * max(values):.2f}" for values in zip(*gaps, strict=True))
        print(f"| {devices} | {len(gaps)} | {alike} | {sampled} | {greedy} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
