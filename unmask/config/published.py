"""The published JSON schema of the configuration, and what it says of methods: checked before torch is imported.

docs/reference.py writes schema.json; tests/test_docs.py checks that it is current.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from unmask.config.arguments import check_known, check_method, check_option, choose
from unmask.config.schema import Config
from unmask.core.words import file_of, is_own, piece_of, section_of
from unmask.util.parsing import suggestion

FILE = Path(__file__).parent / "schema.json"
KINDS = {"number": float, "integer": int, "boolean": bool}


@cache
def schema() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def published_names(key: str) -> list[str]:
    """The built-in names of `method`, `with` or `task`."""
    field = schema()["properties"][key]
    names: list[str] = (field["items"] if key == "with" else field)["anyOf"][0]["enum"]
    return names


def is_key(key: str) -> bool:
    """Whether this is a key of the configuration, e.g. `updates` or `optimizer.lr`."""
    fields = schema()["properties"]
    section, _, name = key.rpartition(".")
    if not section:
        return key in fields
    inside = fields.get(section, {})
    inside = schema()["$defs"][inside["$ref"].rpartition("/")[2]] if "$ref" in inside else inside
    return name in inside.get("properties", {})


def check_words(key: str, words: Iterable[str]) -> None:
    """ValueError for a word, e.g. `agrpo:draws=2`, that is neither a built-in name nor a function in a file."""
    for name in (piece_of(word)[0] for word in words if word):
        if not is_own(name):
            check_method(key, name, published_names("method"), published_names("with"))


def check_estimators(words: Iterable[str]) -> None:
    """As `check_words`, for a base or plug-ins joined by +, e.g. `sml:strata=8` or `wd1+sml`."""
    for name in (piece_of(piece)[0] for word in words for piece in word.split("+") if piece.strip()):
        if not is_own(name.strip()):
            check_known("methods", name.strip(), [*published_names("method"), *published_names("with")])


def check_by_schema(config: Config) -> None:
    """ValueError for an unknown method, plug-in, order or option, a wrong type, or a missing file."""
    check_known(
        "rollout.order", config.rollout.order, schema()["$defs"]["RolloutConfig"]["properties"]["order"]["enum"]
    )
    for key, word in [("method", config.method), *(("with", word) for word in config.plugins)]:
        if (file := file_of(word)) is None:
            check_method(key, word, published_names("method"), published_names("with"))
            _check_options(word, config.options.get(word, {}))
        elif section_of(word) != word and not Path(file).is_file():
            raise ValueError(f"{key}: there is no file {file}")


def _check_options(name: str, section: dict[str, Any]) -> None:
    fields = schema()["properties"][name]["properties"]
    for key, value in section.items():
        if key not in fields:
            raise ValueError(f"{name}.{key}: unknown option; {suggestion(key, fields)}")
        if "enum" in fields[key]:
            choose(f"{name}.{key}", value, dict.fromkeys(fields[key]["enum"]))
        else:
            check_option(f"{name}.{key}", value, KINDS[fields[key]["type"]])
