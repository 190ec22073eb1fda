"""The commands, thin: each reads its arguments, calls the library, and prints.

Heavy imports are inside the commands, so that `unmask --help` answers at once.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unmask.evaluate import Decoding
    from unmask.models import Model
    from unmask.rows import Rows

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training for masked diffusion language models.",
)

RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a model folder, or a name (tiny).")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="e.g. rollout.steps=16")]
DataOption = Annotated[Path | None, typer.Option(help="The task's data, a JSONL file, instead of the hub's.")]
TaskOption = Annotated[str | None, typer.Option(help="Default: the run's own task, or sudoku.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run a command; what a user can put right is one line on standard error and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"unmask: {error}", err=True)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        from unmask import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Reinforcement-learning post-training for masked diffusion language models."""


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="A configuration; overrides, e.g. daca.strata=8."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="What to learn (unmask tasks).")] = None,
    model: Annotated[str | None, typer.Option(help="tiny, a folder with a checkpoint, or a hub id.")] = None,
    method: Annotated[str | None, typer.Option(help="The base method (unmask methods).")] = None,
    plugins: Annotated[
        list[str] | None, typer.Option("--with", help="A plug-in on the base: daca, sml, dps, dispo. Repeatable.")
    ] = None,
    data: DataOption = None,
    full: Annotated[bool | None, typer.Option("--full", help="Train all weights, not a low-rank adapter.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts, rollouts and probes.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/TASK-METHOD-seedN.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print passes, memory and hours; train nothing.")] = False,
    hardware: Annotated[str | None, typer.Option(help="Of a dry run: h200, h100, a100-80, 4090 or cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a dry run as JSON.")] = False,
) -> None:
    """Train a model. With no arguments: the embedded model on 4x4 Sudoku with DACA-GRPO, about two minutes on a CPU.

    Without a CONFIG the demo's settings are the defaults; naming --method starts without plug-ins.
    """
    from unmask.config import DEMO, read_config

    path, overrides = _split(arguments or [])
    plugins = [name for text in plugins for name in text.split(",")] if plugins is not None else None
    names_method = method is not None or any(override.startswith("method=") for override in overrides)
    if names_method and plugins is None and path is None:
        plugins = []
    overrides = [*_of_task(task, data=data), *overrides]
    named = {"task": task, "model": model, "method": method, "with": plugins, "full": full, "seed": seed}
    if (as_json or hardware is not None) and not dry_run:
        raise ValueError("--json and --hardware belong to --dry-run")
    if dry_run:
        from unmask.estimate import estimate, lines

        config = read_config(path or DEMO, overrides, **named, device="cpu")  # the check of a device would start CUDA
        found = estimate(config, hardware)
        typer.echo(json.dumps(found.data(), indent=2) if as_json else "\n".join(lines(found, config)))
        return
    config = read_config(path or DEMO, overrides, **named)

    from unmask.display import show_result, training_display
    from unmask.run import Run, check_folder, fresh_folder
    from unmask.train import train as run_training

    name = f"{config.build_task().name}-{config.build_method().name}-seed{config.seed}"
    folder = out or fresh_folder(name)
    check_folder(folder)
    if os.environ.get("RANK", "0") != "0":  # one of several processes, and not the one that speaks
        run_training(config, lambda: Run(folder, config.dump()))
        return
    with training_display(config, name) as report:
        result = run_training(config, lambda: Run(folder, config.dump()), report)
    show_result(config, name, result)


