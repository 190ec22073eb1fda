"""Grade stored generations, without a model: `unmask grade --task gsm8k --protocol d1 generations.jsonl`.

A line of the file is a row of the task, in any format of its data, with a `generation`, or a `completion` as `unmask
generate` writes it. For benchmarks the reference may be in `ground_truth`, as evaluation scripts of papers store it.
"""

import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unmask.core.options import RewardConfig
from unmask.tasks import TASKS
from unmask.tasks.scoring import RewardFailure, grade
from unmask.tasks.support.data import read_rows
from unmask.tasks.task import Grade, Row, Task
from unmask.util.files import check_output
from unmask.util.statistics import Proportion, ratio_proportion


@dataclass(frozen=True)
class GradeReport:
    score: Proportion
    grades: tuple[Grade, ...]
    other_scores: Mapping[str, Proportion] = field(default_factory=dict)
    """Other scores of the same completions, by name."""
    facts: Mapping[str, int] = field(default_factory=dict)
    """Counts that describe the rows."""
    failures: tuple[RewardFailure, ...] = ()
    """Completions whose reward failed: they count as wrong."""

    @property
    def rows(self) -> int:
        return len(self.grades)

    def data(self) -> dict[str, Any]:
        return {
            "score": self.score.value,
            "low": self.score.low,
            "high": self.score.high,
            "rows": self.rows,
            "points": math.fsum(grade.points for grade in self.grades),
            "out_of": math.fsum(grade.out_of for grade in self.grades),
            "errors": len(self.failures),
            **{name: share._asdict() for name, share in self.other_scores.items()},
            **self.facts,
        }


def grade_proportion(grades: Sequence[Grade]) -> Proportion:
    """The sum of points over the sum of possible points, with rows as the independent units."""
    return ratio_proportion([grade.points for grade in grades], [grade.out_of for grade in grades])


def grade_report(
    task: Task,
    rows: Sequence[Row],
    texts: Sequence[str],
    grades: Sequence[Grade],
    failures: Sequence[RewardFailure] = (),
) -> GradeReport:
    def other(grade: Callable[[Row, str], Grade]) -> Proportion:
        return grade_proportion([grade(row, text) for row, text in zip(rows, texts, strict=True)])

    other_scores = {name: other(grade) for name, grade in task.other_scores.items()}
    return GradeReport(grade_proportion(grades), tuple(grades), other_scores, task.facts(rows), tuple(failures))


def grade_lines(task: Task, lines: Iterable[tuple[str, Row]], reward: RewardConfig | None = None) -> GradeReport:
    """Grade (place, line) pairs; ValueError with the place of a line that lacks a field."""
    places, rows, texts = list[str](), list[Row](), list[str]()
    for where, line in lines:
        with _naming_line(where, task):
            places.append(where)
            texts.append(line["generation"])
            rows.append(task.stored_row(line))
    with _naming_line("a line", task):
        task.prepare(rows, texts)
    grades, failures = list[Grade](), list[RewardFailure]()
    for where, row, text in zip(places, rows, texts, strict=True):
        with _naming_line(where, task):
            line_grade, failed = grade(task, row, text, reward)
        grades.append(line_grade)
        failures += failed
    return grade_report(task, rows, texts, grades, failures)


@contextmanager
def _naming_line(where: str, task: Task) -> Iterator[None]:
    """Add the place of the line to an error about a missing field or a field of the wrong type."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{where}: {error} is missing; {task.name} needs it") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where}: a field has the wrong type for {task.name}: {error}") from None


def belongs_to_another_task(task: Task, line: Row) -> bool:
    """Whether a line of a file with several benchmarks belongs to another one; d1 names them without "_text"."""
    names = {task.name, task.name.removesuffix("_text")}
    known = {*TASKS, *(name.removesuffix("_text") for name in TASKS)} if task.name in TASKS else set()
    name = line.get("task")
    return isinstance(name, str) and name in known - names


def grade_file(task: Task, path: Path, out: Path | None = None, reward: RewardConfig | None = None) -> GradeReport:
    """Grade a JSONL file (gzip or not), without the lines of other benchmarks. `out` gets every graded line with its
    verdict."""
    check_output(out)
    lines = read_rows(path, {}, _with_generation)
    placed = [(f"{path} line {number}", line) for number, line in zip(_line_numbers(path), lines, strict=True)]
    own = [(where, line) for where, line in placed if not belongs_to_another_task(task, line)]
    if not own:
        raise ValueError(f"{path}: no line belongs to {task.name}; the first belongs to {lines[0]['task']}")
    report = grade_lines(task, own, reward)
    others = {"of_other_tasks": len(placed) - len(own)} if len(own) < len(placed) else {}
    if out is not None:
        verdicts = [{"points": g.points, "out_of": g.out_of, "read": g.answer} for g in report.grades]
        out.write_text(
            "".join(json.dumps({**line, **verdict}) + "\n" for (_, line), verdict in zip(own, verdicts, strict=True))
        )
    return replace(report, facts={**report.facts, **others})


def _with_generation(line: Row) -> Row:
    """The line with its text as `generation`; `unmask generate` writes it as `completion`."""
    field = "generation" if "generation" in line or "completion" not in line else "completion"
    if not isinstance(line.get(field), str):
        problem = f"{type(line[field]).__name__}, not str" if field in line else "missing"
        raise ValueError(f"{field!r} is {problem}")
    return {**line, "generation": line[field]}


def _line_numbers(path: Path) -> list[int]:
    """The numbers of the lines that are not blank: one for each row of `read_rows`."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [number for number, line in enumerate(file, 1) if line.strip()]
