"""Options of methods, plug-ins and tasks: keyword arguments of their Python functions, checked by their signatures."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from unmask.config.schema import Config, as_list
from unmask.core.advantage import ADVANTAGES
from unmask.core.method import Method
from unmask.core.objective import KLS, NORMALISERS
from unmask.methods import BASES, PLUGINS
from unmask.methods.agrpo import STEP_LAWS
from unmask.methods.daca import LAYOUTS, SCOPES, VARIANTS
from unmask.methods.own import own_method, section_of
from unmask.tasks import TASKS, Task
from unmask.tasks.support.split import with_validation_split
from unmask.util.parsing import check_not_bool, pydantic_message, short_repr, suggestion

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


# --- names ----------------------------------------------------------------------------------------------------------


def method_words(data: Mapping[str, Any]) -> list[Any]:
    """The names of the method and the plug-ins in a configuration; functions in files too."""
    plugins = as_list(data.get("with"))
    return [data.get("method"), *(plugins if isinstance(plugins, list | tuple) else [])]


def section_names(data: Mapping[str, Any]) -> set[str]:
    """Names that a section of options may have."""
    return {*BASES, *PLUGINS, *TASKS, *(section_of(word) for word in method_words(data) if section_of(word) != word)}


def method_factory(key: str, word: str) -> Callable[..., Method]:
    """The function of a name; `key` is `method` or `with`."""
    return own_method(key, word, CHOICES) or {"method": BASES, "with": PLUGINS}[key][word]


def factories(config: Config) -> dict[str, Callable[..., Any]]:
    """The functions of task, method and plug-ins, by the section of their options."""
    plugins = {section_of(word): method_factory("with", word) for word in config.plugins}
    method = {section_of(config.method): method_factory("method", config.method)}
    return {config.task: TASKS[config.task], **method, **plugins}


def check_known(key: str, name: str, names: Mapping[str, Any]) -> None:
    if name not in names:
        raise ValueError(f"{key}: there is no {name!r}; {suggestion(name, names)}")


# --- values ---------------------------------------------------------------------------------------------------------


def build_task(config: Config) -> Task:
    task: Task = _build(TASKS[config.task], config.task, config.options)
    return with_validation_split(task) if config.eval.split == "validation" else task


def build_method(config: Config) -> Method:
    _, (section, base), *plugins = factories(config).items()
    method: Method = _build(base, section, config.options)
    for section, plugin in plugins:
        method = _build(plugin, section, config.options, method)
    return method


def resolved_options(config: Config) -> dict[str, dict[str, Any]]:
    """Every section of options, defaults written out."""
    return {
        name: _option_values(factory, _arguments(factory, name, config.options))
        for name, factory in factories(config).items()
    }


def option_defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function with their defaults."""
    return _option_values(factory, {})


def _build(factory: Callable[..., Any], name: str, options: Mapping[str, dict[str, Any]], *base: Method) -> Any:
    """Call a function with the options of its section."""
    arguments = _arguments(factory, name, options)
    try:
        return factory(*base, **arguments)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith((f"{name}:", f"{name}.")) else f"{name}: {message}") from None


def _arguments(factory: Callable[..., Any], name: str, options: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The options of a section with their types checked and names replaced by formulas."""
    parameters = _parameters(factory)
    arguments = {}
    for key, value in options.get(name, {}).items():
        if key not in parameters:
            raise ValueError(f"{name}.{key}: unknown option; {suggestion(key, parameters)}")
        if key in CHOICES:
            check_known(f"{name}.{key}", value if isinstance(value, str) else short_repr(value), CHOICES[key])
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
    """The parameters of a function without a plug-in's base."""
    return {name: p for name, p in inspect.signature(factory).parameters.items() if name != "base"}


def _option_values(factory: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a function with their values, formulas by name."""
    names = {id(f): name for choice in CHOICES.values() for name, f in choice.items()}
    values = {key: options.get(key, p.default) for key, p in _parameters(factory).items()}
    plain = {key: names.get(id(value), value) for key, value in values.items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
