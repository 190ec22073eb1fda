"""`unmask grade`: scores, intervals, verdicts, and honest errors."""

import gzip
import json
import math
from pathlib import Path

import pytest

from unmask.evaluation.benchmark import Benchmark, BenchmarkCase, run_benchmark
from unmask.evaluation.grade import grade_lines, grade_proportion
from unmask.models import tiny_policy
from unmask.rollout.decoding import Decoding
from unmask.tasks import TASKS
from unmask.tasks.task import Grade
from unmask.util.micro_batch import MicroBatch
from unmask.util.statistics import wilson_interval
from wording import mentions

LINES = [
    {"generation": "\\boxed{18}", "ground_truth": 18.0, "id": "a"},
    {"generation": "\\boxed{1,000}", "ground_truth": "1,000", "id": "b"},
    {"generation": "no idea", "ground_truth": "so it is\n#### 5", "id": "c"},
]


def written(path: Path, lines: list[dict]) -> str:
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")  # blank lines between
    return str(path)


def test_score_interval_and_verdicts(unmask, tmp_path: Path) -> None:
    file, out = written(tmp_path / "made.jsonl", LINES), tmp_path / "verdicts.jsonl"
    code, printed, _ = unmask("grade", "--task", "gsm8k", file, "--json", "--out", str(out))
    assert code == 0
    share = wilson_interval(2, 3)
    assert json.loads(printed) == {
        "task": "gsm8k",
        "protocol": None,
        "score": share.value,
        "low": share.low,
        "high": share.high,
        "rows": 3,
        "points": 2.0,
        "out_of": 3.0,
        "errors": 0,
    }
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(v["id"], v["points"], v["out_of"], v["read"]) for v in verdicts] == [
        ("a", 1, 1, "18"),
        ("b", 1, 1, "1000"),
        ("c", 0, 1, ""),
    ]
    code, printed, _ = unmask("grade", "--task", "gsm8k", "--protocol", "d1", file)
    assert code == 0 and printed.startswith("gsm8k (d1): 33.33 % [") and "of 3 rows" in printed
    code, printed, err = unmask("grade", "--task", "gsm8k", file, "gsm8k.weights={format: 1}")  # at most 2
    assert code == 0 and "of 3 rows" in printed, err


def test_a_compressed_file_and_the_other_tasks(unmask, tmp_path: Path) -> None:
    made = {
        "countdown_text": {"generation": "\\boxed{1+2}", "ground_truth": [[1, 2], 3]},
        "sudoku_text": {
            "generation": "1234341221434321",
            "ground_truth": "1234341221434321",
            "question": "Solve the following Sudoku puzzle: 1234000000000000\n",
        },
        "math500": {"generation": "\\boxed{7}", "ground_truth": "7"},
        "sudoku": {"generation": "1234341221434321", "puzzle": "1234............"},
    }
    for task, line in made.items():
        path = tmp_path / f"{task}.jsonl.gz"
        with gzip.open(path, "wt") as file:
            file.write(json.dumps(line) + "\n")
        code, printed, err = unmask("grade", "--task", task, str(path), "--json")
        assert code == 0, err
        assert json.loads(printed)["score"] == 1.0
    numbers = {"generation": "\\boxed{1+2}", "numbers": [1, 2], "target": 4}
    assert grade_lines(TASKS["countdown_text"](), [("here", numbers)]).score.value == 0.0


def test_points_are_pooled_and_rows_are_the_units() -> None:
    grades = [Grade(4, 8), Grade(0, 8), Grade(8, 8), Grade(4, 4)]
    score = grade_proportion(grades)
    assert score.value == 16 / 28
    residuals = [g.points - score.value * g.out_of for g in grades]
    half = 1.959963984540054 * math.sqrt(sum(r * r for r in residuals) / 3 * 4) / 28
    assert score.low == pytest.approx(max(0, score.value - half)) and score.high == min(1, score.value + half)
    alike = grade_proportion([Grade(0, 8)] * 5)
    assert alike.value == alike.low == 0 and 0 < alike.high < 1  # Wilson's, where the normal interval is empty
    with pytest.raises(ValueError, match="anything to score"):
        grade_proportion([Grade(0, 0)])


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("gsm8k", {"ground_truth": 1}, "generation"),
        ("gsm8k", {"ground_truth": 1, "completion": 1}, "completion"),
        ("gsm8k", {"generation": "x"}, "ground_truth"),
        ("gsm8k", {"generation": "x", "ground_truth": None}, "ground_truth"),
        ("gsm8k", {"generation": "x", "ground_truth": "none"}, "number"),
        ("math500", {"generation": "x", "ground_truth": 5}, "ground_truth"),
        ("countdown_text", {"generation": "x", "ground_truth": 5}, "[numbers, target]"),
        ("countdown_text", {"generation": "x", "ground_truth": [5, 5]}, "list"),
        ("sudoku_text", {"generation": "x", "ground_truth": "1"}, "question"),
        ("sudoku_text", {"generation": "x", "question": "?", "ground_truth": "1"}, "puzzle"),
        ("sudoku", {"generation": "x"}, "puzzle"),
    ],
)
def test_a_line_with_a_missing_field_is_named(unmask, task: str, line: dict, message: str, tmp_path: Path) -> None:
    good = {
        "gsm8k": LINES[0],
        "math500": {"generation": "\\boxed{7}", "ground_truth": "7"},
        "countdown_text": {"generation": "", "ground_truth": [[1, 2], 3]},
        "sudoku_text": {"generation": "", "ground_truth": "1234341221434321", "puzzle": "1234000000000000"},
        "sudoku": {"generation": "", "puzzle": "1234............"},
    }[task]
    code, _, err = unmask("grade", "--task", task, written(tmp_path / "made.jsonl", [good, line]))
    assert code == 2
    assert mentions(err, "made.jsonl:3", message), err


