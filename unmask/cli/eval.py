"""unmask eval and unmask grade"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unmask.cli.arguments import AsJson, DataOption, Overrides, RunOrModel, TaskOption, load, of_task

if TYPE_CHECKING:
    from unmask.config import Config
    from unmask.evaluation.benchmark import Bench, Case
    from unmask.tasks.task import Row, Task

TABLES = "Tables: a line for each, greedy"
SAMPLES = 8
PROBLEMS = 256


def eval(
    run_or_model: RunOrModel,
    task: TaskOption = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, max=2**24, help="Held-out problems. Default: 256, in tables all of a set that has an end."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=2**16, help="Sampled completions of each, for pass@k. Default: 8, in tables none."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of the sampled completions.")] = 0,
    overrides: Overrides = None,
    protocol: Annotated[str | None, typer.Option(help="Prompts, grading, decoding: unmask, d1, ...")] = None,
    data: DataOption = None,
    lengths: Annotated[
        str | None, typer.Option(help="Lengths, decoded as the protocol has it: 128,256,512.", rich_help_panel=TABLES)
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Numbers of steps, score against passes: 16,32,64.", rich_help_panel=TABLES)
    ] = None,
    paraphrase: Annotated[
        Path | None, typer.Option(help="Other wordings: JSONL with a template a line.", rich_help_panel=TABLES)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write scores, cards and answers.", rich_help_panel=TABLES)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Of --steps. Default: beside --out, or frontier.png.", rich_help_panel=TABLES),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Solve held-out problems: pass@1 sampled and greedy, and pass@k, with 95 % intervals.

    With --lengths, --steps or --paraphrase: a table of greedy scores, and with --samples pass@k beside them.
    """
    from unmask.cli.display import show_evaluation
    from unmask.config.defaults import device_of
    from unmask.evaluation.evaluate import Evaluator
    from unmask.tasks.scoring import failure_summary
    from unmask.training.setup import decoding_of, micro_batches

    table = _table(lengths, steps, paraphrase, out, plot)
    _check_keys(overrides or [])
    about = [*of_task(task, data=data, protocol=protocol, rewards=_rewards(task, protocol)), *(overrides or [])]
    config, policy = load(run_or_model, about, task)
    built, device = config.build_task(), device_of(config)
    batch, _ = micro_batches(config, policy)
    rows, how = _held_out(config, built, problems, table), decoding_of(config, built)
    if table:
        from unmask.evaluation.benchmark import Bench, Case, cases_by_length, numbers_in

        if samples and not how.sampling.temperature:
            raise ValueError("--samples: at rollout.temperature=0 all samples are the greedy answer; leave it out")
        bench = Bench(policy, rows, device, samples or 0, how.sampling, seed, config.reward)
        cases = [Case(built, how, batch)]
        if lengths is not None:
            cases = cases_by_length(built, numbers_in(lengths, "--lengths", "128,256,512"), how.cache, batch)
        if steps is not None:
            _show_frontier(bench, cases, steps, out, plot, run_or_model, as_json)
        elif paraphrase is not None:
            _show_wordings(bench, cases, paraphrase, out, as_json)
        else:
            _show_lengths(bench, cases, out, as_json)
        return
    samples = samples or SAMPLES
    with _spinner(f"{built.name}: {len(rows)} problems, {samples} samples each"):
        evaluator = Evaluator(policy, built, how, samples, seed, device, batch, reward=config.reward)
        found = evaluator.evaluate(rows)
    if as_json:
        typer.echo(json.dumps({"task": built.name, "problems": len(rows), "samples": samples, **found.metrics()}))
    else:
        show_evaluation(f"{run_or_model} on {built.name}", found)
    if found.failures:
        typer.echo(failure_summary(found.failures), err=True)


def _check_keys(overrides: list[str]) -> None:
    """ValueError for a key that is about evaluation in training, and would change nothing here."""
    options = {"eval.prompts": "use --problems", "eval.samples": "use --samples"}
    for key in (override.partition("=")[0] for override in overrides):
        if key.startswith("eval.") and key != "eval.split":
            raise ValueError(f"{key} is for training: {options.get(key, 'leave it out')}")


