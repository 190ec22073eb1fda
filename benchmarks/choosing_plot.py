"""Draw the figures of docs/studies/choosing.md, from the results of choosing.py.

python benchmarks/choosing_plot.py --figures docs/figures
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from choosing import LIKELIHOODS, RESULTS, value_at

from unmask.util.plots import new_figure
from unmask.util.statistics import t_interval

SHOWN = {
    "raft, SML": ("#009e73", "raft"),
    "diffu_grpo+daca": ("#0072b2", "diffu_grpo+daca"),
    "agrpo": ("#cc79a7", "agrpo"),
    "diffu_grpo": ("0.4", "diffu_grpo"),
    "diffu_grpo+daca 0.1": ("#d55e00", "diffu_grpo+daca, both signs (0.1)"),
    "spg": ("#e69f00", "spg"),
    "diffu_grpo+daca, exact negative": ("#56b4e9", "diffu_grpo+daca, exact_negative=1"),
    "own samples, SML": ("0.75", "own samples, no selection"),
}
"""The colour and the label of every line among the curves."""
CEILING = {"sampled": 0.862, "greedy": 0.867}
"""A model that was taught careful answers only: benchmarks/starts/careful.yaml."""
FIRST = ("raft", "own samples", "diffu_grpo", "coupled_grpo", "spg", "agrpo")


def group_of(name: str) -> str:
    base = name.partition("+")[0].partition(",")[0]
    return base if base in FIRST else "other bases"


def draw_curves(lines: dict[str, Any], path: Path) -> None:
    """Means over seeds, between the evaluations of each run, until the first of them ends."""
    figure = new_figure(11, 4.6)
    assert figure is not None
    for axes, measure in zip(figure.subplots(1, 2, sharey=True), CEILING, strict=True):
        for name, (colour, label) in SHOWN.items():
            curves = list(lines[name]["curves"].values())
            last = min(curve[-1]["forwards"] for curve in curves)
            places = [last * step / 60 for step in range(61)]
            heights = [100 * mean(value_at(curve, place, measure) for curve in curves) for place in places]
            axes.plot([place / 1000 for place in places], heights, color=colour, label=label)
        axes.axhline(100 * CEILING[measure], color="0.2", linewidth=0.8, linestyle=":", label="taught careful only")
        axes.set(xlabel="forwards spent, thousands", title=measure, ylim=(0, 100), xlim=(0, 300))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("solved, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, ncols=5, loc="outside lower center")
    figure.savefig(path, dpi=110)


def draw_lines(lines: dict[str, Any], path: Path) -> None:
    """The end of every line with its interval, by base."""
    figure = new_figure(9.5, 9)
    assert figure is not None
    axes = figure.subplots()
    ends = {name: [curve[-1] for curve in line["curves"].values()] for name, line in lines.items()}
    order = [*FIRST, "other bases"]
    names = sorted(ends, key=lambda n: (order.index(group_of(n)), -mean(end["sampled"] for end in ends[n])))
    place, ticks = 0.0, []
    for before, name in zip([None, *names], names, strict=False):
        place += 1 if before is None or group_of(before) == group_of(name) else 1.8
        ticks.append(place)
        for measure, shift, mark, colour in (("sampled", -0.15, "o", "#0072b2"), ("greedy", 0.15, "s", "#d55e00")):
            middle, low, high = (100 * x for x in t_interval([end[measure] for end in ends[name]]))
            axes.errorbar(middle, place + shift, xerr=[[middle - low], [high - middle]], fmt=mark, color=colour,
                          markersize=4, capsize=2, label=measure if name == names[0] else None)  # fmt: skip
    start = next(iter(lines["raft, SML"]["curves"].values()))[0]["sampled"]
    marks = {100 * start: "start", 100 * CEILING["sampled"]: "taught careful only"}
    for place in marks:
        axes.axvline(place, color="0.5", linewidth=0.8, linestyle=":")
    axes.secondary_xaxis("top").set_xticks(list(marks), list(marks.values()), fontsize=8)
    axes.set_yticks(ticks, names, fontsize=9)
    axes.set(ylim=(ticks[-1] + 0.8, 0.2), xlim=(0, 100), xlabel="solved after 300,000 forwards, %")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0.25, 0.75))
    figure.savefig(path, dpi=110)


def draw_signs(worlds: dict[str, Any], path: Path) -> None:
    """The end of every likelihood by the weight of wrong answers, a panel for each world."""
    figure = new_figure(12, 3.8)
    assert figure is not None
    signs = {"both signs": "both", "x 0.3": "0.3", "x 0.1": "0.1", "positive": "positive", "correct only": "correct"}
    colours = ("0.4", "#e69f00", "#009e73", "#0072b2", "#cc79a7")
    for axes, (world, found) in zip(figure.subplots(1, len(worlds), sharey=True), worlds.items(), strict=True):
        for likelihood, colour in zip(LIKELIHOODS, colours, strict=True):
            ends = [
                [100 * curve[-1]["sampled"] for curve in found["lines"][f"{likelihood}, {sign}"]["curves"].values()]
                for sign in signs.values()
            ]
            axes.plot(range(len(signs)), [mean(values) for values in ends], color=colour, marker="o", label=likelihood)
            for place, values in enumerate(ends):
                axes.plot([place] * len(values), values, ".", color=colour, markersize=3, alpha=0.5)
        axes.set_xticks(range(len(signs)), list(signs), rotation=40, ha="right", fontsize=8)
        axes.set(title=world, ylim=(0, 100))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("solved, sampled, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, ncols=5, loc="outside lower center")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, metavar="FOLDER", required=True)
    folder = parser.parse_args().figures
    lines = json.loads((RESULTS / "choosing_long.json").read_text())["lines"]
    draw_curves(lines, folder / "choosing_curves.png")
    draw_lines(lines, folder / "choosing_lines.png")
    draw_signs(json.loads((RESULTS / "choosing_signs.json").read_text()), folder / "choosing_signs.png")


if __name__ == "__main__":
    main()
