"""JSON in small: typed fields in, a JSON object out, one character a token; generated.

The prompt names fields with their types and values ("age:n=42 pet:s=cat ok:b=yes>"), the completion is the object
({"age":42,"pet":"cat","ok":true}): numbers bare, texts in quotes also where they are digits, yes and no as true and
false. It is judged by the schema of those fields and by their values, as in `json_schema`; order does not matter.
Prompts are filled up with spaces on the left, to one length. The split is by the set of fields with their values.
"""

import json
import random
from typing import Any

from unmask.tasks.benchmarks.json_schema import credit, score, validator, verdict
from unmask.tasks.support.split import in_test, split_rng
from unmask.tasks.task import About, Row, Task, checked_partial

KEYS = ("age", "big", "cap", "day", "fee", "id", "key", "max", "min", "no", "ok", "pet", "row", "tag", "top", "zip")
WORDS = ("ant", "bee", "cat", "dog", "eel", "elk", "fox", "gnu", "hen", "jay", "koi", "owl", "pig", "ram", "rat", "yak")
LARGEST = 99
TYPES = {"n": "integer", "s": "string", "b": "boolean"}
ASKED, WRITTEN = len("tag:s=cat"), len('"tag":"cat"')  # the longest field in a prompt and in an object


def _drawn(rng: random.Random, key: str) -> tuple[str, str, Any]:
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


def task(fields: int = 2, partial: float = 0.0) -> Task:
    """Objects of `fields` fields, 1 to 3.

    An object with the right keys, types and values earns 1. One with at least one of the keys earns up to `partial`.
    """
    if not 1 <= fields <= 3:
        raise ValueError(f"json_mini: fields must be 1, 2 or 3, not {fields}.")
    partial = checked_partial("json_mini", partial)

    def rows(split: str, n: int, seed: int) -> list[Row]:
        rng = split_rng("json_mini", split, seed)
        validator(True)  # a missing package is told now, not at the first reward
        found: list[Row] = []
        while len(found) < n:
            keys = rng.sample(KEYS, fields)
            drawn = [_drawn(rng, key) for key in keys]
            if in_test(" ".join(sorted(text for text, _, _ in drawn))) != (split == "test"):
                continue
            found.append(
                {
                    "id": f"json_mini-{split}-{seed}-{len(found)}",
                    "request": " ".join(text for text, _, _ in drawn),
                    "schema": {
                        "type": "object",
                        "properties": {key: {"type": TYPES[d[1]]} for key, d in zip(keys, drawn, strict=True)},
                        "required": keys,
                        "additionalProperties": False,
                    },
                    "reference": {key: value for key, (_, _, value) in zip(keys, drawn, strict=True)},
                }
            )
        return found

    return Task(
        name="json_mini",
        summary=f"A JSON object of {fields} typed field{'s' if fields > 1 else ''}",
        length=fields * WRITTEN + (fields - 1) + 2,
        rows=rows,
        prompt=lambda row: row["request"].rjust(fields * ASKED + fields - 1) + ">",
        solution=lambda row: json.dumps(row["reference"], separators=(",", ":")),
        reward=lambda row, completion: credit(row, score(row, completion), partial),
        solved=lambda row, completion: score(row, completion).right,
        verdict=verdict,
        about=About(apart="by the fields with their values: one in five is for the test", needs=("unmask[json]",)),
    )
