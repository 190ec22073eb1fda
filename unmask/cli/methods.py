"""unmask methods"""

import json
from typing import Annotated

import typer

from unmask.cli.arguments import AsJson

ADVICE = """
What to use when (the measurements: docs/choosing.md)
  the reward is right or wrong     --method raft
  the reward is graded             --method agrpo, or --method diffu_grpo --with daca
  raft gains little                --method agrpo
  the base asks at few states      --with dispo
  never                            sml.negative=1 without KL and anchor, or raft.advantage=every_sample"""
"""The last lines of the list, as in docs/choosing.md."""


def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of them.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the base methods and the plug-ins, or describe one: what it does, and its options."""
    from unmask.config.published import published_names, schema
    from unmask.util.parsing import suggestion

    sections = schema()["properties"]
    default = sections["method"]["default"]
    kinds = {method: kind for key, kind in (("method", "base"), ("with", "plug-in")) for method in published_names(key)}
    rows = [
        {
            "name": method,
            "kind": kind,
            "default": method == default,
            "summary": sections[method]["description"],
            "options": {key: option["default"] for key, option in sections[method]["properties"].items()},
        }
        for method, kind in kinds.items()
        if name in (None, method)
    ]
    if not rows:
        raise ValueError(f"there is no method {name!r}; {suggestion(str(name), kinds)}")
    if as_json:
        typer.echo(json.dumps(rows if name is None else rows[0], indent=2))
    elif name is None:
        for row in rows:
            summary = row["summary"].partition("\n")[0]
            typer.echo(f"{row['name']:14} {row['kind']:8} {summary}{' (the default)' if row['default'] else ''}")
        typer.echo(ADVICE)
    else:
        flag = "--method" if kinds[name] == "base" else "--with"
        kind = "base method" if kinds[name] == "base" else "plug-in"
        typer.echo(f"{name}: a {kind}, {flag} {name}{' (the default)' if name == default else ''}\n")
        typer.echo("\n".join([sections[name]["description"], "", *option_lines(name)]))


def option_lines(section: str) -> list[str]:
    """The options of a method, plug-in or task as text: default, meaning, and choices."""
    from unmask.config.published import schema

    lines = [f"options, {section}.KEY=VALUE:"]
    for key, option in schema()["properties"][section]["properties"].items():
        default = option["default"] if isinstance(option["default"], str) else json.dumps(option["default"])
        choices = f": {', '.join(option['enum'])}" if "enum" in option else ""
        lines.append(f"  {key:16} {default:14} {option['description']}{choices}")
    return lines
