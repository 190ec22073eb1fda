"""The tables of docs/results.md, from what `unmask compare` and grid.py have written.

    python benchmarks/tables.py plugins benchmarks/results/compare_sudoku_rates.json    # a base a line
    python benchmarks/tables.py rows benchmarks/results/compare_daca.json               # a variant a line
    python benchmarks/tables.py rates benchmarks/results/compare_sudoku_rates.json      # the sweep of learning rates
    python benchmarks/tables.py curves benchmarks/results/stability.json                # of grid.py: a seed a line

Solved %, sampled. Intervals are Student's, 95 %, over seeds; differences are paired by seed.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from unmask.compare_report import summary

Table = Iterator[list[str]]


def share(found: Mapping[str, Any]) -> str:
    return f"{100 * found['mean']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def apart(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{100 * found['mean']:+.1f} [{100 * found['t_low']:+.1f}, {100 * found['t_high']:+.1f}]"


def plugins(results: dict[str, Any]) -> Table:
    """A base a line: alone, then the difference that each plug-in makes, sampled and greedy."""
    rows = summary(results)["rows"]
    bases = [row for row in rows if row["against"] is None]
    names = list(dict.fromkeys(row["label"][len(row["against"]) :] for row in rows if row["against"]))
    heads = [head for name in names for head in (name, f"{name}, greedy")]
    yield ["base", "rate", "alone", "greedy", *heads]
    for base in bases:
        added = {row["label"][len(row["against"]) :]: row for row in rows if row["against"] == base["label"]}
        rate = "" if base["rate"] is None else f"{base['rate']:g}"
        found = [added[name][f"{kind} difference"] for name in names for kind in ("sampled", "greedy")]
        yield [base["label"], rate, share(base["sampled"]), f"{100 * base['greedy']['mean']:.1f}", *map(apart, found)]


def rows(results: dict[str, Any]) -> Table:
    """A variant a line."""
    yield ["", "sampled", "difference", "greedy", "pass@4", "updates", "forwards spent"]
    for row in summary(results)["rows"]:
        ends = [f"{100 * row[name]['mean']:.1f}" for name in ("greedy", "pass@4")]
        spent = [f"{row['updates']:.0f}", f"{row['forwards'] / 1000:.0f}k"]
        yield [row["label"], share(row["sampled"]), apart(row["sampled difference"]), *ends, *spent]


def rates(results: dict[str, Any]) -> Table:
    """Validation problems solved at each learning rate; the chosen one in bold."""
    tried = list(next(iter(results["rates"].values()))["solved"])
    yield ["", *tried]
    for base, found in results["rates"].items():
        means = {rate: f"{100 * mean(values):.1f}" for rate, values in found["solved"].items()}
        yield [base, *(f"**{text}**" if float(rate) == found["chosen"] else text for rate, text in means.items())]


def curves(results: dict[str, Any]) -> Table:
    """Every evaluation of every run of grid.py."""
    for cell, runs in results.items():
        found = {seed: runs[seed]["curve"] for seed in sorted(runs, key=int)}
        solved = {seed: [100 * row["eval/solved_sampled"] for row in curve] for seed, curve in found.items()}
        steps = [int(row["step"]) for row in next(iter(runs.values()))["curve"]]
        solved["mean"] = [mean(values) for values in zip(*solved.values(), strict=True)]
        yield [cell, *(f"{step}" for step in steps), "best - last"]
        for seed, row in solved.items():
            yield [seed, *(f"{value:.1f}" for value in row), f"{max(row) - row[-1]:.1f}"]


def main(kind: str, path: str) -> None:
    table = {"plugins": plugins, "rows": rows, "rates": rates, "curves": curves}[kind]
    for number, cells in enumerate(table(json.loads(Path(path).read_text()))):
        print("| " + " | ".join(cells) + " |")
        if number == 0:
            print("|---" * len(cells) + "|")


if __name__ == "__main__":
    main(*sys.argv[1:])
