"""What a comparison says: a table, learning curves and one sentence, all from results.json."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, PositiveFloat

from unmask.studies.compare.cells import CellScores, outcome_of, read_whole, write_json
from unmask.util.statistics import Interval, bootstrap, paired_differences, t_interval

FEW = 5
"""Fewer seeds than this, and a bootstrap interval is too narrow to be relied on."""
STROKES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
"""Lines of the plug-ins; colours are the bases'."""

Seed = Annotated[str, Field(pattern=r"^[0-9]+$")]


class Row(BaseModel):
    """A variant in results.json."""

    label: str
    base: str
    against: str | None
    planned_forwards: PositiveFloat | None
    rate: float | None
    folders: dict[Seed, str]
    runs: dict[Seed, CellScores]
    failed: dict[Seed, str]


class Rates(BaseModel):
    """How a method's learning rate was chosen."""

    chosen: float | None
    solved: dict[Annotated[str, Field(pattern=r"^[0-9.e+-]+$")], Annotated[list[float], Field(min_length=1)]]


class Results(BaseModel):
    """results.json, as far as something is made of it."""

    task: str
    budget: str
    seeds: int
    problems: int
    rates: dict[str, Rates]
    cells: list[Row]


def measures_of(results: Mapping[str, Any]) -> list[str]:
    """What is compared: sampled, greedy, and pass@k for the largest k that all runs have."""
    points = [point for row in results["cells"] for run in row["runs"].values() for point in run["curve"]]
    shared = set.intersection(*map(set, points)) if points else set()
    ks = [int(name.removeprefix("pass@")) for name in shared if name.startswith("pass@")]
    return ["sampled", "greedy", *([f"pass@{max(ks)}"] if ks else [])]


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Every variant's means over seeds, with their intervals, and paired differences to what it is compared with."""
    measures, cells = measures_of(results), {row["label"]: row for row in results["cells"]}
    rows = [_summed(row, cells.get(row["against"]), measures) for row in results["cells"]]
    starts = [run["curve"][0] for row in results["cells"] for run in row["runs"].values()]
    told = {
        "task": results["task"],
        "budget": results["budget"],
        "seeds": results["seeds"],
        "problems": results["problems"],
        "measures": measures,
        "start": {name: sum(start[name] for start in starts) / len(starts) for name in measures} if starts else None,
        "rows": rows,
    }
    return {**told, "notes": list(_notes(results, rows)), "conclusion": conclusion(told, cells)}


def _summed(row: Mapping[str, Any], base: Mapping[str, Any] | None, measures: Sequence[str]) -> dict[str, Any]:
    ends = {seed: run["curve"][-1] for seed, run in row["runs"].items()}
    found: dict[str, Any] = {key: row[key] for key in ("label", "against", "rate", "failed")} | {"seeds": len(ends)}
    for name in ("updates", "forwards", "seconds"):
        found[name] = sum(end[name] for end in ends.values()) / len(ends) if ends else None
    for name in measures:
        found[name] = _within(t_interval([end[name] for end in ends.values()])) if ends else None
        found[f"{name} difference"] = None if base is None else difference(row, base, name)
    return found


def _within(found: Interval) -> dict[str, Any]:
    """The interval of a share, which has nothing beyond 0 and 1."""
    low, high = (None if edge is None else min(1.0, max(0.0, edge)) for edge in (found.low, found.high))
    return {"mean": found.mean, "low": low, "high": high}


def difference(row: Mapping[str, Any], base: Mapping[str, Any], measure: str) -> dict[str, Any] | None:
    """How much one variant is above another over the seeds that both have: bootstrap and t-interval."""
    shared = [seed for seed in row["runs"] if seed in base["runs"]]
    if not shared:
        return None
    ends = [[cell["runs"][seed]["curve"][-1][measure] for seed in shared] for cell in (row, base)]
    apart = paired_differences(*ends)
    drawn, student = bootstrap(apart), t_interval(apart)
    return {**drawn._asdict(), "t_low": student.low, "t_high": student.high, "seeds": len(shared)}


