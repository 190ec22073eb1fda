"""YAML as people write it: no key twice, and no more work than there are keys."""

import pytest
import yaml

from unmask.util.parsing import _Loader, parse_yaml


@pytest.mark.parametrize(
    ("text", "key", "line", "column"),
    [
        ("a: 1\nb: 2\nc: 3\nb: 4\na: 5", "'a'", 1, 1),  # the first of the two that are
        ("x: 1\ns: {k: 1, k: 2}", "'k'", 2, 4),
        ("'': 1\n'': 2", "''", 1, 1),
    ],
)
def test_a_key_that_is_there_twice_is_named(text: str, key: str, line: int, column: int) -> None:
    with pytest.raises(ValueError, match=f"file.yaml.*{key} .*line {line}, column {column}"):
        parse_yaml(text, "file.yaml")


def test_keys_are_not_compared_with_one_another() -> None:
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    kind, names = "tag:yaml.org,2002:str", [Name(f"key{i}") for i in range(2000)]
    pairs = [(yaml.ScalarNode(kind, name), yaml.ScalarNode(kind, "value")) for name in names]
    found = _Loader("").construct_mapping(yaml.MappingNode("tag:yaml.org,2002:map", pairs))
    assert list(map(str, found)) == list(map(str, names)) and compared <= 2 * len(names)
