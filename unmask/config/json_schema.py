"""The JSON schema of the configuration, for editors: written to schema.json by docs/reference.py."""

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from unmask.config.arguments import parameters
from unmask.config.options import CHOICES, meaning, option_defaults
from unmask.config.schema import Config
from unmask.core.order import ORDERS
from unmask.methods import BASES, PLUGINS
from unmask.tasks import TASKS


def json_schema() -> dict[str, Any]:
    """Every key with its type, default and description; a section for each method, plug-in and task."""
    schema = Config.model_json_schema()
    fields = schema["properties"]
    del fields["options"]
    fields["task"] = {**fields["task"], **_named(TASKS, r"\.py$")}
    fields["method"] = {**fields["method"], **_named(BASES, r"\.py:\w+$")}
    names = _named(PLUGINS, r"\.py:\w+$")
    fields["with"] = {**fields["with"], "type": ["array", "string"], "items": names}
    schema["$defs"]["RolloutConfig"]["properties"]["order"]["enum"] = list(ORDERS)
    fields |= {name: _section(name, factory) for name, factory in {**BASES, **PLUGINS, **TASKS}.items()}
    schema["additionalProperties"] = {"type": "object"}  # the options of a function in a file of your own
    return with_heading(schema, "unmask configuration")


def with_heading(schema: dict[str, Any], title: str) -> dict[str, Any]:
    """The schema with its dialect and a title of its own."""
    heading = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**heading, **{key: value for key, value in schema.items() if key != "title"}}


def _named(names: dict[str, Any], own: str) -> dict[str, Any]:
    """A built-in name, or a Python file."""
    return {"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": own}]}


def _section(name: str, factory: Callable[..., Any]) -> dict[str, Any]:
    defaults = option_defaults(factory)
    options = {}
    for option, parameter in parameters(factory).items():
        kind = {"enum": list(CHOICES[option])} if option in CHOICES else TypeAdapter(parameter.annotation).json_schema()
        if option == "protocol":
            kind = {"enum": list(factory().about.protocols)}
        options[option] = {**kind, "default": defaults[option], "description": meaning(name, option)}
    about = getattr(factory, "summary", None) or inspect.getdoc(factory)
    return {"type": "object", "description": about, "properties": options, "additionalProperties": False}
