"""What the page is told of runs: their settings and curves, and a line for every group that was written down.

A run folder is read as it lies, also while it is being written: what has been read is not read again, a last line that
is not whole yet waits, and one that is no JSON is passed over. The groups themselves stay on the disk.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from unmask.util.parsing import parse_yaml
from unmask.util.trace_lines import VERSION, TraceLine
from unmask.view.series import Series

FINISHED = "finished.json"  # as in unmask.training.run.folder, which would load torch
ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
PROMPT = 120
"""Characters of a prompt in the list of groups."""
TAIL = 64
"""Bytes by which a log is known again."""
DEEPEST = 64
"""Lists within lists that are told of."""


def plain(value: Any, deep: int = DEEPEST) -> Any:
    """The same as any reader of JSON takes it: keys are texts, and what is no finite number, or too deep, is null."""
    if isinstance(value, dict | list | tuple) and not deep:
        return None
    if isinstance(value, dict):
        return {str(key): plain(inside, deep - 1) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inside, deep - 1) for inside in value]
    return value if not isinstance(value, float | int) or _is_number(value) else None


def json_text(value: Any) -> str:
    """JSON by the letter, whatever a run folder holds. It seldom needs to be made plain, which takes longer."""
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(plain(value), allow_nan=False, default=str)


class Log:
    """A file of JSON lines that may grow, or be cut and written on (`unmask train --resume`)."""

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.tail = path, 0, b""

    def grown_only(self) -> bool:
        """Whether what has been read is still there."""
        if not self.read:
            return True
        if not self.path.is_file():
            return False
        with self.path.open("rb") as file:
            file.seek(self.read - len(self.tail))
            return file.read(len(self.tail)) == self.tail

    def fresh(self) -> Iterator[tuple[int, int, TraceLine]]:
        """The lines that have not been read, each with its place and its length in bytes."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start, self.read, self.tail = self.read, self.read + len(line), line[-TAIL:]
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict):
                    yield start, len(line), found


