"""Whether answers equal a gold answer: the table of math_pairs.py, and every gold of MATH500 in several spellings."""

import json
from pathlib import Path

import pytest
from math_pairs import DIFFERENT, EQUAL, REJECTED

from unmask.tasks.support import verifier

pytest.importorskip("sympy")
DATA = Path(__file__).parents[2] / "shared" / "data" / "math" / "math500_test.jsonl"


@pytest.fixture(scope="module", autouse=True)
def compared() -> None:
    """All pairs at once, in all processes: `equal` then has them in its cache."""
    tables = [pair for table in (EQUAL, DIFFERENT) for rows in table.values() for pair in rows]
    verifier.compare((gold, answer) for gold, answers in tables for answer in answers)


@pytest.mark.parametrize("group", EQUAL)
def test_equal_answers_are_right(group: str) -> None:
    assert [pair for gold, answers in EQUAL[group] for pair in ((gold, a) for a in answers) if not right(*pair)] == []


@pytest.mark.parametrize("group", DIFFERENT)
def test_other_answers_are_wrong(group: str) -> None:
    assert [pair for gold, answers in DIFFERENT[group] for pair in ((gold, a) for a in answers) if right(*pair)] == []


def test_equal_answers_that_are_rejected_are_listed() -> None:
    assert [pair[:2] for pair in REJECTED if right(*pair[:2])] == []


def right(gold: str, answer: str) -> bool:
    return verifier.equal(gold, answer)


@pytest.mark.skipif(not DATA.is_file(), reason="needs the shared data folder beside the checkout")
def test_every_gold_of_math500_equals_itself_in_other_spellings() -> None:
    golds = {json.loads(line)["answer"] for line in DATA.read_text().splitlines()}
    pairs = [
        (g, text) for g in golds for text in (g, f"{g}.", f"\\mathbf{{{g}}}", f"  {g} ", f"\\mathbf{{{g}}}.", f"${g}$")
    ]
    assert len(golds) == 301
    verifier.compare(pairs)
    assert [pair for pair in pairs if not right(*pair)] == []
