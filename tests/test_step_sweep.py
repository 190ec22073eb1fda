"""The step sweep: scores against the passes that were made, steps that fit, and the plot if it is asked for."""

import json
from pathlib import Path

import pytest

from unmask.core.schedule import even, timestep
from unmask.evaluation.benchmark import BenchmarkCase
from unmask.evaluation.step_sweep import cases_by_steps
from unmask.rollout.decoding import Decoding
from unmask.tasks import TASKS
from unmask.util.micro_batch import MicroBatch
from unmask.view.sources import find_runs
from wording import naming


def case(*shape: int, **how) -> BenchmarkCase:
    return BenchmarkCase(TASKS["sudoku"](), Decoding(*shape, **how), MicroBatch(8))


def test_only_the_steps_differ() -> None:
    first = case(16, 8, 8)
    found = cases_by_steps(first, [2, 16])
    assert [c.decoding.steps for c in found] == [2, 16]
    assert all(
        (c.task, c.decoding.length, c.decoding.block, c.micro_batch) == (first.task, 16, 8, first.micro_batch)
        for c in found
    )


@pytest.mark.parametrize(
    ("shape", "steps", "every"),
    [((256, 128, 32), 20, 8), ((16, 8, 16), 17, 1), ((16, 8, 2), 4, 8)],
)
def test_steps_that_do_not_fit_are_told_which_do(shape: tuple[int, int, int], steps: int, every: int) -> None:
    length, _, block = shape
    fitting = [f"multiple of {every}"] if every > 1 else []
    with pytest.raises(ValueError, match=naming(steps, length, *fitting)):
        cases_by_steps(case(*shape), [shape[1], steps])
    for count in range(1, length + 2):  # what the message says is what the schedule takes
        if count % every == 0 and count <= length:
            assert sum(map(sum, even(length, count, block))) == length
        else:
            with pytest.raises(ValueError, match=naming("steps", count)):
                even(length, count, block)


def test_dreams_schedule_takes_any_number_and_a_threshold_none() -> None:
    assert [c.decoding.steps for c in cases_by_steps(case(16, 8, 16, schedule=timestep), [3, 40])] == [3, 40]
    with pytest.raises(ValueError, match=r"rollout\.threshold"):
        cases_by_steps(case(16, 16, 16, threshold=0.9), [4])


def test_the_command_draws_more_passes_for_a_better_score(unmask, tmp_path: Path) -> None:
    command = ["eval", "tiny", "--task", "sudoku", "--problems", "48", "--steps", "1,4,16"]
    code, said, _ = unmask(*command, "--out", "sweep.json")
    assert code == 0 and [path.name for path in tmp_path.iterdir()] == ["sweep.json"]  # no plot unless it is asked for
    lines = json.loads((tmp_path / "sweep.json").read_text())
    assert [(line["steps"], line["passes"]) for line in lines] == [(1, 1.0), (4, 4.0), (16, 16.0)]
    assert lines[0]["score"] < lines[1]["score"] < lines[2]["score"]  # what the shipped model is known to do
    task = TASKS["sudoku"]()
    rows = task.rows("test", 48, 0)
    for line, row in zip(lines, said.splitlines()[2:], strict=False):
        solved = sum(task.solved(r, t) for r, t in zip(rows, line["answers"], strict=True))
        assert line["points"] == [float(task.solved(r, t)) for r, t in zip(rows, line["answers"], strict=True)]
        assert line["prompts"] == [task.prompt(row) for row in rows]
        assert line["score"] == solved / 48 and row.split()[:2] == [str(line["steps"]), f"{100 * solved / 48:.1f}"]
    runs = find_runs([tmp_path / "sweep.json"])  # the viewer opens the file
    assert [run.name for run in runs] == [f"sweep.json: length 16, {steps} steps" for steps in (1, 4, 16)]
    for line, run in zip(lines, runs, strict=True):
        shown = run.data(run.name)
        assert (shown["task"], shown["config"]["problems"]) == ("sudoku", 48)
        assert shown["finished"] == {"ended": "evaluation"}
        assert shown["metrics"]["eval/solved_greedy"] == {"x": [0], "y": [line["score"]]}
        assert [group["prompt"] for group in shown["traces"]] == line["prompts"]
        assert [group["rewards"] for group in shown["traces"]] == [[points] for points in line["points"]]
        group = json.loads(run.trace("e0-3") or b"")
        assert group["rollouts"][0]["tokens"] == [line["answers"][3]] and group["steps"] == 0
        assert "e0-3" in run.search(line["answers"][3])


def test_json_alone_is_on_standard_output_and_samples_are_drawn(unmask, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ["eval", "tiny", "--task", "sudoku", "--problems", "6", "--steps", "4,8", "--samples", "2"]
    code, said, told = unmask(*command, "--json", "--plot", "p.png", "--lengths", "16")
    assert code == 0 and "plot: p.png" in told and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    lines = json.loads(said)
    assert [line["steps"] for line in lines] == [4, 8] and all(line["pass@2"]["high"] <= 1 for line in lines)
    told = "2 at temperature 1.0, top_k 0, top_p 1.0, guidance 0.0, seed 0"
    assert {line["card"]["sampled"] for line in lines} == {told}


@pytest.mark.parametrize("name", ["p.xyz", "p"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(unmask, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    command = ["eval", "tiny", "--task", "sudoku", "--problems", "4", "--steps", "4", "--out", "t.json"]
    code, said, told = unmask(*command, "--plot", name)
    assert code == 2 and f"--plot: {name} " in told and "png" in told
    assert not said and not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--steps", "5", "rollout.block=4"], "multiple of 4"),
        (["--steps", "4,"], "--steps: '4,'"),
        (["--steps", "4", "--lengths", "16,32"], "--lengths"),
        (["--steps", "4", "--paraphrase", "w.jsonl"], "--paraphrase"),
        (["--steps", "4", "--plot", "nowhere/p.png"], "there is no folder nowhere"),
        (["--lengths", "16", "--plot", "p.png"], "--steps"),
    ],
)
def test_honest_errors(unmask, more: list[str], told: str) -> None:
    code, _, said = unmask("eval", "tiny", "--task", "sudoku", "--problems", "4", *more)
    assert code == 2 and told in said
