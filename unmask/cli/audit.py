"""unmask audit"""

import json
import time
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.arguments import (
    AsJson,
    DataOption,
    FiguresFolder,
    Overrides,
    TaskOption,
    check_shared_settings,
    of_task,
    settings_of,
)
from unmask.cli.progress import show_progress
from unmask.models.known import check_model_name
from unmask.util.files import check_folder

if TYPE_CHECKING:
    from unmask.config import Config
    from unmask.config.method_names import MethodSpec
    from unmask.studies.credit.study import MeasuredCredit


def audit(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run folder, a model folder, tiny, or an audit.json to show again.")
    ],
    overrides: Overrides = None,
    task: TaskOption = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="METHODS",
            help="e.g. diffu_grpo,sml:strata=8:anchor=0,my.py:NAME. Default: all estimators.",
        ),
    ] = None,
    problems: Annotated[
        int, typer.Option(metavar="N", min=1, max=2**20, help="Problems; intervals are over problems.")
    ] = 8,
    group: Annotated[int, typer.Option(metavar="N", min=2, max=2**16, help="Completions of each problem.")] = 8,
    draws: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            max=2**20,
            help="Draws of each estimator on each completion (16); with --credit completions of each state (2 x 32).",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(metavar="N", min=0.1, help="Forward passes per completion to compare at. Default: 4."),
    ] = None,
    states: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Most passes for the sum over orders. Default: 100000, or 2000 for a large model."
        ),
    ] = None,
    data: DataOption = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Two estimators of an audit.json, paired: agrpo:draws=4,agrpo:draws=2"),
    ] = None,
    credit: Annotated[
        bool, typer.Option("--credit", help="Audit credit rules instead: are the steps that matter weighted most?")
    ] = False,
    rule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --credit: your own rule, a file with credit(trace).")
    ] = None,
    out: FiguresFolder = None,
    as_json: AsJson = False,
) -> None:
    """Compare estimators of the log-probability: bias, noise, correlation, and the direction of the gradient.

    With --credit: compare credit rules with the true credit of every step.
    """
    from unmask.config.published import check_estimators

    if out is not None:
        check_folder(out)
    if credit:
        unused = {"methods": methods, "budget": budget, "states": states, "compare": compare}
        if given := [name for name, value in unused.items() if value is not None]:
            raise ValueError(f"--{given[0]} is about estimators and has no effect with --credit: leave it out")
        return _audit_credit(
            model, task, [*of_task(task, data=data), *(overrides or [])], problems, group, draws, rule, out, as_json
        )
    if rule is not None:
        raise ValueError("--rule is a credit rule: add --credit")
    if model.endswith(".json"):
        from unmask.studies.audit.report import read_audit

        audit_data = read_audit(Path(model))
        if compare is not None:
            return _show_comparison(audit_data, compare, as_json)
    elif compare is not None:
        raise ValueError("compare: measure with --out FOLDER first, then compare in FOLDER/audit.json")
    else:
        check_model_name(model)
        check_estimators(methods.split(",") if methods is not None else [])
        about = [*of_task(task, data=data), *(overrides or [])]
        settings, run_task = settings_of(model, task)
        check_shared_settings(settings, about, (methods or "").split(","), task=run_task, model=model)
        audit_data = _measure(model, task, about, methods, problems, group, draws or 16, budget or 4, states)
    _show(audit_data, out, as_json)


