"""Strict configuration: YAML and key=value overrides in, frozen models out. Unknown keys are errors.

    model: tiny
    task: sudoku
    method: diffu_grpo
    with: [daca]
    daca: {strata: 8}          # options live in a section named after the thing they turn

On the command line the same is `--task sudoku --method diffu_grpo --with daca daca.strata=8`. An option of a method,
plug-in or task is a keyword argument of its Python function, checked against that function's signature.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, PrivateAttr, TypeAdapter, ValidationError

from unmask.config.renamed_keys import current_key, with_current_keys
from unmask.config.sections import EvalConfig, OptimizerConfig, RolloutConfig
from unmask.core.advantage import ADVANTAGES
from unmask.core.method import Method
from unmask.core.objective import KLS, NORMALISERS
from unmask.core.order import ORDERS, score_threshold
from unmask.core.schedule import SCHEDULES, one_by_one
from unmask.methods import BASES, PLUGINS
from unmask.methods.agrpo import STEP_LAWS
from unmask.methods.daca import LAYOUTS, SCOPES, VARIANTS
from unmask.methods.own import file_of, own_method, section_of
from unmask.models.lora import LoraOptions
from unmask.tasks import TASKS, Task
from unmask.tasks.own import with_own_task
from unmask.tasks.scoring import RewardConfig
from unmask.tasks.support.split import with_validation_split
from unmask.util.parsing import assign, check_not_bool, parse_yaml, pydantic_message, read_keys, short_repr, suggestion
from unmask.util.strict_model import Strict
from unmask.util.user_file import run_file

DEMO = Path(__file__).parent / "demo.yaml"

CHOICES: dict[str, Mapping[str, Any]] = {
    "advantage": ADVANTAGES,
    "normaliser": NORMALISERS,
    "kl_kind": KLS,
    "layout": LAYOUTS,
    "variant": VARIANTS,
    "scope": SCOPES,
    "steps": STEP_LAWS,
}
"""Options that name a formula, by the name of the argument."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Config(Strict):
    model: str = Field("tiny", min_length=1)
    """tiny, a folder with a checkpoint or an adapter, or an id on the hub."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The type of the weights; as the checkpoint says if not given."""
    full: bool | None = None
    """Train all weights instead of a low-rank adapter; if not given, the embedded model's are, others' are not."""
    lora: LoraOptions = LoraOptions()
    """The low-rank adapter."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the model's layers: seconds to begin with, then faster on a large GPU."""
    task: str = "sudoku"
    """What to learn (unmask tasks), or the Python file of a task of your own."""
    method: str = "diffu_grpo"
    """The base method (unmask methods), or FILE.py:NAME, a function of your own."""
    plugins: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field((), alias="with")
    """Plug-ins, applied in this order."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of prompts, rollouts and probes."""
    updates: int = Field(80, ge=1, lt=2**24)
    """Batches of rollouts, each followed by `inner_steps` optimiser steps."""
    prompts: int = Field(12, ge=1, lt=2**20)
    """Prompts in a batch."""
    group: int = Field(8, ge=2, lt=2**16)
    """Rollouts of each prompt."""
    inner_steps: int = Field(1, ge=1)
    """Optimiser steps on each batch of rollouts (mu)."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Masked states in one forward pass of an update, which bounds its memory; gradients do not depend on it. 512 for a
    small model, 8 for a large one if not given; halved when memory runs out."""
    idle_groups: Literal["keep", "skip", "resample"] = "keep"
    """Groups whose rewards are all alike: kept, left out, or replaced by other prompts."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU where there is one, but the embedded model stays on the CPU."""
    save_every: int = Field(50, ge=0)
    """Updates between checkpoints, from which a run that is cut off goes on; 0 saves the last only."""
    track: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], BeforeValidator(_listed)] = ()
    """Where metrics go beside metrics.jsonl."""
    trace_every: int = Field(10, ge=0)
    """Updates between groups of rollouts that are written down for `unmask view`, the first update's among them; with
    some problems of every evaluation. 0: none."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during training."""
    reward: RewardConfig = RewardConfig()
    """What a reward that fails does."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude=True)
    """Option sections by the name of a method, plug-in or task."""
    _user_files: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def user_files(self) -> dict[str, str]:
        """The user's own Python files by name, with the sha256 of what was run when the configuration was read."""
        return self._user_files

    def dump(self) -> dict[str, Any]:
        """The resolved configuration as it would stand in a YAML file, defaults written out."""
        data = self.model_dump(mode="json", by_alias=True)
        for name, factory in self._factories().items():
            data[name] = _spelled(factory, _arguments(factory, name, self.options))
        return data

    def _factories(self) -> dict[str, Callable[..., Any]]:
        return {self.task: TASKS[self.task], section_of(self.method): _named("method", self.method), **self._plugged()}

    def _plugged(self) -> dict[str, Callable[..., Method]]:
        return {section_of(word): _named("with", word) for word in self.plugins}

    def build_task(self) -> Task:
        task: Task = _built(TASKS[self.task], self.task, self.options)
        return with_validation_split(task) if self.eval.split == "validation" else task

    def build_method(self) -> Method:
        base = _built(_named("method", self.method), section_of(self.method), self.options)
        return reduce(lambda m, plugin: _built(plugin[1], plugin[0], self.options, m), self._plugged().items(), base)


