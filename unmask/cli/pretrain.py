"""unmask pretrain"""

from pathlib import Path
from typing import Annotated

import typer

from unmask.config.recipes import config_path
from unmask.util.files import check_writable
from unmask.util.parsing import read_keys


def pretrain(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="A file, or recipe:pretrain_tiny.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write the model.")],
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="cpu or cuda; another device rounds differently.")
    ] = "cpu",
) -> None:
    """Pre-train the embedded model from scratch, on partly wrong solutions."""
    check_writable(out)
    path = config_path(config)
    read_keys(path)  # reports a missing file before torch is imported

    from unmask.cli.display import training_bar
    from unmask.config.defaults import check_device
    from unmask.sft.pretrain import pretrain as run_pretraining, read_pretrain_config

    settings = read_pretrain_config(path)
    check_device(device)
    with training_bar(settings.steps, "pre-training", "step") as report:
        run_pretraining(settings, out, report, device)
    typer.echo(f"model in {out}")
