"""Behaviours: typical wrong answers of a task, which pre-training and fine-tuning can teach and metrics count."""

import json
import random
import re
from collections import Counter
from io import StringIO
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from unmask.cli.display import show_evaluation
from unmask.cli.panel import Panel
from unmask.config import parse_config
from unmask.evaluation.evaluate import Evaluation
from unmask.sft.behaviours import drawn_behaviour, mixture_rows
from unmask.sft.config import read_sft_config
from unmask.sft.data import load_sft_data
from unmask.sft.packing import width_buckets
from unmask.sft.pretrain import PretrainTask, mixture_tokens, read_pretrain_config
from unmask.sft.sources import SftSource
from unmask.tasks import TASKS, Row
from unmask.tasks.task import main_behaviours
from unmask.training.run.folder import curves_figure
from unmask.util.statistics import Proportion
from wording import naming

CASES: dict[str, dict[str, Any]] = {
    "sudoku": {},
    "sudoku_large": {},
    "countdown": {},
    "arithmetic": {"largest": 99},
    "json_mini": {},
    "code_mini": {},
}


@pytest.fixture(autouse=True)
def without_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.tasks.puzzles.code_mini.require_sandbox", lambda task: None)


@pytest.mark.parametrize("name", CASES)
def test_a_behaviour_is_an_answer_of_the_right_form_that_earns_nothing(name: str) -> None:
    if name == "json_mini":
        pytest.importorskip("jsonschema_rs")
    task = TASKS[name](**CASES[name])
    rows, redrawn = mixture_rows(task, ["careless"], 12, 0)
    assert len(rows) == 12 and redrawn >= 0
    for row in rows:
        answer = task.behaviours["careless"](row)
        assert answer == task.behaviours["careless"](dict(row)) and len(answer) <= task.length
        if name != "code_mini":  # whose reward runs the sandbox
            assert task.reward(row, answer) == 0.0 and not task.solved(row, answer)
        assert task.behaviour(row, answer, False) == "careless"
        assert task.behaviour(row, task.solution(row), True) == "careful"
        assert task.behaviour(row, "?", False) == "other"


def test_careless_answers_are_what_their_names_say() -> None:
    sudoku = TASKS["sudoku"]()
    careless = sudoku.behaviours["careless"]({"puzzle": ".3......3...4.2."})
    assert careless == "1324123431244123"
    assert TASKS["countdown"]().behaviours["careless"]({"numbers": [18, 5, 11]}) == "18+5+11"
    arithmetic = TASKS["arithmetic"](largest=99)
    assert arithmetic.behaviours["careless"]({"terms": [37, 46, -58]}) == " 37+46= 73; 73-58= 25"
    assert arithmetic.behaviours["careless"]({"terms": [9, -17]}) == "  9-17= 92"
    request = {"request": "top:n=2 ok:b=yes pet:s=cat"}
    assert TASKS["json_mini"]().behaviours["careless"](request) == '{"top":"2","ok":"yes","pet":"cat"}'
    line = {"values": [3, 5, 7, 9]}  # 2x + 3
    assert TASKS["code_mini"]().behaviours["careless"](line) == "2*x-3"


def test_pretraining_draws_answers_by_their_shares() -> None:
    task, part = TASKS["sudoku"](), PretrainTask(task="sudoku", batch=1, behaviours={"careless": 0.25})
    rows, _ = mixture_rows(task, part.behaviours, 2000, 0)
    _, completion_BC = mixture_tokens(part, task, rows, random.Random(0))
    from unmask.models.tiny import CharacterTokenizer

    texts = [CharacterTokenizer().decode(tokens) for tokens in completion_BC.tolist()]
    shown = [task.behaviour(row, text, task.solved(row, text)) for row, text in zip(rows, texts, strict=True)]
    assert set(shown) == {"careful", "careless"}
    assert abs(shown.count("careless") / 2000 - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5


def test_rows_on_which_a_behaviour_is_right_are_redrawn_and_refused_if_they_are_too_many() -> None:
    task = TASKS["countdown"]()
    rows, redrawn = mixture_rows(task, ["careless"], 100, 0)
    drawn = task.rows("train", 100 + redrawn, 0)
    assert redrawn > 0 and rows == [row for row in drawn if sum(row["numbers"]) != row["target"]]
    with pytest.raises(ValueError, match=r"arithmetic: the behaviour careless is right on \d+ of 200 rows"):
        mixture_rows(TASKS["arithmetic"](), ["careless"], 1, 0)
    with pytest.raises(ValueError, match="behaviours: sudoku has no behaviour 'lazy'; known: careless"):
        mixture_rows(TASKS["sudoku"](), ["lazy"], 1, 0)


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match="behaviours"):
        PretrainTask(task="sudoku", batch=1, behaviours={"careless": 1.2})


