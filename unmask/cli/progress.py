"""The progress of a long measurement in stages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from unmask.studies.audit.audit import OnProgress


@contextmanager
def show_progress() -> "Iterator[OnProgress]":
    """Progress on standard error: a bar in a terminal, elsewhere a line for every tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console, started, tenths = Console(stderr=True), 0.0, 0
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        job = bar.add_task("", total=1.0)

        def on_progress(stage: str, done: float) -> None:
            nonlocal started, tenths
            if done == 0:
                started, tenths = time.monotonic(), 0
                bar.reset(job, total=1.0)
            bar.update(job, completed=done, description=stage)
            if not console.is_terminal and (done == 0 or int(10 * done) > tenths):
                tenths = int(10 * done)
                left = f", about {(time.monotonic() - started) * (1 - done) / done:.0f} s left" if done else ""
                typer.echo(f"{stage}: {done:.0%}{left}", err=True)

        yield on_progress
