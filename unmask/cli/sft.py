"""unmask sft; and what it shares with unmask adapt"""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.runs import can_resume, run_folder, run_until_paused, split_settings
from unmask.models.known import check_model_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from unmask.sft.config import SftConfig
    from unmask.sft.sft_run import SftResult
    from unmask.training.run.base_run import Hooks

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="A configuration; overrides, e.g. optimizer.lr=1e-4."),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="SOURCE",
        help="A JSONL file with prompt and completion, or a task (unmask tasks). Repeatable.",
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="The run folder. Default: runs/NAME.")]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Resume an interrupted run; give nothing else.")]


def sft(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A run, a model folder, tiny, or a hub id.")
    ] = None,
    arguments: Settings = None,
    data: Data = None,
    full: Annotated[bool | None, typer.Option("--full", help="Train all weights, not a low-rank adapter.")] = None,
    out: Out = None,
    resume: Resume = None,
) -> None:
    """Fine-tune a masked diffusion model on prompts and completions: the step before reinforcement learning."""
    if resume is not None:
        resume_sft(resume, (model, arguments, data, full is not None, out))
        return
    if model is None:
        raise ValueError("name the model to fine-tune: a run, a model folder, tiny, or a hub id")
    folder = run_folder(f"sft-{Path(model).name}", out)
    check_model_name(model)
    config = read_settings(arguments, data, folder, model, model=model, full=full)

    from unmask.sft.config import CONFIG
    from unmask.sft.finetune import finetune
    from unmask.training.run.folder import RunFolder

    def make_folder() -> RunFolder:
        return RunFolder(folder, config.dump(), CONFIG)

    train_with_display(config, folder, lambda hooks: finetune(config, make_folder, hooks))


def read_settings(
    arguments: list[str] | None, data: list[str] | None, folder: Path, start: str, **named: Any
) -> "SftConfig":
    """The configuration. Prints the first line of the run, with `start` as its model, before torch is imported."""
    from unmask.config.defaults import check_device, device_of
    from unmask.sft.config import read_sft_without_torch

    path, overrides = split_settings(arguments or [])
    config = read_sft_without_torch(path, overrides, data=data, **named)
    print_start(config, folder, start)
    check_device(device_of(config))
    return config


def print_start(config: "SftConfig", folder: Path, start: str) -> None:
    names = ", ".join(source.name for source in config.data)
    typer.echo(f"fine-tuning {start} on {names}, seed {config.seed}; run folder: {folder}")


def resume_sft(folder: Path, given: tuple[object, ...]) -> None:
    from unmask.sft.config import CONFIG, read_sft_without_torch

    if can_resume(folder, CONFIG, given):
        config = read_sft_without_torch(folder / CONFIG)
        print_start(config, folder, config.model)
        from unmask.sft.finetune import resume

        train_with_display(config, folder, lambda hooks: resume(folder, hooks))


def train_with_display(config: "SftConfig", folder: Path, training: "Callable[[Hooks], SftResult]") -> None:
    """Train under a progress bar, until the end or until a signal asks to stop."""
    from unmask.cli.display import training_bar
    from unmask.training.run.base_run import Hooks

    def train_until(should_stop: "Callable[[], bool]") -> "SftResult":
        with training_bar(config.updates, "fine-tuning", "update") as show:

            def on_metrics(step: int, metrics: dict[str, float]) -> None:
                losses = {key.removeprefix("train/"): metrics[key] for key in metrics if key.startswith("train/loss")}
                if step and losses:
                    show(step - 1, losses)
                for key, value in metrics.items():
                    if key.endswith("solved_greedy"):
                        typer.echo(f"update {step}: {key.split('/')[1]} solved {value:.1%} greedy")

            return training(Hooks(on_metrics=on_metrics, should_stop=should_stop))

    result = run_until_paused("sft", folder, train_until)
    if result is None:
        return
    for name, counts in result.behaviours.items():
        taught = " and ".join(f"{count:,} {what}" for what, count in counts.items() if what != "redrawn")
        typer.echo(f"{name}: trained on {taught} answers; rows redrawn: {counts['redrawn']:,}")
    shown = tuple(f"{name}/behaviour/{one}" for name, counts in result.behaviours.items() for one in (*counts, "other"))
    for key, value in result.after.items():
        if key.removeprefix("eval/") in shown or key.endswith(("/loss", "solved_sampled", "solved_greedy")):
            typer.echo(f"{key.removeprefix('eval/')}: {result.before[key]:.3f} -> {value:.3f}")
    typer.echo(f"{result.seconds:.0f} s. Model: {folder / 'checkpoint'}")
    typer.echo(f"Try next: {next_command(config, folder)}")


def next_command(config: "SftConfig", folder: Path) -> str:
    """Reinforcement learning on the first task that was taught, as it was taught: its options and its canvas."""
    source = next((source for source in config.data if source.task is not None), None)
    if source is None:
        return f"unmask train --model {folder} --task TASK --full"
    options = dict(source.options)
    task = options.pop("file") if source.task == "own" else source.task
    changes = [f"{source.task}.{key}={value if isinstance(value, str) else json.dumps(value)}"
               for key, value in options.items()]  # fmt: skip
    changes += [f"rollout.length={source.canvas}"] if source.canvas else []
    return shlex.join(["unmask", "train", "--model", str(folder), "--task", str(task), "--full", *changes])
