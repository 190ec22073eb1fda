"""Arguments that several commands share."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from unmask.models import Model


def names_of(key: str) -> "Callable[[str], list[str]]":
    """Shell completion: the built-in names of `task`, `method` or `with`."""

    def complete(incomplete: str) -> list[str]:
        from unmask.config.published import published_names

        return [name for name in published_names(key) if name.startswith(incomplete)]

    return complete


RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a model folder, or a name (tiny-two, tiny).")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="e.g. rollout.steps=16")]
BlockLength = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[causal_block=N]", help="The block length of a block-causal model whose files and name do not say it."
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The task's data, a JSONL file; for your own task also ORG/NAME on the hub."),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task", metavar="TASK", autocompletion=names_of("task"), help="Default: the run's own task, or sudoku."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FiguresFolder = Annotated[Path | None, typer.Option(metavar="FOLDER", help="A folder for the figures as JSON and PNG.")]


def block_length_of(words: list[str] | None) -> int | None:
    """The N of causal_block=N, the only key that commands with `BlockLength` take."""
    block = None
    for word in words or []:
        key, _, value = word.partition("=")
        if key != "causal_block":
            raise ValueError(f"{word}: this command takes only the key causal_block=N")
        if not value.isdecimal() or not 1 <= int(value) < 2**20:
            raise ValueError(f"causal_block: expected a number of tokens, at least 1, got {value!r}")
        block = int(value)
    return block


def of_task(task: str | None, **options: Any) -> list[str]:
    """Options of a task as overrides."""
    from unmask.tasks.support.data import is_hub_data

    values = {key: value for key, value in options.items() if value is not None}
    if values and task is None:
        raise ValueError(f"--{next(iter(values))} belongs to a task: name it with --task")
    section = "own" if task is not None and task.endswith(".py") else task
    on_hub = section == "own" and is_hub_data(str(values.get("data", "")))
    if "data" in values and not values["data"].is_file() and not on_hub:
        raise ValueError(f"{section}: there is no data file {values['data']}")
    return [f"{section}.{key}={value}" for key, value in values.items()]


def settings_of(run_or_model: str, task: str | None) -> "tuple[Path | dict[str, Any], str | None]":
    """The settings of a command that does not train, and its task: the demo's for a plain model, a run's own for a run.
    A run folder may come from anywhere and must not decide what code is run: its method is dropped, and the Python file
    of its task must also be named by the user.
    """
    from unmask.config import DEMO
    from unmask.config.parse import without_method
    from unmask.util.parsing import read_keys, short_repr

    folder = Path(run_or_model)
    if not (folder / "checkpoint").is_dir() or not (folder / "config.yaml").is_file():
        return DEMO, task
    data = without_method(read_keys(folder / "config.yaml"))
    own, trained = data.pop("own", None), str(data.get("task"))
    if trained != "own" and not trained.endswith(".py"):
        return data, task
    file = own.get("file") if isinstance(own, dict) else None
    if task is None:
        name = short_repr(file) if isinstance(file, str) else "FILE.py"
        raise ValueError(f"{folder}: its task is a Python file, which runs only if you name it: add --task {name}")
    if isinstance(file, str) and Path(file).resolve() == Path(task).resolve():
        return {**data, "task": "own", "own": own}, None  # with the rows and weights that the run had
    return data, task


def check_shared_settings(
    settings: "Path | dict[str, Any]", overrides: "Iterable[str]", words: "Sequence[str]", **named: Any
) -> None:
    """ValueError for a wrong key, value or model in the settings that several methods share, before torch is imported.
    Options of methods, and all settings of your own methods, are checked with torch."""
    from unmask.config.parse import read_without_torch
    from unmask.config.published import published_names
    from unmask.core.words import is_own, piece_of
    from unmask.models.known import check_model_name

    names = [piece_of(piece)[0].strip() for word in words for piece in word.split("+")]
    if any(map(is_own, names)):
        return
    bases = published_names("method")
    general = [text for text in overrides if text.partition(".")[0] not in (*bases, *published_names("with"))]
    method = next((name for name in names if name in bases), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of old key names: they come again with the full check
        config = read_without_torch(settings, general, **named, **{"method": method, "with": []})
    check_model_name(config.model)


def load(run_or_model: str, overrides: list[str], task: str | None = None) -> "tuple[Any, Model]":
    """The configuration of a run (or the demo's, for a plain model) and its policy."""
    from unmask.config import DEMO, read_config
    from unmask.models.known import check_model_name

    check_model_name(run_or_model)
    settings, task = settings_of(run_or_model, task)
    named = {"model": run_or_model} if settings == DEMO else {}
    overrides = ["method=agrpo", *overrides]  # it is not used, and takes every task and setting
    config = read_config(settings, overrides, task=task, **named)  # reports a typo before torch is imported

    import torch

    from unmask.config.defaults import device_of
    from unmask.models import load_model
    from unmask.training.run.folder import checkpoint_of

    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    policy = load_model(checkpoint_of(run_or_model), dtype, device_of(config), causal_block=config.causal_block)
    if config.rollout.precision == "fp8":
        from unmask.models.fp8 import Fp8Layers

        Fp8Layers(policy).quantize()
    return config, policy
