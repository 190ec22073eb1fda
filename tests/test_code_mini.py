"""Expressions from examples: rows read a second time by plain Python, splits by what functions do, hostile answers."""

import ast
import random
import re
import time
from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, settings, strategies as st

from unmask import sandbox
from unmask.tasks.puzzles import code_mini

needs_sandbox = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem() or "programs can be run")
ROW = {"shown": [0, 2, 3], "values": [2 * x + 1 for x in code_mini.INPUTS], "solution": "2*x+1"}


def plain(expression: str, x: int) -> int:
    """What an expression of ours gives: sums of products of x and numbers, put together without `values`."""
    total = 0
    for sign, term in re.findall(r"([+-]?)([^+-]+)", expression):
        value = 1
        for factor in term.split("*"):
            value *= x if factor == "x" else int(factor)
        total += -value if sign == "-" else value
    return total


@needs_sandbox
@pytest.mark.parametrize("options", [{}, {"squares": 1}, {"squares": 3, "largest": 4}])
def test_rows_are_asked_and_answered_rightly(options: dict[str, int]):
    task = code_mini.CodeMini(**options)
    widths, longest = set(), 0
    for split in ("train", "test"):
        for row in task.rows(split, 1500, 3):
            prompt, solution = task.prompt(row), task.solution(row)
            examples = re.findall(r"(\d+): *(-?\d+)", prompt)
            assert prompt.endswith(">") and len({x for x, _ in examples}) == code_mini.SHOWN
            assert all(plain(solution, int(x)) == int(y) for x, y in examples)
            assert row["values"] == [plain(solution, x) for x in code_mini.INPUTS]
            assert ast.unparse(ast.parse(solution)).replace(" ", "") == solution  # Python reads it as it stands
            assert len(set(row["values"])) > 1
            widths.add(len(prompt))
            longest = max(longest, len(solution))
    assert len(widths) == 1 and longest == task.length


def test_functions_are_written_shortly():
    functions = [(1, -1, 3), (0, 1, 0), (0, -1, 0), (2, 0, -9), (0, -3, 1), (0, 0, 1), (3, 2, 0), (0, 0, -5)]
    wanted = ["x*x-x+3", "x", "-x", "2*x*x-9", "-3*x+1", "1", "3*x*x+2*x", "-5"]
    assert [code_mini.expression_of(function) for function in functions] == wanted


def test_the_examples_determine_the_function():
    every = [(a, b, c) for a in range(4) for b in range(-9, 10) for c in range(-9, 10)]
    known = [code_mini.values(function) for function in every]
    for shown in combinations(code_mini.SHOWN_FROM, code_mini.SHOWN):  # with 0 or without
        assert len({tuple(values[x] for x in shown) for values in known}) == len(every)
    assert set(code_mini.SHOWN_FROM) < set(code_mini.INPUTS)  # others decide


@needs_sandbox
def test_rows_depend_on_nothing_but_their_arguments_and_the_splits_share_no_function():
    task = code_mini.CodeMini(squares=1)
    first = task.rows("train", 40, 7)
    assert code_mini.CodeMini(squares=1).rows("train", 40, 7) == first and task.rows("train", 15, 7) == first[:15]
    assert task.rows("train", 40, 8) != first
    seen = {}
    for split in ("train", "test"):
        others = (code_mini.CodeMini(squares=squares) for squares in (0, 1, 3))
        seen[split] = {tuple(row["values"]) for other in others for row in other.rows(split, 3000, 1)}
        assert len({tuple(row["values"]) for row in task.rows(split, 3000, 1)}) > 100
    assert not seen["train"] & seen["test"]
    with pytest.raises(ValueError, match="validation"):
        task.rows("validation", 1, 0)


@needs_sandbox
def test_the_split_never_moves():
    # Moving it would leak test problems into models that are already trained.
    rows = code_mini.CodeMini().rows("test", 3, 0)
    assert [(row["solution"], row["shown"]) for row in rows] == [
        ("-9*x+8", [0, 2, 3]),
        ("-5*x-3", [0, 2, 4]),
        ("-9*x+8", [0, 1, 4]),
    ]


@needs_sandbox
def test_any_right_expression_is_right_and_one_that_fits_the_examples_alone_is_not():
    task, lenient = code_mini.CodeMini(), code_mini.CodeMini(partial=0.5)
    for text in ("2*x+1", "x+x+1", "1+2*x", " 1 +x*2", "2*(x+1)-1", "3*x-x+1", "4*x//2+1", "2*x+1/1"):
        assert task.solved(ROW, text) and task.reward(ROW, text) == 1.0 == lenient.reward(ROW, text), text
    assert [2 * (x % 5) + 1 for x in ROW["shown"]] == [ROW["values"][x] for x in ROW["shown"]]
    assert not task.solved(ROW, "2*(x%5)+1") and task.reward(ROW, "2*(x%5)+1") == 0.0
    assert lenient.reward(ROW, "2*(x%5)+1") == pytest.approx(0.5 * 5 / 13)
    assert lenient.reward(ROW, "x*x+1") == pytest.approx(0.5 * 2 / 13)  # at 0 and at 2
    for text in ("", " ", "x", "2*x", "2*x+", "1", "2*x+1)", "1)+2*(x", "2x+1", "x(2)", "()", "2*x+1.", "x//0", "-"):
        assert not task.solved(ROW, text) and task.reward(ROW, text) == 0.0, text