def read_config(path: Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = (), **named: Any) -> Config:
    """The configuration of a file (or of data, or of nothing), then `key=value` overrides, then keyword arguments.

    Raises ValueError with one sentence that names the key at fault.
    """
    data = with_current_keys(read_keys(path) if isinstance(path, Path) else deepcopy(dict(path or {})))
    sections, catalogue, replaced = set(data), _catalogue(data), set()
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(f"{override!r} is not of the form key=value")
        key = current_key(key)
        assign(data, key, parse_yaml(value, key))
        sections.discard(key.split(".")[0])
        replaced.add(key)
    chosen = {key: value for key, value in named.items() if value is not None}
    data.update(with_current_keys(chosen))
    if (chosen.keys() | replaced) & {"task", "method", "with"}:
        # A file may hold options of what has just been replaced; options set beside the replacement stay and count.
        used = [data.get("task"), *map(section_of, _words(data))]
        data = {key: value for key, value in data.items() if key in used or key not in sections & catalogue}
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> Config:
    """Check a configuration given as plain data, down to a rehearsal of the method's probes."""
    catalogue, data = _catalogue(data), with_own_task(with_current_keys(data))
    for key in data:
        if not isinstance(key, str):
            raise ValueError(f"{key!r}: keys must be text")
    if "options" in data:
        raise ValueError("options: unknown key; write a method's options as METHOD.key=value")
    options = {key: value for key, value in data.items() if key in catalogue}
    rest = {key: value for key, value in data.items() if key not in catalogue}
    for name, section in options.items():
        if not isinstance(section, dict):
            raise ValueError(f"{name}: expected options such as {name}.key=value, got {short_repr(section)}")
        if strange := next((key for key in section if not isinstance(key, str)), None):
            raise ValueError(f"{name}.{strange}: keys must be text")
    try:
        config = Config(**rest, options=options)
    except ValidationError as error:
        raise ValueError(_sentence(error)) from None
    _known("rollout.order", config.rollout.order, ORDERS)
    _known("task", config.task, TASKS)
    _check_names(config)
    _check_sections(config)
    _check_combination(config)
    words = [file_of(word) for word in (config.method, *config.plugins)]
    files = [*words, config.options.get("own", {}).get("file")]
    config._user_files = {file: run_file(Path(file)).digest for file in files if file}
    return config


