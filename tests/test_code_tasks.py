"""HumanEval and MBPP: the program in a completion, the tests of a row, and references and mutants in the sandbox."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from unmask import sandbox
from unmask.tasks.benchmarks import humaneval, mbpp
from unmask.tasks.support import programs

DATA = Path(__file__).parents[2] / "shared" / "data"
HUMANEVAL, MBPP, SANITIZED = (
    DATA / name for name in ("humaneval/humaneval.jsonl", "mbpp/mbpp.jsonl", "mbpp/sanitized_mbpp.jsonl")
)
needs_data = pytest.mark.skipif(not HUMANEVAL.is_file(), reason="needs the shared data folder beside the checkout")
needs_sandbox = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem() or "programs can be run")

ROW = {
    "task_id": "own/1",
    "prompt": "import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef floor_half(x):\n"
    '    """ Half of x, rounded down; None for None. """\n',
    "entry_point": "floor_half",
    "canonical_solution": "    return None if x is None else math.floor(half(x))\n",
    "test": "def check(candidate):\n    many = [3, 4]\n    assert candidate(many[0]) == 1\n"
    "    assert candidate(4) == half(4)\n    assert True\n    assert candidate(None) is None\n",
}
SUM = {
    "task_id": 126,
    "text": "Write a function to add numbers.",
    "code": "import math\ndef sum(a, b):\n    return a + b",
    "test_list": ["assert sum(1, 2) == 3", "assert math.isclose(sum(1, .5), 1.5)", "assert sum(0, 0) == 0"],
    "test_setup_code": "",
}


def written(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def benchmark():
    """benchmarks/code_references.py, whose mutants these are a sample of."""
    path = Path(__file__).parent.parent / "benchmarks" / "code_references.py"
    spec = importlib.util.spec_from_file_location("code_references", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The program in a completion


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("Sure:\n```python\ndef f(x):\n    return x\n```\nThat is it.", "def f(x):\n    return x\n"),
        ("```\nx = 1\n```\nand\n```py\ndef f(x): pass\n```", "def f(x): pass\n"),
        ("```python\ndef f(x):\n    return x", "def f(x):\n    return x"),  # cut off
        ("Here:\ndef f(x):\n    return x", "def f(x):\n    return x"),
        ("import math\ndef f(x): pass<|eot_id|>def g", "import math\ndef f(x): pass"),
        ("def f(x): pass\n[DONE] and more", "def f(x): pass\n"),
        ("I do not know.", ""),
        ("", ""),
    ],
)
def test_the_program_in_an_answer(completion, program):
    assert programs.program_of(completion, "f") == program


@pytest.mark.parametrize(
    ("completion", "ends"),
    [
        ("    return 1\n", 'rounded down; None for None. """\n    return 1\n'),
        ("    return 1\n\ndef other():\n    pass\nprint(1)", "    return 1\n"),
        ("```python\n    return 1\n```", "    return 1\n"),
        ("```python\ndef floor_half(x):\n    return 1\n```", "def floor_half(x):\n    return 1\n"),
        ("def floor_half(x):\n    return 1", "def floor_half(x):\n    return 1"),
    ],
)
def test_a_function_is_completed_or_written_whole(completion, ends):
    program = humaneval.PROTOCOLS["unmask"].program(ROW, completion)
    assert program.startswith("import math\n\n\ndef half(x)") and program.endswith(ends)
    assert program.count("return 1") == 1


@pytest.mark.parametrize("completion", ["", "1", "# nothing", "```python\nprint(1)\n```", "\n\n\n", "I cannot", "```"])
def test_a_text_that_is_not_a_body_does_not_become_a_function_that_returns_none(completion):
    for protocol in humaneval.PROTOCOLS.values():
        assert "floor_half" not in protocol.program(ROW, completion)


@settings(max_examples=300)
@given(st.text(st.characters() | st.sampled_from(" \n\t`#[|<>")))
def test_any_text_has_a_program_or_none(text):
    for protocol in humaneval.PROTOCOLS.values():
        assert isinstance(protocol.program(ROW, text), str)
    for protocol in mbpp.PROTOCOLS.values():
        assert isinstance(protocol.program(SUM, text), str)


def test_long_completions_are_read_in_no_time():
    for text in ("```" * 10**6, "\n" * 10**6, " " * 10**6, "```python\n" + "x" * 10**6, "<|" * 10**6):
        for protocol in humaneval.PROTOCOLS.values():
            assert len(protocol.program(ROW, text)) <= programs.LONGEST + len(ROW["prompt"])
        assert len(programs.program_of(text, "f")) <= programs.LONGEST


# The tests of a row


def test_a_check_is_taken_apart():
    setup, tests = humaneval.check_tests(ROW["test"])
    assert setup == "" and [test.splitlines()[-1] for test in tests] == [
        "assert candidate(many[0]) == 1",
        "assert candidate(4) == half(4)",
        "assert candidate(None) is None",
    ]
    assert all(test.startswith("many = [3, 4]") for test in tests)
    for text in ("x = 1", "def check(candidate):\n    assert True", "def check(f):\n    assert f(1)", "def ("):
        with pytest.raises(ValueError):
            humaneval.check_tests(text)


