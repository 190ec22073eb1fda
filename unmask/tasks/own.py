"""Your own task: a Python file with a reward, and rows from a JSONL file or from the file itself.

    def reward(prompt, completion, row):           # a number; or a function in TRL's form:
        return float(completion == row["answer"])  # def f(completions, **columns) -> list of numbers

Several rewards are a list `rewards`, or a dictionary with names, and are added with weights. The file may also define
rows(), prompt(row), solved(prompt, completion, row), and `length`, the size of the canvas. It is the user's program and
runs with the user's rights. Errors name the file and the row.

Rewards are called in a separate process (unmask/tasks/own_worker.py), which is killed if one does not return. The file
is run again there.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from unmask.tasks.support.data import DataTask
from unmask.tasks.task import About, Outcome, RewardPart, Row, Task, Weights, finite
from unmask.util.json_process import Process, ProcessEnded
from unmask.util.turns import Turns, checked_turns, plain_text
from unmask.util.user_file import run_file

LENGTH = 256
PLAIN = ("prompt", "completion", "row")
FORMS = "reward(prompt, completion, row), or in TRL's form f(completions, **columns)"
STARTING = 600.0  # seconds that the file may take to run: it may load a model
# Like multiprocessing: the other process finds modules in the same places.
WORKER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import unmask.tasks.own_worker as w; w.main()"
ABOUT = About(
    source="JSONL files or data sets on the hub with a prompt, or rows() of your Python file",
    separation="by a hash of the prompt, one in five for the test, unless a row names its split",
)


def with_own_task(data: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with a task that is a Python file replaced by the task `own` with that file."""
    task, section = data.get("task"), data.get("own") or {}
    if not isinstance(task, str) or not task.endswith(".py") or not isinstance(section, dict):
        return dict(data)
    return {**data, "task": "own", "own": {**section, "file": task}}


def task(file: str = "", data: str = "", test_data: str = "", weights: Weights = None) -> Task:
    """The task in a Python file, `--task my_task.py`, with rows from `data` or from its rows().

    `data` and `test_data` are JSONL files, or names of data sets on the hub (the splits train and test).
    `weights` are the weights of its rewards; they override the file's.
    """
    return OwnTask(file, data, test_data, weights or {}) if file else NoTaskFile()


class NoTaskFile(Task):
    """The entry in the list of tasks, without a file."""

    name = "own"
    summary = "Your own task: --task my_task.py"
    length = LENGTH
    text = True
    reward_range = None
    about = ABOUT

    def _refuse(self, *_: Any) -> Any:
        raise ValueError("own: name the Python file of your task: --task my_task.py")

    rows = prompt = solution = reward = solved = _refuse  # type: ignore[assignment]


class OwnTask(DataTask):
    text = True
    runs_user_code = True
    names_split = True
    hub_names = True
    section = "own"
    about = ABOUT

    def __init__(self, file: str, data: str, test_data: str, weights: Mapping[str, Any]) -> None:
        path = Path(file)
        if not path.is_file():
            raise ValueError(f"own: there is no file {file}")
        self.file = self.place = file
        self.module = run_file(path).module
        _check_names(file, self.module)
        parts = {name: self._part(_reward_function(file, name, f)) for name, f in _rewards(file, self.module).items()}
        self.length = getattr(self.module, "length", LENGTH)
        self.own_prompt, self.own_solved = getattr(self.module, "prompt", None), getattr(self.module, "solved", None)
        self.name = path.stem
        self.summary = (self.module.__doc__ or f"Your own task in {file}").strip().splitlines()[0]
        self.row_fields = {} if self.own_prompt else {"prompt": (str, list)}
        super().__init__(data, test_data)
        self.set_reward_parts(parts, {**getattr(self.module, "weights", {}), **weights}, where=file)
        self.reward_range = None
        command = [sys.executable, "-c", WORKER, json.dumps(sys.path), file, json.dumps(weights)]
        self.process = Process(command, STARTING)

    def _part(self, value: Callable[[Row, str, str], float]) -> RewardPart:
        last: list[tuple[Row, str, float]] = []  # cached: reward and solved both need it

        def value_of(row: Row, completion: str) -> float:
            if not last or last[0][0] is not row or last[0][1] != completion:
                last[:] = [(row, completion, value(row, self.prompt(row), completion))]
            return last[0][2]

        return RewardPart(value_of, 1.0)

    def turns(self, row: Row) -> str | Turns:
        own = self.own_prompt
        prompt = row["prompt"] if own is None else _call(self.file, "prompt", _name_of(row), own, row)
        try:
            return prompt if isinstance(prompt, str) else checked_turns(prompt)
        except ValueError as error:
            raise ValueError(f"{self.file}: the prompt {error} ({_name_of(row)})") from None

    def prompt(self, row: Row) -> str:
        return plain_text(self.turns(row))

    def key(self, row: Row) -> str:
        return self.prompt(row)

    def published_rows(self, split: str) -> list[Row]:
        if not hasattr(self.module, "rows"):
            raise ValueError(f"{self.file}: there are no rows; give own.data=FILE.jsonl, or define rows() in the file")
        rows = _own_rows(self.file, self.module.rows, self.own_prompt is None)
        return [row for row in rows if self.split_of(row) == split]

    def stored_row(self, line: Row) -> Row:
        return Task.stored_row(self, line)

    def solution(self, row: Row) -> str:
        return str(row.get("solution", ""))

    def solved(self, row: Row, completion: str) -> bool:
        own = self.own_solved
        if own is not None:
            return bool(_call(self.file, "solved", _name_of(row), own, self.prompt(row), completion, row))
        return next(iter(self.reward_parts.values())).value(row, completion) >= 1.0

    def outcome_in_process(self, row: Row, completion: str, seconds: float) -> Outcome:
        try:
            reply = self.process.ask([row, completion], seconds)
        except ProcessEnded as ended:
            raise ValueError(f"{self.file}: the reward {ended} ({_name_of(row)})") from None
        if isinstance(reply, str):
            raise ValueError(reply)
        return Outcome(**reply)