def without_method(data: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without its method, plug-ins and their options, for what does not train."""
    dropped = {"method", "with", *_catalogue(data)} - {*TASKS}
    return {key: value for key, value in data.items() if key not in dropped}


def _words(data: Mapping[str, Any]) -> list[Any]:
    """What a configuration says of its method: names, or functions in files."""
    plugins = _listed(data.get("with"))
    return [data.get("method"), *(plugins if isinstance(plugins, list | tuple) else [])]


def _catalogue(data: Mapping[str, Any]) -> set[str]:
    """What may have a section of options."""
    return {*BASES, *PLUGINS, *TASKS, *(section_of(word) for word in _words(data) if section_of(word) != word)}


def _named(key: str, word: str) -> Callable[..., Method]:
    return own_method(key, word, CHOICES) or {"method": BASES, "with": PLUGINS}[key][word]


def _check_names(config: Config) -> None:
    """Methods by name are there; functions in files can be run, and have names that mean nothing else."""
    taken = dict.fromkeys([*BASES, *PLUGINS, *TASKS, *Config.model_fields, "with"], "")
    for key, word in [("method", config.method), *(("with", word) for word in config.plugins)]:
        if own_method(key, word, CHOICES) is None:
            _known(key, word, BASES if key == "method" else PLUGINS)
        elif taken.setdefault(name := section_of(word), word) != word:
            raise ValueError(f"{key}: {word}: {name} has a meaning already; give the function another name")


def _known(key: str, name: str, catalogue: Mapping[str, Any]) -> None:
    if name not in catalogue:
        raise ValueError(f"{key}: there is no {name!r}; {suggestion(name, catalogue)}")


def _sentence(error: ValidationError) -> str:
    """The first problem pydantic found, in one line that names the key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if "[" not in str(part))  # but pydantic's own words
    if first["type"] == "extra_forbidden":
        parent: Any = Config if len(first["loc"]) == 1 else Config.model_fields[str(first["loc"][0])].annotation
        names = [field.alias or name for name, field in parent.model_fields.items() if name != "options"]
        for section in ("rollout", "optimizer", "eval", "lora"):
            inner: Any = Config.model_fields[section].annotation
            if len(first["loc"]) == 1 and key in inner.model_fields:
                return f"{key}: unknown key; did you mean {section}.{key}?"
        return f"{key}: unknown key; {suggestion(str(first['loc'][-1]), names)}"
    return f"{key}: {pydantic_message(first)}, got {short_repr(first['input'])}"


def _check_sections(config: Config) -> None:
    used = config._factories()
    for name in config.options:
        if name not in used:
            flag = "--with" if name in PLUGINS else "--method" if name in BASES else "--task"
            raise ValueError(f"{name}: has options, but is not used; add {flag} {name}")


def _check_combination(config: Config) -> None:
    """What no single key shows. The method is rehearsed on a blank canvas, so that a bad option fails now."""
    from unmask.config.probe_check import rehearse

    check_device(device_of(config))
    if len(set(config.plugins)) < len(config.plugins):
        raise ValueError("with: a plug-in is named twice")
    if len(set(config.track)) < len(config.track):
        raise ValueError("track: a tracker is named twice")
    if "daca" in config.plugins and (both := {"sml", "dps"} & set(config.plugins)):
        raise ValueError(f"with: daca is sml and dps together; leave out {' and '.join(sorted(both))}")
    task = config.build_task()
    length, steps, block = rollout_shape(config, task)
    if length < task.length and not task.text:
        raise ValueError(f"rollout.length: an answer of {config.task} takes {task.length} positions, not {length}")
    if config.optimizer.warmup > config.updates:
        raise ValueError(f"optimizer.warmup: {config.optimizer.warmup} is more than the {config.updates} updates")
    if not config.eval.every and (config.eval.early_stop or config.eval.collapse):
        raise ValueError("eval.every: how often to evaluate must be given where a run may end early")
    try:
        if config.rollout.threshold is None:
            SCHEDULES[config.rollout.schedule](length, steps, block)
        else:
            one_by_one(length, steps, block)
            score_threshold(ORDERS[config.rollout.order], config.rollout.threshold)
    except ValueError as error:
        raise ValueError(f"rollout: {error}") from None
    _check_cache(config)
    method = config.build_method()
    if method.order is not None and ORDERS[config.rollout.order] is not method.order:
        raise ValueError(
            f"rollout.order: {method.name} is set to score the choice of positions of {method.order.__name__}, "
            f"not of {config.rollout.order}"
        )
    if method.order is not None and config.rollout.correction:
        raise ValueError(f"rollout.correction: {method.name} scores the choice of positions, which has no weight")
    if method.order is not None and config.rollout.threshold is not None:
        raise ValueError(f"rollout.threshold: {method.name} scores the choice of a fixed number of positions")
    try:
        rehearse(method, length, steps, block)
    except ValueError as error:
        raise ValueError(f"{method.name}: {error}") from None