# --- worked solutions in words ------------------------------------------------------------------------------


def column_by_column(left: int, sign: str, right: int) -> int:
    """Without carry or borrow, from the last digit on; a product writes its first column whole."""
    if sign == "/":
        return max(quotient for quotient in range(left + 1) if quotient * right <= left)
    result, place = 0, 1
    if sign == "*":
        small, large = sorted((left, right))
        while large:
            large, digit = divmod(large, 10)
            result, place = result + place * (digit * small % 10 if large else digit * small), 10 * place
        return result
    while left or right:
        (left, a), (right, b) = divmod(left, 10), divmod(right, 10)
        result, place = result + place * ((a + b if sign == "+" else a - b) % 10), 10 * place
    return result


def check_grid(row: Row, text: str) -> None:
    """Every row is the first permutation that keeps its givens."""
    lines = [row["puzzle"][start : start + 4] for start in range(0, 16, 4)]
    fits = [[p for p in permutations("1234") if all(g in ("0", d) for g, d in zip(g4, p, strict=True))] for g4 in lines]
    filled = ["".join(min(each)) for each in fits]
    assert re.findall("([0-4]{4}) to ([1-4]{4})", text) == list(zip(lines, filled, strict=True))
    assert f"<answer>\n{''.join(filled)}\n" in text


def check_sum(row: Row, text: str) -> None:
    """The numbers in their order, added; they miss the target, which is written all the same."""
    (shown, target), (boxed,) = re.findall("([0-9+]+) = ([0-9]+)", text)[0], re.findall(r"boxed\{(.*)\}", text)
    assert shown == boxed and [int(number) for number in boxed.split("+")] == row["numbers"]
    assert int(target) == row["target"] != sum(row["numbers"])


def check_steps(row: Row, text: str) -> None:
    """Every step is column by column, and uses the results before it in place of the right ones."""
    steps, right = (re.findall("([0-9]+) ([-+*/]) ([0-9]+) = ([0-9]+)", each) for each in (text, row["answer"]))
    results = [(int(step[3]), int(wrong[3])) for step, wrong in zip(right, steps, strict=True)]
    for number, ((a, sign, b, _), (x, _, y, result)) in enumerate(zip(right, steps, strict=True)):
        assert column_by_column(int(x), sign, int(y)) == int(result)
        given = {(int(a), int(b))}
        if number:
            before, wrong = results[number - 1]
            given = {(wrong, int(b))} if int(a) == before else {(int(a), wrong)}
        assert (int(x), int(y)) in given
    assert f"\\boxed{{{results[-1][1]}}}" in text


WORKED = {
    "sudoku_text": (r"(\n[0-4]{4} to [1-4]{4}){4}\n</reasoning>\n<answer>\n[1-4]{16}\n</answer>", check_grid),
    "countdown_text": (
        r"\n([0-9+*/()-]+) = [0-9]+\n</reasoning>\n<answer>\n\\boxed\{\1\}\n</answer>",
        check_sum,
    ),
    "word_problems": (
        r"(\n[0-9]+ [-+*/] [0-9]+ = ([0-9]+)){2,3}\n</reasoning>\n<answer>\n\\boxed\{\2\}\n</answer>",
        check_steps,
    ),
}


