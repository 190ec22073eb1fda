"""The index of a run: curves that lose no spike, logs that are being written, and folders that are none."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from unmask.view.index import RunReader, json_text, runs_index
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
    curve = series.data()
    kept = list(zip(curve["x"], curve["y"], strict=True))
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
    curve = of([(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)]).data()
    assert curve == {"x": [0, 1, 2, 3], "y": [1.0, None, None, 2.0]}
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
    run = RunReader(folder)
    assert not run.refresh()
    (shown,) = runs_index([run], live=True)["runs"]
    assert (shown["name"], shown["method"], shown["task"]) == ("first", "diffu_grpo + daca + dispo", "sudoku")
    assert (shown["updates"], shown["done"], shown["finished"], shown["metrics"]) == (80, 0, None, {})
    assert (shown["warnings"], shown["errors"], shown["traces"]) == ([], 0, [])
    assert runs_index([run], live=True)["live"] and not runs_index([run], live=False)["live"]


def test_logs_are_read_as_far_as_they_are_whole_and_then_on(folder: Path) -> None:
    metrics, traces = folder / "metrics.jsonl", folder / "traces.jsonl"
    measured = ('{"step": 0, "eval/reward": 0.5}', '{"step": 1, "train/reward": NaN}', "not JSON", "[1]")
    metrics.write_text("\n".join([*measured, '{"step": 2, "tr']))
    strange = group("../../etc/passwd") + group("x" * 65) + '{"id": "t2-0"}\n'
    traces.write_text(group("t1-0") + strange + group("e1-0")[:-9])
    run = RunReader(folder)
    assert run.refresh() and not run.refresh()
    shown = run.data("first")
    assert shown["done"] == 1 and [entry["id"] for entry in shown["traces"]] == ["t1-0"]
    assert shown["metrics"] == {"eval/reward": {"x": [0], "y": [0.5]}, "train/reward": {"x": [1], "y": [None]}}
    assert shown["traces"][0] == {
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
    shown = run.data("first")
    assert shown["metrics"]["train/reward"] == {"x": [1, 2], "y": [None, 1.5]} and shown["done"] == 2
    assert [entry["id"] for entry in shown["traces"]] == ["t1-0", "e1-0"]
    assert (shown["warnings"], shown["errors"]) == ([{"step": 2, "name": "idle"}], 2)
    assert not runs_index([run], live=True)["live"] and shown["finished"] == {"before": {}, "after": {}}
    assert [run.trace(name) for name in ("e1-0", "t1-0")] == [group(name)[:-1].encode() for name in ("e1-0", "t1-0")]
    assert run.trace("../../etc/passwd") is None and run.trace("e9-0") is None


@pytest.mark.parametrize("more", [0, 5])
def test_a_log_that_was_cut_and_written_on_is_read_again(folder: Path, more: int) -> None:
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {i}, "a": {i}}}\n' for i in range(9)))
    run = RunReader(folder)
    run.refresh()
    metrics.write_text("".join(f'{{"step": {i}, "a": {-i}}}\n' for i in range(5 + more)))  # a resumed run's
    assert run.refresh() and run.data("first")["metrics"]["a"]["y"] == [-i for i in range(5 + more)]
    metrics.unlink()
    run.refresh()
    assert run.data("first")["metrics"] == {}


def test_the_clock_counts_the_seconds_of_training(folder: Path) -> None:
    """Cumulative over all updates, also those that the curves leave out, and without evaluations."""
    rows = [{"step": n, "time/rollout": 1.5, "time/update": 0.5} for n in range(1, 3 * BINS)]
    rows[5] |= {"time/rollout": math.nan, "time/update": "?"}
    rows.insert(9, {"step": 9, "time/evaluation": 100.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunReader(folder)
    assert run.refresh()
    clock = run.data("first")["clock"]
    assert run.data("first")["changed"] == pytest.approx((folder / "metrics.jsonl").stat().st_mtime, abs=0.1)
    known = {step: 2.0 * (step if step < 6 else step - 1) for step in range(1, 3 * BINS) if step != 6}
    assert clock["x"][-1] == 3 * BINS - 1 and len(clock["x"]) <= 2 * BINS
    assert [known[step] for step in clock["x"]] == clock["y"]


def test_a_group_is_not_read_where_another_is_now(folder: Path) -> None:
    traces = folder / "traces.jsonl"
    traces.write_text(group("t1-0") + group("t2-0") + group("t3-0"))
    run = RunReader(folder)
    assert run.refresh() and run.trace("t2-0") is not None
    traces.write_text(group("t1-0") + group("e1-0") + group("t2-0", prompt=""))  # a resumed run's
    assert run.trace("t2-0") is None and run.trace("t3-0") is None  # another is there; a part of one
    traces.unlink()
    assert run.trace("t1-0") is None
    traces.write_text(group("e1-0", prompt="") + group("t2-0", step=2))
    assert run.refresh() and run.trace("t2-0") == group("t2-0", step=2)[:-1].encode()
    assert run.trace("t1-0") is None


def test_a_run_that_begins_again_is_news_with_the_settings_it_has_then(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 7, "a": 1}\n')
    run = RunReader(folder)
    assert run.refresh() and run.data("first")["done"] == 7
    (folder / "metrics.jsonl").unlink()
    (folder / "config.yaml").write_text("task: countdown\n")
    assert run.refresh() and not run.refresh()
    assert (run.data("first")["done"], run.data("first")["task"]) == (0, "countdown")
    (folder / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n')
    run.refresh()
    (folder / "metrics.jsonl").unlink()
    (folder / "config.yaml").write_text("task: [")
    assert run.refresh() and run.data("first")["task"] == "countdown"  # what is half written is not shown yet


def test_of_two_groups_of_one_name_the_first_counts(folder: Path) -> None:
    (folder / "traces.jsonl").write_text(group("t1-0") + group("t1-0", step=9))
    run = RunReader(folder)
    assert run.refresh() and [group["step"] for group in run.groups()] == [1]
    assert run.trace("t1-0") == group("t1-0")[:-1].encode()


def test_without_groups_the_samples_are_shown_as_they_were_written(folder: Path) -> None:
    row = {"puzzle": "1."}
    samples = [{"step": s, "row": row, "completion": f"{s}{i}", "reward": i} for s in (1, 2) for i in (0, 1)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    run = RunReader(folder)
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
    runs = [RunReader(folder), RunReader(tmp_path / "b" / "first")]
    names = [run["name"] for run in runs_index(runs, live=False)["runs"]]
    assert names == [str(folder), str(tmp_path / "b" / "first")]


def test_a_configuration_may_hold_what_json_does_not(folder: Path) -> None:
    (folder / "config.yaml").write_text("optimizer: {max_grad_norm: .inf, betas: [.nan, 1]}\nday: 2024-01-02\n")
    (shown,) = json.loads(json_text(runs_index([RunReader(folder)], live=False)))["runs"]
    assert shown["config"] == {"optimizer": {"max_grad_norm": None, "betas": [None, 1]}, "day": "2024-01-02"}
    (folder / "config.yaml").write_text(f"2024-01-02: 1\nlarge: 0x{'f' * 5000}\npairs: !!pairs [a: .nan]\n")
    (shown,) = json.loads(json_text(runs_index([RunReader(folder)], live=False)))["runs"]
    assert shown["config"] == {"2024-01-02": 1, "large": None, "pairs": [["a", None]]}


@pytest.mark.parametrize(
    ("given", "method"),
    [("5", "wd1 + 5"), ("daca", "wd1 + daca"), ("{a: 1}", 'wd1 + {"a": 1}'), ("[[1], daca]", "wd1 + [1] + daca")],
)
def test_a_configuration_of_wrong_types_is_shown_as_text(folder: Path, given: str, method: str) -> None:
    (folder / "config.yaml").write_text(f"task: [1, a]\nmethod: wd1\nwith: {given}\nupdates: many\n")
    (folder / "samples.jsonl").write_text('{"step": 1, "completion": "x"}\n')
    run = RunReader(folder)
    assert run.refresh()
    (shown,) = json.loads(json_text(runs_index([run], live=True)))["runs"]
    assert (shown["method"], shown["task"], shown["updates"]) == (method, '[1, "a"]', None)
    assert json.loads(run.trace("t1-0") or b"")["task"] == '[1, "a"]'


@pytest.mark.parametrize("text", ["5", "[]", "true", '"x"', "0"])
def test_a_run_is_finished_by_what_a_run_writes(folder: Path, text: str) -> None:
    (folder / "finished.json").write_text(text)
    run = RunReader(folder)
    assert not run.refresh() and runs_index([run], live=True)["live"]


def test_warnings_have_the_types_that_the_page_shows(folder: Path) -> None:
    """It writes numbers with so many digits, which a text or a truth has none of."""
    rows = [
        {"step": "x", "name": 5, "value": "high", "bound": True, "told": None},
        {"step": 2, "value": [1], "told": {}},
    ]
    (folder / "warnings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "5\nnull\n")
    run = RunReader(folder)
    assert run.refresh()
    assert run.data("first")["warnings"] == [
        {"step": None, "name": "5", "value": None, "bound": None, "message": None},
        {"step": 2, "value": None, "message": "{}"},
    ]


FAR = "9" * 400
DEEP = {depth: "[" * depth + "]" * depth for depth in range(850, 1000)}  # about as deep as Python reads and writes


def by_the_letter(text: str | bytes | None) -> Any:
    """JSON as a browser takes it."""
    assert text is not None

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_constant=refused)


def test_damaged_logs_are_shown_as_far_as_they_are_sound(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(f'{{"step": {FAR}, "a": 1}}\n{{"step": 1, "a": {FAR}, "b": 2}}\n')
    deep = "".join(f'{{"name": {nested}}}\n' for nested in DEEP.values())
    (folder / "warnings.jsonl").write_text(deep + '{"name": "idle"}\n')
    (folder / "finished.json").write_text("[" * 200_000)
    strange = b'{"id": "t2-0", "step": [1], "prompt": "\xed\xa0\x80", "rollouts": [{"reward": 1e999, "p": [NaN]}]}\n'
    lines = [group("t1-0", step=int(FAR)).encode(), b"\xef\xbb\xbf" + strange]
    (folder / "traces.jsonl").write_bytes(b"".join(lines))
    run = RunReader(folder)
    assert run.refresh()
    (shown,) = by_the_letter(json_text(runs_index([run], live=False)))["runs"]
    assert (shown["done"], shown["metrics"], shown["finished"]) == (1, {"b": {"x": [1], "y": [2]}}, None)
    assert [line["name"] == "idle" for line in shown["warnings"]] == [False] * (len(shown["warnings"]) - 1) + [True]
    assert [(each["id"], each["step"], each["rewards"]) for each in shown["traces"]] == [
        ("t1-0", None, [1.0, 0.0]),
        ("t2-0", None, [None]),
    ]
    line = by_the_letter(run.trace("t2-0"))
    assert (line["prompt"], line["rollouts"]) == ("\ud800", [{"reward": None, "p": [None]}])
    assert by_the_letter(run.trace("t1-0"))["rollouts"] == json.loads(group("t1-0"))["rollouts"]


def test_damaged_samples_are_shown_as_far_as_they_are_sound(folder: Path) -> None:
    rows = {1: '{"é": NaN}', **DEEP}
    lines = (f'{{"step": {n}, "row": {row}, "completion": "x", "reward": NaN}}\n' for n, row in rows.items())
    (folder / "samples.jsonl").write_text("".join(lines))
    run = RunReader(folder)
    assert run.refresh()
    (shown,) = by_the_letter(json_text(runs_index([run], live=False)))["runs"]
    assert [each["id"] for each in shown["traces"][:2]] == ["t1-0", "t850-0"]
    for each in shown["traces"]:
        assert each["rewards"] == [None]
        assert by_the_letter(run.trace(each["id"]))["rollouts"] == [{"tokens": ["x"], "reward": None}]
    assert by_the_letter(run.trace("t1-0"))["prompt"] == '{"é": null}'


def test_a_prompt_may_be_anything(folder: Path) -> None:
    lines = (group(f"t{n}-0").replace(json.dumps("p" * 200), nested) for n, nested in DEEP.items())
    (folder / "traces.jsonl").write_text("".join(lines) + group("t1-0", prompt={"a": math.nan}))
    run = RunReader(folder)
    assert run.refresh()
    (shown,) = by_the_letter(json_text(runs_index([run], live=False)))["runs"]
    assert shown["traces"][0]["id"] == "t850-0" and shown["traces"][-1]["prompt"] == "{'a': None}"
    for each in shown["traces"]:
        assert by_the_letter(run.trace(each["id"]))["rollouts"] == json.loads(group("t1-0"))["rollouts"]


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9))
NONE = ("- 1\n", "a: [", "a: !!int ''", "a: !!timestamp x", "a: " + "[" * 9999, BOMB, "a: &a [*a]\n")


@pytest.mark.parametrize(("text", "says"), [(None, "not a run folder"), *((text, "not a con") for text in NONE)])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=says):
        RunReader(tmp_path)
