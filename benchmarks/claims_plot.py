"""Draw four claims of the papers as they came out here (docs/results.md), from benchmarks/results.

python benchmarks/claims_plot.py docs/figures/claims.png
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unmask.studies.compare.report import summary
from unmask.util.statistics import paired_differences, t_interval

RESULTS = Path(__file__).parent / "results"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "0.4"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(*names: str) -> dict[str, Any]:
    """The summary of every variant in some comparisons, by its label."""
    return {row["label"]: row for name in names for row in summary(read(name))["rows"]}


def bar(row: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """Mean and distances to the ends of its interval, in %."""
    ends = row["sampled"]
    return 100 * ends["mean"], [[100 * (ends["mean"] - ends["low"])], [100 * (ends["high"] - ends["mean"])]]


def strata(axes: Axes) -> None:
    known = rows("compare_prompt", "compare_strata_sudoku", "compare_daca")
    for count in (1, 2, 3, 4, 8):
        height, ends = bar(known["diffu_grpo+daca" if count == 4 else f"diffu_grpo+daca:strata={count}"])
        axes.errorbar(count, height, yerr=ends, fmt="o", color=BLUE, capsize=2)
    for label, text in (("diffu_grpo", "diffu_grpo"), ("diffu_grpo:prompt_masking=0", "diffu_grpo, whole prompt")):
        height = bar(known[label])[0]
        axes.axhline(height, color=GREY, linewidth=0.8)
        axes.text(8.3, height + 0.4, text, ha="right", fontsize=8, color=GREY)
    axes.set(xlabel="strata", ylabel="solved, sampled %", xticks=(1, 2, 3, 4, 8))
    axes.set_title("DACA on diffu_grpo, by strata, at equal passes", fontsize=10)


def dps(axes: Axes) -> None:
    """Each variant less the control whose scores are shuffled, paired by seed."""
    lines = []
    places = {"dps": "", "dps_blocks": "blocks of 4, ", "dps_dense": "dense reward, ", "dps_6x6": "6 x 6, "}
    for name, where in places.items():
        cells = {cell["label"]: cell["runs"] for cell in read(f"compare_{name}")["cells"]}
        for label, runs in cells.items():
            if control := cells.get(f"{label}:shuffled=true"):
                solved, others = ([one[seed]["curve"][-1]["sampled"] for seed in runs] for one in (runs, control))
                base, _, options = label.partition("+dps:")
                text = options.replace("variant=", "").replace("scope=", "scope ").replace(":strength=", " ")
                text = text.replace("strength=0.3", base)
                lines.append((where + text, t_interval(paired_differences(solved, others))))
    for place, (_, (middle, low, high)) in enumerate(lines):
        ends = [[100 * (middle - low)], [100 * (high - middle)]]
        axes.errorbar(100 * middle, place, xerr=ends, fmt="o", color=BLUE, markersize=4, capsize=2)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(lines)), [text for text, _ in lines], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("points solved, less the shuffled control")
    axes.set_title("DPS: none of 13 differs after Holm's correction", fontsize=10)


def dispo(axes: Axes) -> None:
    known = rows("compare_dispo", "compare_dispo_loo")
    weights = {":weight=0.1": 0.05, "": 0.25, ":branches=3": 1 / 3, ":branches=4": 0.375, ":weight=0.9": 0.45}
    for option, weight in weights.items():
        height, ends = bar(known[f"diffu_grpo+dispo{option}"])
        label = "baseline of the paper" if not option else None
        axes.errorbar(weight, height, yerr=ends, fmt="o", color=BLUE, capsize=2, label=label)
    for option, shift, label in (("", -0.006, "leave one out"), (":branches=4", 0.006, None)):
        height, ends = bar(known[f"diffu_grpo+dispo:advantage=leave_one_out{option}"])
        axes.errorbar(0.5 + shift, height, yerr=ends, fmt="s", color=ORANGE, capsize=2, label=label)
    axes.errorbar(0, *bar(known["diffu_grpo"]), fmt="o", color=GREY, capsize=2, label="diffu_grpo alone")
    axes.set(xlabel="weight x (Z - 1) / Z (leave one out: weight)", ylabel="solved, sampled %")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("DiSPO: the effective weight explains 2, 3, 4 branches", fontsize=10)


def steps(axes: Axes) -> None:
    known, counts = read("after_sudoku"), (2, 4, 8, 16)
    for label, colour in (("start", GREY), ("diffu_grpo", ORANGE), ("diffu_grpo+daca", BLUE), ("agrpo", GREEN)):
        runs = [known["start"]] if label == "start" else list(known[label].values())
        for kind, style in (("sampled", "-"), ("greedy", ":")):
            heights = [100 * mean(run["sudoku"][str(count)][kind] for run in runs) for count in counts]
            axes.plot(counts, heights, style, marker=".", color=colour, label=label if style == "-" else None)
    axes.set(xscale="log", xlabel="denoising steps (trained with 8)", ylabel="solved %")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Fewer steps cost as before training (dotted: greedy)", fontsize=10)


def main(out: str) -> None:
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    for draw, axes in zip((strata, dps, dispo, steps), figure.subplots(2, 2).flat, strict=True):
        draw(axes)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
