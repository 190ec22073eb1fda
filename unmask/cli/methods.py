"""unmask methods"""

import json
from typing import Any

import typer

from unmask.cli.arguments import AsJson


def methods(as_json: AsJson = False) -> None:
    """List the base methods and the plug-ins."""
    from unmask.config.options import option_defaults
    from unmask.methods import BASES, PLUGINS

    catalogue = [("base", name, f) for name, f in BASES.items()] + [("plug-in", n, f) for n, f in PLUGINS.items()]
    if as_json:
        rows = [
            {"name": n, "kind": kind, "summary": _line(f), "options": option_defaults(f)} for kind, n, f in catalogue
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for kind, name, factory in catalogue:
        typer.echo(f"{name:14} {kind:8} {_line(factory)}")


def _line(factory: Any) -> str:
    return (factory.__doc__ or "").strip().splitlines()[0]
