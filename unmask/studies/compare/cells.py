"""The cells of a comparison: a method with plug-ins and options, its configuration, and the files of its outcome.

A cell is written as on the command line: `agrpo`, `diffu_grpo+daca+dispo`, `agrpo:draws=2`, `my.py:halves:low=0.1`,
`wd1:inner_steps=4+sml:strata=8`. A colon precedes an option of the method or plug-in, or any key of the configuration.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from unmask.config import DEMO, Config, read_config
from unmask.config.keys import with_old_keys
from unmask.config.method_names import MethodSpec
from unmask.core.words import WORD, is_own, section_of
from unmask.methods import BASES, PLUGINS
from unmask.models.load import outline
from unmask.studies.cost.counting import planned_passes, prompt_tokens
from unmask.training.run.folder import checkpoint_of
from unmask.training.setup import decoding_of
from unmask.util.files import write_whole
from unmask.util.metering import WITH_GRADIENT

FIXED = {"method": "--methods", "with": "--with", "seed": "--seeds"}
"""Configuration keys that the grid sets, with their options."""


def method_grid(methods: Sequence[str], plugins: Sequence[str]) -> list[MethodSpec]:
    """Every method with every set of plug-ins; `none` is the empty set. A method can have plug-ins of its own."""
    sets = [() if names == "none" else tuple(names.split("+")) for names in plugins]
    lines = [method.split("+") for method in methods]
    grid = [MethodSpec(base, (*own, *names)) for base, *own in lines for names in sets]
    labels = [spec.label for spec in grid]
    if not grid or not all(all(spec.sections) for spec in grid):
        raise ValueError("--methods and --with are names with commas between them, such as diffu_grpo,agrpo")
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"{twice} is in the grid twice; name it once, and two functions differently")
    return grid


def own_sections(grid: Iterable[MethodSpec]) -> frozenset[str]:
    """Option sections of your own methods and plug-ins (FILE.py:NAME)."""
    return frozenset(section_of(word) for spec in grid for word in spec.words if is_own(word))


def reference_of(spec: MethodSpec, grid: Iterable[MethodSpec]) -> MethodSpec | None:
    """What a method is compared with: its base with the same options, else without; None if the grid has neither."""
    for other in (MethodSpec(spec.base), MethodSpec(spec.words[0])):
        if other in grid and other != spec:
            return other
    return None


@dataclass(frozen=True)
class SharedSettings:
    """The settings that all cells share."""

    path: Path | None = None
    """A configuration file. Default: the demo's."""
    overrides: tuple[str, ...] = ()
    task: str | None = None
    device: str | None = None
    own: frozenset[str] = frozenset()
    """`own_sections` of the grid."""

    def check(self, grid: Sequence[MethodSpec]) -> None:
        """ValueError for a key that the grid sets, and for options of a method that no cell has."""
        used = {section for spec in grid for section in spec.sections}
        for text in (*self.overrides, *(text for spec in grid for text in spec.overrides())):
            key = text.partition("=")[0]
            if key in FIXED:
                raise ValueError(f"{key}: the grid sets it; use {FIXED[key]}")
            if (name := key.split(".")[0]) in {*BASES, *PLUGINS} - used:
                raise ValueError(f"{key}: no cell of the grid has {name}; name it in --methods or --with")

    def config(self, spec: MethodSpec, *more: str) -> Config:
        """The configuration of a method, `more` overrides on top."""
        foreign = {*BASES, *PLUGINS, *self.own} - set(spec.sections)
        common = [text for text in self.overrides if text.partition("=")[0].split(".")[0] not in foreign]
        base, *plugins = spec.words
        named: dict[str, Any] = {"task": self.task, "device": self.device, "method": base, "with": plugins}
        try:
            return read_config(self.path or DEMO, [*common, *spec.overrides(), *more], **named)
        except ValueError as error:
            raise ValueError(f"{spec.label}: {str(error).removeprefix(f'{base}: ')}") from None


@dataclass(frozen=True)
class CellCost:
    """Forward passes of one update and of one evaluation, counted before the run. An upper bound: completions may end
    early, and groups may be idle."""

    update: float
    evaluation: float


def cost_of(config: Config) -> CellCost:
    """The cost of a configuration, counted without its weights (cost/counting.py)."""
    model, task = outline(checkpoint_of(config.model), config.causal_block), config.build_task()
    decoding, (prompt, _) = decoding_of(config, task).for_policy(model), prompt_tokens(config, task, model)
    passes = planned_passes(config, decoding, model, prompt)
    width = prompt + decoding.length
    forwards = {
        kind: (WITH_GRADIENT if kind == "update, gradient" else 1) * tally.columns / width
        for kind, tally in passes.items()
    }
    evaluation = sum(value for kind, value in forwards.items() if kind.startswith("evaluation"))
    return CellCost(sum(forwards.values()) - evaluation, evaluation)


def key_of(data: Mapping[str, Any]) -> str:
    """A hash of a resolved configuration and of the files that it names. It uses the keys of 0.1, so that cells of
    earlier versions are not trained again."""
    sections = [section for section in data.values() if isinstance(section, dict)]
    values = [value for section in sections for value in section.values() if isinstance(value, str) and value]
    words = [WORD.fullmatch(word) for word in (data.get("method", ""), *data.get("with", ()))]
    values += [word["file"] for word in words if word is not None]
    files = sorted({value for value in values if Path(value).is_file()})
    hashes = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in files}
    return hashlib.sha256(json.dumps([with_old_keys(data), hashes], sort_keys=True).encode()).hexdigest()[:12]


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all, even if the process is killed or the disk is full."""
    write_whole(path, json.dumps(data, indent=1) + "\n")


class CurvePoint(BaseModel):
    """An evaluation in result.json: the cost so far and the solve rates. pass@k are extra fields."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)
    updates: float
    forwards: float
    seconds: float
    sampled: float
    greedy: float


class CellScores(BaseModel):
    """What the table is computed from."""

    curve: Annotated[list[CurvePoint], Field(min_length=1)]
    versions: dict[str, Any]


class CellOutcome(CellScores):
    """result.json."""

    seconds_per_update: float
    tail: dict[str, Any]
    wall: float
    threads: int


class CellFailure(BaseModel):
    """error.json."""

    error: str


def read_json(path: Path, shape: type[BaseModel]) -> dict[str, Any] | None:
    """The content of a JSON file; None if the file is truncated or has another shape."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        shape.model_validate(data, strict=True)
    except (OSError, ValueError, RecursionError):
        return None
    return data


def outcome_of(folder: Path) -> dict[str, Any]:
    """The result of a cell, or {"error": reason}; empty if it has not ended, or if its file is damaged."""
    for name, shape in (("result.json", CellOutcome), ("error.json", CellFailure)):
        if (path := folder / name).is_file():
            if (outcome := read_json(path, shape)) is not None:
                return outcome
            message = f"{path} is truncated or damaged: its run counts as not finished"
            warnings.warn(message, stacklevel=1)  # one place, so that the warning is shown once
    return {}
