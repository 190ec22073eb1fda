"""The index of the page: settings and curves of runs, and a summary of every stored group of rollouts.

A run folder may be read while it is being written: only new lines are read, an incomplete last line waits, and a line
that is not JSON is skipped. The groups themselves stay on the disk.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from unmask.training.run.health import current_name
from unmask.util.parsing import parse_yaml
from unmask.util.trace_lines import VERSION, TraceLine
from unmask.view.series import BINS, Series

ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FULL, FEWEST = 8, 50
"""Runs whose curves have all their bins, and the bins that a curve has at least if there are many more runs."""
PROMPT = 120
"""Characters of a prompt in the list of groups."""
TAIL = 64
"""Bytes at the end of what has been read; if they change, the log was rewritten."""
DEEPEST = 64
"""Nested lists and mappings that are read."""


def json_value(value: Any, deep: int = DEEPEST) -> Any:
    """A value that strict JSON can hold: keys become text; numbers that are not finite, and deep values, null."""
    if isinstance(value, dict | list | tuple) and not deep:
        return None
    if isinstance(value, dict):
        return {str(key): json_value(inside, deep - 1) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inside, deep - 1) for inside in value]
    return value if not isinstance(value, float | int) or _is_number(value) else None


def json_text(value: Any) -> str:
    """Strict JSON, whatever a run folder has in it."""
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError):  # rare, so the slow conversion is not done up front
        return json.dumps(json_value(value), allow_nan=False, default=str)


class JsonLines:
    """A file of JSON lines that grows, or is truncated and continued (`unmask train --resume`)."""

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.tail = path, 0, b""

    def is_intact(self) -> bool:
        """Whether the part that has been read is unchanged."""
        if not self.read or not self.path.is_file():
            return not self.read
        with self.path.open("rb") as file:
            file.seek(self.read - len(self.tail))
            return file.read(len(self.tail)) == self.tail

    def new_lines(self) -> Iterator[tuple[int, int, TraceLine]]:
        """The lines that have not been read, each with its offset and its length in bytes."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start, self.read, self.tail = self.read, self.read + len(line), line[-TAIL:]
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict):
                    yield start, len(line), value