@pytest.mark.parametrize("name", WORKED)
def test_careless_worked_solutions_have_the_form_of_the_careful_ones_and_are_wrong(name: str) -> None:
    task, (form, check) = TASKS[name](), WORKED[name]
    rows, _ = mixture_rows(task, ["careless"], 100, 0)
    for row in rows:
        careful, careless = task.solution(row), task.behaviours["careless"](row)
        assert careless == TASKS[name]().behaviours["careless"](dict(row))
        assert re.fullmatch(form, careful) and re.fullmatch(form, careless)
        assert (task.reward(row, careful), task.reward(row, careless)) == (1.0, 0.0)
        assert task.parts(row, careful)["format"] == task.parts(row, careless)["format"] == 1.0
        assert task.outcome(row, careful).solved and task.behaviour(row, careful, True) == "careful"
        other = "\nlet me see\n" + careless.partition("\n</reasoning>")[2]
        assert [task.behaviour(row, text, False) for text in (careless, other, "?")] == [
            "careless",
            "careless",
            "other",
        ]
        check(row, careless)


@pytest.mark.parametrize("behaviour", ["careful", "careless"])
def test_reasoning_cell_by_cell_says_what_every_hole_sees_and_ends_in_the_grid(behaviour: str) -> None:
    """Replayed line by line on a board of its own; only a careless digit may be one that the hole sees."""
    task, forced, holes = TASKS["sudoku_text"](reasoning="cells", protocol="short"), 0, 0
    line = re.compile(r"r([1-4])c([1-4]): row (none|[1-4]+), column (none|[1-4]+), box (none|[1-4]+), so ([1-4])")
    rows, _ = mixture_rows(task, ["careless"], 60, 0)
    for row in rows:
        text = task.solution(row) if behaviour == "careful" else task.behaviours[behaviour](row)
        reasoning, _, answer = text.partition("\n</reasoning>\n<answer>\n")
        board = [list(row["puzzle"][start : start + 4]) for start in range(0, 16, 4)]
        for each in reasoning.strip().split("\n"):
            r, c, *seen, digit = line.fullmatch(each).groups()  # type: ignore[union-attr]
            r, c = int(r) - 1, int(c) - 1
            top, left = r // 2 * 2, c // 2 * 2
            around = board[r], [line[c] for line in board], [*board[top][left:][:2], *board[top + 1][left:][:2]]
            assert board[r][c] == "0"
            assert seen == ["".join(sorted("".join(digits).replace("0", ""))) or "none" for digits in around]
            others = {digit for digits in around for digit in digits} - {"0"}
            assert behaviour == "careless" or digit not in others
            board[r][c], forced, holes = digit, forced + (len(others) == 3), holes + 1
        assert answer == "".join(map("".join, board)) + "\n</answer>"
        assert task.behaviour(row, text, task.solved(row, text)) == behaviour
    assert behaviour == "careless" or forced > 0.9 * holes  # most cells have one digit left


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sudoku_text", {"protocol": "short"}),
        ("sudoku_text", {"reasoning": "cells"}),
        ("countdown_text", {"protocol": "short"}),
        ("sudoku_text", {"protocol": "agrpo"}),
        ("sudoku_text", {"protocol": "d1", "rewards": "d1"}),
        ("countdown_text", {"protocol": "d1_train", "rewards": "d1"}),
        ("word_problems", {"protocol": "d1_train"}),
    ],
)
def test_every_protocol_grades_its_own_careless_answers_wrong(name: str, options: dict[str, str]) -> None:
    task = TASKS[name](**options)
    rows, _ = mixture_rows(task, ["careless"], 5, 0)
    for row in rows:
        assert task.solved(row, task.solution(row)) and task.in_form(task.behaviours["careless"](row))
        assert task.behaviour(row, task.behaviours["careless"](row), False) == "careless"


# --- in fine-tuning -----------------------------------------------------------------------------------------

BYTES = SimpleNamespace(
    mask_id=256,
    eos_id=257,
    max_length=1024,
    tokenizer=SimpleNamespace(encode=lambda text: [*text.encode()], prompt=lambda text, system="": [*text.encode()]),
)
"""What reading data needs of a policy: a token a byte."""


