"""unmask methods, unmask tasks and unmask doctor"""

import json
from typing import Annotated, Any

import typer

from unmask.cli.arguments import AsJson


def methods(as_json: AsJson = False) -> None:
    """List the base methods and the plug-ins."""
    from unmask.config.config import option_help
    from unmask.methods import BASES, PLUGINS

    catalogue = [("base", name, f) for name, f in BASES.items()] + [("plug-in", n, f) for n, f in PLUGINS.items()]
    if as_json:
        rows = [{"name": n, "kind": kind, "summary": _line(f), "options": option_help(f)} for kind, n, f in catalogue]
        typer.echo(json.dumps(rows, indent=2))
        return
    for kind, name, factory in catalogue:
        typer.echo(f"{name:14} {kind:8} {_line(factory)}")


def tasks(
    name: Annotated[str | None, typer.Argument(help="One of them, or the Python file of your own.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks, or describe one: source, splits, prompt, reward, protocols, options."""
    from unmask.cli.describe import description, page, task_named
    from unmask.tasks import TASKS

    if name is not None:
        found = description(*task_named(name))
        typer.echo(json.dumps(found, indent=2) if as_json else page(found))
    elif as_json:
        typer.echo(json.dumps([description(name, factory) for name, factory in TASKS.items()], indent=2))
    else:
        for name, factory in TASKS.items():
            typer.echo(f"{name:16} {factory().summary}")


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, and what is missing for which feature."""
    from unmask.cli.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            state = "ok" if finding.ok else "missing" if finding.needed else "none"
            typer.echo(f"{state:8}{finding.what:14} {finding.detail}")
    if any(finding.needed and not finding.ok for finding in findings):
        raise typer.Exit(1)


def _line(factory: Any) -> str:
    return (factory.__doc__ or "").strip().splitlines()[0]
