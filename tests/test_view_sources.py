"""What `unmask view` opens: runs in a folder, a comparison, and the results of `unmask eval` and `unmask grade`."""

import json
from pathlib import Path
from typing import Any

import pytest

from unmask.evaluation.grade import grade_file
from unmask.tasks import TASKS
from unmask.view.index import RunReader, runs_index
from unmask.view.series import BINS
from unmask.view.sources import find_runs
from wording import mentions


def made(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("task: sudoku\nmethod: agrpo\nupdates: 2\n")
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def shown(*paths: Path) -> dict[str, dict[str, Any]]:
    runs = find_runs(paths)
    for run in runs:
        run.refresh()
    return {run["name"]: run for run in runs_index(runs, live=False)["runs"]}


def test_a_folder_shows_the_runs_in_it_by_their_path(tmp_path: Path) -> None:
    for name in ("b", "a/x", "a/y", ".hidden", "1/2/3/4/5"):
        made(tmp_path / name)
    made(tmp_path / "b" / "checkpoint")  # inside a run
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.yaml").write_text("- of something else\n")
    assert [run.name for run in find_runs([tmp_path])] == ["a/x", "a/y", "b"]
    assert [run.name for run in find_runs([tmp_path / "b"])] == ["b"]
    assert [run.name for run in find_runs([tmp_path], {tmp_path / "a" / "x"})] == ["a/y", "b"]
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none", tmp_path / "1/2/3/4/5/config.yaml"):
        with pytest.raises(ValueError, match=str(path)):
            find_runs([path])


def test_a_comparison_shows_its_cells_with_how_they_ended(tmp_path: Path) -> None:
    made(tmp_path / "cells" / "agrpo-seed0-aaaaaaaaaaaa", result='{"curve": [], "config": {}}')
    made(tmp_path / "cells" / "agrpo-seed1-bbbbbbbbbbbb", error='{"error": "ValueError: no"}')
    made(tmp_path / "cells" / "agrpo-seed2-cccccccccccc" / "run", finished='{"ended": ""}')
    made(tmp_path / "cells" / "agrpo-seed3-dddddddddddd")
    for kind in ("rates", "pilots"):
        made(tmp_path / kind / "agrpo-seed0-eeeeeeeeeeee")
    ends = {name: run["finished"] for name, run in shown(tmp_path).items()}
    assert ends == {
        "agrpo-seed0": {},
        "agrpo-seed1": {"ended": "failed: ValueError: no"},
        "agrpo-seed2": {"ended": ""},
        "agrpo-seed3": None,
    }


def test_many_runs_have_shorter_curves_and_lose_no_spike(tmp_path: Path) -> None:
    for number in range(16):
        folder = made(tmp_path / f"{number:02}")
        rows = ({"step": n, "a": 9.0 if n == 777 + number else n % 2} for n in range(4 * BINS))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) if number < 2 else "")
    for number, run in enumerate(list(shown(tmp_path).values())[:2]):
        series = run["metrics"]["a"]
        assert len(series["x"]) <= BINS and series["x"] == sorted(series["x"])  # half of what a run alone has
        assert series["x"][series["y"].index(9.0)] == 777 + number and min(series["y"]) == 0
    assert len(shown(tmp_path / "00")["00"]["metrics"]["a"]["x"]) > BINS


def test_graded_generations_open_with_their_points(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1?", "ground_truth": "2", "generation": text} for text in ("\\boxed{2}", "\\boxed{3}")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    grade_file(TASKS["gsm8k"](), tmp_path / "in.jsonl", tmp_path / "graded.jsonl")
    (run,) = shown(tmp_path / "graded.jsonl").values()
    assert run["metrics"] == {"eval/solved_greedy": {"x": [0], "y": [0.5]}}
    assert [(group["prompt"], group["solved"]) for group in run["traces"]] == [("1 + 1?", [True]), ("1 + 1?", [False])]
    (reader,) = find_runs([tmp_path / "graded.jsonl"])
    assert json.loads(reader.trace("e0-1") or b"")["answer"] == "2" and reader.search("BOXED{3}") == ["e0-1"]


def test_an_evaluation_opens_with_its_numbers_and_completions(unmask, tmp_path: Path) -> None:
    command = ["eval", "tiny", "--task", "sudoku", "--problems", "3", "--samples", "2"]
    code, out, err = unmask(*command, "--json", "--out", "folder")
    assert code == 0 and "unmask view folder" in err, err
    found = json.loads(out)
    greedy, sampled = shown(tmp_path / "folder").values()
    assert [greedy["name"], sampled["name"]] == ["folder, greedy", "folder, sampled"]
    assert (greedy["config"]["task"], greedy["config"]["problems"]) == ("sudoku", 3)
    read = {key: series["y"] for run in (greedy, sampled) for key, series in run["metrics"].items()}
    assert read == {key: [value] for key, value in found.items() if key[:5] == "eval/" and key != "eval/reward_errors"}
    solved = [solved for group in sampled["traces"] for solved in group["solved"]]
    rewards = [reward for group in sampled["traces"] for reward in group["rewards"]]
    assert len(solved) == 6 and sum(solved) / 6 == found["eval/solved_sampled"]
    assert sum(rewards) / 6 == pytest.approx(found["eval/reward"])
    assert sum(group["solved"][0] for group in greedy["traces"]) / 3 == found["eval/solved_greedy"]

    task = TASKS["sudoku"]()
    for run in find_runs([tmp_path / "folder"]):
        for number, row in enumerate(task.rows("test", 3, 0)):
            line = run.line(f"e0-{number}") or {}
            assert line["prompt"] == task.prompt(row)
            assert [task.solved(row, each["tokens"][0]) for each in line["rollouts"]] == [
                each["solved"] for each in line["rollouts"]
            ]

    code, out, _ = unmask(*command, "--steps", "2,4")
    assert code == 0 and out.splitlines()[-1].endswith("unmask view runs/eval-tiny-sudoku")
    names = [
        f"runs/eval-tiny-sudoku: length 16, {steps} steps, {how}" for steps in (2, 4) for how in ("greedy", "sampled")
    ]
    table = shown(tmp_path)
    assert list(table) == ["folder, greedy", "folder, sampled", *names]
    for name in names[1::2]:
        solved = [solved for group in table[name]["traces"] for solved in group["solved"]]
        assert len(solved) == 6 and table[name]["metrics"]["eval/solved_sampled"]["y"] == [sum(solved) / 6]


def test_an_evaluation_does_not_write_over_anything(unmask, tmp_path: Path) -> None:
    made(tmp_path / "run")
    code, _, err = unmask("eval", "tiny", "--problems", "1", "--out", "run")
    assert code == 2 and mentions(err, "run", "--out")
    unmask("eval", "tiny", "--problems", "1", "--samples", "1", "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # with --json and no --out nothing is written


@pytest.mark.parametrize(("name", "text"), [("a.json", "{}"), ("a.json", "[1]"), ("a.jsonl", "{}\n"), ("a.txt", "x")])
def test_other_files_are_refused(unmask, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    code, out, err = unmask("view", name)
    assert (code, out) == (2, "") and mentions(err, name, "unmask eval", "unmask grade") and err.count("\n") == 1


def test_completions_are_searched_in_any_case(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    lines = [
        {"id": f"t{n}-0", "step": n, "rollouts": [{"tokens": tokens}, {"tokens": None}, 5]}
        for n, tokens in enumerate([["Th", "e sum"], ["the", " product"], [3, None]])
    ]
    (folder / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunReader(folder)
    run.refresh()
    assert run.search("the S") == ["t0-0"] and run.search("THE") == ["t0-0", "t1-0"] and run.search("x") == []
