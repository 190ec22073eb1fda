"""unmask compare"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.cli.arguments import AsJson, DataOption, check_shared_settings, of_task
from unmask.cli.runs import short_warnings, split_settings
from unmask.studies.compare.budget import budget_of
from unmask.util.files import check_writable
from unmask.util.signals import AT_ONCE

if TYPE_CHECKING:
    from unmask.studies.compare.compare import ComparisonProgress


def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="What all runs share; the demo's if not given."),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="TASK", help="What to learn (unmask tasks).")] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="METHODS",
            help="Base methods, e.g. diffu_grpo,agrpo:draws=2,diffu_grpo+daca,my.py:NAME.",
        ),
    ] = "",
    plugins: Annotated[
        str,
        typer.Option(
            "--with", metavar="PLUGINS", help="Sets of plug-ins, e.g. none,daca:strata=8,daca+dispo,my.py:NAME."
        ),
    ] = "none",
    seeds: Annotated[int, typer.Option(metavar="N", help="Runs of each method, with seeds from 0.")] = 5,
    budget: Annotated[
        str | None, typer.Option(metavar="KEY=N", help="What a run may spend: updates=N, forwards=N or seconds=S.")
    ] = None,
    lr: Annotated[
        str | None,
        typer.Option(metavar="RATES", help="Learning rates to choose from, for each line, e.g. 5e-5,1e-4,2e-4."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The folder; the same command resumes it.")] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Runs in parallel. Default: one per core; one on a GPU.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ...")] = None,
    data: DataOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep every run folder with its trained model.")] = False,
    redraw: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Print and draw a folder's results again; run nothing.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods over seeds: a table, learning curves, and a conclusion in one sentence.

    Finished runs are not repeated: the same command resumes an interrupted comparison.
    """
    from unmask.config import DEMO
    from unmask.config.published import check_words

    if redraw is not None:
        from unmask.studies.compare.report import redraw as redraw_results

        with short_warnings():
            results, folder = redraw_results(redraw), redraw
    elif not methods or out is None:
        missing = [name for name, given in (("--methods", methods), ("--out", out)) if not given]
        raise ValueError(f"give {' and '.join(missing)}, e.g. --methods diffu_grpo,agrpo --out runs/compared")
    else:
        folder = out
        check_writable(out)
        if budget is not None:
            budget_of(budget)
        lines = [line.split("+") for line in methods.split(",")]
        check_words("method", [base for base, *_ in lines])
        check_words("with", [name for _, *own in lines for name in own])
        check_words("with", [name for names in plugins.split(",") if names != "none" for name in names.split("+")])
        path, overrides = split_settings(arguments or [])
        shared = (*of_task(task, data=data), *overrides)
        words = [*methods.split(","), *plugins.split(",")]
        check_shared_settings(path or DEMO, shared, words, task=task, device=device)
        with _stoppable(folder), short_warnings(), _display() as report:
            from unmask.studies.compare.cells import SharedSettings
            from unmask.studies.compare.compare import Comparison, compare as run_comparison

            settings = SharedSettings(path, shared, task, device)
            plan = Comparison(methods.split(","), plugins.split(","), seeds, budget, _rates(lr), settings)
            results = run_comparison(plan, out, jobs, keep, report)
    from unmask.studies.compare.report import markdown

    if as_json:
        typer.echo(json.dumps(results["summary"], indent=1))
        return
    typer.echo(markdown(results["summary"]))
    typer.echo(f"{folder / 'table.md'}, {folder / 'curves.png'}; everything: {folder / 'results.json'}")


def _rates(text: str | None) -> list[float]:
    try:
        return [float(rate) for rate in text.split(",")] if text is not None else []
    except ValueError:
        raise ValueError(f"--lr: {text!r} is not a list of numbers such as 5e-5,1e-4,2e-4") from None


class _Stopped(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """SIGTERM and SIGINT end the comparison: SIGTERM with exit code 0, as in `unmask train`, SIGINT with 130."""
    stopped_at = -math.inf

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_at
        if time.monotonic() > stopped_at + AT_ONCE:  # a second one would disturb the end of the processes
            stopped_at = time.monotonic()
            raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except _Stopped as stopped:
        typer.echo(f"stopped: finished runs are kept in {out}. To resume: the same command", err=True)
        raise typer.Exit(130 if stopped.number == signal.SIGINT else 0) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _display() -> "Iterator[Callable[[ComparisonProgress], None]]":
    """Progress on standard error: a live bar in a terminal, elsewhere a line for every run."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    live = console.is_terminal
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[left]}")
    with Progress(*columns, console=console, disable=not live) as bar:
        job = bar.add_task("planning", total=1.0, left="")

        def report(now: "ComparisonProgress") -> None:
            left = f"{_duration(now.left)} left"
            bar.update(job, completed=now.share, description=f"{now.stage} {now.done}/{now.total}", left=left)
            if now.event.share == 1.0:
                text = f"{now.stage} {now.done}/{now.total}  {_event_text(now)}" + ("" if live else f"  {left}")
                bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield report


def _event_text(now: "ComparisonProgress") -> str:
    job, error = now.event.job, now.event.error
    rate = f" lr {job.config['optimizer']['lr']:g}" if now.stage == "learning rates" else ""
    text = f"{job.label} seed {job.seed}{rate}: "
    if error:
        return f"{text}FAILED: {error}"
    result = job.result()
    first, last = result["curve"][0], result["curve"][-1]
    solved = [f"{name} {100 * first[name]:.1f} -> {100 * last[name]:.1f} %" for name in ("sampled", "greedy")]
    return f"{text}{', '.join(solved)}, {result['wall']:.0f} s"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
