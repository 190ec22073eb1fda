"""The `unmask` command."""

import sys
from collections.abc import Callable
from typing import Annotated, cast

import typer

from unmask.cli.adapt import adapt
from unmask.cli.audit import audit
from unmask.cli.compare import compare
from unmask.cli.doctor import doctor
from unmask.cli.eval import eval
from unmask.cli.fetch import fetch
from unmask.cli.generate import generate
from unmask.cli.grade import grade
from unmask.cli.merge import merge
from unmask.cli.methods import methods
from unmask.cli.pretrain import pretrain
from unmask.cli.push import push
from unmask.cli.sample import sample
from unmask.cli.sft import sft
from unmask.cli.tasks import tasks
from unmask.cli.train import train
from unmask.cli.view import view

# A wrong command line. The place of this class differs between versions of typer.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training for masked diffusion language models.",
)
COMMANDS: list[Callable[..., None]] = [train, compare, audit, eval, view, sample, generate, methods, tasks, doctor]
COMMANDS += [merge, push, pretrain, fetch, adapt, sft, grade]
for _command in COMMANDS:
    app.command()(_command)


def main() -> None:
    """Run a command. An error that the user can fix is one line on standard error, with exit code 2."""
    try:
        sys.exit(app(prog_name="unmask", standalone_mode=False) or 0)  # torchrun takes None for not ended
    except UsageError as error:
        command, message = error.ctx.command_path if error.ctx else "unmask", error.format_message()
        if message and "\n" not in message:  # else there were no arguments, and it is the help
            message = f"{command}: {message[0].lower()}{message[1:].rstrip('.')}"
            message += f"{' See' if message.endswith('?') else '; see'} {command} --help"
        typer.echo(message, err=True)
        sys.exit(2)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # on a CPU; a GPU has its own error
            raise
        typer.echo(
            "unmask: memory ran out: lower micro_batch_size and rollout.micro_batch_size, or prompts and group",
            err=True,
        )
        sys.exit(2)
    except (ValueError, OSError) as error:
        typer.echo(f"unmask: {' '.join(str(error).splitlines())}", err=True)
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
