"""What plug-ins add to each base, one panel a comparison:

    python benchmarks/plugins_plot.py benchmarks/results/compare_{sudoku,countdown}_rates.json \
      --out docs/figures/plugins.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from unmask.studies.compare.report import summary

COLOURS = ("#0072b2", "#d55e00")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figure = Figure(figsize=(4.6 * len(arguments.files), 3.8), layout="constrained")
    panels = figure.subplots(1, len(arguments.files), squeeze=False, sharey=True)[0]
    for axes, path in zip(panels, arguments.files, strict=True):
        told = summary(json.loads(path.read_text()))
        bases = [row["label"] for row in told["rows"] if row["against"] is None]
        added = [row for row in told["rows"] if row["against"]]
        names = list(dict.fromkeys(row["label"].removeprefix(row["against"]) for row in added))
        for number, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
            mine = [row for row in added if row["label"].removeprefix(row["against"]) == name]
            found = [row["sampled difference"] for row in mine]
            place = [bases.index(row["against"]) + 0.16 * (2 * number - 1) for row in mine]
            middle = [100 * each["mean"] for each in found]
            ends = [[100 * abs(each[edge] - each["mean"]) for each in found] for edge in ("t_low", "t_high")]
            axes.errorbar(middle, place, xerr=ends, fmt="o", color=colour, markersize=4, label=name, capsize=2)
        axes.axvline(0, color="0.4", linewidth=0.8)
        axes.set_yticks(range(len(bases)), bases)
        axes.set_xlabel("points solved, against the base alone")
        axes.set_title(f"{told['task']}, {told['budget']}, {told['seeds']} seeds", fontsize=10)
    panels[0].invert_yaxis()
    panels[0].legend(frameon=False)
    figure.savefig(arguments.out, dpi=130)


if __name__ == "__main__":
    main()
