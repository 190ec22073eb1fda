"""unmask eval"""

import json
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.arguments import AsJson, DataOption, Overrides, RunOrModel, TaskOption, load, of_task
from unmask.util.files import check_folder, check_output, check_writable, fresh_folder
from unmask.util.trace_lines import results_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unmask.config import Config
    from unmask.evaluation.benchmark import Benchmark, BenchmarkCase, BenchmarkResult
    from unmask.tasks.task import Row, Task

TABLES = "Tables: a line for each, greedy"
SAMPLES = 8
PROBLEMS = 256


def eval(
    run_or_model: RunOrModel,
    task: TaskOption = None,
    problems: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=2**24, help="Held-out problems. Default: 256; in tables all of a finite set."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=2**16, help="Sampled completions of each, for pass@k. Default: 8; in tables none."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**32, help="Seed of the sampled completions.")] = 0,
    overrides: Overrides = None,
    protocol: Annotated[
        str | None, typer.Option(metavar="NAME", help="Prompts, grading, decoding: unmask, d1, ...")
    ] = None,
    data: DataOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="For scores and graded completions; or a FILE.json. Default: runs/eval-MODEL-TASK, with --json none.",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Lengths, decoded by the protocol's rules: 128,256,512.", rich_help_panel=TABLES
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Numbers of steps, score against passes: 16,32,64.", rich_help_panel=TABLES
        ),
    ] = None,
    paraphrase: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Other wordings: JSONL, one template per line.", rich_help_panel=TABLES),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of --steps: draw score against passes, e.g. sweep.png.", rich_help_panel=TABLES
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Solve held-out problems: pass@1 sampled and greedy, and pass@k, with 95 % intervals.

    With --lengths, --steps or --paraphrase: a table of greedy scores; --samples adds pass@k.
    """
    table = _is_table(lengths, steps, paraphrase, plot)
    _check_out(out, plot, as_json)
    _check_keys(overrides or [])
    if lengths is not None and any(override.startswith("rollout.preset=") for override in overrides or []):
        raise ValueError("rollout.preset: --lengths decodes by the rules of the protocol; leave out one of them")
    about = [*of_task(task, data=data, protocol=protocol, rewards=_rewards(task, protocol)), *(overrides or [])]
    config, policy = load(run_or_model, about, task)

    from rich.console import Console

    from unmask.cli.display import show_evaluation
    from unmask.config.defaults import device_of
    from unmask.evaluation.benchmark import Benchmark, BenchmarkCase, cases_by_length, parse_numbers, run_benchmark
    from unmask.evaluation.evaluate import Evaluator, evaluation_from
    from unmask.evaluation.results import evaluation_line
    from unmask.tasks.scoring import failure_summary
    from unmask.training.setup import decoding_of, micro_batches

    built, device = config.build_task(), device_of(config)
    micro_batch, _ = micro_batches(config, policy)
    rows, decoding = _held_out(config, built, problems, table), decoding_of(config, built)
    samples = samples or (0 if table else SAMPLES)
    bench = Benchmark(policy, rows, device, samples, decoding.sampling, seed, config.reward)
    case = BenchmarkCase(built, decoding, micro_batch)
    if out is None and not as_json:
        out = fresh_folder(f"eval-{Path(run_or_model).resolve().name}-{built.name}")
    if table:
        if samples and not decoding.sampling.temperature:
            raise ValueError("--samples: at rollout.temperature=0 all samples are the greedy answer; leave it out")
        cases = [case]
        if lengths is not None:
            cases = cases_by_length(
                built, parse_numbers(lengths, "--lengths", "128,256,512"), decoding.cache, micro_batch
            )
        if steps is not None:
            _show_step_sweep(bench, cases, steps, out, plot, as_json)
        elif paraphrase is not None:
            _show_variants(bench, cases, paraphrase, out, as_json)
        else:
            lines = run_benchmark(bench, cases, "length", as_json)
            _write_table(lines, [line.data() for line in lines], out, as_json)
        return
    with Console(stderr=True).status(f"{built.name}: {len(rows)} problems, {samples} samples each"):
        evaluator = Evaluator(policy, built, decoding, samples, seed, device, micro_batch, reward=config.reward)
        sampled, greedy = evaluator.solve(rows)
        evaluation = evaluation_from(sampled.scores, greedy.scores, samples)
    if as_json:
        typer.echo(json.dumps({"task": built.name, "problems": len(rows), "samples": samples, **evaluation.metrics()}))
    else:
        show_evaluation(f"{run_or_model} on {built.name}", evaluation)
    if evaluation.failures:
        typer.echo(failure_summary(evaluation.failures), err=True)
    if out is not None:
        _write(out, [evaluation_line(bench, case, evaluation, sampled, greedy)], as_json)


def _check_out(out: Path | None, plot: Path | None, as_json: bool) -> None:
    """ValueError if the results or the plot cannot be written; before the model is loaded."""
    if out is not None and results_file(out) == out:
        check_output(out)
    elif out is not None:
        check_folder(out)
    elif not as_json:
        check_writable(Path("runs"))
    check_output(plot)


def _write(out: Path, lines: "Sequence[dict[str, Any]]", as_json: bool) -> None:
    from unmask.evaluation.results import write_results

    write_results(out, lines)
    typer.echo(f"Results: {out}. To read the completions: unmask view {quote(str(out))}", err=as_json)


def _write_table(
    results: "Sequence[BenchmarkResult]", data: "Sequence[dict[str, Any]]", out: Path | None, as_json: bool
) -> None:
    """Print the lines of a table as JSON, and write them with every completion."""
    from unmask.evaluation.results import table_line

    if as_json:
        typer.echo(json.dumps(list(data), indent=2))
    if out is not None:
        _write(out, [table_line(each, result) for each, result in zip(data, results, strict=True)], as_json)


def _check_keys(overrides: list[str]) -> None:
    """ValueError for a key about evaluation during training, which has no effect here."""
    options = {"eval.prompts": "use --problems", "eval.samples": "use --samples"}
    for key in (override.partition("=")[0] for override in overrides):
        if key.startswith("eval.") and key != "eval.split":
            raise ValueError(f"{key} is for training: {options.get(key, 'leave it out')}")


def _rewards(task: str | None, protocol: str | None) -> str | None:
    """The task's own rewards for a protocol whose prompt d1's rewards do not fit. Only grades count here, so a run that
    was trained with d1's rewards can be evaluated under any protocol."""
    return "unmask" if task in ("gsm8k", "countdown_text") and protocol not in (None, "d1_train") else None


