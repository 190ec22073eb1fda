"""JSON that follows a schema: the prompt is a request and a JSON schema, the completion a JSON value.

The answer is the first fenced block of JSON, else the first balanced object or array, else the whole completion. It is
read strictly: no NaN or Infinity, no number beyond a double or 400 digits, and no object that repeats a key (a model
could write two answers). Broken JSON is not searched for valid parts.

What the model writes is untrusted, and a schema may be hostile: completions are cut at 20,000 characters and 64
levels, patterns run on a linear engine or, where they look around, with a bounded number of steps (giving up is
invalid, also under `not`), and a `$ref` to another document is never fetched: such a schema is refused. Schemas are
checked in another process, with SECONDS of CPU time for each check: references can double the work at every level. An
answer whose check takes longer is invalid.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unmask.tasks.support.answers import text_before_end
from unmask.tasks.support.data import hub_rows
from unmask.tasks.support.protocol import TextTask
from unmask.tasks.support.split import hashed_split
from unmask.tasks.task import About, Grade, Row, Weights, valid_partial
from unmask.util.json_process import Process, ProcessEnded, ProcessNotStarted

DEEPEST = 64
DIGITS = 400
SECONDS = 2.0  # of CPU time for one check
PATIENCE = 12  # the limit of wall time, in limits of CPU time
STARTING = 60.0  # seconds
WORKER = Path(__file__).parents[1] / "support" / "json_worker.py"
BLANK = " \t\n\r"  # what JSON calls white space

FIELDS = {"schema": (dict, str, bool)}
HUB = "NousResearch/json-mode-eval"
ONE_OF_SEVERAL = ("BFCL_parallel", "BFCL_parallel_multiple")
"""Groups of BFCL that request several calls and have one as reference: graded by the schema only."""

OPENING = re.compile(r"[\[{]")
# A string ends at its quote or with the text, so no character is read twice.
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)

Formats = Literal["asserted", "ignored"]


class JsonAnswer(NamedTuple):
    text: str
    value: Any


class SchemaMatch(NamedTuple):
    """How far a completion follows the schema and agrees with the reference."""

    answer: JsonAnswer | None
    valid: bool = False
    agreement: float | None = None
    """With the reference; None if there is none."""

    @property
    def right(self) -> bool:
        return self.valid and self.agreement in (None, 1.0)


def parse_json(text: str) -> Any:
    """A JSON value, read strictly; ValueError for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key is named twice")
        return dict(pairs)

    def whole(digits: str) -> int:
        if len(digits) > DIGITS:
            raise ValueError(f"a number of more than {DIGITS} digits")
        return int(digits)

    def real(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"{digits} is beyond a double")
        return value

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_int=whole, parse_float=real, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # an error for half a surrogate pair
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_answer(completion: str) -> JsonAnswer | None:
    """The answer in a completion; None if there is none."""
    text = _json_block(text_before_end(completion)).strip(BLANK)
    if text and not OPENING.match(text):
        try:
            return JsonAnswer(text, parse_json(text))
        except ValueError:
            pass  # prose; the answer may be in it
    place = 0
    while opening := OPENING.search(text, place):
        end = _closing(text, opening.start())
        if end is None:
            return None
        piece, place = text[opening.start() : end], end
        try:
            return JsonAnswer(piece, parse_json(piece))
        except ValueError:
            continue
    return None


def _json_block(text: str) -> str:
    """The content of the first fenced block of JSON or of no named language; the text itself if there is none."""
    for block in text.split("```")[1::2]:
        language, newline, inside = block.partition("\n")
        if newline and language.strip().lower() in ("", "json"):
            return inside
    return text


def _closing(text: str, start: int) -> int | None:
    """The place after the bracket that closes the one at start; None if it stays open or is too deep."""
    depth = 0
    for token in TOKEN.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
        if depth > DEEPEST:
            return None
    return None


@cache
def _process() -> Process:
    if find_spec("jsonschema_rs") is None:
        raise ValueError("JSON schemas are checked by the package jsonschema-rs: pip install 'unmask[json]'")
    return Process([sys.executable, "-P", str(WORKER)], STARTING, bare=True)  # -P: no imports from the file's folder


@lru_cache(maxsize=2048)
def _check(schema: str, formats: Formats, document: str | None, explain: bool) -> dict[str, Any]:
    """The worker's reply. Cached, because reward and solved both need it."""
    try:
        request = [schema, formats == "asserted", document, explain, SECONDS]
        reply: dict[str, Any] = _process().ask(request, PATIENCE * SECONDS)
    except ProcessNotStarted:
        raise ValueError("jsonschema-rs does not start: try python -c 'import jsonschema_rs'") from None
    except ProcessEnded:
        problem = f"the check takes more than {SECONDS:g} seconds, or too much memory"
        return {"problem": problem} if document is None else {"valid": False, "error": problem}
    return reply


def check_schema(schema: Any, formats: Formats = "asserted") -> None:
    """ValueError if the schema cannot be used."""
    if "problem" in (reply := _check(json.dumps(schema), formats, None, False)):
        raise ValueError(f"the schema cannot be used: {reply['problem']}")


def leaves(document: Any) -> dict[tuple[str | int, ...], Any]:
    """The values of a document without values inside, empty objects and arrays included, by path."""
    values: dict[tuple[str | int, ...], Any] = {}
    queue: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while queue:
        path, value = queue.pop()
        if value and isinstance(value, dict | list):
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            queue += [((*path, key), part) for key, part in inside]
        else:
            values[path] = value
    return values


