"""The index of a run: curves that lose no spike, logs that are being written, and folders that are none."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from unmask.view.index import RunFolder, index_of
from unmask.view.page import index_text
from unmask.view.series import BINS, PENDING, Series


def of(points: list[tuple[float, float]]) -> Series:
    series = Series()
    for x, y in points:
        series.add(x, y)
    return series


@pytest.mark.parametrize("count", [1, BINS, BINS + 1, PENDING + 5, 40_003])
def test_a_curve_is_bounded_and_keeps_the_least_and_the_greatest_of_every_bin(count: int) -> None:
    rng = random.Random(count)
    points = [(3 * i, rng.gauss(0, 1)) for i in range(count)]
    series = of(points)
    found = series.data()
    kept = list(zip(found["x"], found["y"], strict=True))
    assert len(kept) <= 2000 and kept == sorted(kept) and set(kept) <= set(points)
    for start in range(0, count, series.width):  # by brute force
        inside = points[start : start + series.width]
        least, greatest = (choose(inside, key=lambda point: point[1]) for choose in (min, max))
        assert {point for point in kept if inside[0][0] <= point[0] <= inside[-1][0]} == {least, greatest}
    assert kept == points if count <= BINS else series.width < 2 * count / BINS


def test_a_curve_does_not_depend_on_when_it_was_looked_at() -> None:
    points = [(i, math.sin(i * i)) for i in range(30_000)]
    series = Series()
    for i, point in enumerate(points):
        series.add(*point)
        if i % 777 == 0:
            series.data()
    assert series.data() == of(points).data()


def test_what_is_no_number_is_a_gap_unless_a_number_is_beside_it() -> None:
    found = of([(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)]).data()
    assert found == {"x": [0, 1, 2, 3], "y": [1.0, None, None, 2.0]}
    flat = of([(i, math.nan if i % 2 else 5.0) for i in range(4 * BINS)]).data()["y"]
    assert set(flat) == {5.0} and len(flat) == BINS  # a flat curve has one point a bin
    assert set(of([(i, math.nan) for i in range(4 * BINS)]).data()["y"]) == {None}


# --- run folders --------------------------------------------------------------------------------------------


def group(name: str, **more: Any) -> str:
    rollouts = [{"reward": 1.0, "solved": True}, {"reward": 0.0, "solved": False}]
    line = {"v": 1, "id": name, "kind": "train", "step": 1, "prompt": "p" * 200, "rollouts": rollouts, **more}
    return json.dumps(line) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "config.yaml").write_text("task: sudoku\nmethod: diffu_grpo\nwith: [daca, dispo]\nupdates: 80\n")
    return folder


def test_a_run_that_has_only_begun_is_a_run(folder: Path) -> None:
    run = RunFolder(folder)
    assert not run.refresh()
    (told,) = index_of([run], live=True)["runs"]
    assert (told["name"], told["method"], told["task"]) == ("first", "diffu_grpo + daca + dispo", "sudoku")
    assert (told["updates"], told["done"], told["finished"], told["metrics"]) == (80, 0, None, {})
    assert (told["warnings"], told["errors"], told["traces"]) == ([], 0, [])
    assert index_of([run], live=True)["live"] and not index_of([run], live=False)["live"]


def test_logs_are_read_as_far_as_they_are_whole_and_then_on(folder: Path) -> None:
    metrics, traces = folder / "metrics.jsonl", folder / "traces.jsonl"
    measured = ('{"step": 0, "eval/reward": 0.5}', '{"step": 1, "train/reward": NaN}', "not JSON", "[1]")
    metrics.write_text("\n".join([*measured, '{"step": 2, "tr']))
    strange = group("../../etc/passwd") + group("x" * 65) + '{"id": "t2-0"}\n'
    traces.write_text(group("t1-0") + strange + group("e1-0")[:-9])
    run = RunFolder(folder)
    assert run.refresh() and not run.refresh()
    told = run.data("first")
    assert told["done"] == 1 and [entry["id"] for entry in told["traces"]] == ["t1-0"]
    assert told["metrics"] == {"eval/reward": {"x": [0], "y": [0.5]}, "train/reward": {"x": [1], "y": [None]}}
    assert told["traces"][0] == {
        "id": "t1-0",
        "kind": "train",
        "step": 1,
        "prompt": "p" * 120,
        "rewards": [1.0, 0.0],
        "solved": [True, False],
    }
    with metrics.open("a") as file:
        file.write('ain/reward": 1.5}\n')
    with traces.open("a") as file:
        file.write(group("e1-0")[-9:])
    (folder / "warnings.jsonl").write_text('{"step": 2, "name": "idle"}\n')
    (folder / "errors.jsonl").write_text('{"step": 1}\n{"step": 1}\n')
    (folder / "finished.json").write_text('{"before": {}, "after": {}}')
    assert run.refresh()
    told = run.data("first")
    assert told["metrics"]["train/reward"] == {"x": [1, 2], "y": [None, 1.5]} and told["done"] == 2
    assert [entry["id"] for entry in told["traces"]] == ["t1-0", "e1-0"]
    assert (told["warnings"], told["errors"]) == ([{"step": 2, "name": "idle"}], 2)
    assert not index_of([run], live=True)["live"] and told["finished"] == {"before": {}, "after": {}}
    assert run.trace("e1-0") == group("e1-0").encode() and run.trace("t1-0") == group("t1-0").encode()
    assert run.trace("../../etc/passwd") is None and run.trace("e9-0") is None


@pytest.mark.parametrize("more", [0, 5])
def test_a_log_that_was_cut_and_written_on_is_read_again(folder: Path, more: int) -> None:
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {i}, "a": {i}}}\n' for i in range(9)))
    run = RunFolder(folder)
    run.refresh()
    metrics.write_text("".join(f'{{"step": {i}, "a": {-i}}}\n' for i in range(5 + more)))  # a resumed run's
    assert run.refresh() and run.data("first")["metrics"]["a"]["y"] == [-i for i in range(5 + more)]
    metrics.unlink()
    run.refresh()
    assert run.data("first")["metrics"] == {}


def test_without_groups_the_samples_are_shown_as_they_were_written(folder: Path) -> None:
    row = {"puzzle": "1."}
    samples = [{"step": s, "row": row, "completion": f"{s}{i}", "reward": i} for s in (1, 2) for i in (0, 1)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    run = RunFolder(folder)
    assert run.refresh()
    assert [entry["id"] for entry in run.data("first")["traces"]] == ["t1-0", "t2-0"]
    line = json.loads(run.trace("t2-0") or b"")
    assert line["rollouts"] == [{"tokens": ["20"], "reward": 0}, {"tokens": ["21"], "reward": 1}]
    assert line["prompt"] == '{"puzzle": "1."}' and line["steps"] == 0
    (folder / "traces.jsonl").write_text(group("t1-0"))
    assert run.refresh() and [entry["rewards"] for entry in run.data("first")["traces"]] == [[1.0, 0.0]]


def test_runs_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "b" / "first").mkdir(parents=True)
    (tmp_path / "b" / "first" / "config.yaml").write_text("task: sudoku\n")
    runs = [RunFolder(folder), RunFolder(tmp_path / "b" / "first")]
    names = [run["name"] for run in index_of(runs, live=False)["runs"]]
    assert names == [str(folder), str(tmp_path / "b" / "first")]


def test_a_configuration_may_hold_what_json_does_not(folder: Path) -> None:
    (folder / "config.yaml").write_text("optimizer: {max_norm: .inf, betas: [.nan, 1]}\nday: 2024-01-02\n")
    (told,) = json.loads(index_text([RunFolder(folder)], live=False))["runs"]
    assert told["config"] == {"optimizer": {"max_norm": None, "betas": [None, 1]}, "day": "2024-01-02"}


@pytest.mark.parametrize(("text", "says"), [(None, "no run folder"), ("- 1\n", "not a con"), ("a: [", "not a con")])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=says):
        RunFolder(tmp_path)
