"""Options of methods and plug-ins, whose functions import torch."""

from collections.abc import Callable, Mapping
from typing import Any

from unmask.config.arguments import Choices, arguments, build, parameters
from unmask.config.schema import Config
from unmask.core.advantage import ADVANTAGES
from unmask.core.method import Method
from unmask.core.objective import KLS, NORMALISERS
from unmask.core.states import STATES
from unmask.core.steps import STEP_DISTRIBUTIONS
from unmask.core.strata import LAYOUTS
from unmask.core.words import section_of
from unmask.methods import BASES, PLUGINS
from unmask.methods.daca import SCOPES, VARIANTS
from unmask.methods.meanings import MEANINGS
from unmask.methods.own import own_method
from unmask.tasks import TASKS
from unmask.tasks.meanings import TASK_MEANINGS

CHOICES: Choices = {
    "advantage": ADVANTAGES,
    "normaliser": NORMALISERS,
    "kl_kind": KLS,
    "layout": LAYOUTS,
    "variant": VARIANTS,
    "scope": SCOPES,
    "steps": STEP_DISTRIBUTIONS,
    "states": STATES,
}


def method_factory(key: str, word: str) -> Callable[..., Method]:
    """The function of a name; `key` is `method` or `with`."""
    return own_method(key, word, CHOICES) or {"method": BASES, "with": PLUGINS}[key][word]


def factories(config: Config) -> dict[str, Callable[..., Any]]:
    """The functions of task, method and plug-ins, by the section of their options."""
    plugins = {section_of(word): method_factory("with", word) for word in config.plugins}
    method = {section_of(config.method): method_factory("method", config.method)}
    return {config.task: TASKS[config.task], **method, **plugins}


def build_method(config: Config) -> Method:
    _, (section, base), *plugins = factories(config).items()
    method: Method = build(base, section, config.options.get(section, {}), CHOICES)
    for section, plugin in plugins:
        method = build(plugin, section, config.options.get(section, {}), CHOICES, method)
    return method


def resolved_options(config: Config) -> dict[str, dict[str, Any]]:
    """Every section of options, defaults written out."""
    return {
        name: _option_values(factory, arguments(factory, name, config.options.get(name, {}), CHOICES))
        for name, factory in factories(config).items()
    }


def option_defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function with their defaults."""
    return _option_values(factory, {})


def _option_values(factory: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a function with their values, formulas by name."""
    names = {id(f): name for choice in CHOICES.values() for name, f in choice.items()}
    values = {key: options.get(key, p.default) for key, p in parameters(factory).items()}
    plain = {key: names.get(id(value), value) for key, value in values.items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def meaning(section: str, option: str) -> str:
    """One phrase on an option of a method, plug-in or task."""
    meanings = TASK_MEANINGS if section in TASKS else MEANINGS
    return meanings.get(f"{section}.{option}") or meanings.get(option, "")