def agreement(reference: Any, value: Any) -> float:
    """The share of equal fields among all fields in either; 1 means equal documents.

    An empty string in the reference may be left out of the answer, if the schema allows it.
    """
    gold, given = leaves(reference), leaves(value)
    optional = {path for path, leaf in gold.items() if leaf == "" and path not in given}
    above = {path[:length] for path in optional for length in range(len(path))}
    optional |= {path for path, leaf in given.items() if leaf == {} and path in above}
    paths = (gold.keys() | given.keys()) - optional
    agreeing = sum(path in gold and path in given and _same(gold[path], given[path]) for path in paths)
    return agreeing / len(paths) if paths else 1.0


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def schema_match(row: Row, completion: str, formats: Formats = "asserted") -> SchemaMatch:
    """How far a completion follows a row's `schema` and agrees with its `reference`, if there is one."""
    answer = json_answer(completion)
    if answer is None:
        return SchemaMatch(None)
    check_schema(row["schema"], formats)
    valid = _check(json.dumps(row["schema"]), formats, json.dumps(answer.value), False)["valid"]
    return SchemaMatch(answer, valid, agreement(row["reference"], answer.value) if "reference" in row else None)


def explanation(row: Row, completion: str, formats: Formats = "asserted") -> str:
    """What is wrong with a completion, or that it is right."""
    match = schema_match(row, completion, formats)
    if match.answer is None:
        return "no JSON value was found"
    if not match.valid:
        error = _check(json.dumps(row["schema"]), formats, json.dumps(match.answer.value), True)["error"]
        return f"against the schema: {error}"
    if not match.right:
        return f"follows the schema; {match.agreement:.0%} of the fields agree with the reference"
    return "follows the schema" + ("" if match.agreement is None else " and agrees with the reference")


def credit(row: Row, match: SchemaMatch, partial: float) -> float:
    """1 if right; else `partial` times the mean of 1, validity and agreement.

    Partial credit needs an object with at least one property of the schema.
    """
    if match.right:
        return 1.0
    if match.answer is None or not isinstance(row["schema"], dict) or not isinstance(match.answer.value, dict):
        return 0.0
    if match.answer.value.keys().isdisjoint(row["schema"].get("properties", ())):
        return 0.0
    parts = [1.0, float(match.valid), *([] if match.agreement is None else [match.agreement])]
    return partial * sum(parts) / len(parts)


class JsonSchema(TextTask):
    """Rows with a `schema`, a `request` (or `prompt`) and perhaps a `reference`.

    formats: whether `format` is asserted or ignored. fields: whether an answer must agree with the reference.
    A right answer earns 1, others up to `partial`; `weights` weighs the parts of the reward. The split is a row's
    `split`, else it is by a hash of the schema.
    """

    name = "json_schema"
    summary = "A JSON value that follows the schema in the prompt"
    about = About(
        source=f"the hub: {HUB}; or JSONL files with schema, request and perhaps reference",
        separation="by a hash of the schema, one in five for the test, unless a row names its split",
        example={
            "request": "Ann is 34 years old.",
            "schema": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            },
            "reference": {"name": "Ann", "age": 34},
        },
        needs=("unmask[json]", "unmask[data], for the hub"),
    )
    row_fields = FIELDS
    names_split = True

    def __init__(
        self,
        data: str = "",
        test_data: str = "",
        formats: Formats = "asserted",
        fields: bool = True,
        partial: float = 0.0,
        weights: Weights = None,
    ) -> None:
        self.partial = valid_partial(self.name, partial)
        super().__init__(data, test_data)
        self.formats, self.fields = formats, fields
        self.set_reward_parts(self.standard_parts(), weights)

    def published_rows(self, split: str) -> Sequence[Row]:
        """The hub has one split; a part of it is held out."""
        rows = hub_rows(HUB, None, "train")
        return [{**r, "reference": parse_json(r["completion"])} for r in rows if hashed_split(r["schema"]) == split]

    def parse_row(self, row: Row) -> Row:
        """A row with `request`, `schema` and `reference`."""
        schema = parse_json(row["schema"]) if isinstance(row["schema"], str) else row["schema"]
        check_schema(schema, self.formats)
        request = row.get("request", row.get("prompt", ""))
        if isinstance(request, list) and all(isinstance(turn, dict) for turn in request):
            # Messages: their system turn has the schema, which our prompt adds.
            request = "\n\n".join(str(turn.get("content", "")) for turn in request if turn.get("role") == "user")
        if not isinstance(request, str):
            raise ValueError("the request is neither a string nor a list of messages")
        result: Row = {key: row[key] for key in ("id", "split") if key in row}
        if self.fields and "reference" in row and row.get("group") not in ONE_OF_SEVERAL:
            result["reference"] = row["reference"]
        return {**result, "request": request, "schema": schema}

    def key(self, row: Row) -> str:
        return json.dumps(row["schema"], sort_keys=True)

    def prompt(self, row: Row) -> str:
        schema = json.dumps(row["schema"], ensure_ascii=False)
        instruction = "Answer with one JSON value that follows this JSON schema, and with nothing else:"
        return "\n\n".join(part for part in (row["request"], f"{instruction}\n{schema}") if part)

    def solution(self, row: Row) -> str:
        return json.dumps(row["reference"]) if "reference" in row else ""

    def grade(self, row: Row, completion: str) -> Grade:
        match = schema_match(row, completion, self.formats)
        return Grade(float(match.right), 1.0, match.answer.text if match.answer else "")

    def credit(self, row: Row, completion: str) -> float:
        return credit(row, schema_match(row, completion, self.formats), self.partial)

    def in_form(self, completion: str) -> bool:
        """Whether the completion is a JSON value and nothing else, as the prompt asks."""
        try:
            parse_json(text_before_end(completion).strip(BLANK))
        except ValueError:
            return False
        return True

    def verdict(self, row: Row, completion: str) -> str:
        return explanation(row, completion, self.formats)
