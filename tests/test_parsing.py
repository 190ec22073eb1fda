"""YAML as people write it: no key twice, and no more work than there are keys."""

import pytest
import yaml

from unmask.util.parsing import _Loader, parse_yaml


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\nc: 3\nb: 4\na: 5", "'a' is there twice, line 1, column 1"),  # the first of the two that are
        ("x: 1\ns: {k: 1, k: 2}", "'k' is there twice, line 2, column 4"),
        ("'': 1\n'': 2", "'' is there twice, line 1, column 1"),
    ],
)
def test_a_key_that_is_there_twice_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_yaml(text, "file.yaml")
    assert str(refused.value) == f"file.yaml: not YAML: {told}"


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
