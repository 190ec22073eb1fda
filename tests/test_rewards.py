"""Rewards of several parts, and rewards that fail: each kind is named, and the run stops with all it has or goes on."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unmask.config import parse_config
from unmask.core.options import RewardConfig
from unmask.distributed.processes import Ranks
from unmask.tasks import TASKS, Task, own
from unmask.tasks.scoring import RewardError, RewardFailure, grades, score
from unmask.tasks.support.protocol import brevity
from unmask.tasks.task import weighted_sum

GSM = TASKS["gsm8k"]().about.example
assert GSM is not None
BENCHMARKS = ["gsm8k", "math500", "countdown_text", "sudoku_text", "humaneval", "mbpp", "json_schema"]


class TestParts:
    @pytest.mark.parametrize("name", [*BENCHMARKS, "multiple_choice"])
    def test_all_benchmarks_have_the_same_parts_and_correctness_alone_counts(self, name: str) -> None:
        assert TASKS[name]().weights == {"correctness": 1.0, "format": 0.0, "length": 0.0}
        assert TASKS[name](weights={"length": 0.5}).weights == {"correctness": 1.0, "format": 0.0, "length": 0.5}

    @pytest.mark.parametrize(
        ("name", "formed", "formless"),
        [
            ("gsm8k", "\na\n</reasoning>\n<answer>\nb\n</answer>", "a <answer>b</answer>"),
            ("humaneval", "Here:\n```python\nx\n```\n", "```python\nx"),
            ("json_schema", ' {"a": 1} ', 'It is {"a": 1}'),
            ("multiple_choice", "Answer: C", "C"),
        ],
    )
    def test_the_format_is_what_the_prompt_asks_for(self, name: str, formed: str, formless: str) -> None:
        task = TASKS[name](weights={"correctness": 0, "format": 1})
        row = task.about.example
        assert row is not None and [task.reward(row, text) for text in (formed, formless, "")] == [1.0, 0.0, 0.0]

    def test_the_form_of_another_protocol_has_its_own_tag(self) -> None:
        task = TASKS["gsm8k"](protocol="agrpo", weights={"correctness": 0, "format": 1})
        assert task.reward(GSM, task.solution(GSM)) == 1.0
        assert task.reward(GSM, task.solution(GSM).replace("think>", "thinks>")) == 0.0

    def test_only_a_solution_is_rewarded_for_being_short(self) -> None:
        task = TASKS["gsm8k"](weights={"correctness": 0, "length": 1})
        assert task.length == 256
        right = "\\boxed{7}"  # 9 characters of 4 * 256
        assert task.reward(GSM, right) == 1 - 9 / 1024
        assert task.reward(GSM, right + "<|eot_id|>" + "x" * 999) == 1 - 9 / 1024
        assert task.reward(GSM, "\\boxed{8}") == task.reward(GSM, "") == 0.0
        assert task.reward(GSM, "x" * 2000 + right) == 0.0
        assert [brevity("ab", 4), brevity("abcdefgh", 4)] == [0.5, 0.0]

    def test_the_reward_is_the_weighted_sum_and_its_range_follows(self) -> None:
        task = TASKS["gsm8k"](weights={"correctness": 2, "format": -0.5, "length": 0.25})
        assert task.reward_range == (-0.5, 2.25)
        outcome = task.outcome(GSM, task.solution(GSM))
        assert outcome.parts["correctness"] == outcome.parts["format"] == 1.0 and 0 < outcome.parts["length"] < 1
        assert outcome.reward == task.reward(GSM, task.solution(GSM)) == 2 - 0.5 + 0.25 * outcome.parts["length"]

    def test_weights_that_add_up_to_one_make_a_reward_of_one(self) -> None:
        """0.7 + 0.2 + 0.1 is below 1, term by term; raft counts rewards of at least 1 as correct."""
        weights = {"correctness": 0.7, "format": 0.2, "length": 0.1}
        assert TASKS["gsm8k"](weights=weights).reward_range[1] == 1
        assert weighted_sum(dict.fromkeys(weights, 1.0), weights) == 1

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ("{style: 1}", "'style'.* correctness, format, length"),
            ("{format: heavy}", "format .*'heavy'.* correctness, format, length"),
            ("{format: .nan}", "weight of format"),
            ("{format: true}", "weight of format"),
            ("{correctness: 0}", "every weight is 0"),
            ("3", "gsm8k.weights"),
        ],
    )
    def test_bad_weights_are_named(self, weights: str, message: str) -> None:
        import yaml

        with pytest.raises(ValueError, match=message):
            parse_config({"task": "gsm8k", "gsm8k": {"weights": yaml.safe_load(weights)}, "device": "cpu"})


FAILING = {
    "loop": ("while True: pass", "took more than 0.5 seconds"),
    "sleep": ("import time; time.sleep(1e9)", "took more than 0.5 seconds"),
    "regex": ("import re; re.match(r'(a|aa)+$', 'a' * 60 + 'b')", "took more than 0.5 seconds"),
    "raises": ("raise KeyError('nothing')", "reward raised KeyError: 'nothing'"),
    "exits": ("raise SystemExit(3)", "reward raised SystemExit: 3"),
    "nan": ("return float('nan')", "reward returned nan"),
    "none": ("return None", "reward returned None"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended its process with SIGKILL"),
    "left": ("import os; os._exit(0)", "ended its process with exit code 0"),
    "recursion": ("f = lambda: f(); f()", "reward raised RecursionError"),
}
ROWS = [{"id": f"row-{n}", "prompt": f"{n}="} for n in range(3)]


def made(folder: Path, body: str, signature: str = "reward(completion)", before: str = "") -> Task:
    """A task whose reward does `body` where the completion is bad, and is else 1."""
    file = folder / "my_task.py"
    file.write_text(f"{before}\ndef {signature}:\n    if 'bad' not in completion: return 1.0\n    {body}\n")
    return own.task(str(file))


@pytest.mark.parametrize("kind", FAILING)
def test_a_reward_that_fails_is_named_and_the_others_count(tmp_path: Path, kind: str) -> None:
    body, message = FAILING[kind]
    task, texts = made(tmp_path, body), ["good", "bad", "good"]
    start = time.perf_counter()
    scores = score(task, ROWS, texts, RewardConfig(on_error="zero", timeout=0.5))
    assert time.perf_counter() - start < 30
    assert scores.reward_B.tolist() == [1.0, 0.0, 1.0] and scores.solved_B.tolist() == [True, False, True]
    (failure,) = scores.failures
    assert failure[:3] == ("my_task", ROWS[1], "bad")
    assert message in failure.error and "my_task.py" in failure.error and "row-1" in failure.error
    error = str(RewardError(scores.failures))
    assert "'my_task'" in error and failure.error in error and "completion 'bad'" in error


@pytest.mark.parametrize(
    ("body", "message"),
    [("return []", "list of 1"), ("return [1.0, 2.0]", "list of 1"), ("return [None]", "returned None")],
)
def test_functions_in_the_form_of_trl_fail_in_the_same_way(tmp_path: Path, body: str, message: str) -> None:
    source = f"def reward(completions, **_):\n    if completions == ['good']: return [1.0]\n    {body}\n"
    (tmp_path / "my_task.py").write_text(source)
    scores = score(own.task(str(tmp_path / "my_task.py")), ROWS, ["good", "bad", "good"], RewardConfig(on_error="zero"))
    assert scores.reward_B.tolist() == [1.0, 0.0, 1.0] and message in scores.failures[0].error


def test_no_reward_is_called_after_the_failure_that_stops_a_run(tmp_path: Path) -> None:
    body = f"open({str(tmp_path / 'calls')!r}, 'a').write(completion); return float('nan')"
    with pytest.raises(RewardError, match=r"'my_task'.*my_task\.py.*row-0.*completion 'bad1'"):
        score(made(tmp_path, body), ROWS, ["bad1", "bad2", "bad3"])
    assert (tmp_path / "calls").read_text() == "bad1"


def test_the_process_of_rewards_does_not_import_torch(tmp_path: Path) -> None:
    """It would add seconds to every start."""
    assert score(made(tmp_path, "import sys; return 'torch' in sys.modules"), ROWS[:1], ["bad"]).reward_B.tolist() == [
        0
    ]


def test_output_and_input_of_the_file_are_not_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = made(tmp_path, "import os; os.system('echo 0.25'); print('{}'); import sys; return len(sys.stdin.read())")
    assert score(task, ROWS, ["good", "bad", "good"]).reward_B.tolist() == [1.0, 0.0, 1.0]
    out, err = capfd.readouterr()
    assert out == "" and "0.25" in err and "{}" in err


def test_what_the_reward_started_ends_with_it(tmp_path: Path) -> None:
    child = "import subprocess; p = subprocess.Popen(['sleep', '600']); open({!r}, 'w').write(str(p.pid)); p.wait()"
    task = made(tmp_path, child.format(str(tmp_path / "pid")))
    assert score(task, ROWS[:1], ["bad"], RewardConfig(on_error="zero", timeout=0.5)).failures
    pid = int((tmp_path / "pid").read_text())
    deadline = time.perf_counter() + 10
    while _alive(pid) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_that_died_between_two_questions_is_replaced(tmp_path: Path) -> None:
    before = f"import os, pathlib; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    task = made(tmp_path, "return 0.5", before=before)
    assert score(task, ROWS[:1], ["good"]).reward_B.tolist() == [1.0]
    pid = int((tmp_path / "pid").read_text())
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    while _alive(pid):
        time.sleep(0.01)
    assert score(task, ROWS[:1], ["bad"]).reward_B.tolist() == [0.5]
    assert int((tmp_path / "pid").read_text()) != pid


def test_without_a_limit_the_reward_runs_in_this_process(tmp_path: Path) -> None:
    task = made(tmp_path, "import os; return os.getpid()")
    assert score(task, ROWS[:1], ["bad"], RewardConfig(timeout=None)).reward_B.tolist() == [os.getpid()]
    assert score(task, ROWS[:1], ["bad"]).reward_B.tolist() != [os.getpid()]


def test_failures_of_built_in_tasks_are_named_too() -> None:
    """A Task made in Python, whose reward is asked in this process."""
    for value, message in ((None, "returned None"), (float("inf"), "returned inf"), ("1", "returned '1'")):
        task = TASKS["sudoku"]().variant(name="mine", reward=lambda row, text, value=value: value)
        with pytest.raises(RewardError, match=f"'mine'.*{message}"):
            score(task, [{"puzzle": "." * 16}], ["x" * 900])
    task = TASKS["sudoku"]().variant(name="mine", solved=lambda row, text: 1 / 0)
    scores = score(task, [{}], ["x"], RewardConfig(on_error="zero"))  # a row from which no behaviour can answer
    assert scores.failures == [RewardFailure("mine", {}, "x", "ZeroDivisionError: division by zero")]
    assert scores.behaviours["other"].tolist() == [1.0]


def test_grades_of_a_file_come_from_its_process(tmp_path: Path) -> None:
    task = made(tmp_path, "while True: pass")
    file_grades, failures = grades(task, ROWS, ["good", "bad", "good"], RewardConfig(on_error="zero", timeout=0.5))
    assert [grade.points for grade in file_grades] == [1.0, 0.0, 1.0]
    assert [(failure.row, failure.completion) for failure in failures] == [(ROWS[1], "bad")]
    sudoku = TASKS["sudoku_text"](protocol="d1")
    row = sudoku.about.example
    assert row is not None
    (grade,), failures = grades(sudoku, [row], [sudoku.solution(row)])
    assert grade.out_of == row["puzzle"].count("0") and not failures


def test_a_table_says_which_rewards_failed(unmask, tmp_path: Path) -> None:
    """Every one, greedy and sampled, of every line; and a table stops where it is to."""
    rows = "def rows(): return [{'prompt': f'{n}=', 'split': 'test'} for n in range(3)]\n"
    (tmp_path / "my_task.py").write_text(f"length = 4\n{rows}def reward(completion): return float('nan')\n")
    table = ["eval", "tiny", "--task", "my_task.py", "--lengths", "4,8", "--samples", "2"]
    code, said, message = unmask(*table, "reward.on_error=zero")
    wanted = "9 rewards of my_task failed and count as wrong; the first: "
    assert code == 0 and "0.0 %" in said and "reward returned nan" in message
    assert [line.partition(wanted)[0] for line in message.splitlines()] == ["length 4: ", "length 8: "]
    code, said, message = unmask(*table, "--json", "reward.on_error=zero")
    assert code == 0 and [line["errors"] for line in json.loads(said)] == [9, 9] and message.count(wanted) == 2
    code, _, message = unmask(*table)
    assert code == 2 and "reward.on_error=zero" in message


class Two(Ranks):
    """Two processes that have seen the same."""

    def gather(self, value: Tensor, dim: int = 0) -> Tensor:
        return torch.cat([value, value], dim)

    def max(self, value: int, device: torch.device) -> int:
        return value


def test_every_process_has_every_failure(tmp_path: Path) -> None:
    task = made(tmp_path, "raise ValueError('schlecht: \\u00fc')")
    scores = score(task, ROWS, ["good", "bad", "good"], RewardConfig(on_error="zero"), Two(0, 2))
    assert scores.reward_B.tolist() == [1.0, 0.0, 1.0] * 2
    assert len(scores.failures) == 2 and scores.failures[0] == scores.failures[1] and "ü" in scores.failures[0].error
    with pytest.raises(RewardError):
        score(task, ROWS, ["good", "bad", "good"], RewardConfig(), Two(0, 2))


COUNTED = """
length, calls = 4, 0
def rows(): return [{"prompt": f"{n}="} for n in range(40)]
def reward(completion):
    global calls
    calls += 1
    if LIMIT < calls: raise RuntimeError("no more")
    return len(completion) / 4
