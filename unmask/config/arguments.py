"""Options as keyword arguments of Python functions, checked by their signatures. Imports no torch."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from unmask.tasks import TASKS, Task
from unmask.tasks.support.split import with_validation_split
from unmask.util.parsing import as_number, pydantic_message, short_repr, suggestion

if TYPE_CHECKING:
    from unmask.config.schema import Config

Choices = Mapping[str, Mapping[str, Any]]
"""Options that name a formula: the name of the argument -> the formulas by name."""


def check_known(key: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise ValueError(f"{key}: there is no {name!r}; {suggestion(name, names)}")


def check_method(key: str, name: str, bases: Collection[str], plugins: Collection[str]) -> None:
    """ValueError for a name that is not a base (`key` is `method`) or not a plug-in (`key` is `with`)."""
    if key == "method" and name.lower() in plugins:
        raise ValueError(f"method: {name.lower()} is a plug-in, not a base method; write --with {name.lower()}")
    if key == "with" and name.lower() in bases:
        raise ValueError(f"with: {name.lower()} is a base method, not a plug-in; write --method {name.lower()}")
    check_known(key, name, bases if key == "method" else plugins)


def check_option(key: str, value: Any, kind: Any) -> Any:
    """The value of an option as its type; ValueError that names the option."""
    try:
        return TypeAdapter(kind).validate_python(as_number(value, kind))
    except ValidationError as error:
        raise ValueError(f"{key}: {pydantic_message(error.errors()[0])}, got {short_repr(value)}") from None
    except ValueError as error:
        raise ValueError(f"{key}: {error}, got {short_repr(value)}") from None


def choose(key: str, value: Any, formulas: Mapping[str, Any]) -> Any:
    """The formula of this name; ValueError that names the option."""
    check_known(key, value if isinstance(value, str) else short_repr(value), formulas)
    return formulas[value]


def parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function without a plug-in's base."""
    return {name: p for name, p in inspect.signature(factory).parameters.items() if name != "base"}


def arguments(factory: Callable[..., Any], name: str, section: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    """The options of a section with their types checked and names replaced by formulas."""
    known, values = parameters(factory), {}
    for key, value in section.items():
        if key not in known:
            text = TASKS.get(f"{name}_text")
            other = f"{name}_text has it: --task {name}_text" if text and key in parameters(text) else ""
            raise ValueError(f"{name}.{key}: unknown option; {other or suggestion(key, known)}")
        place = f"{name}.{key}"
        formulas = choices.get(key)
        values[key] = (
            check_option(place, value, known[key].annotation) if formulas is None else choose(place, value, formulas)
        )
    return values


def build(factory: Callable[..., Any], name: str, section: Mapping[str, Any], choices: Choices, *base: Any) -> Any:
    """Call a function with the options of its section."""
    values = arguments(factory, name, section, choices)
    try:
        return factory(*base, **values)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith((f"{name}:", f"{name}.")) else f"{name}: {message}") from None


def build_task(config: "Config") -> Task:
    task: Task = build(TASKS[config.task], config.task, config.options.get(config.task, {}), {})
    return with_validation_split(task) if config.eval.split == "validation" else task
