"""A task of one's own: a Python file with a reward, and rows from a JSONL file or from the file itself.

    def reward(prompt, completion, row):           # a number; or a function as TRL wants it:
        return float(completion == row["answer"])  # def f(completions, **columns) -> list of numbers

Several rewards are a list `rewards`, or a dictionary with names of your choice, and are added with weights. The file
may also define rows(), prompt(row), solved(prompt, completion, row), and `length`, the size of the canvas. It is the
user's own program and is run as such, with all the user's rights. Errors name the file and the row.

Rewards are asked in a process of their own (unmask/tasks/own_worker.py), where one that never ends can be ended; the
file is run there once more.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from unmask.tasks.support.composite import RewardPart, Weights, composite
from unmask.tasks.support.process import Ended, Process
from unmask.tasks.support.sources import Shape, set_rows
from unmask.tasks.support.split import hashed_split
from unmask.tasks.task import About, Outcome, Row, Task, finite
from unmask.util.user_file import run_file

LENGTH = 256
PLAIN = ("prompt", "completion", "row")
FORMS = "reward(prompt, completion, row), or as TRL has it f(completions, **columns)"
STARTING = 600.0  # seconds that the file may take to run: it may load a model of its own
# As multiprocessing does it: the other process finds its modules where this one does.
WORKER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import unmask.tasks.own_worker as w; w.main()"
ABOUT = About(
    source="JSONL files with a prompt, or rows() of your own Python file",
    apart="by a hash of the prompt, one in five for the test, where a row does not say its split",
)


def spelled_out(data: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose task is a file, as the task `own` with that file."""
    task, section = data.get("task"), data.get("own") or {}
    if not isinstance(task, str) or not task.endswith(".py") or not isinstance(section, dict):
        return dict(data)
    return {**data, "task": "own", "own": {**section, "file": task}}


def task(file: str = "", data: str = "", test_data: str = "", weights: Weights = None) -> Task:
    """The task in a Python file, `--task my_task.py`, with rows from `data` or from its own rows().

    `weights` weighs its rewards, over the weights that the file gives.
    """
    return _loaded(file, data, test_data, weights or {}) if file else _unnamed()


def _unnamed() -> Task:
    """What stands in a list of tasks, where no file is named."""

    def refused(*_: Any) -> Any:
        raise ValueError("own: name the Python file of your task: --task my_task.py")

    told = "A task of your own: --task my_task.py"
    five = (refused,) * 5
    return Task("own", told, LENGTH, *five, text=True, reward_range=None, about=ABOUT)


def _loaded(file: str, data: str, test_data: str, weights: Mapping[str, Any]) -> Task:
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"own: there is no file {file}")
    module = run_file(path).module
    values = {name: _value(file, name, f) for name, f in _rewards(file, module).items()}
    length = getattr(module, "length", LENGTH)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"{file}: length must be a number of tokens, not {length!r}")
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
        marked=True,
    )

    def own_rows(split: str) -> list[Row]:
        if not hasattr(module, "rows"):
            raise ValueError(f"{file}: there are no rows; give own.data=FILE.jsonl, or define rows() in the file")
        return [row for row in _own_rows(file, module.rows, own_prompt is None) if shape.split(row) == split]

    def part(value: Callable[[Row, str, str], float]) -> RewardPart:
        last: list[tuple[Row, str, float]] = []  # remembered, since reward and verdict both ask

        def known(row: Row, completion: str) -> float:
            if not last or last[0][0] is not row or last[0][1] != completion:
                last[:] = [(row, completion, value(row, prompt(row), completion))]
            return last[0][2]

        return RewardPart(known, 1.0)

    def solved(row: Row, completion: str) -> bool:
        if own_solved is not None:
            return bool(_called(file, "solved", _named(row), own_solved, prompt(row), completion, row))
        return first.value(row, completion) >= 1.0

    def elsewhere(row: Row, completion: str, seconds: float) -> Outcome:
        try:
            reply = process.ask([row, completion], seconds)
        except Ended as ended:
            raise ValueError(f"{file}: the reward {ended} ({_named(row)})") from None
        if isinstance(reply, str):
            raise ValueError(reply)
        return Outcome(**reply)

    parts = {name: part(value) for name, value in values.items()}
    first = next(iter(parts.values()))
    built = Task(
        name=path.stem,
        summary=(module.__doc__ or f"A task of your own in {file}").strip().splitlines()[0],
        length=length,
        rows=set_rows(path.stem, data, test_data, shape, own_rows, section="own", place=file),
        prompt=prompt,
        solution=lambda row: str(row.get("solution", "")),
        reward=first.value,
        solved=solved,
        text=True,
        fixed=True,
        about=ABOUT,
    )
    weighed = composite(built, parts, {**dict(getattr(module, "weights", {})), **weights}, where=file)
    process = Process([sys.executable, "-c", WORKER, json.dumps(sys.path), file, json.dumps(weights)], STARTING)
    return replace(weighed, reward_range=None, elsewhere=elsewhere)


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


def _value(file: str, name: str, function: Callable[..., Any]) -> Callable[[Row, str, str], float]:
    """A reward of either form as a function of a row, its prompt and a completion."""
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{file}: {name} is asynchronous; a reward here is a plain function")
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wanted = {key for key, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    needed = {key for key in wanted if parameters[key].default is inspect.Parameter.empty}
    if "completions" not in wanted and ("completion" not in wanted or not needed <= set(PLAIN)):
        raise ValueError(f"{file}: {name}{inspect.signature(function)} is no reward; define {FORMS}")

    def found(row: Row, prompt: str, completion: str) -> float:
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
        try:
            return finite(name, value)
        except ValueError as error:
            raise ValueError(f"{file}: {error} ({_named(row)})") from None

    return found


def _columns(row: Row, completion: str) -> dict[str, Any]:
    """What TRL would give a reward function for this one completion; a conversation is answered by a message."""
    talk = isinstance(row["prompt"], list)
    said = [{"role": "assistant", "content": completion}] if talk else completion
    columns = {key: [value] for key, value in row.items() if key not in ("prompt", "completion")}
    return {**columns, "prompts": [row["prompt"]], "completions": [said]}


def _called(file: str, name: str, where: str, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    try:
        return function(*args, **named)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{file}: {name} raised {type(error).__name__}: {error} ({where})") from error


def _own_rows(file: str, rows: Callable[[], Any], prompted: bool) -> list[Row]:
    """What rows() of the file returns, checked, and as a file of JSON would have it."""
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
    try:
        return [json.loads(json.dumps(row)) for row in found]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: rows() must return texts, numbers, lists and dictionaries: {error}") from None


def _named(row: Row) -> str:
    """A row as a user finds it: by its id, or by how it begins."""
    return f"row {row['id']}" if "id" in row else f"row {str(row)[:120]}"
