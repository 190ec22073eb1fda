"""A credit audit as JSON, tables and a figure."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from unmask.studies.audit.report import interval_text
from unmask.studies.credit.study import CreditAudit, MeasuredCredit
from unmask.training.run.folder import FINISHED, RunFolder
from unmask.util.files import write_whole
from unmask.util.plots import new_figure
from unmask.util.statistics import Interval
from unmask.util.versions import versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("rule", "forwards", "r with the true credit", "above uniform", "AUROC")
COMMIT_COLUMNS = ("weight at commit", "rank at commit")


def credit_data(measured: MeasuredCredit) -> dict[str, Any]:
    """The audit as JSON; an interval is [figure, low, high], null if it is not defined."""
    settings, audit = measured.settings, measured.audit
    shown = ("length", "steps", "threshold", "block", "order", "temperature")
    return {
        "model": settings["model"],
        "task": settings["task"],
        "problems": settings["prompts"],
        "group": settings["group"],
        "draws": measured.draws,
        "seed": settings["seed"],
        **{name: settings["rollout"][name] for name in shown},
        "reward": measured.reward,
        "seconds": round(measured.seconds, 1),
        "versions": versions(),
        **audit._asdict(),
        "rules": [rule._asdict() for rule in audit.rules],
    }


def interval_cell(interval: Interval | None) -> str:
    return interval_text(interval, ".2f")


def rule_rows(audit: CreditAudit) -> list[tuple[str, ...]]:
    return [
        (
            rule.name,
            f"{rule.forwards:.3g}",
            interval_cell(rule.correlation),
            interval_text(rule.gain, "+.2f"),
            interval_cell(rule.auroc),
            *(map(interval_cell, (rule.commit_weight, rule.commit_rank)) if audit.committed else ()),
        )
        for rule in audit.rules
    ]


def credit_tables(audit: CreditAudit) -> list[Table]:
    """Rules, and distributions over steps."""
    rules = Table(title="credit rules against V(s_{t+1}) - V(s_t)", title_justify="left")
    for number, column in enumerate((*COLUMNS, *(COMMIT_COLUMNS if audit.committed else ()))):
        rules.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rule_rows(audit):
        rules.add_row(*row)
    steps = Table(title="distributions over steps: variance of the estimated sum", title_justify="left")
    steps.add_column("steps")
    steps.add_column("relative to uniform", justify="right")
    for name, left in audit.step_variances.items():
        steps.add_row(name, interval_cell(left))
    return [rules, steps]


def summary(audit: CreditAudit) -> str:
    """What the tables rest on, and when rollouts commit."""
    text = (
        f"{audit.decisive} of {audit.written} steps are decisive; {audit.scored} of {audit.rollouts} rollouts have one "
        f"and count for the AUROC. Reliability of the differences {interval_cell(audit.reliability)}; "
        f"{audit.forwards:.0f} forward passes a rollout."
    )
    if audit.committed:
        counts = [f"{count} after step {step}" for step, count in enumerate(audit.committed) if count and step]
        early = [f"{audit.committed[0]} before any step"] if audit.committed[0] else []
        text += f" Rollouts of which 95 % of the completions show one behaviour: {', '.join(early + counts)}."
    return text


def write_credit(folder: Path, data: dict[str, Any], measured: MeasuredCredit) -> list[Path]:
    """Write credit.json, the rollouts with their values for `unmask view`, and credit.png if matplotlib is installed;
    return the files."""
    settings = {key: value for key, value in measured.settings.items() if key != "updates"}  # nothing is trained
    run = RunFolder(folder, settings)
    run.log_traces(measured.lines)
    write_whole(folder / FINISHED, json.dumps({"ended": "credit audit"}) + "\n")
    write_whole(folder / "credit.json", json.dumps(data) + "\n")
    files, picture = [folder / "credit.json", folder / "traces.jsonl"], folder / "credit.png"
    return [*files, picture] if draw_credit(measured.audit, picture) else files


def draw_credit(audit: CreditAudit, path: Path) -> bool:
    """Correlation and AUROC of every rule, and the true credit by step; False if matplotlib is not installed."""
    if (figure := new_figure(14, 0.26 * len(audit.rules) + 1.6)) is None:
        return False
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    _draw_intervals(axes[0], {rule.name: rule.correlation for rule in audit.rules}, 0.0)
    axes[0].set(xlabel="r with the true credit")
    _draw_intervals(axes[1], {rule.name: rule.auroc for rule in audit.rules}, 0.5)
    axes[1].set(xlabel="AUROC of decisive steps")
    axes[1].set_yticklabels([])
    step_T = range(1, len(audit.change_T) + 1)
    axes[2].bar(step_T, audit.change_T, color="C0", label="true credit, root mean square")
    if audit.committed:
        share = [count / audit.rollouts for count in audit.committed[1:]]
        axes[2].plot(step_T, share, "C1o-", label="share of rollouts that commit")
    axes[2].set(xlabel="step", ylim=(0, None))
    axes[2].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return True


def _draw_intervals(axes: "Axes", figures: dict[str, Interval | None], line: float) -> None:
    axes.axvline(line, color="0.7", linewidth=1)
    axes.set_yticks(range(len(figures)), list(figures), fontsize=8)
    axes.invert_yaxis()
    for place, one in enumerate(figures.values()):
        if one is not None:
            low, high = one.mean if one.low is None else one.low, one.mean if one.high is None else one.high
            axes.plot([low, high], [place, place], "C0|-")
            axes.plot([one.mean], [place], "C0o")
    axes.grid(axis="x", alpha=0.3)
