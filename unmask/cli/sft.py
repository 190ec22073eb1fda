"""unmask sft; and what it shares with unmask adapt"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from unmask.sft.config import SftConfig
    from unmask.sft.finetune import Report, SftResult, Stop

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="A configuration; overrides, e.g. optimizer.lr=1e-4."),
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", help="A JSONL file with prompt and completion, or a task (unmask tasks). Repeatable."),
]
Out = Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME.")]
Resume = Annotated[Path | None, typer.Option(help="Resume a run; takes no other argument.")]


def sft(
    model: Annotated[str | None, typer.Argument(help="A run, a model folder, tiny, or a hub id.")] = None,
    arguments: Settings = None,
    data: Data = None,
    full: Annotated[bool | None, typer.Option("--full", help="Train all weights, not a low-rank adapter.")] = None,
    out: Out = None,
    resume: Resume = None,
) -> None:
    """Fine-tune a masked diffusion model on prompts and completions: the step before reinforcement learning."""
    if resume is not None:
        resume_sft(resume, model, arguments, data, full, out)
        return
    from unmask.sft.finetune import CONFIG, finetune
    from unmask.training.run.folder import RunFolder

    if model is None:
        raise ValueError("name the model to fine-tune: a run, a model folder, tiny, or a hub id")
    folder = run_folder(f"sft-{Path(model).name}", out)
    config = read_settings(arguments or [], data, model=model, full=full)

    def training(report: "Report", stop: "Stop") -> "SftResult":
        return finetune(config, lambda: RunFolder(folder, config.dump(), CONFIG), report, stop=stop)

    train_with_display(config, folder, training)


def read_settings(arguments: list[str], data: list[str] | None, **named: Any) -> "SftConfig":
    from unmask.cli.train import split_arguments
    from unmask.sft.config import read_sft_config

    path, overrides = split_arguments(arguments)
    return read_sft_config(path, overrides, data=data, **named)


def run_folder(name: str, out: Path | None) -> Path:
    from unmask.training.run.folder import check_folder, fresh_folder

    folder = out or fresh_folder(name)
    check_folder(folder)
    return folder


def resume_sft(folder: Path, *others: object) -> None:
    from unmask.sft.config import read_sft_config
    from unmask.sft.finetune import CONFIG, resume
    from unmask.training.run.folder import FINISHED
    from unmask.util.parsing import check_exists

    if any(value is not None for value in others):
        raise ValueError("--resume uses the run's own configuration: remove the other arguments")
    if (folder / FINISHED).is_file():
        typer.echo(f"{folder} is finished: there is nothing to resume")  # no error: a queue may well try again
        return
    check_exists(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not the folder of a fine-tuning run: there is no {CONFIG} in it")
    train_with_display(read_sft_config(folder / CONFIG), folder, lambda report, stop: resume(folder, report, stop))


def train_with_display(config: "SftConfig", folder: Path, training: "Callable[[Report, Stop], SftResult]") -> None:
    """Train until the end or until a signal asks to stop."""
    from unmask.cli.display import training_bar
    from unmask.util.signals import Paused, stop_requests

    try:
        with stop_requests() as should_stop, training_bar(config.updates, "fine-tuning", "update") as show:

            def report(step: int, metrics: dict[str, float]) -> None:
                brief = {key.removeprefix("train/"): metrics[key] for key in metrics if key.startswith("train/loss")}
                solved = {key: value for key, value in metrics.items() if key.endswith("solved_greedy")}
                if step and brief:
                    show(step - 1, brief)
                for key, value in solved.items():
                    typer.echo(f"update {step}: {key.split('/')[1]} solved {value:.1%} greedy")

            result = training(report, should_stop)
    except Paused as paused:
        typer.echo(f"{paused}. To resume: unmask sft --resume {folder}")
        return
    for key, value in result.after.items():
        if key.endswith(("/loss", "solved_sampled", "solved_greedy")):
            typer.echo(f"{key.removeprefix('eval/')}: {result.before[key]:.3f} -> {value:.3f}")
    typer.echo(f"{result.seconds:.0f} s. Model: {folder / 'checkpoint'}")
    tasks = [source.task for source in config.data if source.task is not None]
    typer.echo(f"Try next: unmask train --model {folder} --task {tasks[0] if len(tasks) == 1 else 'TASK'} --full")
