"""unmask adapt"""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.runs import run_folder
from unmask.cli.sft import Data, Out, Resume, Settings, read_settings, resume_sft, train_with_display


def adapt(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="smollm2, a folder, or a hub id: a Llama or a Qwen.")
    ] = None,
    arguments: Settings = None,
    data: Data = None,
    mask_token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="The MASK token; no text may contain it. Default: the model's, or a new one."
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Block-causal attention in blocks of N positions. Default: full."),
    ] = None,
    out: Out = None,
    resume: Resume = None,
) -> None:
    """Turn an autoregressive model into a masked diffusion model: bidirectional attention, then fine-tuning."""
    if resume is not None:
        resume_sft(resume, (model, arguments, data, mask_token, block, out))
        return
    if model is None:
        raise ValueError("name the model to adapt: smollm2, a folder, or a hub id")
    folder = run_folder(f"adapt-{Path(model).name}", out)
    final = folder.resolve()
    if final == Path.cwd():
        raise ValueError("unmask adapt replaces its folder: choose another --out")
    config = read_settings(arguments, data, folder, model, model=str(folder.absolute() / "start"))

    from unmask.models.checkpoint import write_card_metadata
    from unmask.sft.adapt import ADAPTED, adapt as write_start, base_metadata, source_folder
    from unmask.sft.config import CONFIG
    from unmask.sft.finetune import finetune
    from unmask.training.run.folder import RunFolder
    from unmask.util.files import check_folder

    if config.causal_block is not None:
        raise ValueError("causal_block: the block length of an adapted model is --block N")
    if config.full is False:
        raise ValueError("full: an adapter cannot train a new MASK token; adapting trains all weights")
    config = config.model_copy(update={"full": True})
    # The run folder is written aside, with the model in it, and renamed when training can begin. Killed before that, no
    # folder of that name exists; killed afterwards, it has everything that --resume needs.
    source, there = source_folder(model), next(path for path in final.parents if path.exists())
    aside = there / f".{final.name}.new-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        run = RunFolder(aside, config.dump(), CONFIG)
        done = write_start(source, aside / "start", mask_token, block)
        write_card_metadata(aside / "start", base_metadata(model, source))
        (aside / "start" / ADAPTED).write_text(json.dumps({"model": model, **done}, indent=2) + "\n")
        origin = "new" if done["new"] else "its own"
        attends = "both ways" if block is None else f"both ways in blocks of {block}"
        typer.echo(f"{model}: attends {attends}; MASK is {done['mask_token']}, {origin}, token {done['mask_id']}")

        def rename_folder() -> RunFolder:
            check_folder(folder)
            final.parent.mkdir(parents=True, exist_ok=True)
            aside.rename(final)
            run.path = folder
            return run

        train_with_display(config, folder, lambda hooks: finetune(config, rename_folder, hooks, aside / "start"))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