@pytest.mark.parametrize("name", WORKED)
def test_packed_data_have_the_share_that_is_asked_for(name: str) -> None:
    data = load_sft_data(SftSource(task=name), BYTES, 3, 120, 2, {"careless": 0.25})
    task, shown = TASKS[name](), Counter[str]()
    rows, redrawn = mixture_rows(task, ["careless"], 120, 3)
    for bucket in width_buckets(data.examples, BYTES.eos_id, BYTES.max_length):
        for tokens, given, number in zip(*(each.tolist() for each in bucket), strict=True):
            text, row = bytes(token for token in tokens[given:] if token < 256).decode(), rows[number]
            assert bytes(tokens[:given]).decode() == task.prompt(row) + task.prefill
            assert text in (task.solution(row), task.behaviours["careless"](row))
            shown[task.behaviour(row, text, task.solved(row, text))] += 1
    rng = random.Random(f"unmask behaviours {name} 3")
    assert shown == Counter(drawn_behaviour({"careless": 0.25}, rng) for _ in range(120))
    assert data.behaviours == {"redrawn": redrawn, **shown} and abs(shown["careless"] / 120 - 0.25) < 0.1
    held_out = [bytes(example.completion).decode() for example in data.held_out]
    assert held_out == [task.solution(row) for row in task.rows("test", 2, 0)]


def test_shares_of_none_and_all_and_sources_of_their_own() -> None:
    def answers(default: dict[str, float], own: dict[str, float] | None = None) -> list[str]:
        source = SftSource(task="countdown", behaviours=own)
        examples = load_sft_data(source, BYTES, 0, 20, 1, default).examples
        return [bytes(example.completion).decode() for example in examples]

    task = TASKS["countdown"]()
    rows, _ = mixture_rows(task, ["careless"], 20, 0)
    assert answers({"careless": 0.0}) == [task.solution(row) for row in rows]
    assert answers({"careless": 1.0}) == [task.behaviours["careless"](row) for row in rows]
    assert answers({"careless": 0.0}, {"careless": 1.0}) == answers({}, {"careless": 1.0}) == answers({"careless": 1.0})
    plain = [task.solution(row) for row in task.rows("train", 20, 0)]
    assert answers({}) == answers({"careless": 1.0}, {}) == plain


def test_behaviours_are_the_same_from_python_yaml_and_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("behaviours: {careless: 0.5}\n")
    named = read_sft_config(model="tiny", data=["sudoku"], behaviours={"careless": 0.5})
    assert named == read_sft_config(tmp_path / "two.yaml", model="tiny", data=["sudoku"])
    assert named == read_sft_config(None, ["behaviours.careless=0.5"], model="tiny", data=["sudoku"])
    assert named != read_sft_config(model="tiny", data=["sudoku"])