def _split(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The configuration file, if the first argument is one, and the overrides."""
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_file()):
        return Path(arguments[0]), arguments[1:]
    return None, arguments


@app.command()
def eval(
    run_or_model: RunOrModel,
    task: TaskOption = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 256,
    samples: Annotated[int, typer.Option(min=1, help="Sampled completions of each, for pass@k.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the sampled completions.")] = 0,
    overrides: Overrides = None,
    protocol: Annotated[str | None, typer.Option(help="Grade by a named protocol: unmask, d1, ...")] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths of the field's table, e.g. 128,256,512.")] = None,
    data: DataOption = None,
    out: Annotated[Path | None, typer.Option(help="With --lengths: where to write scores, cards and answers.")] = None,
    as_json: AsJson = False,
) -> None:
    """Solve held-out problems: pass@1 sampled and greedy, and pass@k, with 95 % intervals.

    With --lengths: the field's table, decoded greedily (two tokens a step, blocks of 32) and graded by the protocol.
    """
    from unmask.config import device_of
    from unmask.evaluate import evaluate
    from unmask.setup import decoding_of, rollout_rows

    about = [*_of_task(task, data=data, protocol=protocol), *(overrides or [])]
    config, policy = _load(run_or_model, about, task)
    built = config.build_task()
    if lengths is not None:
        from unmask.benchmark import lengths_of, show_table

        how: dict[str, Any] = {"cache": decoding_of(config, built).cache, "batch": rollout_rows(config, policy)}
        how |= {"device": device_of(config), "out": out, "as_json": as_json}
        show_table(policy, built, protocol or "unmask", built.rows("test", problems, 0), lengths_of(lengths), **how)
        return
    rows = built.rows("test", problems, 0)
    with _spinner(f"{built.name}: {problems} problems, {samples} samples each"):
        batch = rollout_rows(config, policy)
        found = evaluate(policy, built, rows, decoding_of(config, built), samples, seed, device_of(config), batch)
    if as_json:
        typer.echo(json.dumps({"task": built.name, "problems": problems, "samples": samples, **found.metrics()}))
        return
    from unmask.display import show_evaluation

    show_evaluation(f"{run_or_model} on {built.name}", found)


def _of_task(task: str | None, **options: Any) -> list[str]:
    """Options of a task as overrides."""
    given = {key: value for key, value in options.items() if value is not None}
    if given and task is None:
        raise ValueError(f"--{next(iter(given))} belongs to a task: name it with --task")
    section = "own" if task is not None and task.endswith(".py") else task
    return [f"{section}.{key}={value}" for key, value in given.items()]


@app.command()
def sample(
    run_or_model: RunOrModel,
    prompt: Annotated[str, typer.Argument(help="The prompt as the model reads it, e.g. a task's own.")],
    overrides: Overrides = None,
    task: TaskOption = None,
    steps: Annotated[bool, typer.Option("--steps", help="Print the canvas after each denoising step.")] = False,
    greedy: Annotated[bool, typer.Option(help="Take the likeliest token at every position.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
) -> None:
    """Complete one prompt."""
    decoding, policy, device, batch = _decoding(run_or_model, overrides or [], greedy, task)
    from unmask.display import canvases

    (trace,) = _traces(policy, [prompt], decoding, [seed], device, batch)
    if steps:
        for line in canvases(policy, trace, decoding.length):
            typer.echo(line)
    typer.echo(policy.tokenizer.decode(trace.tokens_BL[0, -decoding.length :].tolist()))


@app.command()
def generate(
    run_or_model: RunOrModel,
    prompts: Annotated[Path, typer.Argument(help='JSONL, one object a line with a "prompt".')],
    overrides: Overrides = None,
    task: TaskOption = None,
    out: Annotated[Path | None, typer.Option(help="Where to write. Default: standard output.")] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Add token ids, their steps and log-probabilities.")] = False,
    greedy: Annotated[bool, typer.Option(help="Take the likeliest token at every position.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the first line; line i has seed + i.")] = 0,
) -> None:
    """Complete every prompt of a file; each line comes back with its "completion"."""
    from unmask.prompts import entries, read_prompts

    rows = read_prompts(prompts)
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} in")
    decoding, policy, device, batch = _decoding(run_or_model, overrides or [], greedy, task)
    numbers = [seed + i for i in range(len(rows))]
    made = _traces(policy, [row["prompt"] for row in rows], decoding, numbers, device, batch)
    written = [entry for trace in made for entry in entries(policy, trace, decoding.length, traces)]
    lines = [
        json.dumps({**row, **entry, "seed": number}) for row, entry, number in zip(rows, written, numbers, strict=True)
    ]
    if out is None:
        typer.echo("\n".join(lines))
    else:
        out.write_text("".join(line + "\n" for line in lines))
        typer.echo(f"{len(lines)} completions in {out}")


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the base methods and the plug-ins."""
    from unmask.config import option_help
    from unmask.methods import BASES, PLUGINS

    catalogue = [("base", name, f) for name, f in BASES.items()] + [("plug-in", n, f) for n, f in PLUGINS.items()]
    if as_json:
        rows = [{"name": n, "kind": kind, "summary": _line(f), "options": option_help(f)} for kind, n, f in catalogue]
        typer.echo(json.dumps(rows, indent=2))
        return
    for kind, name, factory in catalogue:
        typer.echo(f"{name:14} {kind:8} {_line(factory)}")


@app.command()
def tasks(as_json: AsJson = False) -> None:
    """List the tasks."""
    from unmask.config import option_help
    from unmask.tasks import TASKS

    built = {name: (factory(), option_help(factory)) for name, factory in TASKS.items()}
    if as_json:
        rows = [
            {"name": name, "summary": task.summary, "length": task.length, "options": options}
            for name, (task, options) in built.items()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for name, (task, _) in built.items():
        typer.echo(f"{name:14} {task.summary}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, and what is missing for which feature."""
    from unmask.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            state = "ok" if finding.ok else "missing" if finding.needed else "none"
            typer.echo(f"{state:8}{finding.what:14} {finding.detail}")
    if any(finding.needed and not finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def merge(
    run_or_model: RunOrModel,
    out: Annotated[Path, typer.Option(help="Where to write the checkpoint.")],
) -> None:
    """Write a run's or an adapter's model as a plain checkpoint, under the names its family's own tools know."""
    from unmask.models import load_model, save
    from unmask.models.lora import adapted
    from unmask.models.lora import merge as merge_adapter
    from unmask.run import check_folder, checkpoint_of

    check_folder(out)
    policy = load_model(checkpoint_of(run_or_model))
    if adapted(policy):
        merge_adapter(policy)
    save(policy, out)
    typer.echo(f"checkpoint in {out}")


@app.command()
def pretrain(
    config: Annotated[Path, typer.Argument(help="e.g. configs/pretrain_tiny.yaml")],
    out: Annotated[Path, typer.Option(help="Where to write the model.")],
) -> None:
    """Make the embedded model from nothing: masked-diffusion pre-training on partly wrong solutions."""
    from unmask.display import pretraining_display
    from unmask.pretrain import pretrain as run_pretraining
    from unmask.pretrain import read_pretrain_config

    settings = read_pretrain_config(config)
    with pretraining_display(settings.steps) as report:
        run_pretraining(settings, out, report)
    typer.echo(f"model in {out}")


@app.command()
def grade(
    generations: Annotated[Path, typer.Argument(help='JSONL, each line with a "generation" and its "ground_truth".')],
    task: Annotated[str, typer.Option(help="What was asked (unmask tasks).")],
    protocol: Annotated[str | None, typer.Option(help="Whose grading, e.g. d1. Default: our own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the lines with their verdicts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Grade stored generations, without a model: the score with its 95 % interval."""
    from unmask.grade import grade_file, task_of

    found = grade_file(task_of(task, protocol), generations, out)
    if as_json:
        typer.echo(json.dumps({"task": task, "protocol": protocol, **found.data()}))
        return
    value, low, high = (f"{100 * part:.2f}" for part in found.score)
    typer.echo(f"{task}{f' ({protocol})' if protocol else ''}: {value} % [{low}, {high}] of {found.rows} rows")
    if out is not None:
        typer.echo(f"verdicts in {out}")


def _line(factory: Any) -> str:
    return (factory.__doc__ or "").strip().splitlines()[0]


def _load(run_or_model: str, overrides: list[str], task: str | None = None) -> "tuple[Any, Model]":
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


def _decoding(
    run_or_model: str, overrides: list[str], greedy: bool, task: str | None
) -> "tuple[Decoding, Model, str, Rows]":
    from unmask.config import device_of
    from unmask.setup import decoding_of, rollout_rows

    config, policy = _load(run_or_model, overrides, task)
    decoding = decoding_of(config, config.build_task())
    return (decoding.greedy() if greedy else decoding), policy, device_of(config), rollout_rows(config, policy)


def _traces(
    policy: "Model", prompts: list[str], decoding: "Decoding", seeds: list[int], device: str, rows: "Rows"
) -> Any:
    import torch

    from unmask.evaluate import complete

    ids = [policy.tokenizer.prompt(prompt) for prompt in prompts]
    return complete(policy, ids, decoding, torch.tensor(seeds, device=device), rows)


@contextmanager
def _spinner(message: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield
