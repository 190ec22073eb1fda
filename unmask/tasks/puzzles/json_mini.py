"""Small JSON: typed fields in, a JSON object out, one character a token; generated.

The prompt names fields with their types and values ("age:n=42 pet:s=cat ok:b=yes>"), the completion is the object
({"age":42,"pet":"cat","ok":true}): numbers bare, strings in quotes, also strings of digits, yes and no as true and
false. It is graded by the schema of the fields and by their values, as in `json_schema`; order does not matter.
Prompts are padded on the left to one length. The split is by the set of fields with their values.
"""

import json
import random
from typing import Any

from unmask.tasks.benchmarks.json_schema import check_schema, credit, explanation, schema_match
from unmask.tasks.support.split import GeneratedTask, hashed_split
from unmask.tasks.task import About, Row, valid_partial

KEYS = ("age", "big", "cap", "day", "fee", "id", "key", "max", "min", "no", "ok", "pet", "row", "tag", "top", "zip")
WORDS = ("ant", "bee", "cat", "dog", "eel", "elk", "fox", "gnu", "hen", "jay", "koi", "owl", "pig", "ram", "rat", "yak")
LARGEST = 99
TYPES = {"n": "integer", "s": "string", "b": "boolean"}
ASKED, WRITTEN = len("tag:s=cat"), len('"tag":"cat"')  # the longest field in a prompt and in an object


def _draw_field(rng: random.Random, key: str) -> tuple[str, str, Any]:
    """The request for a field, its type, and its value."""
    kind = rng.choice("nsb")
    if kind == "n":
        number = rng.randint(0, LARGEST)
        return f"{key}:n={number}", kind, number
    if kind == "b":
        truth = rng.random() < 0.5
        return f"{key}:b={'yes' if truth else 'no'}", kind, truth
    text = rng.choice(WORDS) if rng.random() < 0.5 else str(rng.randint(0, LARGEST))
    return f"{key}:s={text}", kind, text


def all_strings(row: Row) -> str:
    """Every value in quotes, as the request writes it."""
    fields = (field.split(":") for field in row["request"].split())
    return json.dumps({key: value.partition("=")[2] for key, value in fields}, separators=(",", ":"))


class JsonMini(GeneratedTask):
    """Objects of `fields` fields, 1 to 3.

    An object with the right keys, types and values earns 1, another with at least one of the keys up to `partial`.
    """

    name = "json_mini"
    about = About(separation="by the fields with their values: one in five is for the test", needs=("unmask[json]",))

    def __init__(self, fields: int = 2, partial: float = 0.0) -> None:
        if not 1 <= fields <= 3:
            raise ValueError(f"json_mini: fields must be 1, 2 or 3, not {fields}.")
        self.fields, self.partial = fields, valid_partial(self.name, partial)
        self.behaviours = {"careless": all_strings}
        self.summary = f"A JSON object of {fields} typed field{'s' if fields > 1 else ''}"
        self.length = fields * WRITTEN + (fields - 1) + 2

    def rows(self, split: str, n: int, seed: int) -> list[Row]:
        check_schema(True)  # fails now if the package is missing, not at the first reward
        return super().rows(split, n, seed)

    def draw(self, rng: random.Random, split: str) -> Row | None:
        keys = rng.sample(KEYS, self.fields)
        texts, kinds, values = zip(*(_draw_field(rng, key) for key in keys), strict=True)
        if hashed_split(" ".join(sorted(texts))) != split:
            return None
        schema = {
            "type": "object",
            "properties": {key: {"type": TYPES[kind]} for key, kind in zip(keys, kinds, strict=True)},
            "required": keys,
            "additionalProperties": False,
        }
        return {"request": " ".join(texts), "schema": schema, "reference": dict(zip(keys, values, strict=True))}

    def prompt(self, row: Row) -> str:
        return row["request"].rjust(self.fields * ASKED + self.fields - 1) + ">"

    def solution(self, row: Row) -> str:
        return json.dumps(row["reference"], separators=(",", ":"))

    def solved(self, row: Row, completion: str) -> bool:
        return schema_match(row, completion).right

    def reward(self, row: Row, completion: str) -> float:
        return credit(row, schema_match(row, completion), self.partial)

    def verdict(self, row: Row, completion: str) -> str:
        return explanation(row, completion)