def _check_names(file: str, module: ModuleType) -> None:
    """ValueError if a name that the task uses is not what it must be."""
    for name in ("rows", "prompt", "solved"):
        value = getattr(module, name, None)
        if value is not None and not callable(value):
            raise ValueError(f"{file}: {name} must be a function, not a {type(value).__name__}")
    if not isinstance(weights := getattr(module, "weights", {}), dict):
        raise ValueError(f"{file}: weights must be a dictionary {{name: weight}}, not a {type(weights).__name__}")
    length = getattr(module, "length", LENGTH)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"{file}: length must be a number of tokens, not {length!r}")


def _rewards(file: str, module: ModuleType) -> dict[str, Callable[..., Any]]:
    one, several = getattr(module, "reward", None), getattr(module, "rewards", None)
    if (one is None) == (several is None):
        problem = "both a reward and rewards" if one is not None else "no reward"
        raise ValueError(f"{file}: there is {problem}; define {FORMS}; or a list of several, rewards")
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


def _reward_function(file: str, name: str, function: Callable[..., Any]) -> Callable[[Row, str, str], float]:
    """A reward of either form as a function of a row, its prompt and a completion."""
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{file}: {name} is asynchronous; make it a plain function")
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = {key for key, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    needed = {key for key in accepted if parameters[key].default is inspect.Parameter.empty}
    if "completions" not in accepted and ("completion" not in accepted or not needed <= set(PLAIN)):
        raise ValueError(f"{file}: {name}{inspect.signature(function)} is not a reward; define {FORMS}")

    def value_of(row: Row, prompt: str, completion: str) -> float:
        if "completions" in accepted:
            given = _columns({"prompt": prompt, **row}, completion)
        else:
            given = {"prompt": prompt, "completion": completion, "row": row}
        if missing := needed - given.keys():
            raise ValueError(f"{file}: {name} needs {sorted(missing)[0]!r}, which is not a field of {_name_of(row)}")
        passed = given if takes_all else {key: value for key, value in given.items() if key in accepted}
        value = _call(file, name, _name_of(row), function, **passed)
        if "completions" in accepted:
            if not hasattr(value, "__len__") or isinstance(value, str) or len(value) != 1:
                raise ValueError(f"{file}: {name} returned {value!r} for a list of 1 completion ({_name_of(row)})")
            value = value[0]
        try:
            return finite(name, value)
        except ValueError as error:
            raise ValueError(f"{file}: {error} ({_name_of(row)})") from None

    return value_of


def _columns(row: Row, completion: str) -> dict[str, Any]:
    """TRL's arguments of a reward function for one completion; the answer to a conversation is a message."""
    conversation = isinstance(row["prompt"], list)
    reply = [{"role": "assistant", "content": completion}] if conversation else completion
    columns = {key: [value] for key, value in row.items() if key not in ("prompt", "completion")}
    return {**columns, "prompts": [row["prompt"]], "completions": [reply]}


def _call(file: str, name: str, where: str, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    try:
        return function(*args, **named)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{file}: {name} raised {type(error).__name__}: {error} ({where})") from error


def _own_rows(file: str, rows: Callable[[], Any], prompted: bool) -> list[Row]:
    """The rows of the file's rows(), checked, as JSON would store them."""
    try:
        result = list(rows())
    except Exception as error:
        raise ValueError(f"{file}: rows raised {type(error).__name__}: {error}") from error
    for number, row in enumerate(result, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{file}: row {number} of rows() is a {type(row).__name__}, not a dictionary")
        if prompted and not isinstance(row.get("prompt"), str | list):
            raise ValueError(f"{file}: row {number} of rows() has no string 'prompt'")
    if not result:
        raise ValueError(f"{file}: rows() returned no rows")
    try:
        return [json.loads(json.dumps(row)) for row in result]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: rows() must return strings, numbers, lists and dictionaries: {error}") from None


def _name_of(row: Row) -> str:
    """A row's id, or its first characters, for a message."""
    return f"row {row['id']}" if "id" in row else f"row {str(row)[:120]}"
