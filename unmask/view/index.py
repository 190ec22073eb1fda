"""What the page is told of runs: their settings and curves, and a line for every group that was written down.

A run folder is read as it lies, also while it is being written: what has been read is not read again, a last line that
is not whole yet waits, and one that is no JSON is passed over. The groups themselves stay on the disk.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from unmask.view.series import Series

Line = dict[str, Any]
VERSION = 1
"""Of the lines of traces.jsonl and of the index."""
FINISHED = "finished.json"  # as in unmask.run, which would load torch
ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
PROMPT = 120
"""Characters of a prompt in the list of groups."""
TAIL = 64
"""Bytes by which a log is known again."""


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

    def fresh(self) -> Iterator[tuple[int, int, Line]]:
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


class RunFolder:
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
        self.warnings, self.traces = list[Line](), list[Line]()
        self.places: dict[str, tuple[int, int]] = {}
        self.sampled: dict[str, Line] = {}
        self.finished: Any = None

    def refresh(self) -> bool:
        """Read what has been written since; whether there was anything."""
        if not all(log.grown_only() for log in self.logs.values()):
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
        self.warnings += [row for _, _, row in self.logs["warnings"].fresh()]
        self.errors += sum(1 for _ in self.logs["errors"].fresh())
        self.finished = _ended(self.folder / FINISHED)
        return before != ({name: log.read for name, log in self.logs.items()}, self.finished)

    def data(self, name: str) -> dict[str, Any]:
        config, plugins = self.config, self.config.get("with") or []
        return {
            "name": name,
            "config": config,
            "method": " + ".join(map(str, [config.get("method"), *plugins])),
            "task": config.get("task"),
            "finished": self.finished,
            "updates": config.get("updates"),
            "done": self.done,
            "metrics": {key: series.data() for key, series in self.series.items()},
            "warnings": self.warnings,
            "errors": self.errors,
            "traces": self.groups(),
        }

    def groups(self) -> list[Line]:
        """The list of what `trace` knows."""
        return self.traces or [told for line in self.sampled.values() if (told := _told(line)) is not None]

    def trace(self, name: str) -> bytes | None:
        """The line of a group as it was written; None for a name that no group has."""
        if name not in self.places:
            return json.dumps(self.sampled[name]).encode() if name in self.sampled else None
        start, length = self.places[name]
        with self.logs["traces"].path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def _read_samples(self) -> None:
        """The completions of a run in which no groups were written down: their text, and nothing of how it came."""
        for _, _, row in self.logs["samples"].fresh():
            step, prompt = row.get("step"), json.dumps(row.get("row"), ensure_ascii=False)
            name, about = f"t{step}-0", {"kind": "train", "step": step, "task": self.config.get("task")}
            blank: Line = {"v": VERSION, "id": name, **about, "prompt": prompt, "steps": 0, "rollouts": []}
            rollout = {"tokens": [str(row.get("completion"))], "reward": row.get("reward")}
            self.sampled.setdefault(name, blank)["rollouts"].append(rollout)

    def _measured(self, row: Line) -> None:
        step = row.pop("step", None)
        if not isinstance(step, int):
            return
        self.done = max(self.done, step)
        for key, value in row.items():
            if isinstance(value, float | int):
                if key not in self.series:
                    self.series[key] = Series()
                self.series[key].add(step, value)


def index_of(runs: Sequence[RunFolder], live: bool) -> dict[str, Any]:
    """Live where a run that is not finished is served: the page asks again then."""
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    found = [run.data(name) for run, name in zip(runs, names, strict=True)]
    return {"v": VERSION, "live": live and any(run.finished is None for run in runs), "runs": found}


def _settings(path: Path) -> dict[str, Any]:
    """The configuration as it was written: an older run's may not be one of today."""
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a configuration that `unmask train` has written")
    return found


def _ended(path: Path) -> Any:
    """What finished.json says; None as long as the run goes on. It is put there whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _told(line: Line) -> Line | None:
    """A group in the list; None for a line that is not one."""
    name, rollouts = line.get("id"), line.get("rollouts")
    if not isinstance(name, str) or not ID.fullmatch(name) or not isinstance(rollouts, list):
        return None
    told = [rollout for rollout in rollouts if isinstance(rollout, dict)]
    return {
        "id": name,
        "kind": line.get("kind"),
        "step": line.get("step"),
        "prompt": str(line.get("prompt", ""))[:PROMPT],
        "rewards": [rollout.get("reward") for rollout in told],
        "solved": [rollout.get("solved") for rollout in told],
    }