def conclusion(told: Mapping[str, Any], cells: Mapping[str, Any]) -> str:
    """One plain sentence: what is best, by how much, and whether that can be told from chance."""
    ranked = sorted((row for row in told["rows"] if row["sampled"]), key=lambda row: -row["sampled"]["mean"])
    if not ranked:
        return "No run has finished, so nothing can be said."
    best, others = ranked[0], ranked[1:]
    solved = f"{_percent(best['sampled']['mean'])} % sampled on {told['task']} after {told['budget']}"
    if level := [row["label"] for row in others if row["sampled"]["mean"] == best["sampled"]["mean"]]:
        return f"{', '.join([best['label'], *level])} solve the same, {solved}: none of them is the best."
    text = f"{best['label']} solves most, {solved}"
    if not others:
        return text + "; there is nothing to compare it with."
    against = {row["label"]: row for row in others}
    labels = [best["against"]] if best["against"] in against else []
    labels += [others[0]["label"]] if others[0]["label"] not in labels else []
    parts, seeds = [], list[int]()
    for label in labels:
        found = difference(cells[best["label"]], cells[label], "sampled")
        kind = "its base" if label == best["against"] else "the next best,"
        if found is None:
            parts.append(f"{kind} {label} has no seed in common with it")
            continue
        seeds.append(found["seeds"])
        parts.append(f"{_signed(found['mean'])} points against {kind} {label} ({_verdict(found)})")
    text += ": " + ", and ".join(parts) + "."
    if seeds and min(seeds) < FEW:
        many = "one seed" if min(seeds) == 1 else f"{min(seeds)} seeds"
        text += f" With {many} that is not reliable: a bootstrap needs {FEW} at the least."
    return text


def _verdict(found: Mapping[str, Any]) -> str:
    drawn = Interval(found["mean"], found["low"], found["high"])
    student = Interval(found["mean"], found["t_low"], found["t_high"])
    if drawn.low is None or drawn.high is None:
        return "one seed, no interval"
    says = "excludes zero" if drawn.excludes_zero else "includes zero"
    text = f"95 % bootstrap interval {_signed(drawn.low)} to {_signed(drawn.high)} {says}"
    if student.excludes_zero != drawn.excludes_zero and student.low is not None and student.high is not None:
        other = "excludes" if student.excludes_zero else "includes"
        text += f", Student's {_signed(student.low)} to {_signed(student.high)} {other} it"
    return text


def _notes(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        for seed, error in row["failed"].items():
            yield f"{row['label']} seed {seed} failed: {error}"
        missing = results["seeds"] - row["seeds"] - len(row["failed"])
        if missing:
            yield f"{row['label']}: {missing} of {results['seeds']} seeds have not been run to the end"
    for base, found in results["rates"].items():
        if found["chosen"] is None:
            continue
        tried = ", ".join(f"{rate}: {_percent(sum(v) / len(v))} %" for rate, v in found["solved"].items())
        rates = [float(rate) for rate in found["solved"]]
        edge = len(rates) > 1 and found["chosen"] in (min(rates), max(rates))
        more = "; it is at the edge of what was tried" if edge else ""
        yield f"{base}: learning rate {found['chosen']:g}, by validation problems solved ({tried}){more}"
    for row, cell in zip(rows, results["cells"], strict=True):
        planned = cell["planned_forwards"]
        if planned is not None and row["forwards"] is not None and abs(row["forwards"] / planned - 1) > 0.05:
            share = f"{100 * row['forwards'] / planned:.0f} %"
            why = "rows ended early or groups were idle" if row["forwards"] < planned else "groups were drawn again"
            yield f"{row['label']} made {share} of the forwards reckoned for its updates: {why}"
    runs = [run for cell in results["cells"] for run in cell["runs"].values()]
    if len({json.dumps(run["versions"], sort_keys=True) for run in runs}) > 1:
        yield "the runs were made with different versions of unmask, torch or Python; see results.json"


def markdown(told: Mapping[str, Any]) -> str:
    """The table, its notes and the sentence."""
    rated = any(row["rate"] is not None for row in told["rows"])
    heads = ["", *(["lr"] if rated else []), "seeds", "updates", "forwards", "seconds"]
    heads += [head for name in told["measures"] for head in (name, "difference")]
    table = [heads, ["start", *[""] * (len(heads) - 1 - 2 * len(told["measures"]))]]
    table[1] += [text for name in told["measures"] for text in (_percent((told["start"] or {}).get(name)), "")]
    for row in told["rows"]:
        counts = [f"{row[name]:,.0f}" if row[name] is not None else "" for name in ("updates", "forwards", "seconds")]
        table.append([row["label"], *([f"{row['rate']:g}" if row["rate"] else ""] if rated else [])])
        table[-1] += [f"{row['seeds']}" + (f" ({len(row['failed'])} failed)" if row["failed"] else ""), *counts]
        for name in told["measures"]:
            table[-1] += [_interval(row[name], _percent), _interval(row[f"{name} difference"], _signed)]
    title = (
        f"{told['task']}, {told['budget']} a run: solved % of {told['problems']} held-out problems. Mean over seeds "
        "[95 % t-interval]; difference to the base, paired by seed [95 % bootstrap interval]; training cost a run."
    )
    notes = [f"- {note}" for note in told["notes"]]
    return "\n".join([title, "", *_aligned(table), "", *notes, *([""] if notes else []), told["conclusion"], ""])


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table that is one to the eye too: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for number, line in enumerate(table):
        first, *rest = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        yield "| " + " | ".join([line[0].ljust(len(first)), *rest]) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}"


