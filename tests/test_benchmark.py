"""The field's table: every figure from a policy whose answers are known, and a card that says how it was measured."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from unmask.benchmark import card, field_decoding, hashed, lines
from unmask.cli import app
from unmask.evaluate import prompt_ids, wilson
from unmask.models import load_model
from unmask.rows import Rows
from unmask.tasks import TASKS
from unmask.tasks.task import Grade, Task

PROBLEMS = [{"question": f"What is {n}?", "answer": f"It is {n}. #### {n}"} for n in range(40)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    return path


def letter_task() -> Task:
    """Points for how often a completion says 1, out of two; the model is asked for Sudoku."""
    return Task(
        name="letters",
        summary="",
        length=16,
        rows=lambda split, n, seed: [{"i": i} for i in range(n)],
        prompt=lambda row: "..3.1...2.......=" if row["i"] % 2 else "1.3.1...2.......=",
        solution=lambda row: "",
        reward=lambda row, text: 0.0,
        solved=lambda row, text: False,
        text=True,
        grade=lambda row, text: Grade(float(min(2, text.count("1"))), 2.0, text),
    )


def test_the_fields_decoding_is_two_tokens_a_step_in_blocks_of_32_greedily() -> None:
    shapes = [(d.length, d.steps, d.block, d.law.temperature) for d in map(field_decoding, (128, 256, 512))]
    assert shapes == [(128, 64, 32, 0.0), (256, 128, 32, 0.0), (512, 256, 32, 0.0)]
    assert (field_decoding(16).steps, field_decoding(16).block) == (8, 16)


def test_a_line_is_what_grading_the_greedy_answers_gives() -> None:
    policy, task = load_model("tiny"), letter_task()
    rows = task.rows("test", 6, 0)
    how = field_decoding(16)
    (line,) = lines(policy, task, "own", rows, [how], "cpu", Rows(4))
    prompts = [prompt_ids(policy, task, row) for row in rows]
    trace = how.sample(policy, prompts, torch.zeros(6, dtype=torch.long), Rows(64)).trace
    texts = [policy.tokenizer.decode(ids) for ids in trace.tokens_BL[:, -16:].tolist()]
    assert list(line.texts) == texts  # greedy: noise and batch do not matter
    points = sum(min(2, text.count("1")) for text in texts)
    assert (line.score.value == pytest.approx(points / 12) and 0 < points < 12) or points in (0, 12)
    assert line.tokens == pytest.approx(sum(len(text) for text in texts) / 6)
    assert line.data()["card"] == card(policy, task, "own", rows, how, "cpu", 4)


def test_the_card_changes_with_what_changes_a_number() -> None:
    policy, task = load_model("tiny"), letter_task()
    rows, how = task.rows("test", 4, 0), field_decoding(16)
    first = card(policy, task, "own", rows, how, "cpu", 4)
    assert first["model"] == "tiny" and first["dtype"] == "float32" and first["problems"] == 4
    assert first["prompt"] == hashed([task.prompt(rows[0]), ""]) and first["split"] == hashed(rows)
    assert card(policy, task, "own", rows[1:], how, "cpu", 4)["split"] != first["split"]
    assert card(policy, task, "own", rows[1:], how, "cpu", 4)["prompt"] != first["prompt"]
    assert card(policy, task, "own", rows, field_decoding(32), "cpu", 4)["steps"] == 16


def test_the_command_prints_the_table_and_writes_scores_cards_and_answers(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    command = ["eval", "tiny", "--task", "gsm8k", "--protocol", "d1", "--data", str(data), "--problems", "3"]
    # The tiny model knows neither the words nor the length of a real prompt.
    found = CliRunner().invoke(app, [*command, "--lengths", "16", "--out", str(out)])
    assert isinstance(found.exception, ValueError) and "limit of 128" in str(found.exception)
    assert not out.exists()
    short = ["eval", "tiny", "--task", "sudoku", "--problems", "8", "--lengths", "16", "--out", str(out)]
    said = CliRunner().invoke(app, short)
    assert said.exit_code == 0, said.output
    (line,) = json.loads(out.read_text())
    task = TASKS["sudoku"]()
    solved = sum(task.solved(r, t) for r, t in zip(task.rows("test", 8, 0), line["answers"], strict=True))
    assert (line["score"], line["low"], line["high"]) == pytest.approx(tuple(wilson(solved, 8)))
    assert line["card"]["protocol"] == "unmask" and f"{100 * line['score']:.1f} %" in said.output
    as_json = CliRunner().invoke(app, [*short[:-2], "--json"])
    assert json.loads(as_json.output)[0]["score"] == line["score"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--lengths", "128,x"], "'128,x' is not a list of numbers"),
        (["--lengths", "0"], "0 is no length"),
        (["--protocol", "d1"], "--protocol belongs to a task: name it with --task"),
        (["--data", "rows.jsonl"], "--data belongs to a task: name it with --task"),
        (["--task", "gsm8k", "--protocol", "d2", "--lengths", "16"], "there is no protocol 'd2'; known: unmask, d1"),
        (["--task", "gsm8k", "--data", "none.jsonl"], "there is no data file none.jsonl"),
        (["--task", "sudoku", "--protocol", "d1"], "sudoku.protocol: unknown option"),
    ],
)
def test_honest_errors(more: list[str], told: str) -> None:
    found = CliRunner().invoke(app, ["eval", "tiny", *more])
    assert isinstance(found.exception, ValueError) and told in str(found.exception)
