"""The same problems in other words: how much of a score is the wording's.

A file of wordings is JSONL, each line with a `template` and if you like a `name`. In a template {field} stands for a
field of the row and {own_prompt} for the prompt that the task asks with; {{ and }} are braces. Nothing else is allowed
between braces: a template is text, not a program.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from unmask.evaluation.benchmark import Bench, Case, ScoreLine, check_prompts
from unmask.evaluation.evaluate import Z_95
from unmask.tasks.support.data import read_rows
from unmask.tasks.task import Grade, Row, Task

OWN = "own"
OWN_PROMPT = "own_prompt"


@dataclass(frozen=True)
class PromptVariant:
    name: str
    template: str
    where: str


def read_wordings(path: Path) -> list[PromptVariant]:
    rows, found = read_rows(path, {"template": str}), list[PromptVariant]()
    for number, row in enumerate(rows, 1):
        name = str(row.get("name", f"wording {number}"))
        if name in (OWN, *(wording.name for wording in found)):
            raise ValueError(f"{path} row {number}: the name {name!r} is taken; {OWN!r} is the task's own wording")
        found.append(PromptVariant(name, row["template"], f"{path} row {number}"))
    return found


def filled(template: str, fields: Mapping[str, Any]) -> str:
    """The template with its fields in place: texts as they are, other values as JSON."""
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
            told = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(f"{{{told}}} is not the plain name of a field; write {{{{ and }}}} for braces")
        if name not in fields:
            raise ValueError(f"there is no field {name!r}; the fields are {', '.join(fields)}")
        text += fields[name] if isinstance(fields[name], str) else json.dumps(fields[name], ensure_ascii=False)
    return text


def worded(task: Task, wording: PromptVariant) -> Task:
    """The task, asked in other words; what every answer begins with and a system's turn stay. Its example goes where it
    has not all fields of the template."""

    def prompt(row: Row) -> str:
        return filled(wording.template, {**row, OWN_PROMPT: task.prompt(row)})

    example = task.about.example
    if example is not None:
        try:
            prompt(example)
        except ValueError:
            example = None
    return task.variant(prompt=prompt, about=replace(task.about, example=example))


def cases_by_wording(bench: Bench, case: Case, wordings: Sequence[PromptVariant]) -> list[Case]:
    """The task's own wording, then the others; ValueError with file and row for one that cannot be asked."""
    cases = [replace(case, wording=OWN)]
    for wording in wordings:
        task = worded(case.task, wording)
        try:
            check_prompts(bench, replace(case, task=task))
        except ValueError as error:
            raise ValueError(f"{wording.where}: {error}") from None
        cases.append(replace(case, task=task, wording=wording.name))
    return cases


class Difference(NamedTuple):
    """Of two scores on the same problems, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


def paired(before: Sequence[Grade], after: Sequence[Grade]) -> Difference:
    """after - before, problem by problem. The interval is Agresti and Min's: that of the normal law with half a problem
    more of each of the four outcomes (neither, both, only one, only the other), so that it says something also where
    no problem changed hands."""
    assert [grade.out_of for grade in before] == [grade.out_of for grade in after]
    change = [(b.points - a.points, a.out_of) for a, b in zip(before, after, strict=True)]
    total = math.fsum(out_of for _, out_of in change)
    mean = total / len(change)
    weighed = [(gain, out_of, 1.0) for gain, out_of in change] + [(mean, mean, 0.5), (-mean, mean, 0.5), (0.0, mean, 1)]
    value = math.fsum(gain for gain, _ in change) / total
    total += 2 * mean
    centre = math.fsum(weight * gain for gain, _, weight in weighed) / total
    spread = math.fsum(weight * (gain - centre * out_of) ** 2 for gain, out_of, weight in weighed)
    half = Z_95 * math.sqrt(spread) / total
    return Difference(value, max(-1.0, centre - half), min(1.0, centre + half))


def differences(lines: Sequence[ScoreLine]) -> list[Difference | None]:
    """Of every line to the first, the task's own wording, which has none."""
    own, *others = (line.graded.grades for line in lines)
    return [None, *(paired(own, grades) for grades in others)]


def spread_told(lines: Sequence[ScoreLine]) -> list[str]:
    """In words: each wording's difference to the task's own, and the lowest and the highest score."""
    wide = max(len(line.case.wording) for line in lines)
    pairs = zip(lines[1:], differences(lines)[1:], strict=True)
    told = [f"{line.case.wording:>{wide + 2}} {difference}" for line, difference in pairs]
    least, most = (choice(lines, key=lambda line: line.score.value) for choice in (min, max))
    low, high = (f"{100 * line.score.value:.1f} % ({line.case.wording})" for line in (least, most))
    return [f"points more than in the task's {OWN} wording, paired:", *told, f"spread: {low} to {high}"]
