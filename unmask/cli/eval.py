"""unmask eval"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.cli.arguments import AsJson, DataOption, Overrides, RunOrModel, TaskOption, load, of_task
from unmask.util.files import check_output

if TYPE_CHECKING:
    from unmask.config import Config
    from unmask.evaluation.benchmark import Benchmark, BenchmarkCase
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
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write scores, cards and answers.", rich_help_panel=TABLES),
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
    table = _table(lengths, steps, paraphrase, out, plot)
    _check_keys(overrides or [])
    about = [*of_task(task, data=data, protocol=protocol, rewards=_rewards(task, protocol)), *(overrides or [])]
    config, policy = load(run_or_model, about, task)

    from rich.console import Console

    from unmask.cli.display import show_evaluation
    from unmask.config.defaults import device_of
    from unmask.evaluation.evaluate import Evaluator
    from unmask.tasks.scoring import failure_summary
    from unmask.training.setup import decoding_of, micro_batches

    built, device = config.build_task(), device_of(config)
    micro_batch, _ = micro_batches(config, policy)
    rows, decoding = _held_out(config, built, problems, table), decoding_of(config, built)
    if table:
        from unmask.evaluation.benchmark import (
            Benchmark,
            BenchmarkCase,
            cases_by_length,
            parse_numbers,
            run_benchmark,
            write_results,
        )

        if samples and not decoding.sampling.temperature:
            raise ValueError("--samples: at rollout.temperature=0 all samples are the greedy answer; leave it out")
        bench = Benchmark(policy, rows, device, samples or 0, decoding.sampling, seed, config.reward)
        cases = [BenchmarkCase(built, decoding, micro_batch)]
        if lengths is not None:
            cases = cases_by_length(
                built, parse_numbers(lengths, "--lengths", "128,256,512"), decoding.cache, micro_batch
            )
        if steps is not None:
            _show_step_sweep(bench, cases, steps, out, plot, as_json)
        elif paraphrase is not None:
            _show_variants(bench, cases, paraphrase, out, as_json)
        else:
            check_output(out)
            lines = run_benchmark(bench, cases, "length", as_json)
            write_results(lines, [line.data() for line in lines], out, as_json)
        return
    samples = samples or SAMPLES
    with Console(stderr=True).status(f"{built.name}: {len(rows)} problems, {samples} samples each"):
        evaluator = Evaluator(policy, built, decoding, samples, seed, device, micro_batch, reward=config.reward)
        evaluation = evaluator.evaluate(rows)
    if as_json:
        typer.echo(json.dumps({"task": built.name, "problems": len(rows), "samples": samples, **evaluation.metrics()}))
    else:
        show_evaluation(f"{run_or_model} on {built.name}", evaluation)
    if evaluation.failures:
        typer.echo(failure_summary(evaluation.failures), err=True)


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


def _table(
    lengths: str | None, steps: str | None, paraphrase: Path | None, out: Path | None, plot: Path | None
) -> bool:
    """Whether a table is asked for; ValueError for options that cannot be combined."""
    if steps is not None and paraphrase is not None:
        raise ValueError("--steps and --paraphrase are two tables: ask for one at a time")
    if lengths is not None and "," in lengths and (steps is not None or paraphrase is not None):
        raise ValueError(f"{'--steps' if steps is not None else '--paraphrase'} takes a single value of --lengths")
    if plot is not None and steps is None:
        raise ValueError("--plot belongs to --steps")
    if out is not None and lengths is None and steps is None and paraphrase is None:
        raise ValueError("--out belongs to a table: --lengths, --steps or --paraphrase")
    check_output(out)
    check_output(plot)
    return lengths is not None or steps is not None or paraphrase is not None


def _show_step_sweep(
    bench: "Benchmark",
    cases: "list[BenchmarkCase]",
    steps: str,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    from unmask.evaluation.benchmark import parse_numbers, run_benchmark, write_results
    from unmask.evaluation.step_sweep import cases_by_steps, check_plot, draw

    check_output(out)
    if plot is not None:
        check_output(plot)
        check_plot(plot)
    cases = cases_by_steps(cases[0], parse_numbers(steps, "--steps", "16,32,64"))
    lines = run_benchmark(bench, cases, "steps", as_json)
    write_results(lines, [line.data() for line in lines], out, as_json)
    if plot is not None:
        drawn = draw(lines, plot)
        message = f"plot: {plot}" if drawn else "no plot: it needs matplotlib, pip install 'unmask[plot]'"
        typer.echo(message, err=as_json)


def _show_variants(
    bench: "Benchmark", cases: "list[BenchmarkCase]", paraphrase: Path, out: Path | None, as_json: bool
) -> None:
    from unmask.evaluation.benchmark import run_benchmark, write_results
    from unmask.evaluation.prompt_variants import cases_by_variant, differences, read_prompt_variants, spread_summary

    check_output(out)
    cases = cases_by_variant(bench, cases[0], read_prompt_variants(paraphrase))
    lines = run_benchmark(bench, cases, "wording", as_json)
    changes = [difference._asdict() if difference else None for difference in differences(lines)]
    data = [{**line.data(), "difference": change} for line, change in zip(lines, changes, strict=True)]
    write_results(lines, data, out, as_json)
    if not as_json:
        typer.echo("\n".join(spread_summary(lines)))