@needs_sandbox
def test_verdicts_are_those_of_an_interpreter():
    """Drawn expressions, judged in one go, against Python's own values (these texts are the test's, and tame)."""
    rng, task = random.Random(0), code_mini.CodeMini(partial=0.5)
    texts = ["".join(rng.choice(part) for part in ("x2", "+-*/%", "x34", "+-*%", "x15")) for _ in range(24)]

    def value_at(text: str, x: int) -> float | None:
        try:
            return eval(text, {"x": x})
        except ZeroDivisionError:
            return None

    wanted = [value_at("x*x+x", x) for x in code_mini.INPUTS]
    row = {"shown": [0, 1, 2], "values": wanted, "solution": "x*x+x"}
    texts += ["x+x*x", "(x+1)*x"]
    task.prepare([row] * len(texts), texts)
    for text in texts:
        share = sum(value_at(text, x) == y for x, y in zip(code_mini.INPUTS, wanted, strict=True)) / 13
        expected = 0.0 if "x" not in text else 1.0 if share == 1 else 0.5 * share
        assert task.reward(row, text) == pytest.approx(expected), text


HOSTILE = [
    "__import__('os').system('true')",
    "9**9**9",
    "9**9**9*x",  # admitted, and runs out of time in the sandbox
    "x+" * 20 + "x",
    "x" * 100_000,
    "(" * 100_000,
    "-" * 8 + "x",
    "((((((((x",
    "x\n2*x+1",
    "2*x+1#",
    "\u0662*x+1",  # a digit, but not of ours
    "2*x+1\0",
    "\ud800",
    "[].x",
    "x:=2*x+1",
    "\ufffd",
]


@needs_sandbox
def test_hostile_answers_are_contained_and_earn_nothing():
    task = code_mini.CodeMini(partial=0.5)
    start = time.monotonic()
    task.prepare([ROW] * len(HOSTILE), HOSTILE)
    assert time.monotonic() - start < 60  # one hangs, three times two seconds; the machine may be busy
    for text in HOSTILE:
        assert task.reward(ROW, text) == 0.0 and not task.solved(ROW, text), text[:40]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[list[sandbox.ProgramJob]]:
    """What is sent to the sandbox, which here finds every expression wrong."""
    sent: list[list[sandbox.ProgramJob]] = []

    def run_many(jobs):
        sent.append(list(jobs))
        return [[sandbox.Verdict(False, "not run")] * len(job.tests) for job in sent[-1]]

    monkeypatch.setattr(sandbox, "run_many", run_many)
    return sent


def test_an_answer_is_run_once_for_a_function_and_many_at_a_time(jobs: list[list[sandbox.ProgramJob]]):
    task = code_mini.CodeMini()
    other = {**ROW, "shown": [0, 1, 4]}  # the same function, asked otherwise
    third = {**ROW, "values": [3 * x for x in code_mini.INPUTS]}
    rows, texts = zip(*product([ROW, other, third], ["2*x", "x+x", "2*x", " 2*x "]), strict=True)
    task.prepare(list(rows), list(texts))
    assert Counter(job.program for job in jobs[0]) == {"f = lambda x: 2*x": 2, "f = lambda x: x+x": 2}
    for row, text in zip(rows, texts, strict=True):
        assert task.reward(row, text) == 0.0 and not task.solved(row, text)
    assert len(jobs) == 1


@settings(max_examples=300)
@given(st.text() | st.text(alphabet="x0123456789+-*/%() ", max_size=45))
def test_only_short_expressions_in_x_reach_the_sandbox(text: str):
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "run_many", lambda jobs: [sent.append(j) or [sandbox.Verdict(False, "")] for j in jobs])
        task = code_mini.CodeMini(partial=0.9)
        task.prepare([ROW], [text])
        assert task.reward(ROW, text) == 0.0 and not task.solved(ROW, text)
    admitted = len(text) <= 40 and set(text) <= set("x0123456789+-*/%() ") and "x" in text
    assert [job.program for job in sent] == [f"f = lambda x: {text.strip()}"] * admitted


def test_without_a_sandbox_there_are_no_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "problem", lambda: "bubblewrap is not installed")
    with pytest.raises(sandbox.SandboxUnavailable, match="code_mini: bubblewrap is not installed"):
        code_mini.CodeMini().rows("train", 1, 0)


@pytest.mark.parametrize(
    "options", [{"squares": -1}, {"squares": 4}, {"largest": 2}, {"largest": 10}, {"partial": 1.0}]
)
def test_impossible_options_are_named(options: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(options))):
        code_mini.CodeMini(**options)
