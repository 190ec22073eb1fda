"""unmask grade"""

import json
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.arguments import AsJson, Overrides, of_task


def grade(
    generations: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help='JSONL, each line with a "generation" (or "completion") and its "ground_truth".'
        ),
    ],
    task: Annotated[
        str,
        typer.Option("--task", metavar="TASK", help="What was asked (unmask tasks), or the Python file of your own."),
    ],
    overrides: Overrides = None,
    protocol: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose grading, e.g. d1. Default: our own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the lines with their verdicts.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Grade stored generations, without a model: the score with its 95 % interval."""
    from unmask.config import read_config
    from unmask.util.files import check_input, check_output

    check_input(generations)
    check_output(out)
    settings = ["method=diffu_grpo", *of_task(task, protocol=protocol), *(overrides or [])]  # takes every task
    config = read_config(None, settings, task=task)

    from unmask.evaluation.grade import grade_file
    from unmask.tasks.scoring import failure_summary

    report = grade_file(config.build_task(), generations, out, config.reward)
    if report.failures:
        typer.echo(failure_summary(report.failures), err=True)
    if as_json:
        typer.echo(json.dumps({"task": task, "protocol": protocol, **report.data()}))
        return
    scores = {f"{task}{f' ({protocol})' if protocol else ''}": report.score, **report.other_scores}
    for name, share in scores.items():
        value, low, high = (f"{100 * part:.2f}" for part in share)
        typer.echo(f"{name}: {value} % [{low}, {high}] of {report.rows} row{'s' * (report.rows > 1)}")
    for name, count in report.facts.items():
        typer.echo(f"{name.replace('_', ' ')}: {count}")
    if out is not None:
        typer.echo(f"verdicts in {out}")