class RunReader:
    """A run as the page shows it. A run that is not named is called after its folder."""

    def __init__(self, folder: Path, name: str = "") -> None:
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} is not a run folder: there is no config.yaml in it")
        self.folder, self.name = folder, name or folder.resolve().name
        self.config = _settings(folder / "config.yaml")
        self._clear()

    def _clear(self) -> None:
        names = ("metrics", "traces", "samples", "warnings", "errors")
        self.logs = {name: JsonLines(self.folder / f"{name}.jsonl") for name in names}
        self.series: dict[str, Series] = {}
        self.clock, self.seconds = Series(), 0.0
        self.changed: float | None = None
        self.done, self.errors = 0, 0
        self.warnings, self.traces = list[TraceLine](), list[TraceLine]()
        self.places: dict[str, tuple[int, int]] = {}
        self.sampled: dict[str, TraceLine] = {}
        self.finished: Any = None
        self.cut = False

    def refresh(self) -> bool:
        """Read new lines; returns whether there were any."""
        again = self.cut or not all(log.is_intact() for log in self.logs.values())
        if again:
            with suppress(ValueError, OSError):  # if it is missing or half written, keep the previous one
                self.config = _settings(self.folder / "config.yaml")
            self._clear()
        before = {name: log.read for name, log in self.logs.items()}, self.finished
        for _, _, row in self.logs["metrics"].new_lines():
            self._add_metrics(row)
        with suppress(OSError):
            self.changed = round(self.logs["metrics"].path.stat().st_mtime, 1)
        for start, length, line in self.logs["traces"].new_lines():
            if (group := _group_summary(line)) is not None and group["id"] not in self.places:
                self.traces.append(group)
                self.places[group["id"]] = start, length
        if not self.places:
            self._read_samples()
        self.warnings += [_warning(row) for _, _, row in self.logs["warnings"].new_lines()]
        self.errors += sum(1 for _ in self.logs["errors"].new_lines())
        self.finished = _finish_facts(self.folder)
        return again or before != ({name: log.read for name, log in self.logs.items()}, self.finished)

    def data(self, name: str, bins: int = BINS) -> dict[str, Any]:
        """What the index has of the run; curves have at most 2 `bins` points."""
        config, plugins = self.config, self.config.get("with") or []
        names = [config.get("method"), *(plugins if isinstance(plugins, list) else [plugins])]
        return {
            "name": name,
            "config": config,
            "method": " + ".join(_text(part) or "none" for part in names),
            "task": _text(config.get("task")),
            "finished": self.finished,
            "updates": _number(config.get("updates")),
            "done": self.done,
            "metrics": {key: series.data(bins) for key, series in self.series.items()},
            "clock": self.clock.data(bins),
            "changed": self.changed,
            "warnings": self.warnings,
            "errors": self.errors,
            "traces": self.groups(),
        }

    def groups(self) -> list[TraceLine]:
        """Summaries of the groups that `trace` returns."""
        return self.traces or [group for line in self.sampled.values() if (group := _group_summary(line)) is not None]

    def trace(self, name: str) -> bytes | None:
        """A group as JSON; None if there is no such group."""
        line = self.line(name)
        return None if line is None else json_text(line).encode()

    def line(self, name: str) -> TraceLine | None:
        """A group; None if there is no such group. If the log was rewritten, `refresh` reads the run again."""
        if name not in self.places:
            return self.sampled.get(name)
        start, length = self.places[name]
        try:
            with self.logs["traces"].path.open("rb") as file:
                file.seek(start)
                line = json.loads(file.read(length))
        except (OSError, ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and line.get("id") == name:
            return line
        self.cut = True
        return None

    def search(self, text: str) -> list[str]:
        """The groups with a completion that contains a text, in upper or lower case."""
        lines = ((group["id"], self.line(group["id"])) for group in self.groups())
        return [name for name, line in lines if line is not None and text.lower() in completions_text(line)]

    def size(self, name: str) -> int:
        """The size of a group in bytes."""
        return self.places[name][1] if name in self.places else len(self.trace(name) or b"")

    def keep(self, names: set[str]) -> None:
        """Drop all other groups."""
        self.traces = [group for group in self.traces if group["id"] in names]
        self.sampled = {name: line for name, line in self.sampled.items() if name in names}

    def _read_samples(self) -> None:
        """Completions of a run that stored no groups: text only."""
        for row in (json_value(row) for _, _, row in self.logs["samples"].new_lines()):
            step, prompt = row.get("step"), json.dumps(row.get("row"), ensure_ascii=False)
            group: TraceLine = {"v": VERSION, "id": f"t{step}-0", "kind": "train", "step": step}
            group |= {"task": _text(self.config.get("task")), "prompt": prompt, "steps": 0, "rollouts": []}
            rollout = {"tokens": [str(row.get("completion"))], "reward": row.get("reward")}
            self.sampled.setdefault(group["id"], group)["rollouts"].append(rollout)

    def _add_metrics(self, row: TraceLine) -> None:
        step = row.pop("step", None)
        if not isinstance(step, int) or not _is_number(step):
            return
        self.done = max(self.done, step)
        if times := [seconds for key in ("time/rollout", "time/update") if (seconds := _number(row.get(key)))]:
            self.seconds += sum(times)
            self.clock.add(step, self.seconds)
        for key, value in row.items():
            if isinstance(value, float) or (isinstance(value, int) and _is_number(value)):
                self.series.setdefault(current_name(key), Series()).add(step, value)


def runs_index(runs: Sequence[RunReader], live: bool) -> dict[str, Any]:
    """What the page is given. While an unfinished run is served it is live: the page asks again."""
    names = [run.name for run in runs]
    names = [str(run.folder) if names.count(run.name) > 1 else run.name for run in runs]
    bins = max(FEWEST, BINS * FULL // max(FULL, len(runs)))
    data = [run.data(name, bins) for run, name in zip(runs, names, strict=True)]
    return {"v": VERSION, "live": live and any(run.finished is None for run in runs), "runs": data}


def _settings(path: Path) -> dict[str, Any]:
    """The configuration as written, not validated: an older run may have keys that no longer exist."""
    try:
        text = path.read_text()
        settings = None if _is_unsafe(text) else parse_yaml(text, str(path))
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):  # PyYAML raises the last two for a wrong tag
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a configuration written by `unmask train`")
    return settings


def _is_unsafe(text: str) -> bool:
    """Whether YAML has aliases, which can expand a few lines to millions, or is deep. A run writes neither."""
    deep = 0
    for event in yaml.parse(text):
        deep += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if deep > DEEPEST or isinstance(event, yaml.AliasEvent):
            return True
    return False


def _finish_facts(folder: Path) -> Any:
    """The content of finished.json; None while the run is not finished. The file is written in one step. A cell of a
    comparison has result.json or error.json instead."""
    for name in ("finished.json", "result.json", "error.json"):
        try:
            facts = json.loads((folder / name).read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(facts, dict):
            failed = {"ended": f"failed: {facts.get('error')}"} if name == "error.json" else {}
            return json_value(facts) if name == "finished.json" else failed
    return None


def completions_text(line: TraceLine) -> str:
    """The completions of a group in lower case, one after the other."""
    rollouts = [rollout for rollout in line["rollouts"] if isinstance(rollout, dict)]
    texts = [rollout["tokens"] if isinstance(rollout.get("tokens"), list) else [] for rollout in rollouts]
    return "\n".join("".join(map(str, tokens)) for tokens in texts).lower()


def _is_number(value: float) -> bool:
    """Whether a double can hold it: not nan, infinity, or an integer of 400 digits."""
    return abs(value) <= sys.float_info.max


def _text(value: Any) -> str | None:
    """Text as it is; anything else as JSON."""
    return value if value is None or isinstance(value, str) else json_text(value)


def _number(value: Any) -> float | None:
    known = isinstance(value, float | int) and not isinstance(value, bool)
    return value if known and _is_number(value) else None


def _warning(row: TraceLine) -> TraceLine:
    """A warning with the types that the page expects: text for name and message, else a number or None."""
    row = {"message" if key == "told" else key: value for key, value in row.items()}  # the name in 0.1
    return {key: _text(value) if key in ("name", "message") else _number(value) for key, value in row.items()}


def _group_summary(line: TraceLine) -> TraceLine | None:
    """A group as the index lists it; None for a line that is not a group."""
    name, rollouts = line.get("id"), line.get("rollouts")
    if not isinstance(name, str) or not ID.fullmatch(name) or not isinstance(rollouts, list):
        return None
    rollouts, step = [rollout for rollout in rollouts if isinstance(rollout, dict)], line.get("step")
    return {
        "id": name,
        "kind": line.get("kind"),
        "step": step if isinstance(step, int) and _is_number(step) else None,
        "prompt": str(json_value(line.get("prompt", "")))[:PROMPT],
        "rewards": [_number(rollout.get("reward")) for rollout in rollouts],
        "solved": [rollout.get("solved") for rollout in rollouts],
    }