def test_unknown_names_are_reported(unmask, tmp_path: Path) -> None:
    file = written(tmp_path / "made.jsonl", LINES)
    for arguments, message in [
        (("--task", "chess", file), "no 'chess'"),
        (("--task", "gsm8k", "--protocol", "wd1", file), "unmask, d1"),
        (("--task", "sudoku", "--protocol", "d1", file), "sudoku.protocol: unknown option"),
        (("--task", "gsm8k", str(tmp_path / "none.jsonl")), "no data file"),
        (("--task", "gsm8k", file, "--out", str(tmp_path / "none" / "v.jsonl")), "no folder"),
    ]:
        code, _, err = unmask("grade", *arguments)
        assert code == 2 and message in err


CHOICE = {"question": "Which?", "options": ["London", "Paris"], "answer": 1}
RAW = {
    "gsm8k": ({"question": "How many?", "answer": "#### 5"}, "\\boxed{5}"),
    "math500": ({"problem": "Which?", "solution": "It is $\\boxed{x^2}$."}, "\\boxed{x^2}"),
    "countdown_text": ({"numbers": [1, 2], "target": 3}, "\\boxed{1+2}"),
    "sudoku_text": ({"puzzle": "1234............", "solution": "1234341221434321"}, "1234341221434321"),
    "multiple_choice": (CHOICE, "Answer: B"),
    "multiple_choice, HellaSwag": ({"ctx": "Which?", "endings": ["London", "Paris"], "label": "1"}, "Answer: B"),
    "json_schema": ({"prompt": "1?", "schema": '{"type": "integer"}', "reference": 1}, "1"),
    "json_schema, parallel": ({"schema": {}, "reference": 1, "group": "BFCL_parallel"}, "2"),
}


@pytest.mark.parametrize("name", RAW)
def test_a_row_of_the_data_is_graded_as_in_an_evaluation(unmask, tmp_path: Path, name: str) -> None:
    """Both files hold the row as its publisher has it."""
    task, (row, right) = name.partition(",")[0], RAW[name]
    if task in ("math500", "json_schema"):
        pytest.importorskip({"math500": "sympy", "json_schema": "jsonschema_rs"}[task])
    texts = [right, "no idea", ""]
    built = TASKS[task](data=written(tmp_path / "train.jsonl", [row]), test_data=written(tmp_path / "t.jsonl", [row]))
    (row,) = built.rows("test", 5, 0)
    wanted = [built.grade(row, text).points for text in texts]
    out = tmp_path / "verdicts.jsonl"
    file = written(tmp_path / "made.jsonl", [{**row, "generation": text} for text in texts])
    code, _, err = unmask("grade", "--task", task, file, "--out", str(out))
    assert code == 0, err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["points"] for line in lines] == wanted == [1, 0, 0]
    assert all(row.items() <= line.items() for line in lines)  # nothing of the row is written over


def test_options_change_the_grader(unmask, tmp_path: Path) -> None:
    pytest.importorskip("jsonschema_rs")
    file = written(tmp_path / "made.jsonl", [{"schema": {}, "reference": 1, "generation": "2"}])
    for option, points in (("json_schema.fields=true", 0.0), ("json_schema.fields=false", 1.0)):
        code, printed, _ = unmask("grade", "--task", "json_schema", file, option, "--json")
        assert code == 0 and json.loads(printed)["points"] == points
    code, _, err = unmask("grade", "--task", "json_schema", file, "json_schema.field=false")
    assert code == 2 and "did you mean fields" in err


