"""A schema, a row that asks for it, and how a document is judged."""

import json
from typing import Any

from unmask.tasks.benchmarks import json_schema
from unmask.tasks.benchmarks.json_schema import schema_match

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
ROW = {"request": "Anna is 30.", "schema": PERSON, "reference": {"name": "Anna", "age": 30}}


def valid(schema: Any, document: Any, formats: json_schema.Formats = "asserted") -> bool:
    return schema_match({"schema": schema}, json.dumps(document), formats).valid