class RunReader:
    """A run as the page sees it; `refresh` reads what is new."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} is no run folder: there is no config.yaml in it")
        self.folder = folder
        self.config = _settings(folder / "config.yaml")
        self._begin()

    def _begin(self) -> None:
        names = ("metrics", "traces", "samples", "warnings", "errors")
        self.logs = {name: Log(self.folder / f"{name}.jsonl") for name in names}
        self.series: dict[str, Series] = {}
        self.done, self.errors = 0, 0
        self.warnings, self.traces = list[TraceLine](), list[TraceLine]()
        self.places: dict[str, tuple[int, int]] = {}
        self.sampled: dict[str, TraceLine] = {}
        self.finished: Any = None
        self.cut = False

    def refresh(self) -> bool:
        """Read what has been written since; whether there was anything."""
        again = self.cut or not all(log.grown_only() for log in self.logs.values())
        if again:
            with suppress(ValueError, OSError):  # one that is gone or half written: what it said is still shown
                self.config = _settings(self.folder / "config.yaml")
            self._begin()
        before = {name: log.read for name, log in self.logs.items()}, self.finished
        for _, _, row in self.logs["metrics"].fresh():
            self._measured(row)
        for start, length, line in self.logs["traces"].fresh():
            if (told := _told(line)) is not None and told["id"] not in self.places:
                self.traces.append(told)
                self.places[told["id"]] = start, length
        if not self.places:
            self._read_samples()
        self.warnings += [_warned(row) for _, _, row in self.logs["warnings"].fresh()]
        self.errors += sum(1 for _ in self.logs["errors"].fresh())
        self.finished = _ended(self.folder / FINISHED)
        return again or before != ({name: log.read for name, log in self.logs.items()}, self.finished)

    def data(self, name: str) -> dict[str, Any]:
        config, plugins = self.config, self.config.get("with") or []
        parts = [config.get("method"), *(plugins if isinstance(plugins, list) else [plugins])]
        return {
            "name": name,
            "config": config,
            "method": " + ".join(_text(part) or "none" for part in parts),
            "task": _text(config.get("task")),
            "finished": self.finished,
            "updates": _number(config.get("updates")),
            "done": self.done,
            "metrics": {key: series.data() for key, series in self.series.items()},
            "warnings": self.warnings,
            "errors": self.errors,
            "traces": self.groups(),
        }

    def groups(self) -> list[TraceLine]:
        """The list of what `trace` knows."""
        return self.traces or [told for line in self.sampled.values() if (told := _told(line)) is not None]

    def trace(self, name: str) -> bytes | None:
        """A group as JSON; None for a name that no group has, or none any more: then `refresh` reads the run again."""
        if name not in self.places:
            return json_text(self.sampled[name]).encode() if name in self.sampled else None
        start, length = self.places[name]
        try:
            with self.logs["traces"].path.open("rb") as file:
                file.seek(start)
                found = json.loads(file.read(length))
        except (OSError, ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and found.get("id") == name:
            return json_text(found).encode()
        self.cut = True
        return None

    def size(self, name: str) -> int:
        """Bytes of a group."""
        return self.places[name][1] if name in self.places else len(self.trace(name) or b"")

    def keep(self, names: set[str]) -> None:
        """Show no other groups."""
        self.traces = [told for told in self.traces if told["id"] in names]
        self.sampled = {name: line for name, line in self.sampled.items() if name in names}

    def _read_samples(self) -> None:
        """The completions of a run in which no groups were written down: their text, and nothing of how it came."""
        for row in (plain(row) for _, _, row in self.logs["samples"].fresh()):
            step, prompt = row.get("step"), json.dumps(row.get("row"), ensure_ascii=False)
            name, about = f"t{step}-0", {"kind": "train", "step": step, "task": _text(self.config.get("task"))}
            blank: TraceLine = {"v": VERSION, "id": name, **about, "prompt": prompt, "steps": 0, "rollouts": []}
            rollout = {"tokens": [str(row.get("completion"))], "reward": row.get("reward")}
            self.sampled.setdefault(name, blank)["rollouts"].append(rollout)

    def _measured(self, row: TraceLine) -> None:
        step = row.pop("step", None)
        if not isinstance(step, int) or not _is_number(step):
            return
        self.done = max(self.done, step)
        for key, value in row.items():
            if isinstance(value, float) or (isinstance(value, int) and _is_number(value)):
                if key not in self.series:
                    self.series[key] = Series()
                self.series[key].add(step, value)


def index_of(runs: Sequence[RunReader], live: bool) -> dict[str, Any]:
    """Live where a run that is not finished is served: the page asks again then."""
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    found = [run.data(name) for run, name in zip(runs, names, strict=True)]
    return {"v": VERSION, "live": live and any(run.finished is None for run in runs), "runs": found}


def _settings(path: Path) -> dict[str, Any]:
    """The configuration as it was written: an older run's may not be one of today."""
    try:
        text = path.read_text()
        found = None if _swells(text) else parse_yaml(text, str(path))
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):  # the last two of PyYAML, for a tag that lies
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a configuration that `unmask train` has written")
    return found


def _swells(text: str) -> bool:
    """Whether YAML has aliases, by which a few lines become millions, or is deep; a run writes neither."""
    deep = 0
    for event in yaml.parse(text):
        deep += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if deep > DEEPEST or isinstance(event, yaml.AliasEvent):
            return True
    return False


def _ended(path: Path) -> Any:
    """What finished.json says; None as long as the run goes on. It is put there whole, so anything else is not it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return plain(found) if isinstance(found, dict) else None


def _is_number(value: float) -> bool:
    """Whether a double has it, within rounding: not nan, infinity, or an integer of 400 digits."""
    return abs(value) <= sys.float_info.max


def _text(value: Any) -> str | None:
    """What is no text, as JSON."""
    return value if value is None or isinstance(value, str) else json_text(value)


def _number(value: Any) -> float | None:
    known = isinstance(value, float | int) and not isinstance(value, bool)
    return value if known and _is_number(value) else None


def _warned(row: TraceLine) -> TraceLine:
    """A warning with a text where the page writes one, and a number or nothing where it counts."""
    return {key: _text(value) if key in ("name", "told") else _number(value) for key, value in row.items()}


def _told(line: TraceLine) -> TraceLine | None:
    """A group in the list; None for a line that is not one."""
    name, rollouts = line.get("id"), line.get("rollouts")
    if not isinstance(name, str) or not ID.fullmatch(name) or not isinstance(rollouts, list):
        return None
    told, step = [rollout for rollout in rollouts if isinstance(rollout, dict)], line.get("step")
    return {
        "id": name,
        "kind": line.get("kind"),
        "step": step if isinstance(step, int) and _is_number(step) else None,
        "prompt": str(plain(line.get("prompt", "")))[:PROMPT],
        "rewards": [_number(rollout.get("reward")) for rollout in told],
        "solved": [rollout.get("solved") for rollout in told],
    }
