"""Results of `unmask eval --out` and `unmask grade --out` as the page shows them: like runs, without training."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from unmask.util.trace_lines import VERSION, TraceLine
from unmask.view.index import RunReader
from unmask.view.series import BINS


class EvalLine(BaseModel):
    """A line of the table that `unmask eval --out` writes, as far as it is shown."""

    score: float
    low: float
    high: float
    length: int
    steps: int
    passes: float
    seconds: float
    wording: str = ""
    card: dict[str, Any]
    answers: list[str]
    prompts: list[str] = Field(default_factory=list)
    points: list[float | None] = Field(default_factory=list)


class GradedLine(BaseModel):
    """A line that `unmask grade --out` writes, as far as it is shown."""

    generation: str
    points: float
    out_of: float
    prompt: Any = None
    question: Any = None
    ground_truth: Any = None


EVALUATED = TypeAdapter(Annotated[list[EvalLine], Field(min_length=1)])
GRADED = TypeAdapter(Annotated[list[GradedLine], Field(min_length=1)])


class ResultsReader(RunReader):
    """Results that are read once."""

    def __init__(self, path: Path, facts: dict[str, Any], groups: list[TraceLine]) -> None:
        self.folder, self.name, self.facts, self.finished = path, facts["name"], facts, {}
        self.traces, self.places = list[TraceLine](), dict[str, tuple[int, int]]()
        self.sampled = {group["id"]: group for group in groups}

    def refresh(self) -> bool:
        return False

    def data(self, name: str, bins: int = BINS) -> dict[str, Any]:
        blank: dict[str, Any] = {"updates": None, "done": 0, "clock": {"x": [], "y": []}, "warnings": [], "errors": 0}
        return {**blank, "finished": {"ended": "evaluation"}, **self.facts, "name": name, "traces": self.groups()}


def results_of(path: Path) -> list[RunReader]:
    """The results in a file; ValueError if it is neither of the two."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            return [_graded(path, rows, GRADED.validate_python(rows))]
        return [_evaluated(path, line) for line in EVALUATED.validate_json(text)]
    except (ValueError, RecursionError):
        made_by = "`unmask eval --out FILE.json` or `unmask grade --out FILE.jsonl`"
        raise ValueError(f"{path} is not a run folder and not a file of {made_by}") from None


def _evaluated(path: Path, line: EvalLine) -> RunReader:
    about = f"wording {line.wording}" if line.wording else f"length {line.length}, {line.steps} steps"
    facts = {"name": f"{path.name}: {about}", "method": "evaluation, greedy", "task": str(line.card.get("task"))}
    known = {**line.card, "score": line.score, "low": line.low, "high": line.high}
    config = {**known, "length": line.length, "steps": line.steps, "passes": line.passes, "seconds": line.seconds}
    solved = {"": line.score, "_low": line.low, "_high": line.high}
    metrics = {f"eval/solved_greedy{end}": {"x": [0], "y": [value]} for end, value in solved.items()}
    groups = []
    for number, answer in enumerate(line.answers):
        prompt = line.prompts[number] if number < len(line.prompts) else f"problem {number + 1}"
        points = line.points[number] if number < len(line.points) else None
        groups.append(_group(number, facts["task"], prompt, answer, points))
    return ResultsReader(path, {**facts, "config": config, "metrics": metrics}, groups)


def _graded(path: Path, rows: list[dict[str, Any]], lines: list[GradedLine]) -> RunReader:
    total = sum(line.out_of for line in lines)
    facts = {"name": path.name, "method": "graded generations", "task": str(rows[0].get("task", ""))}
    metrics = {"eval/solved_greedy": {"x": [0], "y": [sum(line.points for line in lines) / total]}} if total else {}
    groups = []
    for number, line in enumerate(lines):
        prompt = next((text for text in (line.prompt, line.question) if text is not None), f"row {number + 1}")
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        group = _group(number, facts["task"], text, line.generation, line.points / line.out_of if line.out_of else None)
        groups.append({**group, "answer": None if line.ground_truth is None else str(line.ground_truth)})
    return ResultsReader(path, {**facts, "config": {"rows": len(rows)}, "metrics": metrics}, groups)


def _group(number: int, task: str, prompt: str, answer: str, points: float | None) -> TraceLine:
    """A completion whose steps were not recorded."""
    rollout = {"tokens": [answer], "reward": points, "solved": None if points is None else points >= 1}
    about = {"v": VERSION, "id": f"e0-{number}", "kind": "eval", "step": 0, "task": task, "prompt": prompt, "steps": 0}
    return {**about, "rollouts": [rollout]}
