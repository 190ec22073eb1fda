"""The `unmask` command."""

import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from unmask.cli.adapt import adapt
from unmask.cli.audit import audit
from unmask.cli.bench import bench
from unmask.cli.compare import compare
from unmask.cli.doctor import doctor
from unmask.cli.eval import eval
from unmask.cli.examples import EXAMPLES
from unmask.cli.fetch import fetch
from unmask.cli.generate import generate
from unmask.cli.grade import grade
from unmask.cli.merge import merge
from unmask.cli.methods import methods
from unmask.cli.pretrain import pretrain
from unmask.cli.push import push
from unmask.cli.recipes import recipes
from unmask.cli.sample import sample
from unmask.cli.schema import schema
from unmask.cli.sft import sft
from unmask.cli.tasks import tasks
from unmask.cli.train import train
from unmask.cli.view import view

# A wrong command line. The place of this class differs between versions of typer.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])


def _hide_types(command: Any, ctx: Any) -> None:
    """Let the help show FOLDER or N for an option and nothing for a switch, where typer shows Python types."""
    for parameter in command.get_params(ctx):
        shown = None if getattr(parameter, "is_flag", True) else parameter.metavar
        vars(parameter)["display_type_rich"] = lambda ctx, shown=shown: shown


class Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types(self, ctx)
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types(self, ctx)
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training for masked diffusion language models.",
)
NUMBERS = {
    "Input should be a valid integer, unable to parse string as an integer": "expected a whole number",
    "Input should be a valid number, unable to parse string as a number": "expected a number",
}
TAKES_KEYS = ("train", "compare", "audit", "eval", "sample", "generate", "adapt", "sft", "doctor", "merge")
"""Commands that take keys of the configuration."""
COMMANDS: list[Callable[..., None]] = [
    train,
    compare,
    audit,
    bench,
    eval,
    view,
    sample,
    generate,
    methods,
    tasks,
    recipes,
]
COMMANDS += [doctor, schema, merge, push, pretrain, fetch, adapt, sft, grade]
for _command in COMMANDS:
    _examples = "\n".join(EXAMPLES[_command.__name__])
    app.command(cls=Command, epilog=f"Examples:\n\n\b\n{_examples}")(_command)


def main() -> None:
    """Run a command. An error that the user can fix is one line on standard error, with exit code 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the start, as by >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        sys.exit(app(prog_name="unmask", standalone_mode=False) or 0)  # torchrun takes None for not ended
    except UsageError as error:
        command, message = error.ctx.command_path if error.ctx else "unmask", _plain_message(error)
        if command.rpartition(" ")[2] in TAKES_KEYS:
            message = _as_key(getattr(error, "option_name", "")) or message
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


def _plain_message(error: typer.BadParameter) -> str:
    """The message of a wrong command line, without options that only share their dashes with an unknown one, and
    without the words of a library for a number."""
    if near := getattr(error, "possibilities", None):
        option = str(getattr(error, "option_name", ""))
        match = get_close_matches(option.lstrip("-"), [name.lstrip("-") for name in near], n=1)
        return f"no such option: {option}" + (f". Did you mean --{match[0]}?" if match else "")
    message = error.format_message()
    for library, plain in NUMBERS.items():
        message = message.replace(library, plain)
    return message


def _as_key(option: str) -> str:
    """How to write an unknown option that is a key of the configuration; empty if it is not one."""
    from unmask.config.published import is_key

    key = option.lstrip("-").replace("-", "_")
    words = [word.partition("=") for word in sys.argv]
    given = next((number for number, (word, _, _) in enumerate(words) if word == option), None)
    if not is_key(key) or given is None:
        return ""
    value = words[given][2] or next((word for word in sys.argv[given + 1 : given + 2] if word[:1] != "-"), "VALUE")
    return f"{option} is a key of the configuration, not an option: write {key}={value}"


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
