"""config.json of a checkpoint, read field by field. Errors name the field that is missing or has the wrong type."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
LARGEST, DEEPEST = 2**31, 2**12  # larger than any model


@dataclass(frozen=True)
class ConfigFile:
    path: Path
    fields: Mapping[str, Any]
    built_in: bool = False
    """The fields are the built-in sizes of a well-known model; the file was not read."""

    @property
    def source(self) -> str:
        """What the fields are called where a fact is printed with its source."""
        return "the built-in sizes" if self.built_in else "config.json"

    def get(self, name: str, default: Any = None) -> Any:
        """The field; the default if it is missing or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.path} has no {name}, which a checkpoint of this kind needs.")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A field that is a whole number above 0; the default if it is missing or null."""
        value = self.need(name) if default is None else self.get(name, default)
        if type(value) is not int or not 0 < value < (DEEPEST if "layers" in name else LARGEST):
            raise ValueError(f"{self.path} sets {name} to {value!r}; it must be a whole number above 0.")
        return value

    def check_tokens(self, *names: str) -> None:
        """ValueError for an id of a token that is not a whole number. A field may be a list of ids."""
        for name in names:
            value = self.get(name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and type(token) is not int:
                    raise ValueError(f"{self.path} sets {name} to {value!r}; the id of a token is a whole number.")

    def only(self, allowed: Mapping[str, Any]) -> None:
        """ValueError if a field has another value than the one allowed."""
        for name, value in allowed.items():
            if self.get(name, value) != value:
                raise ValueError(f"{self.path} sets {name} to {self.get(name)!r}; only {value!r} is supported.")

    def kind(self, name: str, wanted: type, default: Any) -> Any:
        """A field of this type; the default if it is missing or null."""
        value = self.get(name, default)
        if not isinstance(value, wanted):
            raise ValueError(f"{self.path} sets {name} to {value!r}; it must be a {wanted.__name__}.")
        return value

    def unbuilt(self, error: Exception) -> ValueError:
        """The error to raise if transformers cannot build the network."""
        message = " ".join(str(error).split())
        message = f"there is no {message}" if isinstance(error, KeyError) else message
        return ValueError(f"{self.path} does not describe a network: {message}")

    def number(self, name: str, value: Any = None) -> float:
        """A field, or this value in its place, that is a number above 0."""
        value = self.need(name) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{self.path} sets {name} to {value!r}; it must be a number above 0.")
        return float(value)
