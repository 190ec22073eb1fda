"""unmask tasks"""

import json
from typing import Annotated

import typer

from unmask.cli.arguments import AsJson


def tasks(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One of them, or the Python file of your own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks, or describe one: source, splits, prompt, reward, protocols, options."""
    from unmask.tasks import TASKS
    from unmask.util.parsing import suggestion

    if name is None and not as_json:
        for name, factory in TASKS.items():
            typer.echo(f"{name:16} {factory().summary}")
        return
    if name is not None and not name.endswith(".py") and name not in TASKS:
        raise ValueError(f"there is no task {name!r}; {suggestion(name, TASKS)}")
    from unmask.cli.describe import description, page, task_factory

    if name is not None:
        task = description(name, task_factory(name))
        typer.echo(json.dumps(task, indent=2) if as_json else page(task))
    else:
        typer.echo(json.dumps([description(name, factory) for name, factory in TASKS.items()], indent=2))
