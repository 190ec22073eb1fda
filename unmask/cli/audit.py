"""unmask audit"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.arguments import AsJson, DataOption, Overrides, TaskOption, of_task, settings_of

if TYPE_CHECKING:
    from unmask.config import Config
    from unmask.config.method_names import Candidate
    from unmask.studies.audit.audit import Report


def audit(
    model: Annotated[str, typer.Argument(help="A run or model folder, a name (tiny); or an audit.json to show again.")],
    overrides: Overrides = None,
    task: TaskOption = None,
    methods: Annotated[
        str | None, typer.Option(help="e.g. diffu_grpo,sml:strata=8:anchor=0,my.py:NAME. Default: all estimators.")
    ] = None,
    problems: Annotated[int, typer.Option(min=1, max=2**20, help="Problems, the units of every interval.")] = 8,
    group: Annotated[int, typer.Option(min=2, max=2**16, help="Completions of each.")] = 8,
    draws: Annotated[int, typer.Option(min=2, max=2**20, help="Draws of each estimator on each completion.")] = 16,
    budget: Annotated[float, typer.Option(min=0.1, help="Forward passes a completion at which to compare.")] = 4,
    states: Annotated[
        int | None,
        typer.Option(min=0, help="Passes at most for the sum over orders; 100000, or 2000 for a large model."),
    ] = None,
    data: DataOption = None,
    compare: Annotated[
        str | None, typer.Option(help="Two estimators of an audit.json, paired: agrpo:draws=4,agrpo:draws=2")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for audit.json and audit.png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Which estimator is worth its passes? Bias, noise and correlation of its values; direction of its gradient."""
    from unmask.training.run.folder import check_folder

    if out is not None:
        check_folder(out)
    if model.endswith(".json"):
        from unmask.studies.audit.report import read

        report = read(Path(model))
        if compare is not None:
            return _show_comparison(report, compare, as_json)
    elif compare is not None:
        raise ValueError("compare: measure with --out FOLDER first, then compare in FOLDER/audit.json")
    else:
        about = [*of_task(task, data=data), *(overrides or [])]
        report = _measure(model, task, about, methods, problems, group, draws, budget, states)
    _show(report, out, as_json)


def _measure(
    model: str,
    task: str | None,
    overrides: list[str],
    words: str | None,
    problems: int,
    group: int,
    draws: int,
    budget: float,
    states: int | None,
) -> dict[str, Any]:
    import torch

    from unmask.config import DEMO, read_config
    from unmask.config.method_names import candidates, every_estimator, split_overrides
    from unmask.core.trace import all_tokens
    from unmask.studies.audit.audit import audit as measure, scores_choice
    from unmask.studies.audit.report import conclusion, plain
    from unmask.training.batch import Experiment, collect
    from unmask.training.setup import decoding_of, is_large, set_up
    from unmask.util.versions import versions

    started = time.monotonic()
    chosen = candidates(words) if words is not None else None
    settings, task = settings_of(model, task)
    named: dict[str, Any] = {"task": task, "model": model, "prompts": problems, "group": group}
    named |= {"lora": {}} if settings != DEMO else {}  # a run's adapter brings its own options

    def configured(one: "Candidate | None", more: list[str]) -> "Config":
        what = {"method": "diffu_grpo", "with": []} if one is None else {"method": one.method, "with": one.plugins}
        return read_config(settings, more, **named, **what)

    general, special = split_overrides(overrides, chosen or every_estimator(8, 8, True))
    config = configured(None, general)
    built = config.build_task()
    decoding = replace(decoding_of(config, built), cache=None)
    chosen = chosen or every_estimator(decoding.length, decoding.steps, scores_choice(decoding))
    methods = {}
    for one in chosen:
        mine = [override for override in special if override.partition(".")[0] in one.uses]
        methods[one.name] = configured(one, [*general, *mine, *one.overrides]).build_method()
        if methods[one.name].branch is not None:
            raise ValueError(f"{one.name}: dispo adds branches and no estimator of its own; leave it out")
    first = next(iter(methods.values()))
    record = reduce(or_, (method.record for method in methods.values()))
    with set_up(config, needs_reference=False) as setup, _progress() as report:
        report("rollouts", 0.0)
        batch = collect(
            Experiment(setup, built, replace(first, record=record, counted=all_tokens, branch=None), config, decoding),
            0,
        )
        if not len(batch.trace):
            raise ValueError("no problem is left: the rewards of every group are all alike; leave out idle_groups")
        if states is None:
            states = 2_000 if is_large(setup.policy) else 100_000
        rng = torch.Generator().manual_seed(config.seed)
        result = measure(
            setup.policy, batch.trace, batch.reward_B, decoding, methods, draws, rng, setup.update_batch, states, report
        )
    rollout = config.rollout
    return {
        "model": model,
        "task": config.task,
        "problems": len(batch.trace.group_B.unique()),
        "group": group,
        "budget": budget,
        "seed": config.seed,
        "length": decoding.length,
        "steps": decoding.steps,
        "block": decoding.block,
        "order": rollout.order,
        "temperature": rollout.temperature,
        "reward": batch.reward,
        "idle": sum(slope is None for slope in result.estimators[0].slopes),
        "parameters": sum(weight.numel() for weight in setup.policy.parameters() if weight.requires_grad),
        "seconds": round(time.monotonic() - started, 1),
        "versions": versions(),
        "conclusion": conclusion(result, budget),
        **plain(result),
    }


def _show_comparison(report: dict[str, Any], names: str, as_json: bool) -> None:
    from rich.console import Console

    from unmask.studies.audit.figures import compared
    from unmask.studies.audit.report import comparison, named, restored

    result = restored(report)
    one, other = named(result, names)
    rows = compared(result, one, other, report["budget"])
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows]))
    else:
        Console(width=None if Console().is_terminal else 200).print(comparison(one, other, rows))


def _show(report: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from unmask.studies.audit.report import conclusion, restored, tables, write

    paths = write(out, report) if out is not None else []
    if as_json:
        typer.echo(json.dumps(report))
        return
    console = Console(width=None if Console().is_terminal else 200)
    typer.echo(
        f"{report['model']} on {report['task']}: {report['problems']} problems x {report['group']} completions, "
        f"{report['draws']} draws; {report['length']} positions in {report['steps']} steps, {report['order']} order. "
        f"{report['seconds']:.0f} s."
    )
    slack = f" (too low by at most {report['slack']:.1g} nats)" if report["slack"] else ""
    typer.echo(
        f"Values against {report['truth']}{slack}. Gradients over {report['parameters']} weights against "
        f"{report['reference']}; {report['idle']} of {report['problems']} groups have none: their rewards are equal."
    )
    result = restored(report)
    for table in tables(result, report["budget"]):
        console.print(table)
    typer.echo(conclusion(result, report["budget"]))
    for path in paths:
        typer.echo(f"written: {path}")


@contextmanager
def _progress() -> "Iterator[Report]":
    """A bar with the time left in a terminal, a line for every tenth elsewhere; on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console, started, tenths = Console(stderr=True), [0.0], [0]
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        job = bar.add_task("", total=1.0)

        def report(what: str, done: float) -> None:
            if done == 0:
                started[0], tenths[0] = time.monotonic(), 0
                bar.reset(job, total=1.0)
            bar.update(job, completed=done, description=what)
            if not console.is_terminal and (done == 0 or int(10 * done) > tenths[0]):
                tenths[0] = int(10 * done)
                left = f", about {(time.monotonic() - started[0]) * (1 - done) / done:.0f} s left" if done else ""
                typer.echo(f"{what}: {done:.0%}{left}", err=True)

        yield report
