"""unmask recipes"""

import json

import typer

from unmask.cli.arguments import AsJson


def recipes(as_json: AsJson = False) -> None:
    """List the configurations that come with the package; use one as recipe:NAME in place of a file."""
    from unmask.config import recipes as shipped

    rows = {name: shipped.summary(path) for name, path in shipped.recipes().items()}
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for name, summary in rows.items():
        typer.echo(f"{name:24} {summary}")