def _interval(found: Mapping[str, Any] | None, shown: Any) -> str:
    if found is None:
        return ""
    between = "" if found["low"] is None else f" [{shown(found['low'])}, {shown(found['high'])}]"
    return f"{shown(found['mean'])}{between}"


def draw(results: Mapping[str, Any], path: Path) -> Path | None:
    """Learning curves against updates, forwards and seconds, means with t-intervals; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    bases = list(dict.fromkeys(row["base"] for row in results["cells"]))
    extras = list(dict.fromkeys(_plugins(row) for row in results["cells"]))
    figure = Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(2, 3, sharey="row")
    for row in (row for row in results["cells"] if row["runs"]):
        style = STROKES[extras.index(_plugins(row)) % len(STROKES)]
        look: dict[str, Any] = {"color": f"C{bases.index(row['base'])}", "linestyle": style}
        points = list(zip(*(run["curve"] for run in row["runs"].values()), strict=False))
        for line, measure in zip(panels, ("sampled", "greedy"), strict=True):
            found = [t_interval([100 * point[measure] for point in at]) for at in points]
            for axes, cost in zip(line, ("updates", "forwards", "seconds"), strict=True):
                spent = [sum(point[cost] for point in at) / len(at) for at in points]
                axes.plot(spent, [value.mean for value in found], marker="o", markersize=3, label=row["label"], **look)
                if all(value.low is not None for value in found):
                    low, high = [value.low for value in found], [value.high for value in found]
                    axes.fill_between(spent, low, high, color=look["color"], alpha=0.12, linewidth=0)
    for line, measure in zip(panels, ("sampled", "greedy"), strict=True):
        line[0].set_ylabel(f"solved {measure}, %")
    for axes, cost in zip(panels[1], ("updates", "forward passes", "seconds of training"), strict=True):
        axes.set_xlabel(cost)
    figure.suptitle(f"{results['task']}, {results['budget']} a run, {results['seeds']} seeds")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=130)
    return path


def _plugins(row: Mapping[str, Any]) -> str:
    return str(row["label"]).removeprefix(row["base"])


def publish(out: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Write results.json, table.md and curves.png; returns the results with their summary."""
    whole = {**results, "summary": summary(results)}
    write_json(out / "results.json", whole)
    (out / "table.md").write_text(markdown(whole["summary"]))
    draw(whole, out / "curves.png")
    return whole


def redraw(out: Path) -> dict[str, Any]:
    """Table, curves and sentence once more from a folder's results.json, and from cells that have come to it since."""
    path = out / "results.json"
    if not path.is_file():
        raise ValueError(f"there is no {path}: run the comparison first")
    if (results := read_whole(path, Results)) is None:
        raise ValueError(f"{path} is not what a comparison has written: the command it was made with writes it again")
    return publish(out, gather(out, results))


def gather(out: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Put the outcomes of a folder's cells into the results: of those that are there and not yet known."""
    for row in results["cells"]:
        for seed, folder in row["folders"].items():
            if seed in row["runs"]:
                continue
            found = outcome_of(out / folder)
            if "curve" in found:
                row["runs"][seed] = {key: found[key] for key in ("curve", "tail", "wall", "threads", "versions")}
                row["failed"].pop(seed, None)
            elif found:
                row["failed"][seed] = found["error"]
        for key in ("runs", "failed"):
            row[key] = dict(sorted(row[key].items(), key=lambda item: int(item[0])))
    return results
