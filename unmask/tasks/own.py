"""A task of one's own: a Python file with a reward, and rows from a JSONL file or from the file itself.

    def reward(prompt, completion, row):           # a number; or a function as TRL wants it:
        return float(completion == row["answer"])  # def f(completions, **columns) -> list of numbers

Several rewards are a list `rewards`, or a dictionary with names of your choice, and are added with weights. The file
may also define rows(), prompt(row), solved(prompt, completion, row), and `length`, the size of the canvas. It is the
user's own program and is run as such, with all the user's rights. Errors name the file and the row.
"""

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from unmask.tasks.sources import Shape, hashed_split, set_rows
from unmask.tasks.task import Row, Task

LENGTH = 256
PLAIN = ("prompt", "completion", "row")
FORMS = "reward(prompt, completion, row), or as TRL has it f(completions, **columns)"
Part = Callable[[Row, str, str], float]  # of a row, its prompt and a completion


@dataclass(frozen=True, kw_only=True)
class OwnTask(Task):
    """A Task whose reward is a weighted sum of parts."""

    parts: Callable[[Row, str], dict[str, float]]
    """The value of each reward function for a completion, without its weight."""
    weights: Mapping[str, float]


def part_means(task: OwnTask, rows: Sequence[Row], texts: Sequence[str]) -> dict[str, float]:
    """The mean of each part over completions, for a log."""
    values = [task.parts(row, text) for row, text in zip(rows, texts, strict=True)]
    return {name: sum(value[name] for value in values) / len(values) for name in task.weights}


