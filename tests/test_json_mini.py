"""The embedded JSON task."""

import json
import re

import pytest
from hypothesis import given, settings, strategies as st

from unmask.tasks.puzzles import json_mini

FIELD = re.compile(r"([a-z]{2,3}):([nsb])=(\w+)")


def plain_object(request: str) -> dict[str, object]:
    """The object a prompt asks for, read a second time."""
    fields: dict[str, object] = {}
    for text in request.split(" "):
        match = FIELD.fullmatch(text)
        assert match is not None
        key, kind, value = match.groups()
        fields[key] = int(value) if kind == "n" else value if kind == "s" else {"yes": True, "no": False}[value]
    return fields


@pytest.mark.parametrize("fields", [1, 2, 3])
def test_rows_are_asked_and_answered_rightly(fields: int):
    task = json_mini.JsonMini(fields=fields)
    assert task.length <= 40
    kinds, lengths, longest = set(), set(), 0
    for split in ("train", "test"):
        for row in task.rows(split, 1000, 3):
            prompt, solution = task.prompt(row), task.solution(row)
            wanted = plain_object(prompt.removesuffix(">").lstrip())
            assert prompt.endswith(">") and len(wanted) == fields
            assert json.loads(solution) == wanted
            assert (prompt + solution).isascii() and (prompt + solution).isprintable()
            assert task.reward(row, solution) == 1.0 and task.solved(row, solution)
            kinds |= {type(value) for value in wanted.values()}
            lengths.add(len(prompt))
            longest = max(longest, len(solution))
    assert kinds == {int, str, bool} and longest == task.length and len(lengths) == 1


def test_rows_depend_on_nothing_but_their_arguments_and_the_splits_are_apart():
    task = json_mini.JsonMini()
    first = task.rows("train", 40, 7)
    assert json_mini.JsonMini().rows("train", 40, 7) == first and task.rows("train", 15, 7) == first[:15]
    assert task.rows("train", 40, 8) != first
    requests = {
        split: {frozenset(row["request"].split(" ")) for seed in range(3) for row in task.rows(split, 3000, seed)}
        for split in ("train", "test")
    }
    assert not requests["train"] & requests["test"]
    with pytest.raises(ValueError, match="validation"):
        task.rows("validation", 1, 0)


def test_the_split_never_moves():
    # Moving it would leak test problems into models that are already trained.
    assert [row["request"] for row in json_mini.JsonMini().rows("test", 3, 0)] == [
        "tag:s=ram age:s=hen",
        "tag:b=yes no:s=84",
        "no:b=no min:b=no",
    ]


def test_keys_types_and_values_count_and_order_does_not():
    row = {
        "request": "zip:s=42 ok:b=no",
        "schema": {
            "type": "object",
            "properties": {"zip": {"type": "string"}, "ok": {"type": "boolean"}},
            "required": ["zip", "ok"],
            "additionalProperties": False,
        },
        "reference": {"zip": "42", "ok": False},
    }
    task = json_mini.JsonMini(partial=0.6)
    assert task.reward(row, '{"ok":false,"zip":"42"}') == 1.0
    assert task.reward(row, '{"zip":42,"ok":false}') == pytest.approx(0.6 * (1 + 0 + 0.5) / 3)
    assert task.reward(row, '{"zip":"43","ok":false}') == pytest.approx(0.6 * (1 + 1 + 0.5) / 3)
    assert task.reward(row, '{"zip":"42","ok":false,"no":1}') == pytest.approx(0.6 * (1 + 0 + 2 / 3) / 3)
    assert task.reward(row, '{"no":1}') == 0.0
    assert json_mini.JsonMini().reward(row, '{"zip":42,"ok":false}') == 0.0


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text(alphabet='{}":,0123456789true falsno', max_size=30))
def test_arbitrary_text_earns_nothing(text: str):
    task = json_mini.JsonMini(partial=0.9)
    row = task.rows("test", 1, 0)[0]
    assert task.reward(row, text) == 0.0 and not task.solved(row, text)


@pytest.mark.parametrize("options", [{"fields": 0}, {"fields": 4}, {"partial": 1.0}])
def test_impossible_options_are_named(options: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(options))):
        json_mini.JsonMini(**options)  # type: ignore[arg-type]