@needs_sandbox
@pytest.mark.parametrize("limit", [1000, 2000])  # the second is what torch.compile sets; Python then parses the text
def test_a_check_that_is_nested_too_deeply_is_refused(tmp_path, limit):
    path = written(tmp_path / "own.jsonl", ROW | {"test": f"def check(candidate):\n    assert {'-' * 5000}1"})
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with pytest.raises(ValueError, match=r"own\.jsonl line 1: a test is"):
            humaneval.HumanEval(data=path, test_data=path).rows("test", 1, 0)
    finally:
        sys.setrecursionlimit(before)


def test_the_reference_says_which_names_are_the_programs():
    names, setup = programs.interface(SUM["code"], "", tuple(SUM["test_list"]))
    assert names == {"sum": "sum"} and setup.strip() == "import math"


# Tasks


@needs_sandbox
def test_rewards_of_a_humaneval_row(tmp_path):
    path = written(tmp_path / "own.jsonl", ROW)
    for name in humaneval.PROTOCOLS:
        task, shares = (
            humaneval.HumanEval(test_data=path, protocol=name, partial=partial) for partial in (False, True)
        )
        [row] = task.rows("test", 5, 0)
        assert task.reward(row, task.solution(row)) == 1.0 and task.solved(row, task.solution(row))
        assert task.grade(row, task.solution(row))[:2] == (1.0, 1.0)
        wrong = "    return x and x // 2 + (x == 3)\n"
        assert (task.reward(row, wrong), shares.reward(row, wrong)) == (0.0, pytest.approx(2 / 3))
        assert not shares.solved(row, wrong) and shares.grade(row, wrong).points == 0.0
        for nothing in ("", "no idea", "1", "```\n```", "    return (", "import os\nos._exit(0)"):
            assert task.reward(row, nothing) == shares.reward(row, nothing) == 0.0


@needs_sandbox
def test_helpers_in_a_test_are_the_references():
    cheat = "```python\ndef half(x): return None\ndef floor_half(x): return None\n```"
    program = humaneval.PROTOCOLS["unmask"].program(ROW, cheat)
    verdicts = sandbox.run_many([humaneval.program_job(ROW, program, 5.0)])[0]
    assert [verdict.passed for verdict in verdicts] == [False, False, True]


@needs_sandbox
def test_rewards_of_an_mbpp_row(tmp_path):
    path = written(tmp_path / "own.jsonl", SUM)
    for name in mbpp.PROTOCOLS:
        task = mbpp.Mbpp(test_data=path, protocol=name)
        [row] = task.rows("test", 5, 0)
        assert all(test in task.prompt(row) for test in SUM["test_list"])
        assert task.reward(row, task.solution(row)) == 1.0
        assert task.reward(row, "def sum(a, b): return a - b") == 0.0
        assert mbpp.Mbpp(test_data=path, protocol=name, partial=True).reward(
            row, "def sum(a, b): return a - b"
        ) == pytest.approx(1 / 3)
        assert task.reward(row, "def plus(a, b): return a + b") == 0.0


@needs_sandbox
@settings(max_examples=20)
@given(st.text())
def test_unrelated_text_earns_nothing(text):
    for job in (
        humaneval.program_job(ROW, humaneval.PROTOCOLS["unmask"].program(ROW, text), 5.0),
        mbpp.program_job(SUM, mbpp.PROTOCOLS["unmask"].program(SUM, text), 5.0),
    ):
        assert not any(verdict.passed for verdict in sandbox.run_many([job])[0])


@needs_sandbox
def test_many_completions_are_judged_together_and_once(monkeypatch):
    counted = []
    real = sandbox.run_many
    monkeypatch.setattr(sandbox, "run_many", lambda jobs: counted.append(len(jobs)) or real(jobs))
    bench = programs.ProgramRunner(lambda row, program: mbpp.program_job(row, program, 5.0))
    texts = [SUM["code"], "def sum(a, b): return 3", SUM["code"]]
    assert [[v.passed for v in each] for each in bench.verdicts([SUM] * 3, texts)] == [
        [True] * 3,
        [True, False, False],
        [True] * 3,
    ]
    assert bench.passed(SUM, SUM["code"]) == (3, 3) and counted == [2]


def test_without_a_sandbox_there_are_no_rows_and_no_rewards(tmp_path, monkeypatch):
    path = written(tmp_path / "own.jsonl", SUM)
    monkeypatch.setattr("unmask.sandbox.verdicts._probe", lambda: (None, "bubblewrap is not here"))
    task = mbpp.Mbpp(test_data=path)
    with pytest.raises(sandbox.SandboxUnavailable, match="mbpp: bubblewrap is not here"):
        task.rows("test", 1, 0)
    with pytest.raises(sandbox.SandboxUnavailable, match="bubblewrap is not here"):
        task.reward(SUM, SUM["code"])


