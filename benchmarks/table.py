"""A result file of grid.py as a Markdown table: solved sampled %, mean over seeds, and the extremes.

    python benchmarks/table.py benchmarks/results/stability.json
"""

import json
import sys
from pathlib import Path
from statistics import mean


def main(path: str) -> None:
    for cell, runs in json.loads(Path(path).read_text()).items():
        if not runs:
            continue
        seeds = sorted(runs, key=int)
        curves = {seed: [100 * row["eval/solved_sampled"] for row in runs[seed]["curve"]] for seed in seeds}
        greedy = [100 * runs[seed]["curve"][-1]["eval/solved_greedy"] for seed in seeds]
        steps = [int(row["step"]) for row in runs[seeds[0]]["curve"]]
        print(f"\n**{cell}**, greedy at the end {mean(greedy):.1f} ({min(greedy):.1f} to {max(greedy):.1f})\n")
        print("| seed | " + " | ".join(f"{step}" for step in steps) + " | best - last |")
        print("|---" * (len(steps) + 2) + "|")
        for seed in seeds:
            row = curves[seed]
            print(f"| {seed} | " + " | ".join(f"{value:.1f}" for value in row) + f" | {max(row) - row[-1]:.1f} |")
        means = [mean(curve[i] for curve in curves.values()) for i in range(len(steps))]
        print("| mean | " + " | ".join(f"{value:.1f}" for value in means) + f" | {max(means) - means[-1]:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1])
