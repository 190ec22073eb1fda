"""MATH500: d1's normalisation, the process that compares answers, and the rows; the pairs are in test_math_pairs.py."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import LifoQueue
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from unmask.tasks.benchmarks import math500
from unmask.tasks.support import d1_answers, verifier
from unmask.tasks.support.answers import LONGEST

DATA = Path(__file__).parents[2] / "shared" / "data" / "math" / "math500_test.jsonl"


def row(answer: str) -> dict[str, str]:
    return {"problem": "Find it.", "answer": answer}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\frac{1}{2}", "\\tfrac12"),
        ("\\frac{1}{2}", "0.5"),
        ("\\frac{1}{2}", "1/2"),
        ("\\frac9{19}", "9/19"),
        ("\\frac 34", "\\dfrac{3}{4}"),
        ("180^\\circ", "180"),
        ("10\\%", "10"),
        ("x = 2", "2"),
        ("(5, \\infty)", "\\left(5,\\infty\\right)"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("\\$32,\\!348", "32,348"),
        (".5", "0.5"),
        ("12\\text{ cm}", "12"),
    ],
)
def test_what_normalisation_makes_equal(one: str, other: str) -> None:
    assert d1_answers.normal(one) == d1_answers.normal(other)
    assert math500.Math500(protocol="d1").solved(row(one), f"\\boxed{{{other}}}")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("58,500", "58500"),
        ("0.25", "\\frac14"),
        ("12 cm", "12"),
        ("4210_5", "4210_{5}"),
        ("1", "-1"),
        ("1/2", "0.5%"),  # a bare percent sign stays
        ("10", "10%"),
        ("x/2", "x / 2"),  # texts are compared as they are if d1's normalisation stops
        ("\\frac{x}{2}", "x/2"),
        ("5\\text{ m}\\text{ s}", "5\\text{ m} \\text{ s}"),
        ("\\sqrt", "\\sqrt "),
        ("\\frac", "\\frac "),
    ],
)
def test_what_normalisation_leaves_apart(one: str, other: str) -> None:
    assert not math500.Math500(protocol="d1").solved(row(one), f"\\boxed{{{other}}}")


@pytest.mark.parametrize(
    ("completion", "solved"),
    [
        ("\\boxed{6} \\boxed{7}", True),
        ("\\boxed{7} \\boxed{6}", False),
        ("<answer>7</answer>", False),  # never looked at: without a box the whole text is the answer
        ("7", True),
        ("\\boxed{} <answer>7</answer>", True),
        ("\\boxed{7 <answer>7</answer>", True),
        ("\\boxed 7", True),  # a space: up to the next dollar sign
        ("$\\boxed 7$ so \\boxed{6}", True),
        ("\\boxed 7 </answer>", False),
        ("\\fbox{7}", False),
        ("\\boxed{7", False),
        ("\\boxed{7} \\boxed{", False),
        ("", False),
    ],
)
def test_the_grader_of_d1(completion: str, solved: bool) -> None:
    assert math500.Math500(protocol="d1").solved(row("7"), completion) == solved


def running() -> set[int]:
    return {process.running.pid for process in verifier.idle_processes().queue if process.running is not None}


def others_in_group(leader: int) -> list[int]:
    """The process ids in a process group except its leader's."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(path.read_text().rpartition(")")[2].split()[2]) == leader:
                members.append(int(path.parent.name))
    return [pid for pid in members if pid != leader]


AS_PID_1 = """
import os
from unmask.tasks.support import verifier
process = verifier.Process(verifier.COMMAND, verifier.STARTING, bare=True)
right = process.ask(["6", "12/2", 5], 60)
process.end()
print(os.getpid(), right, [name for name in os.listdir("/proc") if name.isdigit()])
"""


