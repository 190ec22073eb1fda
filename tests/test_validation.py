"""The validation split: what is chosen on is neither trained on nor tested on."""

import pytest

from unmask.config import parse_config
from unmask.tasks import TASKS
from unmask.tasks.support.split import in_validation, with_validation_split


@pytest.mark.parametrize("name", ["sudoku", "countdown", "arithmetic"])
def test_train_validation_and_test_are_disjoint(name: str) -> None:
    task = TASKS[name]()
    split = with_validation_split(task)
    held = {task.prompt(row) for row in split.rows("test", 200, 0)}
    trained = {task.prompt(row) for seed in range(20) for row in split.rows("train", 40, seed)}
    tested = {task.prompt(row) for row in task.rows("test", 400, 0)}
    assert len(held) > 150 and not held & trained and not held & tested and not trained & tested


def test_rows_are_those_of_the_task_in_their_order() -> None:
    task = TASKS["sudoku"]()
    split, plain = with_validation_split(task), [task.prompt(row) for row in task.rows("train", 400, 7)]
    assert [task.prompt(row) for row in split.rows("train", 30, 7)] == [p for p in plain if not in_validation(p)][:30]
    assert [task.prompt(row) for row in split.rows("test", 20, 7)] == [p for p in plain if in_validation(p)][:20]
    assert split.rows("test", 50, 3)[:20] == split.rows("test", 20, 3)
    share = sum(in_validation(str(i)) for i in range(8000)) / 8000
    assert share == pytest.approx(1 / 8, abs=0.015)


def test_a_small_set_gives_what_it_has_each_once() -> None:
    texts = [str(i) for i in range(40)]
    small = TASKS["sudoku"]().variant(
        rows=lambda split, n, seed: [{"puzzle": texts[i % 40]} for i in range(n)],
        prompt=lambda row: row["puzzle"],
    )
    held = [text for text in texts if in_validation(text)]
    assert [row["puzzle"] for row in with_validation_split(small).rows("test", 100, 0)] == held and held
    assert {row["puzzle"] for row in with_validation_split(small).rows("train", 100, 0)} == set(texts) - set(held)
    none = small.variant(rows=lambda split, n, seed: [{"puzzle": next(t for t in texts if t not in held)}] * n)
    with pytest.raises(ValueError, match="too few training problems"):
        with_validation_split(none).rows("test", 5, 0)


def test_a_configuration_says_which_split_is_evaluated() -> None:
    plain, held = parse_config({}), parse_config({"eval": {"split": "validation"}})
    first = held.build_task().rows("test", 1, 0)[0]
    assert in_validation(held.build_task().prompt(first))
    assert plain.build_task().rows("test", 5, 0) == TASKS["sudoku"]().rows("test", 5, 0)
    with pytest.raises(ValueError, match=r"eval\.split"):
        parse_config({"eval": {"split": "train"}})
