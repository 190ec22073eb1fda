"""JSON schema adherence, checked against published instances and a validator written a second time."""

import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from schemas import ROW, valid
from unmask.tasks.benchmarks import json_schema
from unmask.tasks.benchmarks.json_schema import agreement, json_answer, schema_match

DATA = Path(__file__).parents[2] / "shared" / "data" / "json_schema"
with_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data folder beside the checkout")


# -- the published instances


@with_data
def test_published_instances_are_judged_as_published():
    seen: Counter[tuple[bool, bool]] = Counter()
    changed = 0
    with gzip.open(DATA / "jsonschemabench_subset.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        for instance in row["tests"]:
            judged = valid(row["schema"], instance["data"])
            seen[instance["valid"], judged] += 1
            if valid(row["schema"], instance["data"], "ignored") != judged:
                assert row["needs_format"]
                changed += 1
    assert seen == {(True, True): 1574, (False, False): 2563}
    assert changed >= 83  # every row that needs formats has an instance that shows it


@with_data
@pytest.mark.parametrize(("name", "test", "train"), [("bfcl_prompts", 201, 586), ("json_mode_eval", None, None)])
def test_published_references_earn_the_reward(name: str, test: int | None, train: int | None):
    task = json_schema.JsonSchema(data=str(DATA / f"{name}.jsonl"))
    total = 0
    schemas = {}
    for split, count in (("train", train), ("test", test)):
        rows = task.rows(split, 10_000, 0) if split == "test" else task.rows(split, train or 80, 0)
        rows = list({json.dumps(row, sort_keys=True): row for row in rows}.values())
        assert count is None or len(rows) == count
        total += len(rows)
        schemas[split] = {json.dumps(row["schema"], sort_keys=True) for row in rows}
        for row in rows:
            if "reference" in row:
                assert task.reward(row, task.solution(row)) == 1.0 and task.solved(row, task.solution(row))
                assert task.reward(row, "") == 0.0
            assert task.prompt(row).startswith(row["request"])
    assert not schemas["train"] & schemas["test"]
    assert name != "bfcl_prompts" or total == 787


@with_data
def test_one_of_several_calls_is_judged_by_the_schema_alone():
    task = json_schema.JsonSchema(data=str(DATA / "bfcl_prompts.jsonl"))
    rows = task.rows("test", 1000, 0)
    assert sum("reference" not in row for row in rows) == 37 + 29
    assert all(
        "reference" not in row
        for row in json_schema.JsonSchema(str(DATA / "bfcl_prompts.jsonl"), fields=False).rows("test", 99, 0)
    )


# -- against a validator of our own for a small part of the language

NAMES = ("a", "b", "c")
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.sampled_from([0.5, 1.0, -2.0])
    | st.sampled_from(["", "x", "xy", "é"])
)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
simple = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"]),
        "minimum": st.integers(-3, 3),
        "maxLength": st.integers(0, 2),
        "enum": st.lists(scalars, min_size=1, max_size=3),
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "minItems": st.integers(0, 2),
    },
)
schemas = st.recursive(
    simple,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array"]),
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
            "additionalProperties": st.booleans(),
            "items": inner,
            "not": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=4,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return a == b


def of_type(kind: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "number": number,
        "integer": number and value == int(value),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }[kind]


def plainly_valid(schema: dict[str, Any], value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    checks = [
        "type" not in schema or of_type(schema["type"], value),
        "minimum" not in schema or not number or value >= schema["minimum"],
        "maxLength" not in schema or not isinstance(value, str) or len(value) <= schema["maxLength"],
        "enum" not in schema or any(same(value, choice) for choice in schema["enum"]),
        "minItems" not in schema or not isinstance(value, list) or len(value) >= schema["minItems"],
        "not" not in schema or not plainly_valid(schema["not"], value),
        "anyOf" not in schema or any(plainly_valid(choice, value) for choice in schema["anyOf"]),
    ]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        checks += [name in value for name in schema.get("required", [])]
        checks += [plainly_valid(properties[name], part) for name, part in value.items() if name in properties]
        if schema.get("additionalProperties") is False:
            checks.append(set(value) <= set(properties))
    if isinstance(value, list) and "items" in schema:
        checks += [plainly_valid(schema["items"], part) for part in value]
    return all(checks)


@settings(max_examples=400, deadline=None)
@given(
    schemas, documents, st.sampled_from(["{}", "```json\n{}\n```", "```\n{}```", "Sure:\n```json\n{}\n```\nDone [1]."])
)
def test_documents_are_judged_as_by_a_validator_written_plainly(schema: Any, document: Any, around: str):
    match = schema_match({"schema": schema}, around.replace("{}", json.dumps(document)))
    assert match.answer is not None and match.answer.value == document
    assert match.valid == plainly_valid(schema, document)


@settings(max_examples=200, deadline=None)
@given(documents, documents)
def test_agreement_is_one_for_the_same_document_only(one: Any, other: Any):
    assert agreement(one, one) == 1.0
    assert 0.0 <= agreement(one, other) <= 1.0
    if '""' not in json.dumps(one):
        assert (agreement(one, other) == 1.0) == (
            json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
        ) or one == other


# -- what counts as an answer


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        (" \n[1, 2]\n ", [1, 2]),
        ("3", 3),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('The answer is {"a": {"b": "}"}} and [2] is not.', {"a": {"b": "}"}}),
        ('As in [the list]: {"a": 1}', {"a": 1}),
        ('```python\n{"a": 0}\n```\n```JSON\n{"a": 1}\n```', {"a": 1}),
        ('```json\n{"a": 1}', {"a": 1}),
        ('{"a": 1}<|eot_id|>', {"a": 1}),
    ],
)
def test_answers_that_are_read(completion: str, value: Any):
    answer = json_answer(completion)
    assert answer is not None and answer.value == value


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "I do not know.",
        '{"a": 1',  # cut off
        'I do not know.<|eot_id|>{"a": 1}',  # after its end
        '{"a": {"b": 1}',
        '{"a": bad, "b": {"c": 1}}',  # broken outside, whole inside: no answer
        "{'a': 1}",
        '{"a": 1,}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        "NaN",
        '{"a": 1e999}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 1}}',
        '{"a": 01}',
        '{"a": "\n"}',
        '{"a": "\\ud800"}',  # half a character
        '{"\\udfff": 1}',
        '{"a": "\ud800"}',
        "[" * 10_000 + "]" * 10_000,
        "[" * 65 + "]" * 65,
        '{"a": "' + "x" * 20_000 + '"}',
        '"' + '\\"' * 9_000,
        '{"' + '\\"' * 9_000,
        "{" + "[]" * 9_000,
    ],
)
def test_texts_without_an_answer(completion: str):
    start = time.perf_counter()
    assert json_answer(completion) is None
    task = json_schema.JsonSchema(partial=0.9)
    assert task.reward({"schema": {}}, completion) == 0.0 and not task.solved({"schema": {}}, completion)
    assert time.perf_counter() - start < 1.0


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet='[]{}"\\`:, \n01nutrefals.-eE'))
def test_arbitrary_text_never_raises_and_earns_nothing(text: str):
    task = json_schema.JsonSchema(partial=0.9)
    assert task.reward(ROW, text) == 0.0
    assert not task.solved(ROW, text)
    assert task.grade(ROW, text)[:2] == (0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.integers(-(10**401), 10**401) | st.floats(allow_nan=False, allow_infinity=False))