class TestVerified:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("sympy")

    def test_an_answer_is_in_a_box_or_a_block(self) -> None:
        task, gold = math500.Math500(), row("\\frac{639}{40}")
        for completion, reward in (
            ("so it is\n\\boxed{15.975}", 1.0),
            ("<answer>15.975</answer>", 1.0),
            ("<answer>$\\frac{639}{40}$.</answer>", 1.0),
            ("\\boxed{15.976}", 0.0),
            ("15.975", 0.0),
        ):
            assert task.reward(gold, completion) == task.solved(gold, completion) == reward

    @pytest.mark.parametrize("answer", ["\\binom{999999999}{500000000}", "9^{9^{9^{9^9}}}", "((((10^{99})!)!)!)!"])
    def test_an_answer_that_never_ends_costs_its_time_and_is_wrong(
        self, answer: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert verifier.equal("5", "5.0")  # the process is there
        before = running()
        monkeypatch.setattr(verifier, "SECONDS", 1.0)
        start = time.perf_counter()
        assert math500.Math500().reward(row("5"), f"\\boxed{{{answer}}}") == 0.0
        assert time.perf_counter() - start < 20
        monkeypatch.undo()
        assert verifier.equal("5", f"{5 * len(answer)}/{len(answer)}")  # not asked before
        assert running() == before  # it has forked another child and was not started again

    def test_a_process_that_died_is_replaced(self) -> None:
        assert verifier.equal("6", "6.0")
        for process in verifier.idle_processes().queue:
            if process.running is not None:
                process.running.kill()
                process.running.wait()
        assert verifier.equal("6", "12/2")

    def test_a_child_that_is_killed_between_two_requests_moves_no_verdict(self) -> None:
        process = verifier.Process(verifier.COMMAND, verifier.STARTING, bare=True)
        try:
            assert process.ask(["6", "6.0", 5], 60) is True and process.running is not None
            child = next(pid for pid in others_in_group(process.running.pid))
            os.kill(child, signal.SIGKILL)
            while child in others_in_group(process.running.pid):
                time.sleep(0.001)
            answers = ["18/3", "7", "6.00", "8", "12/2"]
            assert [process.ask(["6", answer, 5], 60) for answer in answers] == [True, False, True, False, True]
        finally:
            process.end()

    def test_as_the_first_process_of_a_container_it_leaves_no_zombies(self) -> None:
        namespace = ["unshare", "-Urpf", "--kill-child", "--mount-proc"]
        if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
            pytest.skip("a PID namespace cannot be made here: unshare -Urpf --mount-proc")
        done = subprocess.run([*namespace, sys.executable, "-c", AS_PID_1], capture_output=True, text=True, timeout=120)
        assert done.stdout == "1 True ['1']\n", done.stderr

    def test_answers_are_compared_side_by_side_and_then_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two processes, each of which answers only while the other is asked too."""
        together, asked, idle = threading.Barrier(2, timeout=60), [], LifoQueue()

        class Waiting:
            def ask(self, request: list, seconds: float) -> bool:
                asked.append(request[:2])
                together.wait()
                return request[0] == request[1]

        for _ in range(2):
            idle.put(Waiting())
        monkeypatch.setattr(verifier, "idle_processes", lambda: idle)
        monkeypatch.setattr(verifier, "WORKERS", 2)
        task, rows = math500.Math500(), [row(answer) for answer in ("101", "102", "102", "103")]
        texts = ["\\boxed{201}", "\\boxed{202}", "\\boxed{202}", "\\boxed{103}"]
        task.prepare(rows, texts)
        assert sorted(asked) == [["101", "201"], ["102", "202"]]  # each once, and none that is equal as a text
        assert [task.grade(*pair).points for pair in zip(rows, texts, strict=True)] == [0, 0, 0, 1] and len(asked) == 2

    @pytest.mark.skipif(not DATA.is_file(), reason="needs the shared data folder beside the checkout")
    def test_every_published_answer_is_solved(self) -> None:
        task = math500.Math500(data=str(DATA), test_data=str(DATA), protocol="unmask")
        rows = task.rows("test", 500, 0)
        assert len(rows) == 500
        for row in rows:
            assert task.reward(row, task.solution(row)) == 1.0
            assert math500.Math500(protocol="d1").solved(row, task.solution(row))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verifier, "find_spec", lambda name: None)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row("1") | {"problem": f"problem {i}"}) + "\n" for i in range(50)))
    with pytest.raises(ValueError, match="pip install"):
        math500.Math500(data=str(file)).rows("train", 1, 0)
    assert math500.Math500(data=str(file), protocol="d1").rows("train", 1, 0)
    with pytest.raises(ValueError, match="pip install"):
        math500.Math500().reward(row("123"), "\\boxed{321}")


@given(text=st.text() | st.text(alphabet="\\boxedfracsqrt{}<answr>/0123456789.,-$% =\n"))
def test_any_text_has_a_grade(text: str) -> None:
    task = math500.Math500(protocol="d1")
    assert task.reward(row("\\frac{271828}{3}"), text) == 0.0
    with mock.patch.object(verifier, "equal", return_value=False):
        assert math500.Math500().reward(row("\\frac{271828}{3}"), text) == 0.0


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "}", "<answer>", "\\frac", "\\sqrt", "\\text{ ", "=", "1/", "\\\\"])
def test_a_hostile_text_costs_little(piece: str) -> None:
    task, text = math500.Math500(protocol="d1"), piece * (100_000 // len(piece))
    start = time.perf_counter()
    for completion in (text, "\\boxed{" + text[: LONGEST - 50] + "}", "<answer>" + text):
        assert task.reward(row("7"), completion) == 0.0
    assert time.perf_counter() - start < 2


def test_a_row_without_an_answer_takes_it_from_its_solution(tmp_path: Path) -> None:
    assert (
        math500.Math500().parse_row({"problem": "?", "solution": "It is $\\boxed{\\frac{1}{2}}$."})["answer"]
        == "\\frac{1}{2}"
    )
    (tmp_path / "bad.jsonl").write_text('{"problem": "?", "solution": "no box"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl line 1"):
        math500.Math500(data=str(tmp_path / "bad.jsonl"), protocol="d1").rows("test", 1, 0)


def test_prompts() -> None:
    for protocol in math500.PROTOCOLS:
        task = math500.Math500(protocol=protocol)
        text = task.system + task.prompt(row("1"))
        assert "Find it." in text and "<answer>\n\\boxed{" in text
    assert '\\boxed{}." \nRespond' in math500.Math500(protocol="d1").prompt(row("1"))
