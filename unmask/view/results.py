"""Results of `unmask eval` and `unmask grade --out` as the page shows them: like runs, without training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from unmask.util.trace_lines import RESULTS, VERSION, TraceLine
from unmask.view.index import RunReader
from unmask.view.series import BINS


class Share(BaseModel):
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float


class Sample(BaseModel):
    """A sampled completion of a problem."""

    text: str
    reward: float | None
    solved: bool


class EvalLine(BaseModel, extra="allow"):
    """A line that `unmask eval` writes, as far as it is shown; its `pass@k` are extra fields."""

    score: float
    low: float
    high: float
    length: int
    steps: int
    passes: float | None = None
    """These two are measured in tables only, the next three without a table only."""
    seconds: float | None = None
    reward: float | None = None
    mixed: Share | None = None
    behaviours: dict[str, float] = Field(default_factory=dict)
    wording: str = ""
    card: dict[str, Any]
    answers: list[str]
    prompts: list[str] = Field(default_factory=list)
    points: list[float | None] = Field(default_factory=list)
    samples: list[list[Sample]] = Field(default_factory=list)

    def pass_at(self) -> dict[str, Share]:
        extra = self.model_extra or {}
        return {name: Share.model_validate(value) for name, value in extra.items() if name.startswith("pass@")}


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


def results_of(path: Path, name: str = "") -> list[RunReader]:
    """The results in a file, or in a folder of `unmask eval`, called after it if no name is given; ValueError for
    anything else."""
    try:
        text = (path / RESULTS if path.is_dir() else path).read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            return [_graded(path, rows, GRADED.validate_python(rows))]
        lines, name = EVALUATED.validate_json(text), name or path.resolve().name
        titles = [name if len(lines) == 1 else f"{name}: {_about(line)}" for line in lines]
        return [run for line, title in zip(lines, titles, strict=True) for run in _evaluated(path, line, title)]
    except (ValueError, RecursionError):
        made_by = "`unmask eval --out` or `unmask grade --out FILE.jsonl`"
        raise ValueError(f"{path} is not a run folder and not a file of {made_by}") from None


def _about(line: EvalLine) -> str:
    """What a line of a table has of its own."""
    return f"wording {line.wording}" if line.wording else f"length {line.length}, {line.steps} steps"


def _evaluated(path: Path, line: EvalLine, title: str) -> Iterator[RunReader]:
    """The greedy answers, and the samples if there are any, as a run each. A group is a problem."""
    task = str(line.card.get("task"))
    known = {**line.card, "score": line.score, "low": line.low, "high": line.high}
    config = {**known, "length": line.length, "steps": line.steps, "passes": line.passes, "seconds": line.seconds}
    prompts = line.prompts + [f"problem {number + 1}" for number in range(len(line.prompts), len(line.answers))]
    points = line.points + [None] * len(line.answers)

    def reader(name: str, how: str, metrics: dict[str, float], rollouts: list[list[TraceLine]]) -> RunReader:
        series = {key: {"x": [0], "y": [value]} for key, value in metrics.items()}
        facts = {"name": name, "method": f"evaluation, {how}", "task": task, "config": config, "metrics": series}
        pairs = zip(prompts, rollouts, strict=False)
        groups = [_group(number, task, prompt, samples) for number, (prompt, samples) in enumerate(pairs)]
        return ResultsReader(path, facts, groups)

    greedy = _interval_metrics("eval/solved_greedy", Share(value=line.score, low=line.low, high=line.high))
    answers = [[_rollout(answer, point)] for answer, point in zip(line.answers, points, strict=False)]
    yield reader(f"{title}, greedy" if line.samples else title, "greedy", greedy, answers)
    if line.samples:
        drawn = [[_rollout(each.text, each.reward, each.solved) for each in samples] for samples in line.samples]
        yield reader(f"{title}, sampled", "sampled", _sampled_metrics(line), drawn)


def _sampled_metrics(line: EvalLine) -> dict[str, float]:
    """What was measured on the samples, by the names that a run's metrics have."""
    passes = line.pass_at()
    metrics = _interval_metrics("eval/solved_sampled", passes.pop("pass@1")) if "pass@1" in passes else {}
    metrics |= {f"eval/{name}": share.value for name, share in passes.items()}
    metrics |= {} if line.reward is None else {"eval/reward": line.reward}
    metrics |= {} if line.mixed is None else {"eval/mixed": line.mixed.value}
    return metrics | {f"eval/behaviour/{name}": share for name, share in line.behaviours.items()}


def _interval_metrics(name: str, share: Share) -> dict[str, float]:
    return {name: share.value, f"{name}_low": share.low, f"{name}_high": share.high}


def _graded(path: Path, rows: list[dict[str, Any]], lines: list[GradedLine]) -> RunReader:
    total = sum(line.out_of for line in lines)
    facts = {"name": path.name, "method": "graded generations", "task": str(rows[0].get("task", ""))}
    metrics = {"eval/solved_greedy": {"x": [0], "y": [sum(line.points for line in lines) / total]}} if total else {}
    groups = []
    for number, line in enumerate(lines):
        prompt = next((text for text in (line.prompt, line.question) if text is not None), f"row {number + 1}")
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        points = line.points / line.out_of if line.out_of else None
        group = _group(number, facts["task"], text, [_rollout(line.generation, points)])
        groups.append({**group, "answer": None if line.ground_truth is None else str(line.ground_truth)})
    return ResultsReader(path, {**facts, "config": {"rows": len(rows)}, "metrics": metrics}, groups)


def _group(number: int, task: str, prompt: str, rollouts: list[TraceLine]) -> TraceLine:
    """Completions whose steps were not recorded."""
    about = {"v": VERSION, "id": f"e0-{number}", "kind": "eval", "step": 0, "task": task, "prompt": prompt, "steps": 0}
    return {**about, "rollouts": rollouts}


def _rollout(text: str, reward: float | None, solved: bool | None = None) -> TraceLine:
    """A completion; if nothing else says so, it is solved if it has all points."""
    if solved is None and reward is not None:
        solved = reward >= 1
    return {"tokens": [text], "reward": reward, "solved": solved}