def _audit_credit(
    model: str,
    task: str | None,
    overrides: list[str],
    problems: int,
    group: int,
    draws: int | None,
    rule: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from unmask.config import DEMO, read_config

    check_model_name(model)
    settings, task = settings_of(model, task)
    named: dict[str, Any] = {"task": task, "model": model, "prompts": problems, "group": group}
    named |= {"lora": {}} if settings != DEMO else {}
    config = read_config(settings, overrides, **named, **{"method": "diffu_grpo", "with": []})

    from unmask.studies.credit.report import credit_data, write_credit
    from unmask.studies.credit.rules import own_rule
    from unmask.studies.credit.study import DRAWS, measure_credit

    own = {} if rule is None else {str(rule): own_rule(rule)}
    with show_progress() as on_progress:
        measured = measure_credit(config, own, draws or DRAWS, on_progress)
    data = credit_data(measured)
    written = write_credit(out, data, measured) if out is not None else []
    if as_json:
        typer.echo(json.dumps(data))
        return
    show_credit(data, measured)
    for path in written:
        typer.echo(f"written: {path}")


def steps_text(data: dict[str, Any], used: float | None) -> str:
    """The steps of the rollouts; by threshold those they used on average."""
    if data.get("threshold") is None:
        return f"{data['steps']} steps"
    return f"{used:.1f} steps on average, by a threshold of {data['threshold']:g}"


def show_credit(data: dict[str, Any], measured: "MeasuredCredit") -> None:
    """Print a credit audit."""
    from rich.console import Console

    from unmask.studies.credit.report import credit_tables, summary

    typer.echo(
        f"{data['model']} on {data['task']}: {data['problems']} problems x {data['group']} rollouts, mean reward "
        f"{data['reward']:.2f}; each state completed 2 x {data['draws']} times; "
        f"{steps_text(data, data['written'] / data['rollouts'])}, {data['order']} order. {data['seconds']:.0f} s."
    )
    console = Console(width=None if Console().is_terminal else 200)
    for table in credit_tables(measured.audit):
        console.print(table)
    typer.echo(summary(measured.audit))


def _measure(
    model: str,
    task: str | None,
    overrides: list[str],
    words: str | None,
    problems: int,
    group: int,
    draws: int,
    budget: float,
    states: int | None,
) -> dict[str, Any]:
    import torch

    from unmask.config import DEMO, read_config
    from unmask.config.method_names import every_estimator, method_specs, split_overrides
    from unmask.core.steps import uniform_steps
    from unmask.core.trace import all_tokens
    from unmask.studies.audit.audit import AuditSettings, audit as measure, scores_choice
    from unmask.studies.audit.report import audit_data, conclusion, constant_reward_note
    from unmask.training.batch import Experiment, collect
    from unmask.training.setup import decoding_of, is_large, set_up
    from unmask.util.versions import versions

    started = time.monotonic()
    specs = method_specs(words) if words is not None else None
    settings, task = settings_of(model, task)
    named: dict[str, Any] = {"task": task, "model": model, "prompts": problems, "group": group}
    named |= {"lora": {}} if settings != DEMO else {}  # a run's adapter brings its own options

    def config_of(spec: "MethodSpec | None", more: list[str]) -> "Config":
        method, *plugins = ["diffu_grpo"] if spec is None else spec.words
        return read_config(settings, more, **named, **{"method": method, "with": plugins})

    general, special = split_overrides(overrides, specs or every_estimator(8, 8, True))
    config = config_of(None, general)
    built = config.build_task()
    decoding = replace(decoding_of(config, built), cache=None)
    methods = {}
    for spec in specs or every_estimator(decoding.length, decoding.steps, scores_choice(decoding)):
        own = [override for override in special if override.partition(".")[0] in spec.sections]
        options = [*own, *spec.overrides(options_only=True)]
        keep = "idle_groups=keep"  # the audit gives all methods advantages with a group baseline
        methods[spec.label] = config_of(spec, [*general, *options, keep]).build_method()
        if methods[spec.label].further:
            raise ValueError(
                f"{spec.label}: the audit measures one estimator, and this one has several terms: name its base alone"
            )
        if methods[spec.label].values is not None:
            raise ValueError(
                f"{spec.label}: the audit gives the same advantages to all methods, and this one has its own for each "
                "step: name agrpo, which asks at the same states"
            )
    first = next(iter(methods.values()))
    record = reduce(or_, (method.record for method in methods.values()))
    with set_up(config, needs_reference=False) as setup, show_progress() as on_progress:
        on_progress("rollouts", 0.0)
        setup = replace(setup, fp8=None)
        batch = collect(
            Experiment(setup, built, replace(first, record=record, counted=all_tokens), config, decoding),
            0,
        )
        if not len(batch.trace):
            raise ValueError("the rewards of every group are identical, so no problem is left; leave out idle_groups")
        if states is None:
            states = 2_000 if is_large(setup.policy) else 100_000
        rng = torch.Generator().manual_seed(config.seed)
        audit_settings = AuditSettings(decoding, setup.update_batch, draws, states, on_progress)
        result = measure(setup.policy, batch.trace, batch.reward_B, methods, rng, audit_settings)
    rollout = config.rollout
    return {
        "model": model,
        "task": config.task,
        "problems": len(batch.trace.group_B.unique()),
        "group": group,
        "budget": budget,
        "seed": config.seed,
        "length": decoding.length,
        "steps": decoding.steps,
        "threshold": decoding.threshold,
        "steps_used": float((uniform_steps(batch.trace) > 0).sum(-1).double().mean()),
        "block": decoding.block,
        "order": rollout.order,
        "temperature": rollout.temperature,
        "reward": batch.reward,
        "note": constant_reward_note(batch.reward_B.tolist(), bool(batch.solved_B.all())),
        "idle": sum(slope is None for slope in result.estimators[0].slopes),
        "parameters": sum(weight.numel() for weight in setup.policy.parameters() if weight.requires_grad),
        "seconds": round(time.monotonic() - started, 1),
        "versions": versions(),
        "conclusion": conclusion(result, budget),
        **audit_data(result),
    }


def _show_comparison(data: dict[str, Any], names: str, as_json: bool) -> None:
    from rich.console import Console

    from unmask.studies.audit.figures import estimator_comparison
    from unmask.studies.audit.report import audit_from_data, comparison_table, two_estimators

    result = audit_from_data(data)
    one, other = two_estimators(result, names)
    rows = estimator_comparison(result, one, other, data["budget"])
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows]))
    else:
        Console(width=None if Console().is_terminal else 200).print(comparison_table(one, other, rows))


def _show(data: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from unmask.studies.audit.report import audit_from_data, conclusion, tables, write_audit

    written = write_audit(out, data) if out is not None else []
    if as_json:
        typer.echo(json.dumps(data))
        return
    console = Console(width=None if Console().is_terminal else 200)
    if data.get("note"):
        typer.echo(data["note"])
    typer.echo(
        f"{data['model']} on {data['task']}: {data['problems']} problems x {data['group']} completions, "
        f"{data['draws']} draws; {data['length']} positions in {steps_text(data, data.get('steps_used'))}, "
        f"{data['order']} order. {data['seconds']:.0f} s."
    )
    slack = f" (too low by at most {data['slack']:.1g} nats)" if data["slack"] else ""
    typer.echo(
        f"Values against {data['truth']}{slack}. Gradients over {data['parameters']} weights against "
        f"{data['reference']}; {data['idle']} of {data['problems']} groups have identical rewards, hence no gradient."
    )
    result = audit_from_data(data)
    for table in tables(result, data["budget"]):
        console.print(table)
    typer.echo(conclusion(result, data["budget"]))
    for path in written:
        typer.echo(f"written: {path}")
