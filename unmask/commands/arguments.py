"""What several commands take, and how it is read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unmask.models import Model

RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a model folder, or a name (tiny).")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="e.g. rollout.steps=16")]
DataOption = Annotated[Path | None, typer.Option(help="The task's data, a JSONL file, instead of the hub's.")]
TaskOption = Annotated[str | None, typer.Option(help="Default: the run's own task, or sudoku.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def of_task(task: str | None, **options: Any) -> list[str]:
    """Options of a task as overrides."""
    given = {key: value for key, value in options.items() if value is not None}
    if given and task is None:
        raise ValueError(f"--{next(iter(given))} belongs to a task: name it with --task")
    section = "own" if task is not None and task.endswith(".py") else task
    return [f"{section}.{key}={value}" for key, value in given.items()]


def load(run_or_model: str, overrides: list[str], task: str | None = None) -> "tuple[Any, Model]":
    """The configuration of a run (or the demo's, for a plain model) and its policy."""
    import torch

    from unmask.config import DEMO, device_of, read_config
    from unmask.models import load_model
    from unmask.run import checkpoint_of

    path = Path(run_or_model) / "config.yaml"
    named = {} if path.is_file() else {"model": run_or_model}
    config = read_config(path if path.is_file() else DEMO, overrides, task=task, **named)
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    return config, load_model(checkpoint_of(run_or_model), dtype=dtype, device=device_of(config))
