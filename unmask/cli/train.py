"""unmask train"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.cli.arguments import DataOption, names_of, of_task
from unmask.cli.runs import can_resume, is_first_process, run_folder, run_until_paused, split_settings
from unmask.config.recipes import FOLDER as RECIPES
from unmask.models.known import check_model_name
from unmask.studies.cost.gpus import check_hardware
from unmask.util.files import check_folder
from unmask.util.parsing import read_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from unmask.config import Config
    from unmask.training.run.base_run import Hooks
    from unmask.training.run.training_run import TrainingResult


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="A configuration; overrides, e.g. daca.strata=8."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TASK", autocompletion=names_of("task"), help="What to learn (unmask tasks)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="tiny-two, tiny, a folder with a checkpoint, or a hub id."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            autocompletion=names_of("method"),
            help="The base method (unmask methods). Default: raft.",
        ),
    ] = None,
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="PLUGINS",
            autocompletion=names_of("with"),
            help="Plug-ins: daca, sml, dps, surprise, dispo, positive, keep_correct; several as daca,dispo.",
        ),
    ] = None,
    data: DataOption = None,
    full: Annotated[bool | None, typer.Option("--full", help="Train all weights, not a low-rank adapter.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of prompts, rollouts and probes.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The run folder. Default: runs/TASK-METHOD-seedN.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Resume an interrupted run; give nothing else.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print passes, memory and hours; train nothing.")] = False,
    hardware: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a dry run: h200, h100, a100-80, 4090 or cpu.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a dry run as JSON.")] = False,
) -> None:
    """Train a model. With no arguments: the embedded model tiny-two on 4x4 Sudoku with raft, one minute on a CPU.

    Without a CONFIG these settings, the demo's, are the defaults: raft, a learning rate of 2e-4 that falls to zero.
    """
    from unmask.config import DEMO
    from unmask.config.key_checks import check_trainable
    from unmask.config.parse import check_with_torch, read_run_config, read_without_torch

    if resume is not None:
        options = (value is not None for value in (task, model, method, plugins, data, full, seed, out, hardware))
        if can_resume(resume, "config.yaml", (arguments, dry_run, as_json, *options)):
            config = read_run_config(resume, checked=False)
            _print_start(config, resume)
            from unmask.training.loop import resume as resume_run

            _train_with_display(config, resume, lambda hooks: resume_run(resume, hooks))
        return
    path, overrides = split_settings(arguments or [])
    if out is not None and not dry_run:
        check_folder(out)
    plugins = [name for text in plugins for name in re.split("[,+]", text)] if plugins is not None else None
    keys = {override.partition("=")[0] for override in overrides}
    if (method is not None or "method" in keys) and plugins is None and path is None and "with" not in keys:
        plugins = []
    overrides = [*of_task(task, data=data), *overrides]
    named = {"task": task, "model": model, "method": method, "with": plugins, "full": full, "seed": seed}
    if (as_json or hardware is not None) and not dry_run:
        raise ValueError("--json and --hardware belong to --dry-run")
    if hardware is not None:
        check_hardware(hardware)
    # A dry run is on the CPU: checking another device would start CUDA.
    config = read_without_torch(path or DEMO, overrides, **named, device="cpu" if dry_run else None)
    _check_model(config, path)
    check_trainable(config)
    if dry_run:
        from unmask.studies.cost.estimate import estimate, lines

        cost = estimate(check_with_torch(config), hardware)
        typer.echo(json.dumps(cost.data(), indent=2) if as_json else "\n".join(lines(cost, config)))
        return
    folder = run_folder(_name(config), out)
    _print_start(config, folder)
    check_with_torch(config)
    from unmask.config.checks import NOTES

    for check in NOTES:
        if (note := check(config)) and is_first_process():
            typer.echo(f"unmask: {note}", err=True)

    def run_training(hooks: "Hooks") -> "TrainingResult":
        from unmask.training.loop import train
        from unmask.training.run.folder import RunFolder

        return train(config, lambda: RunFolder(folder, config.dump()), hooks)

    _train_with_display(config, folder, run_training)


def _check_model(config: "Config", path: Path | None) -> None:
    """ValueError for a model that is not there. The model of some recipes has to be made first."""
    try:
        check_model_name(config.model)
    except ValueError as error:
        if path is None or path.parent != RECIPES or read_keys(path).get("model") != config.model:
            raise
        raise ValueError(
            f"{error}; `unmask recipes {path.stem}` says how to make this model, or give another with --model"
        ) from None


def _name(config: "Config") -> str:
    return f"{config.build_task().name}-{config.method_name}-seed{config.seed}"


def _print_start(config: "Config", folder: Path) -> None:
    """The first line of a run, printed before torch is imported."""
    if is_first_process():
        what = f"training {config.model} on {config.build_task().name} with {config.method_name}, seed {config.seed}"
        typer.echo(f"{what}; run folder: {folder}")


def _train_with_display(config: "Config", folder: Path, training: "Callable[[Hooks], TrainingResult]") -> None:
    """Train under a live display, until the end or until a signal asks to stop."""
    from unmask.cli.display import show_result, training_display

    def train_until(should_stop: "Callable[[], bool]") -> "TrainingResult":
        if not is_first_process():
            from unmask.training.run.base_run import Hooks

            return training(Hooks(should_stop=should_stop))
        with training_display(config, _name(config), should_stop) as hooks:
            return training(hooks)

    result = run_until_paused("train", folder, train_until)
    if result is None or not is_first_process():
        return
    show_result(config, _name(config), result)
    if (folder / "errors.jsonl").is_file():
        typer.echo(f"some rewards failed and scored 0: {folder / 'errors.jsonl'}", err=True)
