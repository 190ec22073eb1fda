"""unmask methods"""

import json

import typer

from unmask.cli.arguments import AsJson


def methods(as_json: AsJson = False) -> None:
    """List the base methods and the plug-ins."""
    from unmask.config.options import option_defaults
    from unmask.methods import BASES, PLUGINS

    rows = [
        {
            "name": name,
            "kind": kind,
            "summary": (factory.__doc__ or "").strip().splitlines()[0],
            "options": option_defaults(factory),
        }
        for kind, factories in (("base", BASES), ("plug-in", PLUGINS))
        for name, factory in factories.items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"{row['name']:14} {row['kind']:8} {row['summary']}")
