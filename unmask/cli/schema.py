"""unmask schema"""

import json
from typing import Annotated

import typer

COMMANDS = ("train", "sft", "pretrain")


def schema(
    command: Annotated[
        str, typer.Argument(metavar="COMMAND", help="Whose configuration: train, sft (also for adapt) or pretrain.")
    ] = "train",
) -> None:
    """Print the JSON schema of a configuration, with which an editor completes and checks YAML."""
    from unmask.config.arguments import check_known
    from unmask.config.published import FILE

    check_known("COMMAND", command, COMMANDS)
    if command == "train":
        typer.echo(FILE.read_text(), nl=False)
        return
    from unmask.sft.json_schema import pretrain_schema, sft_schema

    typer.echo(json.dumps(sft_schema() if command == "sft" else pretrain_schema(), indent=2))
