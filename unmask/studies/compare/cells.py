"""The cells of a comparison: which method with which plug-ins and options, and what configuration that is.

A cell is written as on the command line: `agrpo`, `diffu_grpo+daca+dispo`, `agrpo:draws=2`, `my.py:halves:low=0.1`,
`wd1:inner_steps=4+sml:strata=8`. After a colon stands an option of the method or plug-in, or else any key of the
configuration.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from unmask.config import DEMO, Config, read_config
from unmask.config.defaults import micro_batch_sizes
from unmask.config.keys import with_old_keys
from unmask.config.options import CHOICES, option_defaults
from unmask.methods import BASES, PLUGINS
from unmask.methods.own import WORD, is_own, label_of, own_method, piece_of, section_of
from unmask.models.load import outline
from unmask.studies.cost.counting import counted, prompt_tokens
from unmask.studies.cost.estimate import network_of
from unmask.training.run.folder import checkpoint_of
from unmask.training.setup import decoding_of
from unmask.util.files import write_whole
from unmask.util.metering import WITH_GRADIENT

BUDGETS = ("updates", "forwards", "seconds")
FIXED = {"method": "--methods", "with": "--with", "seed": "--seeds"}
"""Keys of a configuration that the grid sets."""


@dataclass(frozen=True)
class Budget:
    """What every cell may spend: updates, forward passes or seconds of training."""

    kind: str
    amount: float

    def __str__(self) -> str:
        return f"{self.amount:,.10g} {self.kind}"


def budget_of(text: str) -> Budget:
    """forwards=2e5 and the like."""
    kind, _, amount = text.partition("=")
    try:
        value = float(amount)
    except ValueError:
        value = 0.0
    whole = kind == "seconds" or value == int(value if abs(value) < 1e18 else 0)
    if kind not in BUDGETS or not 0 < value < 1e18 or not whole:
        raise ValueError(f"--budget: {text!r} is not updates=N, forwards=N or seconds=S with a number above 0")
    return Budget(kind, value)


@dataclass(frozen=True)
class Variant:
    """A method and its plug-ins, each with the options it is given."""

    base: str
    plugins: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return "+".join(map(label_of, (self.base, *self.plugins)))

    @property
    def words(self) -> list[str]:
        """As a training run takes them: names, and functions in files."""
        return [piece_of(part)[0] for part in (self.base, *self.plugins)]

    @property
    def names(self) -> list[str]:
        """What their options are called."""
        return [section_of(word) for word in self.words]

    def overrides(self) -> Iterator[str]:
        """What its options are in the configuration."""
        catalogue = {**BASES, **PLUGINS}
        for key, part in [("method", self.base), *(("with", part) for part in self.plugins)]:
            word, changes = piece_of(part)
            factory = own_method(key, word, CHOICES) or catalogue.get(word)
            own = option_defaults(factory) if factory is not None else {}
            for change in changes:
                yield f"{section_of(word)}.{change}" if change.partition("=")[0] in own else change


def variants(methods: Sequence[str], plugins: Sequence[str]) -> list[Variant]:
    """Every method with every set of plug-ins; `none` is the empty set."""
    found = [
        Variant(method, () if names == "none" else tuple(names.split("+"))) for method in methods for names in plugins
    ]
    labels = [variant.label for variant in found]
    if not found or not all(all(variant.names) for variant in found):
        raise ValueError("--methods and --with are names with commas between them, such as diffu_grpo,agrpo")
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"{twice} is in the grid twice; name it once, and two functions differently")
    return found


def own_sections(grid: Iterable[Variant]) -> frozenset[str]:
    return frozenset(section_of(word) for variant in grid for word in variant.words if is_own(word))


def reference_of(variant: Variant, grid: Iterable[Variant]) -> Variant | None:
    """What a variant is compared with: its base as it is there, or without options; None if the grid has neither."""
    for other in (Variant(variant.base), Variant(variant.words[0])):
        if other in grid and other != variant:
            return other
    return None


@dataclass(frozen=True)
class Settings:
    """What all cells share."""

    path: Path | None = None
    overrides: tuple[str, ...] = ()
    task: str | None = None
    device: str | None = None
    own: frozenset[str] = frozenset()
    """What the options of functions in files are called, in all of the grid."""

    def check(self, grid: Sequence[Variant]) -> None:
        """ValueError for a key that the grid sets, and for options of what is in no cell."""
        used = {name for variant in grid for name in variant.names}
        for text in (*self.overrides, *(text for variant in grid for text in variant.overrides())):
            key = text.partition("=")[0]
            if key in FIXED:
                raise ValueError(f"{key}: the grid sets it; use {FIXED[key]}")
            if (name := key.split(".")[0]) in {*BASES, *PLUGINS} - used:
                raise ValueError(f"{key}: no cell of the grid has {name}; name it in --methods or --with")

    def config(self, variant: Variant, *more: str) -> Config:
        """The configuration of a variant, `more` overrides on top."""
        foreign = {*BASES, *PLUGINS, *self.own} - set(variant.names)
        common = [text for text in self.overrides if text.partition("=")[0].split(".")[0] not in foreign]
        base, *plugins = variant.words
        try:
            named: dict[str, Any] = {"task": self.task, "device": self.device, "method": base, "with": plugins}
            return read_config(self.path or DEMO, [*common, *variant.overrides(), *more], **named)
        except ValueError as error:
            raise ValueError(f"{variant.label}: {error}") from None


@dataclass(frozen=True)
class Cost:
    """Forward passes of one update and of one evaluation, counted before there is a run: an upper bound where rows end
    early or groups are idle."""

    update: float
    evaluation: float


def cost_of(config: Config) -> Cost:
    """By sending a stand-in through the real sampler and the real update (counting.py)."""
    found, task = outline(checkpoint_of(config.model)), config.build_task()
    decoding, (prompt, _) = decoding_of(config, task), prompt_tokens(config, task, found)
    network = network_of(config, found)
    sizes = micro_batch_sizes(config, network.parameters + network.adapter)
    passes = counted(config, config.build_method(), decoding, found, prompt, sizes)
    width = prompt + decoding.length
    forwards = {
        kind: (WITH_GRADIENT if kind == "update, gradient" else 1) * tally.columns / width
        for kind, tally in passes.items()
    }
    evaluation = sum(value for kind, value in forwards.items() if kind.startswith("evaluation"))
    return Cost(sum(forwards.values()) - evaluation, evaluation)


def key_of(data: Mapping[str, Any]) -> str:
    """A hash of a resolved configuration, and of the files that its options and its method name. It is computed over
    the key names of 0.1, so that cells which 0.1 has finished are not trained again."""
    sections = [section for section in data.values() if isinstance(section, dict)]
    values = [value for section in sections for value in section.values() if isinstance(value, str) and value]
    words = [WORD.fullmatch(word) for word in (data.get("method", ""), *data.get("with", ()))]
    values += [word["file"] for word in words if word is not None]
    files = sorted({value for value in values if Path(value).is_file()})
    held = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in files}
    return hashlib.sha256(json.dumps([with_old_keys(data), held], sort_keys=True).encode()).hexdigest()[:12]


def write_json(path: Path, data: Any) -> None:
    """JSON that is there entirely or not at all, whenever the process is killed or the disk is full."""
    write_whole(path, json.dumps(data, indent=1) + "\n")


class Point(BaseModel):
    """An evaluation in result.json: what had been spent, and what was solved, pass@k among the rest."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)
    updates: float
    forwards: float
    seconds: float
    sampled: float
    greedy: float


class CellScores(BaseModel):
    """What the table is made of."""

    curve: Annotated[list[Point], Field(min_length=1)]
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


def read_whole(path: Path, shape: type[BaseModel]) -> dict[str, Any] | None:
    """What a file of this shape holds; None for one that is cut, or is something else."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        shape.model_validate(found, strict=True)
    except (OSError, ValueError, RecursionError):
        return None
    return found


def outcome_of(folder: Path) -> dict[str, Any]:
    """What a cell found, or {"error": why not}; nothing where it has not ended, or where its file is damaged."""
    for name, shape in (("result.json", CellOutcome), ("error.json", CellFailure)):
        if (path := folder / name).is_file():
            if (found := read_whole(path, shape)) is not None:
                return found
            told = f"{path} is cut or damaged: its run counts as not finished"
            warnings.warn(told, stacklevel=1)  # of one place, so that it is said once, whoever asks
    return {}
