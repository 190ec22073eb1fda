"""The tables of docs/studies, from what `unmask compare` and grid.py have written.

    python benchmarks/tables.py plugins benchmarks/results/compare_sudoku_rates.json    # a base a line
    python benchmarks/tables.py rows benchmarks/results/compare_daca.json               # a variant a line
    python benchmarks/tables.py seeds benchmarks/results/compare_smollm2_countdown.json # a variant a line, every run
    python benchmarks/tables.py rates benchmarks/results/compare_sudoku_rates.json      # the sweep of learning rates
    python benchmarks/tables.py controls benchmarks/results/compare_dps.json            # less the shuffled control
    python benchmarks/tables.py less benchmarks/results/compare_{long_controls,long}.json diffu_grpo+daca    # that row
    python benchmarks/tables.py curves benchmarks/results/stability.json                # of grid.py: a seed a line

Solved %, sampled. Intervals are Student's, 95 %, over seeds; differences are paired by seed.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from unmask.studies.compare.report import summary
from unmask.util.statistics import paired_differences, t_interval

Table = Iterator[list[str]]


def share(found: Mapping[str, Any]) -> str:
    if found["low"] is None:  # one seed
        return f"{100 * found['mean']:.1f}"
    return f"{100 * found['mean']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def apart(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    if found["t_low"] is None:
        return f"{100 * found['mean']:+.1f}"
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
        found = [added.get(name, {}).get(f"{kind} difference") for name in names for kind in ("sampled", "greedy")]
        yield [base["label"], rate, share(base["sampled"]), f"{100 * base['greedy']['mean']:.1f}", *map(apart, found)]


def rows(results: dict[str, Any]) -> Table:
    """A variant a line."""
    yield ["", "sampled", "difference", "greedy", "pass@4", "updates", "forwards spent"]
    for row in summary(results)["rows"]:
        ends = [f"{100 * row[name]['mean']:.1f}" for name in ("greedy", "pass@4")]
        spent = [f"{row['updates']:.0f}", f"{row['forwards'] / 1000:.0f}k"]
        yield [row["label"], share(row["sampled"]), apart(row["sampled difference"]), *ends, *spent]


def seeds(results: dict[str, Any]) -> Table:
    """A variant a line and every run by itself, where two seeds make no interval; idle: groups without a signal."""
    yield ["", "updates", "forwards spent", "sampled", "greedy", "idle groups"]
    first = next(iter(results["cells"][0]["runs"].values()))["curve"][0]
    yield ["start", "", "", *(f"{100 * first[kind]:.1f}" for kind in ("sampled", "greedy")), ""]
    for row in results["cells"]:
        runs = [row["runs"][seed] for seed in sorted(row["runs"], key=int)]
        last = [run["curve"][-1] for run in runs]
        idle = mean(run["tail"]["train/idle_groups"] for run in runs)
        spent = [f"{last[0]['updates']}", f"{mean(end['forwards'] for end in last) / 1000:.0f}k"]
        ends = [", ".join(f"{100 * end[kind]:.1f}" for end in last) for kind in ("sampled", "greedy")]
        yield [row["label"], *spent, *ends, f"{100 * idle:.0f} %"]


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


def controls(results: dict[str, Any]) -> Table:
    """What a variant is above the same with its scores dealt at random."""
    found = {row["label"]: row for row in results["cells"]}
    yield ["", "sampled", "greedy"]
    for label, row in found.items():
        if control := found.get(f"{label}:shuffled=true"):
            yield [label, *(difference(row, control, kind) for kind in ("sampled", "greedy"))]


def less(results: dict[str, Any], others: dict[str, Any], label: str) -> Table:
    """What every row is above one row, of another file or of the same."""
    (base,) = (row for row in others["cells"] if row["label"] == label)
    yield ["", f"sampled, less {label}", "greedy"]
    for row in results["cells"]:
        yield [row["label"], *(difference(row, base, kind) for kind in ("sampled", "greedy"))]


def difference(row: Mapping[str, Any], base: Mapping[str, Any], kind: str) -> str:
    """In the mean over the seeds that both have."""
    both = [seed for seed in row["runs"] if seed in base["runs"]]
    values, partners = ([of["runs"][seed]["curve"][-1][kind] for seed in both] for of in (row, base))
    middle, low, high = t_interval(paired_differences(values, partners))
    return apart({"mean": middle, "t_low": low, "t_high": high})


KINDS = (plugins, rows, seeds, rates, curves, controls, less)
TABLES = {kind.__name__: kind for kind in KINDS}


def main(kind: str, *given: str) -> None:
    read = [json.loads(Path(word).read_text()) if word.endswith(".json") else word for word in given]
    for number, cells in enumerate(TABLES[kind](*read)):
        print("| " + " | ".join(cells) + " |")
        if number == 0:
            print("|---" * len(cells) + "|")


if __name__ == "__main__":
    main(*sys.argv[1:])
