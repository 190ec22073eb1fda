"""unmask view"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.runs import short_warnings


def view(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN2 ...]",
            help="Run folders, folders of runs, comparisons, results of eval and of grade --out.",
        ),
    ],
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML file instead, to open or send anywhere.")
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Where to serve; 0 takes a free port.")] = 0,
    animate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an animated SVG of one recorded rollout, e.g. out.svg.")
    ] = None,
    update: Annotated[
        int | None, typer.Option(metavar="N", help="Of --animate: a recorded update. Default: the last.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Of --animate: words that the prompt contains.")
    ] = None,
    rollout: Annotated[
        int | None, typer.Option(metavar="N", help="Of --animate: which rollout, from 1. Default: the highest reward.")
    ] = None,
    opening: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """Look at runs in a browser: curves, and every stored rollout step by step.

    Only this machine can open the page. It follows a run that trains, until Ctrl-C.
    """
    from unmask.util.parsing import check_exists
    from unmask.view import animation, page, server

    for run in runs:
        check_exists(run, "give a run folder: unmask train writes one and prints its name")
    for option, value in (("--update", update), ("--prompt", prompt), ("--rollout", rollout)):
        if value is not None and animate is None:
            raise ValueError(f"{option} chooses what --animate draws: add --animate out.svg")
    if animate is not None:
        if len(runs) > 1 or export is not None:
            raise ValueError("--animate draws one rollout of one run: give one RUN and no --export")
        path = animation.animate(runs[0], animate, update, prompt, rollout)
        typer.echo(f"{path}: {path.stat().st_size / 1e3:.0f} kB, plays in a browser and as an image on a page")
        return
    if export is not None:
        with short_warnings():
            path = page.export(runs, export)
        typer.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB, one self-contained file")
        return
    with server.Viewer(runs, port) as viewer:
        typer.echo(f"{viewer.address} shows {', '.join(map(str, runs))}; Ctrl-C ends it")
        if opening and _has_screen():
            import webbrowser

            webbrowser.open(viewer.address)
        try:
            viewer.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")


def _has_screen() -> bool:
    """Whether a browser has a screen; without one, a text browser might take over the terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