@pytest.mark.parametrize("factory", [humaneval.HumanEval, mbpp.Mbpp])
def test_impossible_options_are_named(factory, tmp_path):
    with pytest.raises(ValueError, match="unknown protocol 'd2'; known: unmask"):
        factory(protocol="d2")
    for timeout in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            factory(timeout=timeout)
    with pytest.raises(ValueError, match="no data file"):
        factory(data=str(tmp_path / "none.jsonl"))


@needs_sandbox
def test_rows_that_cannot_be_judged_are_named(tmp_path):
    for row, told in (({**ROW, "test": "x = 1"}, "check"), ({**ROW, "entry_point": "other"}, "other")):
        with pytest.raises(ValueError, match=f"line 1: .*{told}"):
            humaneval.HumanEval(test_data=written(tmp_path / "bad.jsonl", row)).rows("test", 1, 0)
    with pytest.raises(ValueError, match="test_list"):
        mbpp.Mbpp(test_data=written(tmp_path / "bad.jsonl", {**SUM, "test_list": []})).rows("test", 1, 0)
    with pytest.raises(ValueError, match=r"for the test.*split=hashed"):
        humaneval.HumanEval(test_data=written(tmp_path / "own.jsonl", ROW)).rows("train", 1, 0)


# The data sets


@needs_data
@needs_sandbox
def test_the_splits():
    task = mbpp.Mbpp(data=str(MBPP))
    train, test = task.rows("train", 371, 0), task.rows("test", 1000, 0)
    assert len(test) == 500 and len({row["task_id"] for row in train}) == 371  # 374 but for the three
    assert not {row["text"] for row in train} & {row["text"] for row in test}
    clean = mbpp.Mbpp(data=str(SANITIZED), sanitized=True)
    assert len(clean.rows("test", 1000, 0)) == 257
    assert len(humaneval.HumanEval(test_data=str(HUMANEVAL)).rows("test", 1000, 0)) == 164
    both = humaneval.HumanEval(data=str(HUMANEVAL))
    held_out = {row["task_id"] for row in both.rows("test", 1000, 0)}
    assert held_out and not held_out & {row["task_id"] for row in both.rows("train", 300, 0)}


@needs_data
@needs_sandbox
def test_humaneval_is_trained_on_only_where_asked_for(unmask, monkeypatch):
    """The hub's rows stood in for by the file: the sizes are those that the task tells."""
    rows = [json.loads(line) for line in HUMANEVAL.read_text().splitlines()]
    monkeypatch.setattr(humaneval, "hub_rows", lambda *_: rows)
    code, _, err = unmask("train", "--task", "humaneval")
    assert code == 2 and "164" in err and "humaneval.split=hashed" in err
    task = humaneval.HumanEval(split="hashed")
    train, test = ({row["task_id"] for row in task.rows(split, 124, 0)} for split in ("train", "test"))
    assert {"train": len(train), "test": len(test)} == dict(task.about.sizes) == {"train": 124, "test": 40}
    assert not train & test
    assert len(humaneval.HumanEval().rows("test", 200, 0)) == humaneval.HumanEval().about.sizes["test"] == 164


@needs_data
@needs_sandbox
@pytest.mark.parametrize(
    ("task", "path", "always"),
    [
        (humaneval, HUMANEVAL, {f"HumanEval/{n}" for n in (10, 32, 33, 38, 44, 50, 53, 64, 129, 151)}),
        (mbpp, MBPP, {126, 367, 533, 596, 601, 927}),
        (mbpp, SANITIZED, {82, 126, 596}),
    ],
)
def test_references_pass_and_mutants_fail(task, path, always):
    mutated, reference = benchmark().mutated, benchmark().reference
    rng = random.Random(1)
    rows = lines(path)
    chosen = [row for row in rows if row["task_id"] in always] + rng.sample(rows, 30)
    bench = programs.ProgramRunner(lambda row, program: task.program_job(row, program, 30.0))
    solution = task.PROTOCOLS["unmask"].solution
    completed = [task.PROTOCOLS["unmask"].program(row, solution(row)) for row in chosen]
    for row, verdicts in zip(chosen, bench.verdicts(chosen, completed), strict=True):
        assert all(verdict.passed for verdict in verdicts), (row["task_id"], verdicts)
    mutants = [(row, code) for row in chosen[:20] if (code := mutated(reference(row), rng))]
    found = bench.verdicts([row for row, _ in mutants], [code for _, code in mutants])
    alive = sum(all(verdict.passed for verdict in verdicts) for verdicts in found)
    assert alive <= len(mutants) // 5  # equivalent programs, and tests that cannot tell


@needs_data
@needs_sandbox
def test_a_helper_brought_by_the_program_does_not_help():
    rows = {row["task_id"]: row for row in lines(HUMANEVAL)}
    cheats = {
        "HumanEval/32": "def poly(xs, x): return 0\ndef find_zero(xs): return 0",
        "HumanEval/38": "def encode_cyclic(s): return s\ndef decode_cyclic(s): return s",
        "HumanEval/50": "def encode_shift(s): return s\ndef decode_shift(s): return s",
        "HumanEval/33": "def sort_third(l): return []",
    }
    for name, code in cheats.items():
        assert not any(
            verdict.passed for verdict in sandbox.run_many([humaneval.program_job(rows[name], code, 10.0)])[0]
        )
