"""unmask bench"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.arguments import AsJson, FiguresFolder
from unmask.cli.audit import show_credit
from unmask.cli.progress import show_progress
from unmask.util.files import check_folder


class BenchmarkName(StrEnum):
    credit = "credit"


def bench(
    name: Annotated[BenchmarkName, typer.Argument(metavar="NAME", help="credit: do credit rules find what matters?")],
    rule: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Your own rule: a Python file with credit(trace).")
    ] = None,
    out: FiguresFolder = None,
    as_json: AsJson = False,
) -> None:
    """Run a frozen benchmark: fixed models, seeds and numbers, so that results can be cited."""
    if out is not None:
        check_folder(out)

    from unmask.studies.credit.benchmark import VERSION, citation, run_benchmark, write_benchmark
    from unmask.studies.credit.rules import own_rule

    own = {} if rule is None else {str(rule): own_rule(rule)}
    with show_progress() as on_progress:
        results = run_benchmark(own, on_progress)
    data = {"version": VERSION, "models": {model: one.data for model, one in results.items()}}
    written = write_benchmark(out, data, results) if out is not None else []
    if as_json:
        typer.echo(json.dumps(data))
        return
    for one in results.values():
        show_credit(one.data, one.measured)
    typer.echo(citation(results))
    for path in written:
        typer.echo(f"written: {path}")
