"""Draw the growth rows of benchmarks/results/speed.json: seconds against completion length, group size and strata.

python benchmarks/growth_plot.py docs/figures/growth.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results" / "speed.json"
PANELS = {"length": "completion length (8 rows)", "group": "group size", "strata": "strata (8 rows)"}


def drawn(rows: list[dict[str, Any]]) -> Figure:
    """One panel for each thing that grows. Both axes are logarithmic; dotted, what grows in proportion."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, (by, title) in zip(figure.subplots(1, 3, sharey=True), PANELS.items(), strict=True):
        some = [row for row in rows if row["by"] == by]
        values = [row[by] for row in some]
        for part, mark, colour in (("rollout", "o", "C0"), ("update", "s", "C1")):
            points = [(row[by], row[part]) for row in some if part in row]
            if points:
                axes.plot(*zip(*points, strict=True), marker=mark, color=colour, label=part)
        start = some[0]["update"] / values[0] / 1.6
        axes.plot(values, [start * value for value in values], color="0.7", linestyle=":", label="in proportion")
        axes.set(xscale="log", yscale="log", xlabel=title)
        axes.set_xticks(values, [str(value) for value in values])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("seconds")
    figure.axes[0].set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    figure.axes[0].legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn([row for run in json.loads(RESULTS.read_text()) for row in run.get("growth", ())]).savefig(out, dpi=110)


if __name__ == "__main__":
    main()