def spelled_out(data: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose task is a file, as the task `own` with that file."""
    task, section = data.get("task"), data.get("own") or {}
    if not isinstance(task, str) or not task.endswith(".py") or not isinstance(section, dict):
        return dict(data)
    return {**data, "task": "own", "own": {**section, "file": task}}


def task(file: str = "", data: str = "", test_data: str = "", weights: dict[str, float] | None = None) -> Task:
    """The task in a Python file, `--task my_task.py`, with rows from `data` or from its own rows()."""
    return _loaded(file, data, test_data, weights or {}) if file else _unnamed()


def _unnamed() -> Task:
    """What stands in a list of tasks, where no file is named."""

    def refused(*_: Any) -> Any:
        raise ValueError("own: name the Python file of your task: --task my_task.py")

    told = "A task of your own: --task my_task.py"
    return Task("own", told, LENGTH, refused, refused, refused, refused, refused, text=True)


def _loaded(file: str, data: str, test_data: str, weights: Mapping[str, float]) -> OwnTask:
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"own: there is no file {file}")
    module = _run(str(path.resolve()), path.stat().st_mtime_ns)
    parts = {name: _part(file, name, f) for name, f in _rewards(file, module).items()}
    length = getattr(module, "length", LENGTH)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"{file}: length must be a number of tokens, not {length!r}")
    weighed = _weighed(file, {**dict(getattr(module, "weights", {})), **weights}, list(parts))
    own_prompt, own_solved = getattr(module, "prompt", None), getattr(module, "solved", None)

    def prompt(row: Row) -> str:
        text = row["prompt"] if own_prompt is None else _called(file, "prompt", _named(row), own_prompt, row)
        if isinstance(text, list) and all(isinstance(turn, dict) and "content" in turn for turn in text):
            text = "\n\n".join(str(turn["content"]) for turn in text)  # a conversation as TRL has it, as one turn
        if not isinstance(text, str):
            raise ValueError(f"{file}: the prompt is neither a text nor a list of messages ({_named(row)})")
        return text

    shape = Shape(
        wanted={} if own_prompt else {"prompt": (str, list)},
        row=lambda row: row,
        key=prompt,
        split=lambda row: row.get("split") or hashed_split(prompt(row)),
    )

    def own_rows(split: str) -> list[Row]:
        if not hasattr(module, "rows"):
            raise ValueError(f"{file}: there are no rows; give own.data=FILE.jsonl, or define rows() in the file")
        return [row for row in _own_rows(file, module.rows, own_prompt is None) if shape.split(row) == split]

    def values(row: Row, completion: str) -> dict[str, float]:
        return {name: part(row, prompt(row), completion) for name, part in parts.items()}

    def solved(row: Row, completion: str) -> bool:
        if own_solved is not None:
            return bool(_called(file, "solved", _named(row), own_solved, prompt(row), completion, row))
        first = next(iter(parts.values()))
        return first(row, prompt(row), completion) >= 1.0

    return OwnTask(
        name=path.stem,
        summary=(module.__doc__ or f"A task of your own in {file}").strip().splitlines()[0],
        length=length,
        rows=set_rows(path.stem, data, test_data, shape, own_rows),
        prompt=prompt,
        solution=lambda row: str(row.get("solution", "")),
        reward=lambda row, completion: sum(weighed[name] * v for name, v in values(row, completion).items()),
        solved=solved,
        text=True,
        parts=values,
        weights=weighed,
    )


@cache
def _run(path: str, changed: int) -> ModuleType:
    """Run a file as a module; once, until it is `changed`."""
    name = f"unmask_own_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look a class up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _rewards(file: str, module: ModuleType) -> dict[str, Callable[..., Any]]:
    one, several = getattr(module, "reward", None), getattr(module, "rewards", None)
    if (one is None) == (several is None):
        told = "both a reward and rewards" if one is not None else "no reward"
        raise ValueError(f"{file}: there is {told}; define {FORMS}; or several of them as a list, rewards")
    if one is not None:
        several = {"reward": one}
    elif isinstance(several, list | tuple):
        named = [(getattr(f, "__name__", type(f).__name__), f) for f in several]
        several = dict(named)
        if len(several) < len(named):
            raise ValueError(f"{file}: two rewards have the same name; make rewards a dictionary with names")
    if not isinstance(several, dict) or not several or not all(callable(f) for f in several.values()):
        raise ValueError(f"{file}: reward must be a function, and rewards a list or dictionary of functions")
    return {str(name): f for name, f in several.items()}


def _weighed(file: str, weights: Mapping[str, Any], names: list[str]) -> dict[str, float]:
    """A weight for every reward, 1 where none is given."""
    for name, weight in weights.items():
        if name not in names:
            raise ValueError(f"{file}: there is a weight for {name!r}, but the rewards are {', '.join(names)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"{file}: the weight of {name} must be a number, not {weight!r}")
    return {name: float(weights.get(name, 1.0)) for name in names}


def _part(file: str, name: str, function: Callable[..., Any]) -> Part:
    """A reward of either form as a function of a row and a completion."""
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{file}: {name} is asynchronous; a reward here is a plain function")
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wanted = {key for key, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    needed = {key for key in wanted if parameters[key].default is inspect.Parameter.empty}
    if "completions" not in wanted and ("completion" not in wanted or not needed <= set(PLAIN)):
        raise ValueError(f"{file}: {name}{inspect.signature(function)} is no reward; define {FORMS}")

    def part(row: Row, prompt: str, completion: str) -> float:
        if "completions" in wanted:
            given = _columns({"prompt": prompt, **row}, completion)
        else:
            given = {"prompt": prompt, "completion": completion, "row": row}
        if missing := needed - given.keys():
            raise ValueError(f"{file}: {name} wants {sorted(missing)[0]!r}, which is no field of {_named(row)}")
        passed = given if takes_all else {key: value for key, value in given.items() if key in wanted}
        value = _called(file, name, _named(row), function, **passed)
        if "completions" in wanted:
            if not hasattr(value, "__len__") or isinstance(value, str) or len(value) != 1:
                raise ValueError(f"{file}: {name} returned {value!r} for a list of 1 completion ({_named(row)})")
            value = value[0]
        return _number(file, name, value, row)

    return part


def _columns(row: Row, completion: str) -> dict[str, Any]:
    """What TRL would give a reward function for this one completion; a conversation is answered by a message."""
    talk = isinstance(row["prompt"], list)
    said = [{"role": "assistant", "content": completion}] if talk else completion
    columns = {key: [value] for key, value in row.items() if key not in ("prompt", "completion")}
    return {**columns, "prompts": [row["prompt"]], "completions": [said]}


def _number(file: str, name: str, value: Any, row: Row) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{file}: {name} returned {value!r}, not a finite number ({_named(row)})")
    return number


def _called(file: str, name: str, where: str, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    try:
        return function(*args, **named)
    except Exception as error:
        raise ValueError(f"{file}: {name} raised {type(error).__name__}: {error} ({where})") from error


def _own_rows(file: str, rows: Callable[[], Any], prompted: bool) -> list[Row]:
    """What rows() of the file returns, checked."""
    try:
        found = list(rows())
    except Exception as error:
        raise ValueError(f"{file}: rows raised {type(error).__name__}: {error}") from error
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{file}: row {number} of rows() is a {type(row).__name__}, not a dictionary")
        if prompted and not isinstance(row.get("prompt"), str | list):
            raise ValueError(f"{file}: row {number} of rows() has no text 'prompt'")
    if not found:
        raise ValueError(f"{file}: rows() returned no rows")
    return found


def _named(row: Row) -> str:
    """A row as a user finds it: by its id, or by how it begins."""
    return f"row {row['id']}" if "id" in row else f"row {str(row)[:120]}"