def _rewards(task: str | None, protocol: str | None) -> str | None:
    """Which rewards a protocol of one's choice leaves: d1's go with one prompt alone, and it is the grade that counts.
    So a run that was trained with them can be measured under any."""
    return "unmask" if task in ("gsm8k", "countdown_text") and protocol not in (None, "d1_train") else None


def _held_out(config: "Config", task: "Task", problems: int | None, table: bool) -> "list[Row]":
    """The test rows that are asked; where these are not all there are, standard error says so."""
    if not task.fixed:
        return task.rows("test", problems or PROBLEMS, 0)
    rows, section = task.rows("test", sys.maxsize, 0), config.options.get(config.task, {})
    if section.get("data") and not section.get("test_data"):
        from unmask.tasks.support.data import read_rows

        path = section["data"]
        if len(rows) < (whole := len(read_rows(path, {}))):
            told = f"{len(rows)} of the {whole} rows of {path} are the test split"
            typer.echo(f"{told}; for a file of test rows alone set {config.task}.test_data={path}", err=True)
    if problems is None and not table and len(rows) > PROBLEMS:
        typer.echo(f"the first {PROBLEMS} of {len(rows)} problems; --problems {len(rows)} asks all", err=True)
    return rows[: problems or (None if table else PROBLEMS)]


def _table(
    lengths: str | None, steps: str | None, paraphrase: Path | None, out: Path | None, plot: Path | None
) -> bool:
    """Whether a table is asked for; ValueError for options that do not go together."""
    if steps is not None and paraphrase is not None:
        raise ValueError("--steps and --paraphrase are two tables: ask for one at a time")
    if lengths is not None and "," in lengths and (steps is not None or paraphrase is not None):
        raise ValueError(f"{'--steps' if steps is not None else '--paraphrase'} goes with one of the --lengths")
    if plot is not None and steps is None:
        raise ValueError("--plot belongs to --steps")
    if out is not None and lengths is None and steps is None and paraphrase is None:
        raise ValueError("--out belongs to a table: --lengths, --steps or --paraphrase")
    return lengths is not None or steps is not None or paraphrase is not None


def _show_lengths(bench: "Bench", cases: "list[Case]", out: Path | None, as_json: bool) -> None:
    from unmask.evaluation.benchmark import check_place, measured, written

    check_place(out)
    lines = measured(bench, cases, "length", as_json)
    written(lines, [line.data() for line in lines], out, as_json)


def _show_frontier(
    bench: "Bench",
    cases: "list[Case]",
    steps: str,
    out: Path | None,
    plot: Path | None,
    run_or_model: str,
    as_json: bool,
) -> None:
    from unmask.evaluation.benchmark import check_place, measured, numbers_in, written
    from unmask.evaluation.step_sweep import cases_by_steps, check_plot, draw, plot_place

    place = plot_place(plot, out, run_or_model)
    check_place(out)
    check_place(place)
    check_plot(place)
    cases = cases_by_steps(cases[0], numbers_in(steps, "--steps", "16,32,64"))
    lines = measured(bench, cases, "steps", as_json)
    written(lines, [line.data() for line in lines], out, as_json)
    told = f"plot: {place}" if draw(lines, place) else "no plot: it needs matplotlib, pip install 'unmask[plot]'"
    typer.echo(told, err=as_json)


def _show_wordings(bench: "Bench", cases: "list[Case]", paraphrase: Path, out: Path | None, as_json: bool) -> None:
    from unmask.evaluation.benchmark import check_place, measured, written
    from unmask.evaluation.prompt_variants import cases_by_wording, differences, read_wordings, spread_told

    check_place(out)
    cases = cases_by_wording(bench, cases[0], read_wordings(paraphrase))
    lines = measured(bench, cases, "wording", as_json)
    found = [difference._asdict() if difference else None for difference in differences(lines)]
    data = [{**line.data(), "difference": change} for line, change in zip(lines, found, strict=True)]
    written(lines, data, out, as_json)
    if not as_json:
        typer.echo("\n".join(spread_told(lines)))


@contextmanager
def _spinner(message: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield
