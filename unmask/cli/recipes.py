"""unmask recipes"""

import json
from typing import Annotated

import typer

from unmask.cli.arguments import AsJson


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of them: print its file.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the configurations that come with the package, or print one; use it as recipe:NAME in place of a file."""
    from unmask.config import recipes as shipped

    rows = {
        name: {"command": f"unmask {shipped.command_of(name)} recipe:{name}", "summary": shipped.summary(path)}
        for name, path in shipped.recipes().items()
    }
    if name is not None:
        path = shipped.config_path(f"{shipped.PREFIX}{name.removeprefix(shipped.PREFIX)}")
        text = path.read_text()
        typer.echo(json.dumps({**rows[path.stem], "text": text}, indent=2) if as_json else text.rstrip())
    elif as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        for row in rows.values():
            typer.echo(f"{row['command']:44} {row['summary']}")
