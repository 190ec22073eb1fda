"""The report of a comparison: a table, learning curves and a conclusion, from results.json."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, PositiveFloat

from unmask.studies.compare.cells import CellScores, outcome_of, read_json, write_json
from unmask.util.plots import new_figure
from unmask.util.statistics import Interval, bootstrap, paired_differences, t_interval

FEW = 5
"""With fewer seeds a bootstrap interval is too narrow to be reliable."""
STROKES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
"""Line styles of sets of plug-ins. Colours are for the bases."""

Seed = Annotated[str, Field(pattern=r"^[0-9]+$")]


class ResultRow(BaseModel):
    """A method in results.json."""

    label: str
    base: str
    against: str | None
    planned_forwards: PositiveFloat | None
    rate: float | None
    folders: dict[Seed, str]
    runs: dict[Seed, CellScores]
    failed: dict[Seed, str]


class RateChoice(BaseModel):
    """How a method's learning rate was chosen."""

    chosen: float | None
    solved: dict[Annotated[str, Field(pattern=r"^[0-9.e+-]+$")], Annotated[list[float], Field(min_length=1)]]


class ComparisonResults(BaseModel):
    """The part of results.json that the report reads."""

    task: str
    budget: str
    seeds: int
    problems: int
    rates: dict[str, RateChoice]
    cells: list[ResultRow]


