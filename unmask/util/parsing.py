"""Safe YAML without duplicate keys, and values in error messages."""

import difflib
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

LONGEST = 100  # characters of a text in a message
DEEPEST = 32  # sections within sections
INTEGER = re.compile(r"[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,2}")


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:  # parsing time grows with the square of the depth
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(problem="it is nested too deeply", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        counts = Counter(names)
        if (twice := next((name for name in names if counts[name] > 1), None)) is not None:
            raise yaml.constructor.ConstructorError(problem=f"{twice!r} appears twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> Any:
    """The data of a YAML text; ValueError that begins with `where` if it is not YAML."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, str(error.problem)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = f"{error.context} {problem}" if problem.startswith("but ") else problem
        raise ValueError(f"{where}: not YAML: {problem}{place}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # OverflowError: a number or a date out of range
        raise ValueError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    except (IndexError, KeyError, AttributeError):  # of the parser: a tag such as !!int before text
        raise ValueError(f"{where}: not YAML: a value does not match its tag") from None


def short_repr(value: Any) -> str:
    """A value for a message, cut to a short length."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = LONGEST
    return short.repr(value)


def as_number(value: Any, annotation: Any) -> Any:
    """The value; 1e3, which YAML reads as text, as 1000 if an integer is expected. ValueError for true or false if a
    number is expected: Python would take them for 1 and 0."""
    kinds = {annotation, *get_args(annotation)}
    if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
        raise ValueError("input should be a number, not true or false")
    if isinstance(value, str) and int in kinds and not kinds & {str, float} and INTEGER.fullmatch(value):
        return int(float(value)) if float(value).is_integer() else value
    return value


def read_keys(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file."""
    if not path.is_file():
        named = path.suffix in (".yaml", ".yml")
        listed = "write it, or use one that comes with the package: unmask recipes lists them"
        advice = listed if named else "a setting is written key=value, for example task=sudoku"
        raise ValueError(f"there is no configuration file {path}; {advice}")
    try:
        data = parse_yaml(path.read_text(), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from None
    if not isinstance(data or {}, dict):
        raise ValueError(f"{path} must hold keys and values, not a {type(data).__name__}")
    return data or {}


def assign(data: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of `section.key`."""
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ValueError(f"{key}: {section} is a value, not a section")
    data[last] = value


def suggestion(name: str, names: Iterable[str]) -> str:
    """The known name that is closest to an unknown one, or all known names."""
    names = list(names)
    match = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {match[0]}?" if match else f"known: {', '.join(names)}"


def missing_folder_message(name: str | Path, advice: str = "") -> str:
    """A message for a missing folder, with a similar folder or run as a suggestion, or else with advice."""
    places = dict.fromkeys([Path(name).parent, Path("runs")])
    near = {path.name: path for place in places if place.is_dir() for path in place.iterdir() if path.is_dir()}
    match = difflib.get_close_matches(Path(name).name, near, n=1)
    hint = f"did you mean {near[match[0]]}?" if match else advice
    return f"there is no folder {name}" + (f"; {hint}" if hint else "")


def check_exists(folder: Path, advice: str) -> None:
    """ValueError for a missing folder."""
    if not folder.exists():
        raise ValueError(missing_folder_message(folder, advice))


EXPECTED = {
    "tuple_type": "a list",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}
"""Type of a pydantic error -> what was expected, where pydantic's own words are long."""


def pydantic_message(problem: Mapping[str, Any]) -> str:
    """The message of a pydantic error."""
    if problem["type"] == "model_type":
        return f"expected keys such as {problem['loc'][-1]}.key=value"
    if problem["type"] in EXPECTED:
        return f"expected {EXPECTED[problem['type']]}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]
