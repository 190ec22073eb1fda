"""What `unmask tasks` says of every task is so: prompt hashes, reward ranges; and rewards are pure."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from reward_cases import completions, earned, tasks

from unmask import sandbox
from unmask.cli.describe import description
from unmask.evaluation.benchmark import Benchmark, card, cases_by_length
from unmask.models import tiny_policy
from unmask.tasks import TASKS, own
from unmask.tasks.benchmarks import gsm8k, humaneval, json_schema, math500, mbpp, text_countdown
from unmask.util.micro_batch import MicroBatch

HERE = Path(__file__).parent


@pytest.fixture
def nothing_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(socket.socket, "connect", refused)
    for module in (gsm8k, math500, humaneval, mbpp, json_schema, text_countdown):
        monkeypatch.setattr(module, "hub_rows", refused)


def test_every_task_is_described_without_data_or_network(unmask, nothing_to_fetch: None) -> None:
    code, out, _ = unmask("tasks", "--json")
    listed = {about["name"]: about for about in json.loads(out)}
    assert code == 0 and list(listed) == list(TASKS)
    for name, about in listed.items():
        assert about["summary"] and about["source"] and about["splits"]["apart"] and about["length"] > 0
        if name not in ("own", "code_mini"):  # which need a file and the sandbox
            assert len(about["prompt"]["hash"]) == 12 and about["prompt"]["text"]
    one = listed["gsm8k"]
    assert one["splits"]["sizes"] == {"train": 7473, "test": 1319} and "openai/gsm8k" in one["source"]
    assert one["reward"] == {"low": 0, "high": 1, "parts": {"correctness": 1, "format": 0, "length": 0}}
    assert {"unmask", "d1", "d1_train"} <= set(one["protocols"])
    assert one["protocols"]["unmask"] == one["prompt"]["hash"] != one["protocols"]["d1"]
    assert listed["own"]["reward"]["low"] is None and "--task my_task.py" in listed["own"]["prompt"]["missing"]
    assert "sandbox" in " ".join(listed["mbpp"]["needs"])


def test_one_task_is_a_page_to_read(unmask, nothing_to_fetch: None, tmp_path: Path) -> None:
    code, out, _ = unmask("tasks", "gsm8k")
    assert code == 0 and "1 x correctness + 0 x format + 0 x length" in out and "    <answer>\n" in out
    (tmp_path / "mine.py").write_text(
        "def rows(): return [{'prompt': f'{n}?'} for n in range(30)]\n"
        "def correct(completion): return 0\ndef short(completion): return 0\nrewards = [correct, short]\n"
        "weights = {'short': 0.5}\n"
    )
    code, out, _ = unmask("tasks", "mine.py")
    assert code == 0 and "any number: 1 x correct + 0.5 x short" in out and "?" in out
    code, out, err = unmask("tasks", "gms8k")
    assert code == 2 and "did you mean gsm8k?" in err


@pytest.mark.parametrize("name", ["gsm8k", "countdown_text", "sudoku_text", "sudoku", "multiple_choice"])
def test_the_hash_of_a_prompt_is_that_of_the_card(name: str) -> None:
    """Whatever the rows are: the hash is of the wording."""
    about = description(name, TASKS[name])
    for protocol, digest in (about["protocols"] or {"": about["prompt"]["hash"]}).items():
        task = TASKS[name](protocol=protocol) if protocol else TASKS[name]()
        rows = [task.about.example] if task.about.example else task.rows("test", 2, 0)
        if name == "gsm8k":
            rows = [{"question": "Another?", "answer": "#### 1"}]
        (case,) = cases_by_length(task, [16], None, MicroBatch(4))
        assert card(Benchmark(tiny_policy(), rows), case)["prompt"] == digest


SAID = {
    "own": {"prompt": "Who?"},
    "multiple_choice": {"question": "Who?", "options": ["she", "he"], "answer": "A"},
    "json_schema": {"schema": {"type": "integer"}, "request": "One."},
    "mbpp": {"text": "Write f.", "code": "def f(): return 1", "test_list": ["assert f() == 1"]},
}


@pytest.mark.parametrize("name", SAID)
def test_no_problem_is_in_both_splits_whatever_its_rows_say(name: str, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("jsonschema_rs" if name == "json_schema" else "json")
    monkeypatch.setattr(sandbox, "problem", lambda: "")  # nothing is run
    place = {"own": "prompt", "json_schema": "schema", "mbpp": "text"}.get(name, "question")
    other = {"type": "string"} if name == "json_schema" else "Who else?"
    rows = [{**SAID[name], "split": split} for split in ("train", "test")]
    rows.append({**SAID[name], place: other, "split": "train"})
    file, mine = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine.write_text("def reward(completion): return 0\n")
    task = own.task(str(mine), data=str(file)) if name == "own" else TASKS[name](data=str(file))
    (tested,), trained = task.rows("test", 9, 0), task.rows("train", 9, 0)
    assert tested[place] == SAID[name][place] and [row[place] for row in trained] == [other] * 9


def test_rewards_are_within_their_range_and_a_solution_earns_the_most() -> None:
    for what, task, rows in tasks():
        assert task.reward_range is not None
        low, high = task.reward_range
        for place, row in enumerate(rows):
            rewards = [task.reward(row, text) for text in completions(task, row, place, 3)]
            assert all(low <= value <= high for value in rewards), what
            assert task.solved(row, task.solution(row)), what
            if what.endswith(" {}"):
                assert rewards[0] == high == 1.0, what


def test_rewards_are_pure() -> None:
    """Computed twice, in another order, and in other processes with another order of sets: the same values."""
    path = os.pathsep.join(p for p in sys.path if p)
    others = [
        subprocess.Popen(
            [sys.executable, str(HERE / "reward_cases.py"), *order],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for order, seed in (([], "12345"), (["reversed"], "54321"))
    ]
    once = earned(False)
    assert earned(True) == once and len(once) > 200 and any(reward not in (0, 1) for _, reward, *_ in once)
    for process in others:
        assert json.loads(process.communicate()[0]) == json.loads(json.dumps(once)) and process.returncode == 0
