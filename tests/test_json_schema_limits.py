"""JSON schema adherence: drafts, formats, bombs, references that are never fetched, files and options."""

import http.server
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from schemas import PERSON, valid
from unmask.tasks.benchmarks import json_schema


def test_the_draft_is_the_one_the_schema_names():
    old = "http://json-schema.org/draft-04/schema#"
    assert not valid({"$schema": old, "type": "integer"}, 1.0)  # an integer by its value since draft 6
    assert valid({"type": "integer"}, 1.0)
    assert not valid({"$schema": old, "maximum": 1, "exclusiveMaximum": True}, 1)
    assert not valid({"prefixItems": [{"type": "string"}]}, [1])  # of 2020-12
    assert valid({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"type": "string"}]}, [1])


def test_formats_are_asserted_or_ignored():
    assert not valid({"format": "date"}, "tomorrow")
    assert valid({"format": "date"}, "tomorrow", "ignored")


# -- hostile schemas and answers


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", r"^(?:(a)|(?=a)a)*b$", r"^((?=a)a|a)*c\1$", "(x+x+)+y"])
def test_pattern_bombs_are_bounded(pattern: str):
    start = time.perf_counter()
    bomb = {"items": {"pattern": pattern}, "minItems": 801}
    assert not valid(bomb, ["a" * 20 + "!"] * 800)
    assert not valid({"pattern": pattern}, "x" * 9_000 + "a" * 9_000 + "!")
    assert time.perf_counter() - start < 5.0


def test_a_pattern_that_gives_up_is_invalid_also_under_not():
    assert not valid({"not": {"pattern": r"^(?:(a)|(?=a)a)*b$"}}, "a" * 40)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"items": {"$ref": "#"}, "uniqueItems": True},
    ],
)
def test_schemas_that_refer_to_themselves_end(schema: Any):
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    assert valid(schema, deep)
    assert valid(schema, list(range(3_000)))


@pytest.mark.parametrize("kind", ["allOf", "anyOf", "oneOf"])
def test_two_branches_at_every_level_do_not_double_the_work(kind: str):
    both = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    sides = {
        name: {"type": "object", "properties": {"x": {kind: both}}, limit: 5 * (limit != "minProperties")}
        for name, limit in (("a", "maxProperties"), ("b", "minProperties"))
    }
    document: Any = 3
    for _ in range(60):
        document = {"x": document}
    start = time.perf_counter()
    assert not valid({"$defs": sides, "$ref": "#/$defs/a"}, document)
    assert time.perf_counter() - start < 2.0


def test_references_that_double_the_work_at_every_level_are_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_schema, "SECONDS", 0.2)
    levels = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    bomb = {"schema": {"$defs": {**levels, "a40": {"type": "integer"}}, "$ref": "#/$defs/a0"}}
    json_schema.check_schema(bomb["schema"])
    assert not json_schema.schema_match(bomb, "1").valid
    assert "0.2 seconds" in json_schema.explanation(bomb, "1")
    assert valid({"type": "integer"}, 1)  # by a new process


class Counting(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


def test_nothing_is_ever_fetched(tmp_path: Path):
    import jsonschema_rs

    asked: list[str] = []
    with http.server.HTTPServer(("127.0.0.1", 0), type("Handler", (Counting,), {"asked": asked})) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/schema.json"
            (tmp_path / "schema.json").write_text("{}")
            for reference in (url, f"file://{tmp_path}/schema.json"):
                for schema in (
                    {"$ref": reference},
                    {"$schema": reference},
                    {"properties": {"a": {"$dynamicRef": reference}}},
                ):
                    with pytest.raises(ValueError, match="schema cannot be used"):
                        json_schema.check_schema(schema)
            assert asked == []
            jsonschema_rs.validator_for({"$ref": url})  # the server is there to be asked: without our settings it is
            assert asked == ["/schema.json"]
        finally:
            server.shutdown()
            thread.join()


# -- rows


def test_rows_of_a_file(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    lines: list[dict[str, Any]] = [{"schema": {"const": i}, "request": f"Say {i}", "reference": i} for i in range(50)]
    lines.append(
        {
            "schema": json.dumps(PERSON),
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Anna"}],
        }
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = json_schema.JsonSchema(data=str(path))
    test, train = task.rows("test", 99, 0), task.rows("train", 40, 0)
    assert not {json.dumps(row["schema"]) for row in test} & {json.dumps(row["schema"]) for row in train}
    assert 4 <= len(test) <= 20 and task.rows("train", 10, 0) == train[:10]
    for row in test + train:
        if "reference" in row:
            assert task.solved(row, task.solution(row))
        else:
            assert (
                row["request"] == "Anna" and task.prompt(row).endswith(json.dumps(PERSON)) and task.solution(row) == ""
            )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"schema": {"type": "objekt"}}, "line 1.*schema"),
        ({"schema": {"$ref": "https://example.org/x"}}, "line 1.*schema"),
        ({"schema": {"pattern": "((a{1000}){1000}){1000}"}}, "line 1.*schema"),
        ({"schema": "{not json"}, "line 1"),
        ({"schema": {}, "request": 3}, "line 1.*request"),
        ({"request": "x"}, "'schema'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: Any, message: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=message):
        json_schema.JsonSchema(data=str(path)).rows("train", 1, 0)


def test_bad_options_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="partial"):
        json_schema.JsonSchema(partial=1.0)
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        json_schema.JsonSchema(data=str(tmp_path / "none.jsonl"))


def test_a_missing_package_is_named():
    code = (
        "import sys; sys.modules['jsonschema_rs'] = None\n"
        "from unmask.tasks.benchmarks import json_schema\n"
        "json_schema.JsonSchema()\n"
        "try: json_schema.check_schema({})\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'unmask[json]'" in done.stdout
