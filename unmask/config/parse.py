"""From YAML and `key=value` overrides to a checked configuration.

Keys, types, names and files are checked before torch is imported, so that a typo is reported at once.
"""

import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from unmask.config.arguments import build_task, check_known
from unmask.config.key_checks import check_keys
from unmask.config.keys import RESOLVED, apply_overrides, validate, with_current_keys
from unmask.config.published import check_by_schema, published_names
from unmask.config.recipes import check_command, config_path
from unmask.config.schema import Config, as_list
from unmask.core.words import file_of, section_of
from unmask.rollout.presets import PRESETS, Preset, preset_of_family
from unmask.tasks import TASKS
from unmask.tasks.own import with_own_task
from unmask.util.parsing import read_keys, short_repr
from unmask.util.user_file import run_file


def read_config(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = (), **named: Any
) -> Config:
    """The configuration of a file, a recipe (`recipe:NAME`), data, or nothing; then `key=value` overrides, then keyword
    arguments.

    Raises ValueError with one sentence that names the wrong key.
    """
    return check_with_torch(read_without_torch(path, overrides, **named))


def read_without_torch(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = (), **named: Any
) -> Config:
    """As `read_config`, without the checks that need torch, whose import takes a second: call `check_with_torch`."""
    if isinstance(path, str | Path):
        check_command(config_path(path), "train")
        content = read_keys(config_path(path))
        content = _with_meaning_of_0_2(content) if RESOLVED in content else content  # a run wrote it
    else:
        content = deepcopy(dict(path or {}))
    data = with_current_keys(content)
    sections, names = set(data), _section_names(data)
    replaced = apply_overrides(data, overrides)
    if (
        "rollout.preset" in replaced and data["rollout"]["preset"] is not None
    ):  # it replaces these keys of the file, not those of the overrides
        dropped = {key for key in Preset().settings() if f"rollout.{key}" not in replaced}
        data["rollout"] = {key: value for key, value in data["rollout"].items() if key not in dropped}
    sections -= {key.split(".")[0] for key in replaced}
    chosen = {key: value for key, value in named.items() if value is not None}
    data.update(with_current_keys(chosen))
    if (chosen.keys() | replaced) & {"task", "method", "with"}:
        # Drop the file's options of a method that was replaced. Options given with the replacement are checked.
        used = [data.get("task"), *map(section_of, _method_words(data))]
        data = {key: value for key, value in data.items() if key in used or key not in sections & names}
    return _parse_without_torch(data)


def read_run_config(folder: Path, overrides: Iterable[str] = (), checked: bool = True) -> Config:
    """The configuration of a run; without `checked` as `read_without_torch` has it. Keys of 0.1 are renamed without a
    warning: the user did not write this file."""
    data = _with_meaning_of_0_2(read_keys(folder / "config.yaml"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return (read_config if checked else read_without_torch)(data, overrides)


def _with_meaning_of_0_2(data: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run, with the options that SML had before 0.3.0 if it is older: both signs, and the larger
    KL of base and plug-in. On AGRPO, where daca is DPS alone, the options of SML had no effect."""
    method = data.get("method", "")
    base = data.get(section_of(method), {})
    base_kl = base.get("kl", 0.0) if base.get("baseline", True) else 0.0  # reinforce_pp has it on the reward
    for name in ("sml", "daca"):
        section = data.get(name)
        if isinstance(section, dict) and "negative" not in section:
            if method == "agrpo":
                data[name] = {key: section[key] for key in section if key not in ("strata", "layout", "anchor", "kl")}
            else:
                negative = 0.0 if base.get("advantage") in ("correct_only", "every_sample") else 1.0
                data[name] = {**section, "negative": negative, "kl": max(base_kl, section.get("kl", 0.0))}
    return data


def parse_config(data: Mapping[str, Any]) -> Config:
    """Check a configuration given as plain data, down to the method's probes on a blank canvas."""
    return check_with_torch(_parse_without_torch(data))


def check_with_torch(config: Config) -> Config:
    """The same configuration, with everything checked that needs torch but no model."""
    from unmask.config.checks import check_combination, check_own_methods

    check_own_methods(config)
    check_combination(config)
    files = [*map(file_of, (config.method, *config.plugins)), config.options.get("own", {}).get("file")]
    config._user_files = {file: run_file(Path(file)).digest for file in files if file}
    return config


def _parse_without_torch(data: Mapping[str, Any]) -> Config:
    names, data = _section_names(data), _with_preset(with_own_task(with_current_keys(data)))
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
    check_by_schema(config)
    check_known("task", config.task, TASKS)
    _check_sections(config)
    check_keys(config, build_task(config))
    return config


def _with_preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of rollout.preset written out, if the section does not have them."""
    section = data.get("rollout")
    name = section.get("preset") if isinstance(section, dict) else None
    if name == "auto":
        from unmask.models.load import family_name

        try:
            name = preset_of_family(family_name(data.get("model", Config.model_fields["model"].default)))
        except ValueError as error:
            raise ValueError(f"rollout.preset: {error}") from None
    if not isinstance(name, str) or name not in PRESETS:
        return dict(data)
    assert isinstance(section, dict)
    return {**data, "rollout": {**PRESETS[name].settings(), **section, "preset": name}}


def without_method(data: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without its method, plug-ins and their options, for commands that do not train."""
    dropped = {"method", "with", *_section_names(data)} - {*TASKS}
    return {key: value for key, value in data.items() if key not in dropped}


def _method_words(data: Mapping[str, Any]) -> list[Any]:
    """The names of the method and the plug-ins in a configuration; functions in files too."""
    plugins = as_list(data.get("with"))
    return [data.get("method"), *(plugins if isinstance(plugins, list | tuple) else [])]


def _section_names(data: Mapping[str, Any]) -> set[str]:
    """Names that a section of options may have."""
    own = [section_of(word) for word in _method_words(data) if section_of(word) != word]
    return {*published_names("method"), *published_names("with"), *TASKS, *own}


def _check_sections(config: Config) -> None:
    used = {config.task, *map(section_of, (config.method, *config.plugins))}
    for name in config.options:
        if name not in used:
            flag = "--with" if name in published_names("with") else "--task" if name in TASKS else "--method"
            raise ValueError(f"{name}: has options, but is not used; add {flag} {name}, or leave them out")
