"""The same problems with other prompts: how much a score depends on the wording.

A file of prompt variants is JSONL; each line has a `template` and an optional `name`. In a template {field} is a field
of the row, {own_prompt} is the task's own prompt, and {{ and }} are braces. Nothing else is allowed between braces.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any

from unmask.evaluation.benchmark import Benchmark, BenchmarkCase, BenchmarkResult, check_prompts
from unmask.tasks.support.data import read_rows
from unmask.tasks.task import Grade, Row, Task
from unmask.util.statistics import Difference, paired_proportion_change

OWN = "own"
OWN_PROMPT = "own_prompt"


@dataclass(frozen=True)
class PromptVariant:
    name: str
    template: str
    where: str


def read_prompt_variants(path: Path) -> list[PromptVariant]:
    rows, variants = read_rows(path, {"template": str}), list[PromptVariant]()
    for number, row in enumerate(rows, 1):
        name = str(row.get("name", f"wording {number}"))
        if name in (OWN, *(variant.name for variant in variants)):
            raise ValueError(f"{path} row {number}: the name {name!r} is taken; {OWN!r} is the task's own wording")
        variants.append(PromptVariant(name, row["template"], f"{path} row {number}"))
    return variants


def template_text(template: str, fields: Mapping[str, Any]) -> str:
    """The template with its fields filled in: strings as they are, other values as JSON."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{str(error).lower()}; write {{{{ and }}}} for braces") from None
    text = ""
    for literal, name, form, conversion in pieces:
        text += literal
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            field = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(f"{{{field}}} is not a plain field name; write {{{{ and }}}} for braces")
        if name not in fields:
            raise ValueError(f"there is no field {name!r}; the fields are {', '.join(fields)}")
        text += fields[name] if isinstance(fields[name], str) else json.dumps(fields[name], ensure_ascii=False)
    return text


def task_in_variant(task: Task, variant: PromptVariant) -> Task:
    """The task with another prompt; prefill and system prompt stay. Its example is dropped if it lacks a field."""

    def prompt(row: Row) -> str:
        return template_text(variant.template, {**row, OWN_PROMPT: task.prompt(row)})

    example = task.about.example
    if example is not None:
        try:
            prompt(example)
        except ValueError:
            example = None
    return task.variant(prompt=prompt, turns=prompt, about=replace(task.about, example=example))


def cases_by_variant(bench: Benchmark, case: BenchmarkCase, variants: Sequence[PromptVariant]) -> list[BenchmarkCase]:
    """The task's own wording, then the others; ValueError with file and row for a prompt that does not fit."""
    cases = [replace(case, variant=OWN)]
    for variant in variants:
        task = task_in_variant(case.task, variant)
        try:
            check_prompts(bench, replace(case, task=task))
        except ValueError as error:
            raise ValueError(f"{variant.where}: {error}") from None
        cases.append(replace(case, task=task, variant=variant.name))
    return cases


def paired_difference(before: Sequence[Grade], after: Sequence[Grade]) -> Difference:
    """after - before, problem by problem."""
    out_of = [grade.out_of for grade in before]
    assert out_of == [grade.out_of for grade in after]
    points = [[grade.points for grade in grades] for grades in (before, after)]
    return paired_proportion_change(points[0], points[1], out_of)


def differences(lines: Sequence[BenchmarkResult]) -> list[Difference | None]:
    """The difference of every line to the first, which is the task's own wording and has None."""
    own, *others = (line.report.grades for line in lines)
    return [None, *(paired_difference(own, grades) for grades in others)]


def spread_summary(lines: Sequence[BenchmarkResult]) -> list[str]:
    """As text: the difference of each wording to the task's own, and the lowest and the highest score."""
    wide = max(len(line.case.variant) for line in lines)
    pairs = zip(lines[1:], differences(lines)[1:], strict=True)
    gains = [f"{line.case.variant:>{wide + 2}} {difference}" for line, difference in pairs]
    least, most = (choice(lines, key=lambda line: line.score.value) for choice in (min, max))
    low, high = (f"{100 * line.score.value:.1f} % ({line.case.variant})" for line in (least, most))
    return [f"difference to the task's {OWN} wording in points, paired:", *gains, f"spread: {low} to {high}"]
