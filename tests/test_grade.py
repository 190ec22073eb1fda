"""`unmask grade`: scores, intervals, verdicts, and honest errors."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest

from unmask.evaluate import wilson
from unmask.grade import graded, score, task_of
from unmask.tasks.task import Grade

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
    code, told, _ = unmask("grade", "--task", "gsm8k", file, "--json", "--out", str(out))
    assert code == 0
    share = wilson(2, 3)
    assert json.loads(told) == {
        "task": "gsm8k",
        "protocol": None,
        "score": share.value,
        "low": share.low,
        "high": share.high,
        "rows": 3,
        "points": 2.0,
        "out_of": 3.0,
    }
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(v["id"], v["points"], v["out_of"], v["answer"]) for v in verdicts] == [
        ("a", 1, 1, "18"),
        ("b", 1, 1, "1000"),
        ("c", 0, 1, ""),
    ]
    code, told, _ = unmask("grade", "--task", "gsm8k", "--protocol", "d1", file)
    assert code == 0 and told.startswith("gsm8k (d1): 33.33 % [") and "of 3 rows" in told


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
        code, told, err = unmask("grade", "--task", task, str(path), "--json")
        assert code == 0, err
        assert json.loads(told)["score"] == 1.0
    numbers = {"generation": "\\boxed{1+2}", "numbers": [1, 2], "target": 4}
    assert graded(task_of("countdown_text", None), [("here", numbers)]).score.value == 0.0


def test_points_are_pooled_and_rows_are_the_units() -> None:
    grades = [Grade(4, 8), Grade(0, 8), Grade(8, 8), Grade(4, 4)]
    found = score(grades)
    assert found.value == 16 / 28
    residuals = [g.points - found.value * g.out_of for g in grades]
    half = 1.959963984540054 * math.sqrt(sum(r * r for r in residuals) / 3 * 4) / 28
    assert found.low == pytest.approx(max(0, found.value - half)) and found.high == min(1, found.value + half)
    alike = score([Grade(0, 8)] * 5)
    assert alike.value == alike.low == 0 and 0 < alike.high < 1  # Wilson's, where the normal interval is empty
    with pytest.raises(ValueError, match="anything to score"):
        score([Grade(0, 0)])


@pytest.mark.parametrize(
    ("task", "line", "told"),
    [
        ("gsm8k", {"ground_truth": 1}, "line 3: 'generation' is missing"),
        ("gsm8k", {"generation": "x"}, "line 3: 'ground_truth' is missing"),
        ("gsm8k", {"generation": "x", "ground_truth": None}, 'line 3: "ground_truth" must be'),
        ("gsm8k", {"generation": "x", "ground_truth": "none"}, "line 3: .*number"),
        ("math500", {"generation": "x", "ground_truth": 5}, 'line 3: "ground_truth" must be'),
        ("countdown_text", {"generation": "x", "ground_truth": 5}, r"line 3: .*\[numbers, target\]"),
        ("countdown_text", {"generation": "x", "ground_truth": [5, 5]}, "line 3: .*list"),
        ("sudoku_text", {"generation": "x", "ground_truth": "1"}, "line 3: 'question' is missing"),
        ("sudoku_text", {"generation": "x", "question": "?", "ground_truth": "1"}, 'line 3: there is no "puzzle"'),
        ("sudoku", {"generation": "x"}, "line 3: 'puzzle' is missing"),
    ],
)
def test_a_line_without_what_it_needs_is_named(unmask, task: str, line: dict, told: str, tmp_path: Path) -> None:
    good = {
        "gsm8k": LINES[0],
        "math500": {"generation": "\\boxed{7}", "ground_truth": "7"},
        "countdown_text": {"generation": "", "ground_truth": [[1, 2], 3]},
        "sudoku_text": {"generation": "", "ground_truth": "1234341221434321", "puzzle": "1234000000000000"},
        "sudoku": {"generation": "", "puzzle": "1234............"},
    }[task]
    code, _, err = unmask("grade", "--task", task, written(tmp_path / "made.jsonl", [good, line]))
    assert code == 2
    assert re.search(told, err), err


def test_what_is_not_known_is_named(unmask, tmp_path: Path) -> None:
    file = written(tmp_path / "made.jsonl", LINES)
    for arguments, told in [
        (("--task", "chess", file), "no 'chess'"),
        (("--task", "gsm8k", "--protocol", "wd1", file), "unmask, d1"),
        (("--task", "sudoku", "--protocol", "d1", file), "no protocols"),
        (("--task", "gsm8k", str(tmp_path / "none.jsonl")), "no data file"),
        (("--task", "gsm8k", file, "--out", str(tmp_path / "none" / "v.jsonl")), "no folder"),
    ]:
        code, _, err = unmask("grade", *arguments)
        assert code == 2 and told in err
