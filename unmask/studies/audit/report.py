"""Tables, a conclusion and a plot of an audit, all from audit.json."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from unmask.studies.audit.figures import (
    Audit,
    EstimatorFigures,
    FigureComparison,
    GradientFigures,
    Shares,
    ValueFigures,
    budget_cosine,
    clipped_interval,
    cosine,
    defined_problems,
    difference,
    mean_cosine,
    mean_of,
    readings,
    relative_noise,
    slope_shares,
    value_shares,
)
from unmask.util.plots import new_figure
from unmask.util.statistics import Interval, jackknife_interval, jackknife_log_interval

# --- data ----------------------------------------------------------------------------------------------------------


def audit_data(audit: Audit) -> dict[str, Any]:
    """The audit as JSON, with a list over the problems for every field."""

    def lists(kind: Any, rows: Sequence[ValueFigures | GradientFigures | None]) -> dict[str, list[float | None]]:
        return {field: [None if row is None else _round(getattr(row, field)) for row in rows] for field in kind._fields}

    def estimator_data(one: EstimatorFigures) -> dict[str, Any]:
        return {
            "name": one.name,
            "forwards": one.forwards,
            "values": {label: lists(ValueFigures, rows) for label, rows in one.values.items()},
            "slopes": lists(GradientFigures, one.slopes),
        }

    return {
        "truth": audit.truth,
        "slack": audit.slack,
        "reference": audit.reference,
        "draws": audit.draws,
        "marginal": None if audit.marginal is None else estimator_data(audit.marginal),
        "estimators": [estimator_data(one) for one in audit.estimators],
    }


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")


def audit_from_data(data: dict[str, Any]) -> Audit:
    """The inverse of `audit_data`."""

    def rows(kind: Any, lists: dict[str, list[Any]]) -> list[Any]:
        tuples = [kind._make(cells) for cells in zip(*(lists[field] for field in kind._fields), strict=True)]
        return [None if all(cell is None for cell in row) else row for row in tuples]

    def estimator(one: dict[str, Any]) -> EstimatorFigures:
        values = {label: rows(ValueFigures, lists) for label, lists in one["values"].items()}
        return EstimatorFigures(one["name"], one["forwards"], values, rows(GradientFigures, one["slopes"]))

    marginal = None if data["marginal"] is None else estimator(data["marginal"])
    estimators = [estimator(one) for one in data["estimators"]]
    return Audit(data["truth"], data["reference"], estimators, data["draws"], data["slack"], marginal)


# --- tables --------------------------------------------------------------------------------------------------------

VALUE_COLUMNS = ("estimator", "forwards", "bias, nats", "a token", "variance", "x forwards", "r", "rank r", "r at {F}")
SLOPE_COLUMNS = ("estimator", "forwards", "cosine", "cosine of mean", "rel. variance", "x forwards", "cosine at {F}")


def value_rows(audit: Audit, budget: float) -> list[tuple[str, ...]]:
    """The likelihood table, one row per reading."""
    rows = list[tuple[str, ...]]()
    for reading in readings(audit):
        values, forwards = reading.values, reading.forwards
        noise = math.fsum(v.noise for v in values) / len(values)
        bias, tokens = mean_of([v.bias for v in values]), math.fsum(v.tokens for v in values) / len(values)
        assert bias is not None
        rows.append(
            (
                reading.name,
                f"{forwards:.3g}",
                interval_text(bias, "+.2f"),
                f"{bias.mean / tokens:+.3f}",
                _few(noise),
                _few(noise * forwards),
                interval_text(clipped_interval(mean_of([v.pearson for v in values])), ".2f"),
                interval_text(clipped_interval(mean_of([v.spearman for v in values])), ".2f"),
                interval_text(_affordable(value_shares(values), forwards, budget, audit.draws), ".2f"),
            )
        )
    return rows


def slope_rows(audit: Audit, budget: float) -> list[tuple[str, ...]]:
    """The gradient table; the sum over orders first, if it was computed."""
    rows = list[tuple[str, ...]]()
    for one in _all(audit):
        shares = slope_shares(one.slopes)
        some = defined_problems(shares)
        noise = jackknife_log_interval(relative_noise(shares), some)
        rows.append(
            (
                one.name,
                f"{one.forwards:.3g}",
                interval_text(clipped_interval(jackknife_interval(cosine(shares, 1.0), some)), ".2f"),
                interval_text(_uncut(jackknife_interval(mean_cosine(shares, audit.draws), some)), ".2f"),
                interval_text(noise, ".3g"),
                "-" if noise is None else _few(noise.mean * one.forwards),
                interval_text(_affordable(shares, one.forwards, budget, audit.draws), ".2f"),
            )
        )
    return rows


def _all(audit: Audit) -> list[EstimatorFigures]:
    return [*([] if audit.marginal is None else [audit.marginal]), *audit.estimators]


def _few(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def _uncut(interval: Interval | None) -> Interval | None:
    """Cut to -1 to 1, except a figure above 1: too much noise was subtracted, and the reader should see it."""
    return interval if interval is not None and interval.mean > 1 else clipped_interval(interval)


def _affordable(shares: Shares, forwards: float, budget: float, draws: int) -> Interval | None:
    return clipped_interval(
        jackknife_interval(budget_cosine(shares, forwards, budget, draws), defined_problems(shares))
    )


def interval_text(interval: Interval | None, form: str) -> str:
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return format(interval.mean, form)
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def tables(audit: Audit, budget: float) -> tuple[Table, Table]:
    one, other = ([c.replace("{F}", f"{budget:g}") for c in columns] for columns in (VALUE_COLUMNS, SLOPE_COLUMNS))
    return (
        _table(f"likelihood against {audit.truth}", one, value_rows(audit, budget)),
        _table(f"gradient against {audit.reference} (below 1 does not prove bias)", other, slope_rows(audit, budget)),
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def two_estimators(audit: Audit, names: str) -> tuple[EstimatorFigures, EstimatorFigures]:
    """Two estimators by their names, separated by a comma."""
    known = {one.name: one for one in _all(audit)}
    words = [word.strip() for word in names.split(",")]
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"compare: there is no {unknown[0]!r}; the file has {', '.join(known)}")
    if len(words) != 2:
        raise ValueError("compare: name two estimators, e.g. agrpo:draws=2,agrpo:draws=4")
    return known[words[0]], known[words[1]]


def comparison_table(one: EstimatorFigures, other: EstimatorFigures, rows: Sequence[FigureComparison]) -> Table:
    def cells(row: FigureComparison) -> list[str]:
        both = ["-" if value is None else _few(value) for value in (row.one, row.other)]
        form, kind = (".2f", "ratio") if row.ratio else ("+.2f", "")
        return [row.figure, *both, interval_text(row.change, form), kind]

    columns = ["figure", one.name, other.name, "difference", ""]
    return _table("paired over problems", columns, [cells(row) for row in rows])


# --- the conclusion ------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """The figures of an estimator, by which it can be compared with others at a budget."""

    name: str
    forwards: float
    shares: Shares

    def cosine(self, budget: float, draws: int) -> float | None:
        value = budget_cosine(self.shares, self.forwards, budget, draws)(range(len(self.shares)))
        return None if value is None else min(1.0, value)


def _candidates(audit: Audit) -> tuple[list[Candidate], list[Candidate]]:
    """The estimators of the likelihood and those of the gradient."""
    values = [Candidate(one.name, one.forwards, value_shares(one.values)) for one in readings(audit)]
    return values, [Candidate(one.name, one.forwards, slope_shares(one.slopes)) for one in audit.estimators]


def conclusion(audit: Audit, budget: float) -> str:
    """One sentence: the best estimator of the likelihood, the best of the gradient, and whether a tie is excluded."""
    values, slopes = _candidates(audit)
    return (
        f"At {budget:g} forward passes a completion, "
        f"for the likelihood {_best(values, budget, audit.draws, 'r')}; "
        f"for the gradient {_best(slopes, budget, audit.draws, 'cosine')}."
    )


def constant_reward_note(rewards: Sequence[float], solved: bool) -> str | None:
    """A sentence about rewards that are all equal; None if they differ. `solved`: every rollout solves its problem."""
    if min(rewards) < max(rewards):
        return None
    easier = "easier problems, partial credit, a model that is fine-tuned first (unmask sft)"
    return (
        f"The reward of all {len(rewards)} rollouts is {rewards[0]:g}, so a method that compares rewards within a "
        f"group gets no gradient. Use {'harder problems' if solved else easier}, or another rollout.temperature."
    )


def _best(candidates: Sequence[Candidate], budget: float, draws: int, unit: str) -> str:
    """The best estimator against the next, of those that are affordable and defined."""
    values = [(value, one) for one in candidates if (value := one.cosine(budget, draws)) is not None]
    if not values:
        return "no estimator can be chosen (none is affordable, the draws are too few, or nothing varies in a group)"
    (value, best), *others = sorted(values, key=lambda pair: -pair[0])
    if not others:
        return f"{best.name} is the only one ({unit} {value:.2f})"
    _, second = others[0]
    first_cosine, second_cosine = (cosine(one.shares, one.forwards / budget) for one in (best, second))
    both = defined_problems(best.shares, second.shares)
    lead = clipped_interval(jackknife_interval(difference(first_cosine, second_cosine), both), 2.0)
    if lead is None or lead.low is None or lead.high is None:
        return f"{best.name} has the largest {unit} ({value:.2f}), with too few problems for an interval"
    tie = "which excludes a tie" if lead.excludes_zero else "which does not exclude a tie"
    gap = f"{lead.mean:.2f} [{lead.low:.2f}, {lead.high:.2f}]"
    return f"{best.name} has the largest {unit} ({value:.2f}), {gap} above {second.name}, {tie}"


# --- files ---------------------------------------------------------------------------------------------------------


def write_audit(folder: Path, data: dict[str, Any]) -> list[Path]:
    """Write audit.json, and audit.png if matplotlib is installed; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "audit.json"
    path.write_text(json.dumps(data) + "\n")
    picture = folder / "audit.png"
    return [path, picture] if draw_audit(audit_from_data(data), data["steps"], picture) else [path]


def read_audit(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        data = json.loads(path.read_text())
        audit_from_data(data)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not an audit.json: {error!r}") from None
    assert isinstance(data, dict)
    return data


def draw_audit(audit: Audit, steps: int, path: Path) -> bool:
    """r and cosine against the forward passes spent; False if matplotlib is not installed."""
    if (figure := new_figure(15, 6.5)) is None:
        return False
    most = 2 * max([float(steps), *(one.forwards for one in audit.estimators)])
    labels = ("r within groups", "cosine with the reference")
    colour = {one.name: number for number, one in enumerate(audit.estimators)}
    for place, (candidates, label) in enumerate(zip(_candidates(audit), labels, strict=True)):
        axes = figure.add_subplot(1, 2, place + 1)
        for one in candidates:
            spent = [one.forwards * (most / one.forwards) ** (i / 20) for i in range(21)]
            heights = [math.nan if (y := one.cosine(x, audit.draws)) is None else y for x in spent]
            number = colour[one.name.partition(" (")[0]]
            look = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
            axes.plot(spent, heights, label=one.name, marker="o", markevery=[0], **look)  # type: ignore[arg-type]
        axes.set(xlabel="forward passes a completion", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.legend(handles=figure.axes[0].get_lines(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
    return True