def _check_cache(config: Config) -> None:
    if config.rollout.cache == "none" and config.rollout.correction:
        raise ValueError("rollout.correction: without a cache there is nothing to correct; set rollout.cache")
    if config.rollout.cache == "none" and config.rollout.refresh != 1:
        raise ValueError("rollout.refresh: without a cache there is nothing to renew; set rollout.cache")
    if 0 < config.rollout.correction < 1:
        raise ValueError("rollout.correction: the limit of weights around 1 must be at least 1, or 0 for none")


def check_device(name: str) -> None:
    """ValueError if nothing can be computed on it."""
    try:
        device = torch.device(name)
        if device.type == "cuda" and torch.cuda.device_count() <= (device.index or 0):  # without a context on it
            raise RuntimeError(f"there are {torch.cuda.device_count()} GPUs")
        if device.type != "cuda":
            torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        pydantic_message = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(f"device: {name!r} cannot be used here: {pydantic_message}") from None


def device_of(config: Config) -> str:
    """The device that `auto` means here."""
    if config.device != "auto":
        return config.device
    return "cuda" if config.model != "tiny" and torch.cuda.is_available() else "cpu"


def rollout_shape(config: Config, task: Task) -> tuple[int, int, int]:
    """(length, steps, block), the defaults filled in."""
    length = config.rollout.length or task.length
    if config.rollout.threshold is not None:
        return length, length, config.rollout.block or length
    return length, config.rollout.steps or max(1, length // 2), config.rollout.block or length


def _built(factory: Callable[..., Any], name: str, options: Mapping[str, dict[str, Any]], *args: Any) -> Any:
    """Call a factory with the options of its section."""
    arguments = _arguments(factory, name, options)
    try:
        return factory(*args, **arguments)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith((f"{name}:", f"{name}.")) else f"{name}: {message}") from None


def _arguments(factory: Callable[..., Any], name: str, options: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The options of a section, names of formulas looked up and types checked."""
    parameters = _parameters(factory)
    arguments = {}
    for key, value in options.get(name, {}).items():
        if key not in parameters:
            raise ValueError(f"{name}.{key}: unknown option; {suggestion(key, parameters)}")
        if key in CHOICES:
            _known(f"{name}.{key}", value if isinstance(value, str) else short_repr(value), CHOICES[key])
            arguments[key] = CHOICES[key][value]
            continue
        try:
            check_not_bool(value, parameters[key].annotation)
            arguments[key] = TypeAdapter(parameters[key].annotation).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name}.{key}: {pydantic_message(error.errors()[0])}, got {short_repr(value)}") from None
        except ValueError as error:
            raise ValueError(f"{name}.{key}: {error}, got {short_repr(value)}") from None
    return arguments


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword options of a factory: all its parameters but a plug-in's base."""
    return {name: p for name, p in inspect.signature(factory).parameters.items() if name != "base"}


def _spelled(factory: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a factory with their values, formulas by name."""
    names = {id(f): name for choice in CHOICES.values() for name, f in choice.items()}
    values = {key: options.get(key, p.default) for key, p in _parameters(factory).items()}
    plain = {key: names.get(id(value), value) for key, value in values.items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def option_help(factory: Callable[..., Any]) -> dict[str, Any]:
    """Options with their defaults, for `unmask methods --json`."""
    return _spelled(factory, {})