def measures_of(results: Mapping[str, Any]) -> list[str]:
    """The measures of the table: sampled, greedy, and pass@k for the largest k that all runs have."""
    points = [point for row in results["cells"] for run in row["runs"].values() for point in run["curve"]]
    shared = set.intersection(*map(set, points)) if points else set()
    ks = [int(name.removeprefix("pass@")) for name in shared if name.startswith("pass@")]
    return ["sampled", "greedy", *([f"pass@{max(ks)}"] if ks else [])]


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Means over seeds with intervals, and paired differences to the method that each is compared with."""
    measures, cells = measures_of(results), {row["label"]: row for row in results["cells"]}
    rows = [_summary_row(row, cells.get(row["against"]), measures) for row in results["cells"]]
    starts = [run["curve"][0] for row in results["cells"] for run in row["runs"].values()]
    facts = {
        **{key: results[key] for key in ("task", "budget", "seeds", "problems")},
        "measures": measures,
        "start": {name: sum(start[name] for start in starts) / len(starts) for name in measures} if starts else None,
        "rows": rows,
    }
    return {**facts, "notes": list(_notes(results, rows)), "conclusion": conclusion(facts, cells)}


def _summary_row(row: Mapping[str, Any], base: Mapping[str, Any] | None, measures: Sequence[str]) -> dict[str, Any]:
    ends = {seed: run["curve"][-1] for seed, run in row["runs"].items()}
    means: dict[str, Any] = {key: row[key] for key in ("label", "against", "rate", "failed")} | {"seeds": len(ends)}
    for name in ("updates", "forwards", "seconds"):
        means[name] = sum(end[name] for end in ends.values()) / len(ends) if ends else None
    for name in measures:
        means[name] = _share_interval(t_interval([end[name] for end in ends.values()])) if ends else None
        means[f"{name} difference"] = None if base is None else difference(row, base, name)
    return means


def _share_interval(interval: Interval) -> dict[str, Any]:
    """The interval clipped to 0 and 1."""
    low, high = (None if edge is None else min(1.0, max(0.0, edge)) for edge in (interval.low, interval.high))
    return {"mean": interval.mean, "low": low, "high": high}


def difference(row: Mapping[str, Any], base: Mapping[str, Any], measure: str) -> dict[str, Any] | None:
    """The difference of two methods over the seeds that both have, with bootstrap and t-interval."""
    shared = [seed for seed in row["runs"] if seed in base["runs"]]
    if not shared:
        return None
    row_ends, base_ends = ([cell["runs"][seed]["curve"][-1][measure] for seed in shared] for cell in (row, base))
    differences = paired_differences(row_ends, base_ends)
    resampled, student = bootstrap(differences), t_interval(differences)
    return {**resampled._asdict(), "t_low": student.low, "t_high": student.high, "seeds": len(shared)}


def conclusion(facts: Mapping[str, Any], cells: Mapping[str, Any]) -> str:
    """One sentence: the best method, its lead, and whether the interval of the lead excludes zero."""
    ranked = sorted((row for row in facts["rows"] if row["sampled"]), key=lambda row: -row["sampled"]["mean"])
    if not ranked:
        return "No run has finished, so there is no conclusion."
    best, others = ranked[0], ranked[1:]
    solved = f"{_percent(best['sampled']['mean'])} % sampled on {facts['task']} after {facts['budget']}"
    if level := [row["label"] for row in others if row["sampled"]["mean"] == best["sampled"]["mean"]]:
        return f"{', '.join([best['label'], *level])} solve the same, {solved}: none is the best."
    text = f"{best['label']} solves most, {solved}"
    if not others:
        return text + "; there is nothing to compare it with."
    against = {row["label"]: row for row in others}
    labels = [best["against"]] if best["against"] in against else []
    labels += [others[0]["label"]] if others[0]["label"] not in labels else []
    parts, seeds = [], list[int]()
    for label in labels:
        change = difference(cells[best["label"]], cells[label], "sampled")
        kind = "its base" if label == best["against"] else "the next best,"
        if change is None:
            parts.append(f"{kind} {label} has no seed in common with it")
            continue
        seeds.append(change["seeds"])
        parts.append(f"{_percent(change['mean'], '+')} points against {kind} {label} ({_verdict(change)})")
    text += ": " + ", and ".join(parts) + "."
    if seeds and min(seeds) < FEW:
        many = "one seed" if min(seeds) == 1 else f"{min(seeds)} seeds"
        text += f" With {many} this is not reliable: a bootstrap needs at least {FEW}."
    return text


def _verdict(change: Mapping[str, Any]) -> str:
    resampled = Interval(change["mean"], change["low"], change["high"])
    student = Interval(change["mean"], change["t_low"], change["t_high"])
    if resampled.low is None or resampled.high is None:
        return "one seed, no interval"
    verdict = "excludes zero" if resampled.excludes_zero else "includes zero"
    text = f"95 % bootstrap interval {_percent(resampled.low, '+')} to {_percent(resampled.high, '+')} {verdict}"
    if student.excludes_zero != resampled.excludes_zero and student.low is not None and student.high is not None:
        other = "excludes" if student.excludes_zero else "includes"
        text += f", Student's {_percent(student.low, '+')} to {_percent(student.high, '+')} {other} it"
    return text


def _notes(results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        for seed, error in row["failed"].items():
            yield f"{row['label']} seed {seed} failed: {error}"
        missing = results["seeds"] - row["seeds"] - len(row["failed"])
        if missing:
            yield f"{row['label']}: {missing} of {results['seeds']} seeds have not finished"
    for base, choice in results["rates"].items():
        if choice["chosen"] is None:
            continue
        tried = ", ".join(f"{rate}: {_percent(sum(v) / len(v))} %" for rate, v in choice["solved"].items())
        rates = [float(rate) for rate in choice["solved"]]
        edge = len(rates) > 1 and choice["chosen"] in (min(rates), max(rates))
        more = "; it is the smallest or largest that was tried" if edge else ""
        yield f"{base}: learning rate {choice['chosen']:g}, by validation problems solved ({tried}){more}"
    for row, cell in zip(rows, results["cells"], strict=True):
        planned = cell["planned_forwards"]
        if planned is not None and row["forwards"] is not None and abs(row["forwards"] / planned - 1) > 0.05:
            share = f"{100 * row['forwards'] / planned:.0f} %"
            less = "rollouts ended early, groups were idle or completions of a state were equal"
            more = "groups were drawn again, more rollouts were correct, or the last update passed the budget"
            why = less if row["forwards"] < planned else more
            yield f"{row['label']} used {share} of the forward passes planned for its updates: {why}"
    runs = [run for cell in results["cells"] for run in cell["runs"].values()]
    if len({json.dumps(run["versions"], sort_keys=True) for run in runs}) > 1:
        yield "the runs used different versions of unmask, torch or Python; see results.json"


def markdown(facts: Mapping[str, Any]) -> str:
    """The table, its notes and the conclusion."""
    rated = any(row["rate"] is not None for row in facts["rows"])
    heads = ["", *(["lr"] if rated else []), "seeds", "updates", "forwards", "seconds"]
    heads += [head for name in facts["measures"] for head in (name, "difference")]
    table = [heads, ["start", *[""] * (len(heads) - 1 - 2 * len(facts["measures"]))]]
    table[1] += [text for name in facts["measures"] for text in (_percent((facts["start"] or {}).get(name)), "")]
    for row in facts["rows"]:
        counts = [f"{row[name]:,.0f}" if row[name] is not None else "" for name in ("updates", "forwards", "seconds")]
        table.append([row["label"], *([f"{row['rate']:g}" if row["rate"] else ""] if rated else [])])
        table[-1] += [f"{row['seeds']}" + (f" ({len(row['failed'])} failed)" if row["failed"] else ""), *counts]
        for name in facts["measures"]:
            table[-1] += [_interval(row[name]), _interval(row[f"{name} difference"], "+")]
    title = (
        f"{facts['task']}, {facts['budget']} a run: solved % of {facts['problems']} held-out problems. Mean over seeds "
        "[95 % t-interval]; difference to the base, paired by seed [95 % bootstrap interval]; training cost a run."
    )
    notes = [f"- {note}" for note in facts["notes"]]
    return "\n".join([title, "", *_table_lines(table), "", *notes, *([""] if notes else []), facts["conclusion"], ""])


def _table_lines(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table, with the first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for number, line in enumerate(table):
        first, *rest = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        yield "| " + " | ".join([line[0].ljust(len(first)), *rest]) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.1f}"


def _interval(values: Mapping[str, Any] | None, sign: str = "") -> str:
    if values is None:
        return ""
    mean, low, high = (_percent(values[key], sign) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]" if low else mean


def draw(results: Mapping[str, Any], path: Path) -> Path | None:
    """Learning curves over updates, forwards and seconds: means with t-intervals. None without matplotlib."""
    if (figure := new_figure(13, 7)) is None:
        return None
    bases = list(dict.fromkeys(row["base"] for row in results["cells"]))
    extras = list(dict.fromkeys(_plugins(row) for row in results["cells"]))
    panels = figure.subplots(2, 3, sharey="row")
    for row in (row for row in results["cells"] if row["runs"]):
        style = STROKES[extras.index(_plugins(row)) % len(STROKES)]
        look: dict[str, Any] = {"color": f"C{bases.index(row['base'])}", "linestyle": style}
        points = list(zip(*(run["curve"] for run in row["runs"].values()), strict=False))
        for line, measure in zip(panels, ("sampled", "greedy"), strict=True):
            means = [_share_interval(t_interval([point[measure] for point in at])) for at in points]
            for axes, cost in zip(line, ("updates", "forwards", "seconds"), strict=True):
                spent = [sum(point[cost] for point in at) / len(at) for at in points]
                mean = [100 * value["mean"] for value in means]
                axes.plot(spent, mean, marker="o", markersize=3, label=row["label"], **look)
                if all(value["low"] is not None for value in means):
                    low, high = ([100 * value[end] for value in means] for end in ("low", "high"))
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
    """Write table, curves and conclusion again from a folder's results.json and the cells added since."""
    path = out / "results.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: run the comparison first")
    if (results := read_json(path, ComparisonResults)) is None:
        raise ValueError(f"{path} is not the results.json of a comparison: run its command again to rewrite it")
    return publish(out, gather(out, results))


def gather(out: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Add new outcomes of a folder's cells to the results."""
    for row in results["cells"]:
        for seed, folder in row["folders"].items():
            if seed in row["runs"]:
                continue
            outcome = outcome_of(out / folder)
            if "curve" in outcome:
                row["runs"][seed] = {key: outcome[key] for key in ("curve", "tail", "wall", "threads", "versions")}
                row["failed"].pop(seed, None)
            elif outcome:
                row["failed"][seed] = outcome["error"]
        for key in ("runs", "failed"):
            row[key] = dict(sorted(row[key].items(), key=lambda item: int(item[0])))
    return results
