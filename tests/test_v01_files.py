"""Run folders, checkpoints, traces and comparisons of 0.1.0 still open and resume: tests/data/v0.1/README.md."""

import json
import math
import shutil
from pathlib import Path

import pytest

from unmask.training.run.replay import replay

DATA = Path(__file__).parent / "data" / "v0.1"
COMPARE = ("compare", "train.yaml", "--methods", "diffu_grpo,wd1:inner=2", "--seeds", "1", "--jobs", "1")

# Other versions of torch and old names of keys are worth a warning to a user, and no failure here.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of all folders, in the working directory."""
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def steps(folder: str) -> list[int]:
    """The steps of metrics.jsonl, a step that was evaluated once more."""
    return [json.loads(line)["step"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("command", "folder", "logs", "expected"),
    [
        ("train", "stopped", ("metrics", "samples", "traces"), [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]),
        ("sft", "sft", ("metrics", "samples"), [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]),
    ],
)
def test_a_stopped_run_resumes_from_its_state(
    unmask, command: str, folder: str, logs: tuple[str, ...], expected: list[int]
) -> None:
    code, _, err = unmask(command, "--resume", folder)
    assert code == 0, err
    assert steps(folder) == expected
    for name in logs:  # lines hold times and draws: a run that began again would have written others
        old, new = ((home / folder / f"{name}.jsonl").read_text() for home in (DATA, Path()))
        assert new.startswith(old) and len(new) > len(old)
    assert (Path(folder) / "finished.json").is_file() and not (Path(folder) / "state").exists()
    old, new = ((home / folder / "checkpoint" / "model.safetensors").read_bytes() for home in (DATA, Path()))
    assert old != new


@pytest.mark.parametrize("model", ["model", "finished", "stopped", "adapter", "sft", "finished/checkpoint-best"])
def test_checkpoints_are_evaluated(unmask, model: str) -> None:
    code, out, err = unmask("eval", model, "--task", "sudoku", "--problems", "3", "--samples", "2", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["task"], found["problems"], found["samples"]) == ("sudoku", 3, 2)


def test_an_adapter_is_merged_into_its_base(unmask) -> None:
    code, _, err = unmask("merge", "adapter", "--out", "merged")
    assert code == 0, err
    before, after = (Path(home, "model.safetensors").read_bytes() for home in ("model", "merged"))
    assert before != after and len(before) == len(after)


def test_a_finished_run_has_nothing_to_resume(unmask) -> None:
    code, out, _ = unmask("train", "--resume", "finished")
    assert code == 0 and "finished" in out
    assert (Path("finished") / "metrics.jsonl").read_text() == (DATA / "finished" / "metrics.jsonl").read_text()


def test_the_viewer_shows_every_group_of_the_traces(unmask) -> None:
    code, _, err = unmask("view", "finished", "stopped", "--export", "page.html")
    assert code == 0, err
    page = Path("page.html").read_text()
    for number, folder in enumerate(("finished", "stopped")):
        names = [json.loads(line)["id"] for line in (DATA / folder / "traces.jsonl").read_text().splitlines()]
        assert len(names) >= 3 and all(f"trace-{number}-{name}" in page for name in names)


def results(folder: str, home: Path = Path()) -> dict[str, str]:
    """result.json of every finished cell, by the name of its folder. It holds times, so a second run differs."""
    return {path.parent.name: path.read_text() for path in (home / folder / "cells").glob("*/result.json")}


def test_a_finished_comparison_runs_nothing_again(unmask) -> None:
    code, out, err = unmask(*COMPARE, "eval.best=false", "--budget", "updates=2", "--out", "study")
    assert code == 0, err
    assert results("study") == results("study", DATA) and len(results("study")) == 2
    code, drawn, err = unmask("compare", "--redraw", "study")
    assert code == 0, err
    assert drawn == out and "wd1:inner=2" in drawn


def test_a_comparison_that_was_ended_trains_the_cell_that_is_left(
    unmask, cells_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unmask.studies.compare.report.draw", lambda *_: None)  # which takes longer than the cell
    code, _, err = unmask(*COMPARE, "eval.best=false", "--budget", "updates=6", "--out", "study-cut")
    assert code == 0, err
    old, new = results("study-cut", DATA), results("study-cut")
    assert len(old) == 1 and len(new) == 2 and new.items() >= old.items()
    cells = json.loads(Path("study-cut/results.json").read_text())["cells"]
    assert [(cell["label"], list(cell["runs"]), cell["failed"]) for cell in cells] == [
        ("diffu_grpo", ["0"], {}),
        ("wd1:inner=2", ["0"], {}),
    ]


def test_an_update_that_was_not_finite_is_replayed() -> None:
    metrics = replay(Path("broken/broken/1"))
    assert math.isnan(metrics["grad_norm"]) and math.isfinite(metrics["loss"])