def test_any_value_can_be_judged(text: str, number: float):
    document = json.dumps({"name": text, "age": number})
    assert 0.0 <= json_schema.JsonSchema(partial=0.5).reward(ROW, document) < 0.5
    assert schema_match({"schema": True}, document).valid == (json_answer(document) is not None)


# -- rewards


def test_reward_and_partial_credit():
    full, some = json_schema.JsonSchema(), json_schema.JsonSchema(partial=0.6)
    for completion, earned in (
        ('{"age": 30, "name": "Anna"}', 1.0),
        ('{"age": 30.0, "name": "Anna"}', 1.0),
        ('{"name": "Anna"}', 0.6 * (1 + 1 + 1 / 2) / 3),
        ('{"name": "Bert", "age": 1}', 0.6 * 2 / 3),
        ('{"name": "Anna", "age": "30"}', 0.6 * (1 + 0 + 1 / 2) / 3),  # not valid
        ('{"nom": "Anna"}', 0.0),  # unrelated
        ("{}", 0.0),
        ("[1]", 0.0),
    ):
        assert some.reward(ROW, completion) == pytest.approx(earned)
        assert full.reward(ROW, completion) == (1.0 if earned == 1.0 else 0.0)
        assert some.solved(ROW, completion) == (earned == 1.0)
    assert some.grade(ROW, 'So: {"name":"Anna","age":30}') == (1.0, 1.0, '{"name":"Anna","age":30}')


def test_an_empty_text_in_a_reference_may_be_left_out():
    assert agreement({"f": {"a": 1, "unit": ""}}, {"f": {"a": 1}}) == 1.0
    assert agreement({"f": {"unit": ""}}, {"f": {}}) == 1.0
    assert agreement({"f": {"a": 1, "unit": ""}}, {"f": {"a": 1, "unit": "km"}}) == 0.5
    assert agreement({"f": {"a": 1, "unit": ""}}, {"f": {}}) == 0.0
    assert agreement({"a": True}, {"a": 1}) == 0.0
    assert agreement([1, 2], [2, 1]) == 0.0