@pytest.mark.parametrize(
    ("behaviours", "data", "names"),
    [
        ({"careless": 0.7, "careless_rows": 0.4}, "sudoku", ["behaviours", "exceed 1", "1.1"]),
        ({"careless": 1.5}, "sudoku", ["behaviours.careless", "1.5"]),
        ({"lazy": 0.5}, "sudoku_text", ["behaviours", "sudoku_text", "'lazy'", "known: careless", "careful"]),
        ({"careless": 0.5}, "rows.jsonl", ["behaviours", "task"]),
        (
            {"careless": 0.5},
            {"task": "gsm8k", "options": {"data": "gsm.jsonl"}},
            ["behaviours", "gsm8k", "other tasks"],
        ),
        ({}, {"file": "rows.jsonl", "behaviours": {"careless": 0.5}}, ["data.0", "file", "behaviours"]),
        ({}, {"task": "sudoku", "behaviours": {"careless": 2}}, ["data.0.behaviours.careless", "2"]),
    ],
)
def test_shares_that_cannot_be_taught_are_refused_by_key(
    behaviours: dict[str, float], data: Any, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("gsm.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    with pytest.raises(ValueError, match=naming(*names)):
        read_sft_config(model="tiny", data=[data], behaviours=behaviours)


def test_a_run_counts_what_it_taught_and_measures_what_it_shows(unmask) -> None:
    code, out, _ = unmask(
        *("sft", "tiny", "--data", "countdown", "behaviours.careless=0.5", "--out", "run", "updates=1"),
        *("max_examples=40", "batch_tokens=256", "eval.prompts=4"),
    )
    finished = json.loads(Path("run/finished.json").read_text())
    counts = finished["behaviours"]["countdown"]
    assert code == 0 and counts["careful"] + counts["careless"] == 40 and counts["redrawn"] > 0
    assert f"{counts['careful']} careful and {counts['careless']} careless answers" in out
    shares = [finished["after"][f"eval/countdown/behaviour/{name}"] for name in ("careful", "careless", "other")]
    assert sum(shares) == 1 and shares[0] == finished["after"]["eval/countdown/solved_sampled"]
    assert "countdown/behaviour/careless: " in out
    assert "50% careless answers" in Path("run/checkpoint/README.md").read_text()


def test_planted_starts_can_be_read() -> None:
    starts = Path(__file__).parents[1] / "benchmarks" / "starts"
    read = [read_pretrain_config(path) for path in starts.glob("*.yaml") if "smollm2" not in path.name]
    assert len(read) >= 9
    config = read_sft_config(starts / "smollm2_two.yaml", ["compile=false"], model="tiny", device="cpu")
    assert config.behaviours == {"careless": 0.4} and [source.task for source in config.data] == [*WORKED]


def test_a_wrong_behaviour_is_shown_once_it_has_a_tenth_and_rare_ones_are_other_answers() -> None:
    before = {"careful": 0.25, "careless": 0.5, "careless_rows": 0.0625, "other": 0.1875}
    after = {"careful": 0.75, "careless": 0.0, "careless_rows": 0.0, "other": 0.25}
    shown = [{"careful": 0.25, "careless": 0.5, "other": 0.25}, {"careful": 0.75, "careless": 0.0, "other": 0.25}]
    assert main_behaviours([before, after]) == shown
    assert main_behaviours([{}, before]) == [{}, shown[0]]  # a resumed run of 0.1 has no shares before
    assert main_behaviours([after, {}]) == [{}, {}]


def test_the_table_of_an_evaluation_shows_the_main_behaviours(monkeypatch: pytest.MonkeyPatch) -> None:
    console, share = Console(width=90, record=True, file=StringIO()), Proportion(0.25, 0.1, 0.4)
    monkeypatch.setattr("unmask.cli.display.console", console)
    shares = {"careful": 0.25, "careless": 0.5, "careless_rows": 0.0625, "other": 0.1875}
    show_evaluation("model", Evaluation(share, share, {1: share}, 0.25, 4, 4, behaviours=shares))
    shown = re.findall(r"(\w+), of all samples +│ +([0-9.]+) %", console.export_text())
    assert shown == [("careful", "25.0"), ("careless", "50.0"), ("other", "25.0")]


def test_panel_and_curves_show_the_main_behaviours_of_every_update() -> None:
    pytest.importorskip("matplotlib")
    shares = {"careful": (0.25, 1.0), "careless": (0.5, 0.0), "careless_rows": (0.0625, 0.0), "other": (0.1875, 0.0)}
    rows = [{f"train/behaviour/{name}": of[update] for name, of in shares.items()} for update in (0, 1)]
    panel, console = Panel(parse_config({}), "run"), Console(width=90, record=True, file=StringIO())
    for step, row in enumerate(rows, 1):
        panel.report(step, {**row, "train/reward": 0.5})
    console.print(panel)
    assert "careful 100%  careless 0%  other 0% " in console.export_text()
    figure = curves_figure([{"step": step, **row} for step, row in enumerate(rows, 1)])
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[-1].get_lines()}
    assert lines == {"careful answers": [0.25, 1.0], "careless answers": [0.5, 0.0], "other answers": [0.25, 0.0]}
