"""Keys of a configuration (reinforcement learning or fine-tuning): overrides, old names, messages for a wrong key."""

import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from unmask.util.parsing import assign, parse_yaml, pydantic_message, short_repr, suggestion

RENAMED = {
    "inner": "inner_steps",
    "rows": "micro_batch_size",
    "checkpointing": "gradient_checkpointing",
    "rollout.rows": "rollout.micro_batch_size",
    "optimizer.max_norm": "optimizer.max_grad_norm",
    "optimizer.patience": "optimizer.max_skipped_updates",
}
"""Old name -> present name. Old names are accepted until 0.3, with one warning each."""

ADDED = {
    "max_forwards": None,
    "causal_block": None,
    "rollout.preset": None,
    "rollout.append": False,
    "rollout.min_per_step": 1,
    "rollout.merge_adapter": True,
    "rollout.precision": "model",
    "rollout.graphs": None,
    "raft.states": "sml",
}
"""Keys that earlier versions did not have, and the value with which a run is what it was without the key."""

NEW_DEFAULTS = {"rollout.cache": ("auto", "none")}
"""Keys whose default is another one than in earlier versions, and the earlier one, which gives the same run."""

RESOLVED = "resolved"
"""The section of a run's configuration that lists the defaults it filled in, by key."""
FINGERPRINT = "model_fingerprint"
"""An entry of that section: the fingerprint of the weights that the run started from."""

ModelT = TypeVar("ModelT", bound=BaseModel)


def apply_overrides(data: dict[str, Any], overrides: Iterable[str], renamed: Mapping[str, str] = RENAMED) -> set[str]:
    """Write `section.key=value` overrides into a configuration, and return the keys that were set."""
    keys = set[str]()
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(f"{override!r} is not of the form key=value")
        key = current_key(key, renamed)
        assign(data, key, parse_yaml(value, key))
        keys.add(key)
    return keys


def validate(model: type[ModelT], data: Mapping[Any, Any]) -> ModelT:
    """The configuration as a pydantic model; ValueError with one sentence that names the first wrong key."""
    for key in data:
        if not isinstance(key, str):
            raise ValueError(f"{key!r}: keys must be text")
    try:
        return model(**data)
    except ValidationError as error:
        raise ValueError(_message(error, model)) from None


def _message(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    place = first["loc"]
    key = ".".join(str(part) for part in place if "[" not in str(part))  # without the names of pydantic's own types
    if first["type"] != "extra_forbidden":
        return f"{key}: {pydantic_message(first)}, got {short_repr(first['input'])}"
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    sections = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    parent = sections.get(str(place[0])) if len(place) > 1 else None
    if parent is not None:
        return f"{key}: unknown key; {suggestion(str(place[-1]), parent.model_fields)}"
    places = {name: f"{section}.{name}" for section, kind in sections.items() for name in kind.model_fields}
    places |= {field.alias or name: field.alias or name for name, field in model.model_fields.items()}
    match = get_close_matches(key.lower(), places, n=1)
    hint = f"did you mean {places[match[0]]}?" if match else "docs/reference/keys.md lists the keys"
    return f"{key}: unknown key; {hint}"


def current_key(key: str, renamed: Mapping[str, str] = RENAMED) -> str:
    """The present name of a key."""
    if key not in renamed:
        return key
    warnings.warn(f"{key} is now called {renamed[key]}; the old name works until 0.3", FutureWarning, stacklevel=2)
    return renamed[key]


def with_current_keys(data: Mapping[str, Any], renamed: Mapping[str, str] = RENAMED) -> dict[str, Any]:
    """A configuration with every old key under its present name, and without the defaults that a run filled in;
    ValueError if an old and a present name are given."""
    keys = _without_resolved(data)
    for old, new in renamed.items():
        section, _, name = old.rpartition(".")
        values = keys.get(section) if section else keys
        if not isinstance(values, dict) or name not in values:
            continue
        current_key(old, renamed)
        if new.rpartition(".")[2] in values:
            raise ValueError(f"{old}: the old name of {new}; both are given, remove one")
        keys = _with_key_renamed(keys, old, new)
    return keys


def with_resolved(data: Mapping[str, Any], decided: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
    """A configuration in which keys without a value have the one that a run decided. `resolved` lists them: whoever
    reads the file, with another device, task or length, decides them again. It also has the model's fingerprint."""
    keys, resolved = deepcopy(dict(data)), {}
    for key, value in decided.items():
        section, _, name = key.rpartition(".")
        values = keys[section] if section else keys
        if values[name] in (None, "auto") and value is not None:
            values[name] = resolved[key] = value
    return {**keys, RESOLVED: {**resolved, FINGERPRINT: fingerprint}}


def _without_resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `with_resolved`. A value that was edited since differs from the one listed, and stays."""
    if not isinstance(data.get(RESOLVED), dict):
        return dict(data)
    keys = deepcopy(dict(data))
    for key, value in keys.pop(RESOLVED).items():
        section, _, name = str(key).rpartition(".")
        values = keys.get(section) if section else keys
        if isinstance(values, dict) and values.get(name) == value:
            del values[name]
    return keys


def with_old_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration under the key names of 0.1, without the keys that came later and change nothing."""
    keys = deepcopy(dict(data))
    for key, (new, old) in NEW_DEFAULTS.items():
        section, _, name = key.rpartition(".")
        if keys.get(section, {}).get(name) == new:
            keys[section][name] = old
    for key, value in ADDED.items():
        section, _, name = key.rpartition(".")
        values = keys.get(section, {}) if section else keys
        if name in values and values[name] == value:
            del values[name]
    for old, new in RENAMED.items():
        keys = _with_key_renamed(keys, new, old)
    return keys


def _with_key_renamed(data: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    """The same values in the same order, one of them renamed in its section."""
    section, _, name = before.rpartition(".")
    if section:
        inner = _with_key_renamed(data[section], name, after.rpartition(".")[2]) if section in data else None
        return data if inner is None else {**data, section: inner}
    return {after if key == name else key: value for key, value in data.items()}
