"""From YAML and `key=value` overrides to a checked configuration."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from unmask.config.checks import check_combination
from unmask.config.keys import apply_overrides, validate, with_current_keys
from unmask.config.options import CHOICES, check_known, factories, method_words, section_names
from unmask.config.schema import Config
from unmask.core.order import ORDERS
from unmask.methods import BASES, PLUGINS
from unmask.methods.own import file_of, own_method, section_of
from unmask.tasks import TASKS
from unmask.tasks.own import with_own_task
from unmask.util.parsing import read_keys, short_repr
from unmask.util.user_file import run_file


def read_config(path: Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = (), **named: Any) -> Config:
    """The configuration of a file (or of data, or of nothing), then `key=value` overrides, then keyword arguments.

    Raises ValueError with one sentence that names the wrong key.
    """
    data = with_current_keys(read_keys(path) if isinstance(path, Path) else deepcopy(dict(path or {})))
    sections, names = set(data), section_names(data)
    replaced = apply_overrides(data, overrides)
    sections -= {key.split(".")[0] for key in replaced}
    chosen = {key: value for key, value in named.items() if value is not None}
    data.update(with_current_keys(chosen))
    if (chosen.keys() | replaced) & {"task", "method", "with"}:
        # Drop the file's options of a method that was replaced. Options given with the replacement are checked.
        used = [data.get("task"), *map(section_of, method_words(data))]
        data = {key: value for key, value in data.items() if key in used or key not in sections & names}
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> Config:
    """Check a configuration given as plain data, down to the method's probes on a blank canvas."""
    names, data = section_names(data), with_own_task(with_current_keys(data))
    if "options" in data:
        raise ValueError("options: unknown key; write a method's options as METHOD.key=value")
    options = {key: value for key, value in data.items() if key in names}
    rest = {key: value for key, value in data.items() if key not in names}
    for name, section in options.items():
        if not isinstance(section, dict):
            raise ValueError(f"{name}: expected options such as {name}.key=value, got {short_repr(section)}")
        if strange := next((key for key in section if not isinstance(key, str)), None):
            raise ValueError(f"{name}.{strange}: keys must be text")
    config = validate(Config, {**rest, "options": options})
    check_known("rollout.order", config.rollout.order, ORDERS)
    check_known("task", config.task, TASKS)
    _check_names(config)
    _check_sections(config)
    check_combination(config)
    words = [file_of(word) for word in (config.method, *config.plugins)]
    files = [*words, config.options.get("own", {}).get("file")]
    config._user_files = {file: run_file(Path(file)).digest for file in files if file}
    return config


def without_method(data: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without its method, plug-ins and their options, for commands that do not train."""
    dropped = {"method", "with", *section_names(data)} - {*TASKS}
    return {key: value for key, value in data.items() if key not in dropped}


def _check_names(config: Config) -> None:
    """ValueError for an unknown method, or a function whose name is taken."""
    taken = dict.fromkeys([*BASES, *PLUGINS, *TASKS, *Config.model_fields, "with"], "")
    for key, word in [("method", config.method), *(("with", word) for word in config.plugins)]:
        if own_method(key, word, CHOICES) is None:
            check_known(key, word, BASES if key == "method" else PLUGINS)
        elif taken.setdefault(name := section_of(word), word) != word:
            raise ValueError(f"{key}: {word}: {name} is the name of something else; rename the function")


def _check_sections(config: Config) -> None:
    used = factories(config)
    for name in config.options:
        if name not in used:
            flag = "--with" if name in PLUGINS else "--method" if name in BASES else "--task"
            raise ValueError(f"{name}: has options, but is not used; add {flag} {name}")
