"""unmask push"""

from pathlib import Path
from typing import Annotated

import typer

from unmask.util.parsing import check_exists


def push(
    run_or_model: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, or a model folder.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The branch, created if it is new. Default: main.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be uploaded; upload nothing.")] = False,
) -> None:
    """Upload a checkpoint, its model card and its curves to the Hugging Face hub."""
    check_exists(run_or_model, "give the folder of a finished run, or of a model")

    from unmask.integrations.hub import files_to_push, push as push_files, push_summary

    upload = files_to_push(run_or_model)
    summary = push_summary(upload, repo, private)
    typer.echo(f"{'would upload' if dry_run else 'uploading'} {summary}")
    if not dry_run:
        typer.echo(f"uploaded to {push_files(upload.files, repo, private, revision)}")
