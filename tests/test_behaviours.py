"""Behaviours: typical wrong answers of a task, which pre-training can teach and metrics count."""

import random
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from unmask.cli.panel import Panel
from unmask.config import parse_config
from unmask.sft.pretrain import PretrainTask, mixture_rows, mixture_tokens
from unmask.tasks import TASKS
from unmask.tasks.task import main_behaviours
from unmask.training.run.folder import curves_figure

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
    part = PretrainTask(task=name, batch=1, behaviours={"careless": 1.0})
    rows, redrawn = mixture_rows(part, task, 12, 0)
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
    rows, _ = mixture_rows(part, task, 2000, 0)
    _, completion_BC = mixture_tokens(part, task, rows, random.Random(0))
    from unmask.models.tiny import CharacterTokenizer

    texts = [CharacterTokenizer().decode(tokens) for tokens in completion_BC.tolist()]
    shown = [task.behaviour(row, text, task.solved(row, text)) for row, text in zip(rows, texts, strict=True)]
    assert set(shown) == {"careful", "careless"}
    assert abs(shown.count("careless") / 2000 - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5


def test_rows_on_which_a_behaviour_is_right_are_redrawn_and_refused_if_they_are_too_many() -> None:
    task, part = TASKS["countdown"](), PretrainTask(task="countdown", batch=1, behaviours={"careless": 0.5})
    rows, redrawn = mixture_rows(part, task, 100, 0)
    drawn = task.rows("train", 100 + redrawn, 0)
    wrong = [row for row in drawn if sum(row["numbers"]) != row["target"]]
    assert redrawn > 0 and rows == wrong[:100] and len(drawn) - len(wrong) <= redrawn
    easy, part = TASKS["arithmetic"](), PretrainTask(task="arithmetic", batch=1, behaviours={"careless": 0.5})
    with pytest.raises(ValueError, match=r"arithmetic: the behaviour careless is right on \d+ of 200 rows"):
        mixture_rows(part, easy, 200, 0)
    part = PretrainTask(task="sudoku", batch=1, behaviours={"lazy": 0.5})
    with pytest.raises(ValueError, match="sudoku has no behaviour 'lazy'; known: careless"):
        mixture_rows(part, TASKS["sudoku"](), 1, 0)


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match="behaviours"):
        PretrainTask(task="sudoku", batch=1, behaviours={"careless": 1.2})


def test_a_wrong_behaviour_is_shown_once_it_has_a_tenth_and_rare_ones_are_other_answers() -> None:
    before = {"careful": 0.25, "careless": 0.5, "careless_rows": 0.0625, "other": 0.1875}
    after = {"careful": 0.75, "careless": 0.0, "careless_rows": 0.0, "other": 0.25}
    shown = [{"careful": 0.25, "careless": 0.5, "other": 0.25}, {"careful": 0.75, "careless": 0.0, "other": 0.25}]
    assert main_behaviours([before, after]) == shown
    assert main_behaviours([{}, before]) == [{}, shown[0]]  # a resumed run of 0.1 has no shares before
    assert main_behaviours([after, {}]) == [{}, {}]


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
