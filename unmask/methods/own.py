"""Your own method: a function in a Python file, `--method my_method.py:halves`, `--with my_method.py:louder`.

    def halves(normaliser: Normaliser = token_mean, kl: float = 0.0) -> Method: ...      # a base
    def louder(base: Method, strength: float = 0.3) -> Method: ...                       # a plug-in

Its arguments are options, `halves.kl=0.1`, checked like those of the built-in methods: by type, formulas by name. The
file is a program that the user trusts, and it is run (unmask/util/user_file.py).
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from unmask.core.method import Method
from unmask.core.words import WORD
from unmask.util.parsing import suggestion
from unmask.util.user_file import run_file


def takes_base(word: str) -> bool:
    """Whether a word names a plug-in in a file; False if there is no file or function of this name."""
    match = WORD.fullmatch(word)
    if match is None or not match["name"] or not Path(match["file"]).is_file():
        return False
    function = getattr(run_file(Path(match["file"])).module, match["name"], None)
    return inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "base"


def own_method(key: str, word: str, formulas: Mapping[str, Mapping[str, Any]]) -> Callable[..., Method] | None:
    """The function in a file that a word names, None for another word. `key` is `method` or `with`; `formulas` has the
    options that take a formula, with the formulas by name."""
    match = WORD.fullmatch(word)
    if match is None:
        return None
    file, name = match["file"], match["name"]
    if not name:
        raise ValueError(f"{key}: {file}: name the function too, as {file}:NAME")
    if not Path(file).is_file():
        raise ValueError(f"{key}: there is no file {file}")
    module = run_file(Path(file)).module
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        names = [each for each, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        hint = f"; {suggestion(name, names)}" if names else ""
        raise ValueError(f"{key}: {file}: there is no function {name} in it{hint}")
    where = f"{key}: {file}: {name}"
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise ValueError(f"{where}: the type of an option is unknown: {error}") from None
    _check_options(where, signature, key == "with", formulas)

    @wraps(function)
    def build(*base: Method, **options: Any) -> Method:
        try:
            method = function(*base, **options)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{file}: it raised {type(error).__name__}: {error}") from error
        if not isinstance(method, Method):
            raise ValueError(f"{file}: it returned {method!r}, not a Method")
        return method

    build.__signature__ = signature  # type: ignore[attr-defined]
    return build


def _check_options(
    where: str, signature: inspect.Signature, plugin: bool, formulas: Mapping[str, Mapping[str, Any]]
) -> None:
    """ValueError unless a configuration and a run folder can record all that the function takes."""
    takes_base = next(iter(signature.parameters), "") == "base"
    if plugin != takes_base:
        problem = "a plug-in takes a `base` first" if plugin else "it takes a `base`, so it is a plug-in: use --with"
        raise ValueError(f"{where}: {problem}")
    for name, option in list(signature.parameters.items())[plugin:]:
        if option.kind in (option.VAR_POSITIONAL, option.VAR_KEYWORD, option.POSITIONAL_ONLY):
            raise ValueError(f"{where}: {name} cannot be set by name; declare every option as name: type = default")
        if option.default is option.empty or option.annotation is option.empty:
            raise ValueError(f"{where}: the option {name} needs a type and a default, for example {name}: float = 1.0")
        if name in formulas and option.default not in formulas[name].values():
            raise ValueError(f"{where}: the option {name} must default to one of {', '.join(formulas[name])}")
        if name not in formulas and not isinstance(option.default, bool | int | float | str | tuple | None):
            raise ValueError(f"{where}: the option {name} must default to a number, a text, true, false or a tuple")
