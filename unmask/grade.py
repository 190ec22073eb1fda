"""Grade stored generations, without a model: `unmask grade --task gsm8k --protocol d1 generations.jsonl`.

A line of the file is a row of the task with its `generation`. For the benchmarks the reference may instead stand under
`ground_truth`, as the field's evaluation scripts store it.
"""

import gzip
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unmask.evaluate import Z_95, Share, mean_share, wilson
from unmask.tasks import TASKS, gsm8k, math500, text_countdown, text_sudoku
from unmask.tasks.data import read_rows
from unmask.tasks.task import Grade, Row, Task

STORED: Mapping[str, Callable[[Row], Row]] = {
    "gsm8k": gsm8k.stored_row,
    "math500": math500.stored_row,
    "countdown_text": text_countdown.stored_row,
    "sudoku_text": text_sudoku.stored_row,
}
"""The row that a stored line is about; a task that is not named takes the line as it is."""


@dataclass(frozen=True)
class Graded:
    score: Share
    rows: int
    grades: tuple[Grade, ...]

    def data(self) -> dict[str, Any]:
        points, out_of = (math.fsum(column) for column in list(zip(*self.grades, strict=True))[:2])
        return {"score": self.score.value, "low": self.score.low, "high": self.score.high, "rows": self.rows} | {
            "points": points,
            "out_of": out_of,
        }


def task_of(name: str, protocol: str | None) -> Task:
    """The task under a protocol; its own default where none is named."""
    if name not in TASKS:
        raise ValueError(f"task: there is no {name!r}; known: {', '.join(TASKS)}")
    if protocol is None:
        return TASKS[name]()
    if "protocol" not in inspect.signature(TASKS[name]).parameters:
        raise ValueError(f"the task {name} has no protocols: leave out --protocol")
    return TASKS[name](protocol=protocol)


def score(grades: Sequence[Grade]) -> Share:
    """All points over all they are of: Wilson's interval where every row is one point or none, else the normal
    interval of a ratio, rows being the independent units."""
    points, out_of = [grade.points for grade in grades], [grade.out_of for grade in grades]
    total = math.fsum(out_of)
    if total == 0:
        raise ValueError("no row has anything to score")
    if set(out_of) == {1.0} and set(points) <= {0.0, 1.0}:
        return wilson(round(sum(points)), len(points))
    ratio = math.fsum(points) / total
    residuals = [p - ratio * o for p, o in zip(points, out_of, strict=True)]
    spread = math.fsum(residual**2 for residual in residuals)
    if spread == 0 or len(grades) == 1:
        return mean_share(torch.full((len(grades),), ratio, dtype=torch.float64))
    half = Z_95 * math.sqrt(spread * len(grades) / (len(grades) - 1)) / total
    return Share(ratio, max(0.0, ratio - half), min(1.0, ratio + half))


def graded(task: Task, lines: Iterable[tuple[str, Row]]) -> Graded:
    """The grades of (where it stands, line) pairs; ValueError that says where for a line without what it needs."""
    row_of, grades = STORED.get(task.name, lambda line: line), []
    for where, line in lines:
        try:
            grades.append(task.graded(row_of(line), line["generation"]))
        except KeyError as error:
            raise ValueError(f"{where}: {error} is missing, which {task.name} needs") from None
        except (ValueError, TypeError, AttributeError) as error:  # of the wrong kind, for a task that does not check
            raise ValueError(f"{where}: {error}") from None
    return Graded(score(grades), len(grades), tuple(grades))


def grade_file(task: Task, path: Path, out: Path | None = None) -> Graded:
    """Grade a JSONL file (gzip or not); with `out`, every line goes there with its verdict."""
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} in")
    lines = read_rows(path, {"generation": str})
    found = graded(task, ((f"{path} line {number}", line) for number, line in zip(_places(path), lines, strict=True)))
    if out is not None:
        verdicts = [grade._asdict() for grade in found.grades]
        out.write_text(
            "".join(json.dumps({**line, **verdict}) + "\n" for line, verdict in zip(lines, verdicts, strict=True))
        )
    return found


def _places(path: Path) -> list[int]:
    """The numbers of the lines that are not blank: where each row of `read_rows` stands."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [number for number, line in enumerate(file, 1) if line.strip()]
