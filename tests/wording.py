"""What a message names, whatever its wording: the keys, values, files and lines that tests look for in errors."""

import re


def mentions(said: str, *names: object) -> bool:
    """Whether a message names all of these, each as a word of its own; FILE:LINE is a file and after it a line."""
    return re.search(naming(*names), said) is not None


def naming(*names: object) -> str:
    """The pattern of messages that name all of these, in any order; for `match` of pytest.raises and pytest.warns."""
    return "(?s)" + "".join(f"(?=.*{_pattern(str(name))})" for name in names)


def _pattern(name: str) -> str:
    file, _, line = name.rpartition(":")
    return f"{_word(file)}.*?{_word(line)}" if file and line.isdigit() else _word(name)


def _word(name: str) -> str:
    """A name that is not a part of a longer word."""
    before, after = r"(?<!\w)" if name[0].isalnum() else "", r"(?!\w)" if name[-1].isalnum() else ""
    return before + re.escape(name) + after
