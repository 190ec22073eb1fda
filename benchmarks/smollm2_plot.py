"""Draw how SmolLM2-135M learns: its adaptation, and the problems solved in training by reinforcement learning.

python benchmarks/smollm2_plot.py docs/figures/smollm2.png
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
LESSONS = {"sudoku_text": "Sudoku", "countdown_text": "Countdown", "word_problems": "word problems"}
COLOURS = {"": "0.3", "+daca": "C0", "+dispo": "C1"}
SMOOTHED = 9
"""Updates in a running mean."""


def adaptation(axes: Axes, curve: list[dict[str, float]]) -> None:
    looks = [row for row in curve if "eval/sudoku_text/loss" in row]
    for number, (lesson, name) in enumerate(LESSONS.items()):
        for kind, style in (("sampled", "-"), ("greedy", ":")):
            points = [100 * row[f"eval/{lesson}/solved_{kind}"] for row in looks]
            label = name if kind == "sampled" else None
            axes.plot([row["step"] for row in looks], points, style, marker=".", color=f"C{number}", label=label)
    axes.set_title("adaptation: held out, sampled (dotted: greedy)", fontsize=10)
    axes.set(xlabel="updates", ylabel="solved %")


def training(axes: Axes, name: str, runs: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    """Both bases, with agrpo dashed; problems of the training batches, which differ from update to update."""
    for label, seeds in runs.items():
        base, plug, rest = label.partition("+")
        for number, run in enumerate(seeds.values()):
            ends = range(SMOOTHED, len(run["solved"]) + 1)
            points = [100 * mean(run["solved"][end - SMOOTHED : end]) for end in ends]
            style, shown = "--" if base == "agrpo" else "-", label if number == 0 else None
            axes.plot(run["forwards"][SMOOTHED - 1 :], points, style, color=COLOURS[plug + rest], label=shown)
    axes.set_title(f"{name}: in training, mean of {SMOOTHED} updates", fontsize=10)
    axes.set_xlabel("forwards")


def drawn(curve: list[dict[str, float]], runs: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    adaptation(first, curve)
    training(second, "Countdown", runs["countdown_text"])
    training(third, "Sudoku in 24 steps", runs["sudoku_text in 24 steps"])
    for axes in (first, second, third):
        axes.grid(alpha=0.3)
    first.legend(fontsize=8)
    third.legend(fontsize=8)
    return figure


def main(out: str) -> None:
    curve = json.loads((RESULTS / "adapt_again.json").read_text())["adapt"]["curve"]
    drawn(curve, json.loads((RESULTS / "smollm2_curves.json").read_text())).savefig(out, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
