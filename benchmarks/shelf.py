"""What should I use? The newer lines beside the best of choosing.py, in every world: docs/studies/shelf.md.

    python benchmarks/shelf.py --device cuda --jobs 22                     # every column, one after the other
    python benchmarks/shelf.py "Sudoku, mixed" --device cuda --jobs 22    # one column
    python benchmarks/shelf.py --tables > tables.md
    python benchmarks/shelf.py --figures docs/figures

100,000 forwards spent, five seeds. A line's learning rate is chosen on validation problems of each task, from the start
of the task's first column. Writes benchmarks/results/shelf.json; a column replaces its entry there.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from choosing import LINES, RATES, RESULTS, WORLDS, Study, heading, percent, points, study_parser, with_options

from unmask.util.plots import new_figure

SHELF: dict[str, str] = {
    "raft, SML": "raft:states=sml",
    "raft, mask pairs": "raft:states=pairs",
    "raft, uniform": "raft:states=uniform",
    "raft, semi-autoregressive": "raft:states=semi_autoregressive",
    "raft, visited": "raft:states=visited",
    "raft, fully masked": "raft:states=fully_masked",
    "raft, best of the group": "raft:states=sml:advantage=best_of_group",
    "dtm": "dtm",
    "diffu_grpo+daca": "diffu_grpo+daca:anchor=0",
    "diffu_grpo+daca, anchor": "diffu_grpo+daca:anchor=0.5",
    "diffu_grpo+daca 0.1": LINES["diffu_grpo+daca 0.1"],
    "agrpo": "agrpo",
    "diffu_grpo": "diffu_grpo",
}
ONE_COLUMN: dict[str, str] = {
    "agrpo, choice": "agrpo:choice=true",
    "trace_rl": "trace_rl",
    "step_merge": "step_merge",
    "fork": "fork:rollout.order=left_to_right:rollout.threshold=0.9",
    "agrpo+keep_correct": "agrpo+keep_correct:states=sml",
}
"""Lines that are run in the first column only."""
SEEDS = 5
COLUMNS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "Sudoku, two behaviours": ("tiny-two", "sudoku", ()),
    "Sudoku, noise": WORLDS["sharpening"],
    "Sudoku, mixed": WORLDS["mixed"],
    "Countdown, two behaviours": WORLDS["countdown"],
    "Countdown, noise": ("tiny", "countdown", ()),
    "arithmetic": WORLDS["arithmetic"],
    "json_mini": WORLDS["json_mini"],
}
"""The start, the task and its settings."""
MARKS = dict(
    zip(COLUMNS, ["o#0072b2", "s#0072b2", "D#0072b2", "^#d55e00", "v#d55e00", "*#009e73", "P#cc79a7"], strict=True)
)
"""The mark of a column in the figure, and its colour."""
FIRST = {task: name for name, (_, task, _) in reversed(COLUMNS.items())}
"""The column in which the rates of a task are chosen."""


def column(study: Study, name: str, found: dict[str, Any]) -> dict[str, Any]:
    model, task, more = COLUMNS[name]
    lines, rates = SHELF | (ONE_COLUMN if name == next(iter(COLUMNS)) else {}), RATES
    if name != FIRST[task]:
        first = found[FIRST[task]]
        chosen = {label: choice["chosen"] for label, choice in first["rates"].items()}
        lines = {line: with_options(text, f"optimizer.lr={chosen[text]}") for line, text in lines.items()}
        rates = ()
    settings = study.settings(model, task, "eval.every=0", *more)
    return study.run(f"shelf {name}", lines, settings, seeds=SEEDS, budget="forwards=1e5", rates=rates)


def values(found: dict[str, Any], name: str, line: str, measure: str) -> list[float]:
    """The ends of a line in a column; none if it was not run there."""
    return [curve[-1][measure] for curve in found[name]["lines"].get(line, {"curves": {}})["curves"].values()]


def means(found: dict[str, Any], line: str, measure: str) -> dict[str, float]:
    """The mean of a line over seeds, in every column in which it was run."""
    return {name: mean(ends) for name in found if (ends := values(found, name, line, measure))}


def start_of(found: dict[str, Any], name: str, measure: str) -> float:
    return next(iter(found[name]["lines"]["agrpo"]["curves"].values()))[0][measure]


def tables() -> None:
    """Print the tables of docs/studies/shelf.md."""
    found = json.loads((RESULTS / "shelf.json").read_text())
    for measure in ("sampled", "greedy", "pass@4"):
        print(f"\n| {measure} | " + " | ".join(found) + " | mean | most behind |\n|---|" + "---|" * (len(found) + 2))
        print("| start | " + " | ".join(f"{100 * start_of(found, name, measure):.1f}" for name in found) + " | | |")
        ends = {line: means(found, line, measure) for line in SHELF}
        best = {name: max(end[name] for end in ends.values() if name in end) for name in found}
        for line in sorted(SHELF, key=lambda line: -mean(ends[line].values())):
            cells = [cell(values(found, name, line, measure)) for name in found]
            whole = len(ends[line]) == len(found)
            behind = max(best[name] - end for name, end in ends[line].items())
            cells += [f"{100 * mean(ends[line].values()):.1f}" if whole else "", f"{100 * behind:.1f}"]
            print(f"| {line} | " + " | ".join(cells) + " |")
    print("\n" + heading("sampled minus raft, SML", found))
    for line in SHELF:
        print(f"| {line} | " + " | ".join(difference(found[name]["lines"], line) for name in found) + " |")
    first = next(iter(found))
    for line in ONE_COLUMN:
        print(line, *(percent(values(found, first, line, measure)) for measure in ("sampled", "greedy", "pass@4")))


def cell(ends: list[float]) -> str:
    """The mean with its interval; fewer than five seeds are counted."""
    return "" if not ends else percent(ends) + (f" ({len(ends)})" if len(ends) < SEEDS else "")


def difference(lines: dict[str, Any], line: str) -> str:
    """A line minus raft with SML, paired by the seeds that both have."""
    if line not in lines:
        return ""
    curves, others = lines[line]["curves"], lines["raft, SML"]["curves"]
    seeds = [seed for seed in curves if seed in others]
    return points(*([runs[seed][-1]["sampled"] for seed in seeds] for runs in (curves, others)))


def draw(path: Path) -> None:
    """The gain of every line over the start at equal cost: a point for each column, a bar for their mean."""
    found = json.loads((RESULTS / "shelf.json").read_text())
    figure = new_figure(9.5, 5.2)
    assert figure is not None
    axes = figure.subplots()
    gain = {
        line: {
            name: 100 * (end - start_of(found, name, "sampled")) for name, end in means(found, line, "sampled").items()
        }
        for line in SHELF
    }
    order = sorted(SHELF, key=lambda line: -mean(gain[line].values()))
    axes.barh(range(len(order)), [mean(gain[line].values()) for line in order], color="0.85")
    for name in found:
        places = [place for place, line in enumerate(order) if name in gain[line]]
        points = [gain[order[place]][name] for place in places]
        axes.plot(points, places, MARKS[name][0], color=MARKS[name][1:], markersize=5, label=name)
    axes.set_yticks(range(len(order)), order, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("points gained, sampled, after 100,000 forwards (bar: mean of the columns)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path / "shelf.png", dpi=110)


def main() -> None:
    parser = study_parser(__doc__, "runs/shelf")
    parser.add_argument("columns", nargs="*", metavar="COLUMN", help=", ".join(COLUMNS))
    parser.add_argument("--figures", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.tables:
        return tables()
    if arguments.figures:
        return draw(arguments.figures)
    study, path = Study(arguments), RESULTS / "shelf.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.columns or COLUMNS:
        found[name] = column(study, name, found)
        path.write_text(json.dumps({name: found[name] for name in COLUMNS if name in found}) + "\n")


if __name__ == "__main__":
    main()
