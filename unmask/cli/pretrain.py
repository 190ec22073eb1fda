"""unmask pretrain"""

from pathlib import Path
from typing import Annotated

import typer

from unmask.config.recipes import config_path
from unmask.util.files import check_writable


def pretrain(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="A file, or recipe:pretrain_tiny.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write the model.")],
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="cpu or cuda; another device rounds differently.")
    ] = "cpu",
) -> None:
    """Pre-train the embedded model from scratch, on partly wrong solutions."""
    from unmask.cli.display import training_bar
    from unmask.config.defaults import check_device
    from unmask.sft.pretrain import pretrain as run_pretraining, read_pretrain_config

    check_writable(out)
    settings = read_pretrain_config(config_path(config))
    check_device(device)
    with training_bar(settings.steps, "pre-training", "step") as report:
        run_pretraining(settings, out, report, device)
    typer.echo(f"model in {out}")