"""
SHORT = ["prompts=2", "group=4", "eval.prompts=2", "eval.samples=2", "optimizer.schedule=constant", "model=tiny"]
BEFORE, STEP = 2 * (2 + 1), 2 * 4  # completions of an evaluation and of an update


def test_a_run_that_stops_saves_its_weights(unmask, tmp_path: Path) -> None:
    whole, stopped = COUNTED.replace("LIMIT", "10**9"), COUNTED.replace("LIMIT", str(BEFORE + STEP + 3))
    (tmp_path / "my_task.py").write_text(stopped)
    code, _, err = unmask("train", "--task", "my_task.py", "--out", "stopped", "updates=3", *SHORT)
    assert code == 2 and "task 'my_task' failed" in err and "RuntimeError: no more" in err
    metrics = [json.loads(line) for line in Path("stopped/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [0, 1]
    (error,) = [json.loads(line) for line in Path("stopped/errors.jsonl").read_text().splitlines()]
    assert error["step"] == 2 and error["row"]["prompt"].endswith("=") and isinstance(error["completion"], str)
    (tmp_path / "my_task.py").write_text(whole)
    assert unmask("train", "--task", "my_task.py", "--out", "short", "updates=1", *SHORT)[0] == 0
    kept, wanted = (load_file(f"{run}/checkpoint/model.safetensors") for run in ("stopped", "short"))
    assert kept.keys() == wanted.keys() and all(torch.equal(kept[name], wanted[name]) for name in kept)
    assert unmask("eval", "stopped", "--task", "my_task.py", "--problems", "2", "--samples", "1", "--json")[0] == 0


def test_a_run_that_continues_counts_and_records_failures(unmask, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(COUNTED.replace("LIMIT", str(BEFORE + 3)))
    arguments = ["--task", "my_task.py", "--out", "run", "updates=2", "reward.on_error=zero", *SHORT]
    code, _, err = unmask("train", *arguments)
    assert code == 0 and "run/errors.jsonl" in err
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    counted = [(line["step"], line.get("train/reward_errors", line.get("eval/reward_errors"))) for line in metrics]
    assert counted == [(0, 0), (1, STEP - 3), (2, STEP), (2, BEFORE)]
    assert [line["train/reward"] for line in metrics if line["step"] == 2 and "train/reward" in line] == [0.0]
    errors = [json.loads(line) for line in Path("run/errors.jsonl").read_text().splitlines()]
    assert [error["step"] for error in errors] == [1] * (STEP - 3) + [2] * (STEP + BEFORE)
    code, out, _ = unmask("eval", "run", "--task", "my_task.py", "--problems", "2", "--samples", "2", "--json")
    assert code == 0 and json.loads(out)["eval/reward_errors"] == 0  # a process of its own, whose calls are few
    code, _, err = unmask("eval", "run", "--task", "my_task.py", "--problems", "4", "--samples", "2")
    assert code == 0 and "3 rewards of my_task failed" in err and "RuntimeError: no more" in err
