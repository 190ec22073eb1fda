"""unmask merge"""

from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.arguments import BlockLength, RunOrModel, block_length_of


def merge(
    run_or_model: RunOrModel,
    block: BlockLength = None,
    *,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write the checkpoint.")],
) -> None:
    """Merge a run's adapter into its model and write a plain checkpoint that the family's own tools can load."""
    from unmask.models.known import check_model_name
    from unmask.util.files import check_folder

    causal_block = block_length_of(block)
    check_folder(out)
    check_model_name(run_or_model)

    from unmask.models import load_model, save
    from unmask.models.checkpoint import CARD
    from unmask.models.lora import has_adapter, merge as merge_adapter
    from unmask.training.run.card import merged_card
    from unmask.training.run.folder import checkpoint_of

    source = checkpoint_of(run_or_model)
    policy = load_model(source, causal_block=causal_block)
    if has_adapter(policy):
        merge_adapter(policy)
    save(policy, out)
    if (card := merged_card(Path(source))) is not None:
        (out / CARD).write_text(card)
    typer.echo(f"checkpoint in {out}")
