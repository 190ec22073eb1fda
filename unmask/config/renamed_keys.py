"""Configuration keys under the names they had in 0.1. They are accepted until 0.3, with one warning each."""

import warnings
from collections.abc import Mapping
from typing import Any

RENAMED = {
    "inner": "inner_steps",
    "rows": "micro_batch_size",
    "checkpointing": "gradient_checkpointing",
    "rollout.rows": "rollout.micro_batch_size",
    "optimizer.max_norm": "optimizer.max_grad_norm",
}


def current_key(key: str, renamed: Mapping[str, str] = RENAMED) -> str:
    """The name that a key has now."""
    if key not in renamed:
        return key
    warnings.warn(f"{key} is now called {renamed[key]}; the old name works until 0.3", FutureWarning, stacklevel=2)
    return renamed[key]


def with_old_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration under the key names of 0.1."""
    keys = dict(data)
    for old, new in RENAMED.items():
        section, _, name = new.rpartition(".")
        values = keys.get(section, {}) if section else keys
        if name in values:
            values = {old.rpartition(".")[2] if key == name else key: value for key, value in values.items()}
            keys = {**keys, section: values} if section else values
    return keys


def with_current_keys(data: Mapping[str, Any], renamed: Mapping[str, str] = RENAMED) -> dict[str, Any]:
    """A configuration with every old key under its present name; ValueError where both are given."""
    keys = dict(data)
    for old in renamed:
        section, _, name = old.rpartition(".")
        values = keys.get(section) if section else keys
        if not isinstance(values, dict) or name not in values:
            continue
        new = current_key(old, renamed).rpartition(".")[2]
        if new in values:
            raise ValueError(f"{old}: is the old name of {renamed[old]}, which is given too; remove one of them")
        values = {new if key == name else key: value for key, value in values.items()}
        keys = {**keys, section: values} if section else values
    return keys
