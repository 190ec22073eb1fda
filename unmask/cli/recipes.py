"""unmask recipes"""

import json

import typer

from unmask.cli.arguments import AsJson


def recipes(as_json: AsJson = False) -> None:
    """List the configurations that come with the package; use one as recipe:NAME in place of a file."""
    from unmask.config import recipes as shipped

    rows = {
        name: {"command": f"unmask {shipped.command_of(name)} recipe:{name}", "summary": shipped.summary(path)}
        for name, path in shipped.recipes().items()
    }
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows.values():
        typer.echo(f"{row['command']:44} {row['summary']}")
