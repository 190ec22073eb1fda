"""The `unmask` command: its subcommands are the functions of `unmask.commands`."""

import sys
from typing import Annotated

import typer

from unmask.commands import checkpoints, evaluation, listing, sampling, training

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training for masked diffusion language models.",
)
for _command in (
    training.train,
    evaluation.eval,
    sampling.sample,
    sampling.generate,
    listing.methods,
    listing.tasks,
    listing.doctor,
    checkpoints.merge,
    checkpoints.pretrain,
    evaluation.grade,
):
    app.command()(_command)


def main() -> None:
    """Run a command; what a user can put right is one line on standard error and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"unmask: {error}", err=True)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        from unmask import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Reinforcement-learning post-training for masked diffusion language models."""
