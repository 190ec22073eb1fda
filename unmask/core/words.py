"""Names of methods as users write them: `agrpo`, `agrpo:draws=2`, `FILE.py:NAME`. Imports no torch."""

import re
from typing import Any

WORD = re.compile(r"(?P<file>.+\.py)(:(?P<name>\w*))?")
PIECE = re.compile(r"(?P<word>[^:=]+\.py:\w+|[^:]*)(?P<options>(:[^:]*)*)")


def section_of(word: Any) -> Any:
    """The section of a method's options: its name, or the name of the function in a file."""
    match = WORD.fullmatch(word) if isinstance(word, str) else None
    return match["name"] if match is not None and match["name"] else word


def piece_of(text: str) -> tuple[str, list[str]]:
    """A word and its options: `agrpo` and `draws=2` of `agrpo:draws=2`. The text after the first colon of a file is the
    name of the function, unless it has an equals sign. A path has neither sign."""
    match = PIECE.fullmatch(text)
    assert match is not None  # the second alternative matches any text
    return match["word"], match["options"].split(":")[1:]


def label_of(text: str) -> str:
    """A word with its options, as tables show it: without the file."""
    word, options = piece_of(text)
    return ":".join([section_of(word), *options])


def file_of(word: str) -> str | None:
    """The file of a word such as `FILE.py:NAME`; None for other words."""
    match = WORD.fullmatch(word)
    return None if match is None else match["file"]


def is_own(word: str) -> bool:
    return WORD.fullmatch(word) is not None