def _held_out(config: "Config", task: "Task", problems: int | None, table: bool) -> "list[Row]":
    """The test rows that are asked; a note on standard error if these are not all."""
    if not task.fixed:
        return task.rows("test", problems or PROBLEMS, 0)
    rows, section = task.rows("test", sys.maxsize, 0), config.options.get(config.task, {})
    if section.get("data") and not section.get("test_data"):
        from unmask.tasks.support.data import hub_data, is_hub_data, read_rows

        path = section["data"]
        whole = len(hub_data(path, "train", {}) if is_hub_data(path) else read_rows(path, {}))
        if len(rows) < whole:
            split = f"{len(rows)} of the {whole} rows of {path} are the test split"
            typer.echo(f"{split}; for a file of test rows alone set {config.task}.test_data={path}", err=True)
    if problems is None and not table and len(rows) > PROBLEMS:
        typer.echo(f"the first {PROBLEMS} of {len(rows)} problems; --problems {len(rows)} asks all", err=True)
    return rows[: problems or (None if table else PROBLEMS)]


def _is_table(lengths: str | None, steps: str | None, paraphrase: Path | None, plot: Path | None) -> bool:
    """Whether a table is asked for; ValueError for options that cannot be combined."""
    if steps is not None and paraphrase is not None:
        raise ValueError("--steps and --paraphrase are two tables: ask for one at a time")
    if lengths is not None and "," in lengths and (steps is not None or paraphrase is not None):
        raise ValueError(f"{'--steps' if steps is not None else '--paraphrase'} takes a single value of --lengths")
    if plot is not None and steps is None:
        raise ValueError("--plot belongs to --steps")
    return lengths is not None or steps is not None or paraphrase is not None


def _show_step_sweep(
    bench: "Benchmark",
    cases: "list[BenchmarkCase]",
    steps: str,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    from unmask.evaluation.benchmark import parse_numbers, run_benchmark
    from unmask.evaluation.step_sweep import cases_by_steps, check_plot, draw

    if plot is not None:
        check_plot(plot)
    cases = cases_by_steps(cases[0], parse_numbers(steps, "--steps", "16,32,64"))
    lines = run_benchmark(bench, cases, "steps", as_json)
    _write_table(lines, [line.data() for line in lines], out, as_json)
    if plot is not None:
        drawn = draw(lines, plot)
        message = f"plot: {plot}" if drawn else "no plot: it needs matplotlib, pip install 'unmask[plot]'"
        typer.echo(message, err=as_json)


def _show_variants(
    bench: "Benchmark", cases: "list[BenchmarkCase]", paraphrase: Path, out: Path | None, as_json: bool
) -> None:
    from unmask.evaluation.benchmark import run_benchmark
    from unmask.evaluation.prompt_variants import cases_by_variant, differences, read_prompt_variants, spread_summary

    cases = cases_by_variant(bench, cases[0], read_prompt_variants(paraphrase))
    lines = run_benchmark(bench, cases, "wording", as_json)
    changes = [difference._asdict() if difference else None for difference in differences(lines)]
    data = [{**line.data(), "difference": change} for line, change in zip(lines, changes, strict=True)]
    if not as_json:
        typer.echo("\n".join(spread_summary(lines)))
    _write_table(lines, data, out, as_json)
