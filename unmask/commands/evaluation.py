"""unmask eval and unmask grade"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from unmask.commands.arguments import AsJson, DataOption, Overrides, RunOrModel, TaskOption, load, of_task


def eval(
    run_or_model: RunOrModel,
    task: TaskOption = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 256,
    samples: Annotated[int, typer.Option(min=1, help="Sampled completions of each, for pass@k.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the sampled completions.")] = 0,
    overrides: Overrides = None,
    protocol: Annotated[str | None, typer.Option(help="Grade by a named protocol: unmask, d1, ...")] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths of the field's table, e.g. 128,256,512.")] = None,
    data: DataOption = None,
    out: Annotated[Path | None, typer.Option(help="With --lengths: where to write scores, cards and answers.")] = None,
    as_json: AsJson = False,
) -> None:
    """Solve held-out problems: pass@1 sampled and greedy, and pass@k, with 95 % intervals.

    With --lengths: the field's table, decoded greedily (two tokens a step, blocks of 32) and graded by the protocol.
    """
    from unmask.config import device_of
    from unmask.evaluate import evaluate
    from unmask.setup import decoding_of, rollout_rows

    about = [*of_task(task, data=data, protocol=protocol), *(overrides or [])]
    config, policy = load(run_or_model, about, task)
    built = config.build_task()
    if lengths is not None:
        from unmask.benchmark import lengths_of, show_table

        how: dict[str, Any] = {"cache": decoding_of(config, built).cache, "batch": rollout_rows(config, policy)}
        how |= {"device": device_of(config), "out": out, "as_json": as_json}
        show_table(policy, built, protocol or "unmask", built.rows("test", problems, 0), lengths_of(lengths), **how)
        return
    rows = built.rows("test", problems, 0)
    with _spinner(f"{built.name}: {problems} problems, {samples} samples each"):
        batch = rollout_rows(config, policy)
        found = evaluate(policy, built, rows, decoding_of(config, built), samples, seed, device_of(config), batch)
    if as_json:
        typer.echo(json.dumps({"task": built.name, "problems": problems, "samples": samples, **found.metrics()}))
        return
    from unmask.display import show_evaluation

    show_evaluation(f"{run_or_model} on {built.name}", found)


@contextmanager
def _spinner(message: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def grade(
    generations: Annotated[Path, typer.Argument(help='JSONL, each line with a "generation" and its "ground_truth".')],
    task: Annotated[str, typer.Option(help="What was asked (unmask tasks).")],
    protocol: Annotated[str | None, typer.Option(help="Whose grading, e.g. d1. Default: our own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the lines with their verdicts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Grade stored generations, without a model: the score with its 95 % interval."""
    from unmask.grade import grade_file, task_of

    found = grade_file(task_of(task, protocol), generations, out)
    if as_json:
        typer.echo(json.dumps({"task": task, "protocol": protocol, **found.data()}))
        return
    value, low, high = (f"{100 * part:.2f}" for part in found.score)
    typer.echo(f"{task}{f' ({protocol})' if protocol else ''}: {value} % [{low}, {high}] of {found.rows} rows")
    if out is not None:
        typer.echo(f"verdicts in {out}")