def test_your_own_task(unmask, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion, row): return {'x': 1.0, 'y': 0.5}[completion]\n")
    fields = {"x": "generation", "y": "completion", "z": "generation"}
    file = written(tmp_path / "made.jsonl", [{"prompt": "?", fields[text]: text} for text in "xyz"])
    code, _, err = unmask("grade", "--task", "mine.py", file)
    assert code == 2 and mentions(err, "made.jsonl:5", "mine", "KeyError: 'z'")
    code, printed, err = unmask("grade", "--task", "mine.py", file, "reward.on_error=zero", "--json")
    result = json.loads(printed)
    assert code == 0 and (result["points"], result["rows"], result["errors"]) == (1, 3, 1)
    assert "1 reward of mine failed" in err


def test_a_data_set_of_reasoning_gym(unmask, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    row = TASKS["reasoning_gym"](name="chain_sum").rows("test", 1, 0)[0]
    file = written(tmp_path / "made.jsonl", [{**row, "generation": f"<answer>{row['answer']}</answer>"}])
    code, printed, err = unmask("grade", "--task", "reasoning_gym", file, "reasoning_gym.name=chain_sum", "--json")
    assert code == 0 and json.loads(printed)["score"] == 1.0, err
    file = written(tmp_path / "bare.jsonl", [{"generation": "<answer>1</answer>", "question": "?", "answer": "1"}])
    code, _, err = unmask("grade", "--task", "reasoning_gym", file, "reasoning_gym.name=chain_sum")
    assert code == 2 and mentions(err, "bare.jsonl:1", "metadata")


def test_lines_of_other_benchmarks_are_left_out_and_counted(unmask, tmp_path: Path) -> None:
    countdown = {"generation": "\\boxed{1+2}", "ground_truth": [[1, 2], 3]}
    lines = [{**LINES[0], "task": "gsm8k"}, {**countdown, "task": "countdown"}, {**LINES[2], "task": "mine"}]
    file = written(tmp_path / "made.jsonl", lines)
    code, printed, _ = unmask("grade", "--task", "gsm8k", file, "--json")
    assert code == 0 and (json.loads(printed)["rows"], json.loads(printed)["of_other_tasks"]) == (2, 1)
    code, printed, _ = unmask("grade", "--task", "countdown_text", written(tmp_path / "two.jsonl", lines[:2]))
    assert code == 0 and "100.00 %" in printed and "of other tasks: 1" in printed
    code, _, err = unmask("grade", "--task", "sudoku_text", written(tmp_path / "two.jsonl", lines[:2]))
    assert code == 2 and mentions(err, "sudoku_text", "gsm8k")


def test_puzzles_and_cells_are_both_reported(unmask, tmp_path: Path) -> None:
    line = {"puzzle": "1234000000000000", "ground_truth": "1234341221434321", "generation": "1234432121433412"}
    file = written(tmp_path / "made.jsonl", [line])
    code, printed, _ = unmask("grade", "--task", "sudoku_text", "--protocol", "d1", file)
    assert code == 0 and printed.splitlines()[0].startswith("sudoku_text (d1): 33.33 %")
    assert printed.splitlines()[1].startswith("puzzles: 100.00 %") and "several solutions: 1" in printed
    code, printed, _ = unmask("grade", "--task", "sudoku_text", file, "--json")
    assert code == 0 and json.loads(printed)["score"] == json.loads(printed)["cells"]["value"] == 1.0


def test_answers_are_prepared_in_parallel() -> None:
    called = []
    task = TASKS["sudoku"]().variant(
        prepare=lambda rows, texts: called.append(([row["puzzle"] for row in rows], texts))
    )
    lines = [("here", {"puzzle": "1234............", "generation": text}) for text in ("1", "2")]
    grade_lines(task, lines)
    assert called == [(["1234............"] * 2, ["1", "2"])]


def test_a_table_has_both_scores_and_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    task = TASKS["sudoku"]()
    task = task.variant(other_scores={"half": lambda row, text: Grade(1, 2)}, facts=lambda rows: {"seen": len(rows)})
    bench = Benchmark(tiny_policy(), task.rows("test", 3, 0))
    (line,) = run_benchmark(bench, [BenchmarkCase(task, Decoding(16, 4, 16), MicroBatch(8))], "steps", quiet=False)
    assert line.data()["half"]["value"] == 0.5 and line.card["seen"] == 3
    header, line = capsys.readouterr().out.splitlines()[1:3]
    assert header.split()[1:3] == ["score", "half"] and "50.0 %" in line
