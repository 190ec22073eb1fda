"""unmask compare: what is run, with which budget, what survives a kill, and what is said at the end."""

import errno
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from unmask.config import Config, parse_config
from unmask.config.keys import ADDED
from unmask.config.method_names import MethodSpec
from unmask.evaluation.evaluate import Evaluator
from unmask.studies.compare import compare as compare_module, report as compare_report, worker as compare_worker
from unmask.studies.compare.budget import budget_of
from unmask.studies.compare.cells import (
    CellCost,
    SharedSettings,
    cost_of,
    key_of,
    method_grid,
    reference_of,
    write_json,
)
from unmask.studies.compare.compare import MAX_UPDATE_FACTOR, SWEEP_SEEDS, Comparison, compare
from unmask.studies.compare.pool import CellJob, JobEvent
from unmask.studies.compare.worker import result_of
from wording import mentions

SHORT = ("prompts=2", "group=3", "sudoku.partial=0.5", "rollout.steps=4", "eval.prompts=6", "eval.samples=2")
DIES = "optimizer.weight_decay=1e300"
"""The first update ruins the weights."""


# --- the grid -------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_method_with_every_set_of_plugins() -> None:
    grid = method_grid(["wd1", "spg:inner_steps=2"], ["none", "sml:strata=8+dispo"])
    assert [variant.label for variant in grid] == [
        "wd1", "wd1+sml:strata=8+dispo", "spg:inner_steps=2", "spg:inner_steps=2+sml:strata=8+dispo",
    ]  # fmt: skip
    bare, full = SharedSettings().config(grid[0]), SharedSettings(overrides=("dispo.branches=3",)).config(grid[3])
    assert (bare.method, bare.plugins, bare.options) == ("wd1", (), {})
    assert (full.method, full.plugins, full.inner_steps) == ("spg", ("sml", "dispo"), 2)
    assert full.options == {"sml": {"strata": 8}, "dispo": {"branches": 3}}


def test_after_a_colon_stands_an_option_or_a_key_of_the_configuration() -> None:
    variant = MethodSpec("agrpo:inner_steps=4:draws=2:optimizer.lr=0.5")
    assert list(variant.overrides()) == ["inner_steps=4", "agrpo.draws=2", "optimizer.lr=0.5"]
    config = SharedSettings(overrides=("inner_steps=2",)).config(variant)
    assert (config.inner_steps, config.optimizer.lr) == (4, 0.5)


def test_a_variant_is_compared_with_its_base_or_with_the_base_without_options() -> None:
    grid = method_grid(["agrpo", "wd1:inner_steps=2"], ["none", "daca"])
    alone, with_daca, other, other_daca = grid
    assert [reference_of(variant, grid) for variant in grid] == [None, alone, None, other]
    assert reference_of(MethodSpec("agrpo:draws=2", ("daca",)), grid) == alone
    assert reference_of(MethodSpec("agrpo:draws=2"), grid) == alone
    assert reference_of(MethodSpec("spg", ("daca",)), grid) is None
    assert reference_of(with_daca, [with_daca, other_daca]) is None


def test_a_key_is_the_configuration_and_the_files_it_names(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("one")
    config = {"seed": 1, "gsm8k": {"data": str(data)}}
    first = key_of(config)
    assert key_of({"gsm8k": {"data": str(data)}, "seed": 1}) == first != key_of(config | {"seed": 2})
    data.write_text("two")
    assert key_of(config) != first


def test_keys_that_came_later_change_the_key_of_a_cell_only_if_they_change_the_run() -> None:
    """So a comparison of an earlier version is not trained again."""
    config = parse_config({"method": "raft", "raft": {"states": "sml"}}).dump()
    earlier = {**config, "rollout": dict(config["rollout"]), "raft": dict(config["raft"])}
    for key in ADDED:
        section, _, name = key.rpartition(".")
        values = earlier[section] if section else earlier
        del values[name]
        changed = config | ({section: config[section] | {name: "other"}} if section else {name: "other"})
        assert key_of(changed) != key_of(config)
    assert key_of(earlier) == key_of(config)


# --- planning, with runs that are made up ---------------------------------------------------------------------------


COSTS: dict[str, CellCost] = {}


def cost_once(config: Config) -> CellCost:
    """`cost_of`, which neither the seed nor the optimiser changes, counted once."""
    key = json.dumps({**config.dump(), "seed": 0, "optimizer": {}})
    if key not in COSTS:
        COSTS[key] = cost_of(config)
    return COSTS[key]


class MadeUp:
    """In the place of run_jobs: writes what a run would, from its configuration alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[CellJob] = []
        monkeypatch.setattr(compare_module, "run_jobs", self.run)
        monkeypatch.setattr(compare_module, "cost_of", cost_once)
        monkeypatch.setattr(compare_report, "draw", lambda *_: None)  # which takes longer than the tests

    def run(self, jobs: Sequence[CellJob], workers: int, keep: bool) -> Iterator[JobEvent]:
        for job in jobs:
            self.trained.append(job)
            shutil.rmtree(job.folder, ignore_errors=True)
            job.folder.mkdir(parents=True)
            config = parse_config(job.config)
            if config.optimizer.lr > 1:
                (job.folder / "error.json").write_text('{"error": "ValueError: too much"}')
                yield JobEvent(job, error="ValueError: too much")
                continue
            yield JobEvent(job, 0.5)
            (job.folder / "result.json").write_text(json.dumps(self.result(config)))
            yield JobEvent(job)

    def result(self, config: Config) -> dict[str, Any]:
        # the best rate is 2e-4 for agrpo and 1e-4 for the others; daca gains 0.1; a seed's luck is its own
        best = 2e-4 if config.method == "agrpo" else 1e-4
        solved = 0.5 + 0.1 * ("daca" in config.plugins) - 1000 * abs(config.optimizer.lr - best)
        luck = {0: 0.0, 1: 0.01, 2: 0.02}.get(config.seed, 0.0) * (1 + ("daca" in config.plugins))
        end = {"sampled": solved + luck, "greedy": 0.7, "pass@2": 0.8, "reward": 0.0}
        curve = [{"updates": 0, "forwards": 0.0, "seconds": 0.0, **dict.fromkeys(end, 0.4)}]
        spent = config.updates * cost_once(config).update
        curve.append({"updates": config.updates, "forwards": spent, "seconds": config.updates * 0.25, **end})
        rest = {"tail": {}, "wall": 1.0, "threads": 1, "versions": {}, "config": config.dump()}
        return {"curve": curve, "seconds_per_update": 0.25 if config.method == "agrpo" else 0.125, **rest}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    return MadeUp(monkeypatch)


def test_forwards_are_shared_out_before_the_first_run(made_up: MadeUp, tmp_path: Path) -> None:
    settings = SharedSettings(overrides=SHORT)
    plan = Comparison(["diffu_grpo", "agrpo"], ["none", "dispo"], seeds=2, budget="forwards=700", settings=settings)
    found = compare(plan, tmp_path)
    # 6 rollouts of 4 steps; 6 reference answers of diffu_grpo and 6 gradients at three forwards each; agrpo's 4 draws;
    # dispo asks for one more pass of each rollout, and for its gradient.
    spent = {"diffu_grpo": 24 + 6 + 18, "diffu_grpo+dispo": 24 + 6 + 18 + 6 + 18}
    spent |= {"agrpo": 24 + 4 * 18, "agrpo+dispo": 24 + 4 * 18 + 6 + 18}
    for row in found["cells"]:
        assert row["planned_updates"] == 700 // spent[row["label"]]
        assert row["planned_forwards"] == 700 == row["config"]["max_forwards"]
        assert row["config"]["updates"] == MAX_UPDATE_FACTOR * row["planned_updates"]  # the forward passes end the run
    updates = {job.config["updates"] for job in made_up.trained if job.label == "agrpo"}
    assert updates == {MAX_UPDATE_FACTOR * (700 // 96)}
    assert {job.config["eval"]["every"] for job in made_up.trained if job.label == "agrpo"} == {2}
    order = [(job.seed, job.label) for job in made_up.trained]
    assert order == [(seed, label) for seed in (0, 1) for label in spent]


@pytest.mark.parametrize(("line", "start"), [("fork", "fork: the steps"), ("fork:low=-1", "fork:low=-1: low=-1.0")])
def test_a_cell_that_is_refused_is_named_once(line: str, start: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{start}"):
        compare(Comparison([line]), tmp_path)


def test_a_warm_up_that_the_budget_does_not_reach_is_refused(made_up: MadeUp, tmp_path: Path) -> None:
    settings = SharedSettings(overrides=(*SHORT, "optimizer.warmup=8"))
    with pytest.raises(ValueError, match=r"optimizer.warmup: 8 is more than the updates of agrpo"):
        compare(Comparison(["agrpo"], budget="forwards=700", settings=settings), tmp_path)


def test_seconds_are_shared_out_by_a_short_run_of_each_that_is_not_made_twice(made_up: MadeUp, tmp_path: Path) -> None:
    def again() -> dict[str, Any]:
        how = SharedSettings(overrides=("eval.every=7",))
        return compare(Comparison(["agrpo", "wd1"], seeds=1, budget="seconds=5", settings=how), tmp_path)

    found, pilots = again(), made_up.trained[:2]
    assert [job.config["updates"] for job in pilots] == [4, 4] and pilots[0].folder.parent.name == "pilots"
    assert [row["planned_updates"] for row in found["cells"]] == [20, 40]
    assert [job.config["eval"]["every"] for job in made_up.trained] == [0, 0, 7, 7]
    assert again() == found and len(made_up.trained) == 4


def test_the_learning_rate_is_chosen_for_each_line_on_validation_problems(made_up: MadeUp, tmp_path: Path) -> None:
    found = compare(Comparison(["wd1", "agrpo"], ["daca"], seeds=2, rates=[5e-5, 1e-4, 2e-4, 2.0]), tmp_path)
    tried, cells = made_up.trained[:16], made_up.trained[16:]
    assert {job.seed for job in tried} == set(SWEEP_SEEDS)
    assert {job.label for job in tried} == {"wd1+daca", "agrpo+daca"}
    assert {job.config["eval"]["split"] for job in tried} == {"validation"}
    assert {job.config["eval"]["split"] for job in cells} == {"test"}
    chosen = {job.label: job.config["optimizer"]["lr"] for job in cells}
    assert chosen == {"wd1+daca": 1e-4, "agrpo+daca": 2e-4} and len(cells) == 4
    assert found["rates"]["wd1+daca"]["chosen"] == 1e-4
    solved = found["rates"]["wd1+daca"]["solved"]
    assert solved["0.0001"] == [0.6, 0.6] and "2" not in solved
    notes = "\n".join(found["summary"]["notes"])
    assert mentions(notes, "wd1", "5e-05: 55.0 %", "0.0001: 60.0 %", "agrpo", 0.0002)
    assert notes.count("smallest or largest") == 1


def test_a_line_without_a_rate_that_goes_through_fails_and_the_others_do_not(made_up: MadeUp, tmp_path: Path) -> None:
    found = compare(Comparison(["wd1"], ["none", "daca"], seeds=1, rates=[2.0]), tmp_path)
    assert len(made_up.trained) == 4 and not any(row["runs"] for row in found["cells"])
    assert mentions(found["cells"][1]["failed"]["0"], "learning rate", "ValueError: too much")
    assert mentions(found["summary"]["conclusion"], "No run")


def test_what_is_finished_is_not_run_again_and_what_failed_is(made_up: MadeUp, tmp_path: Path) -> None:
    methods = ["wd1", "wd1:optimizer.lr=2"]
    found = compare(Comparison(methods, seeds=2), tmp_path)
    assert [job.label for job in made_up.trained] == 2 * methods
    assert found["cells"][1]["failed"] == dict.fromkeys("01", "ValueError: too much")
    shutil.rmtree(next((tmp_path / "cells").glob("wd1-seed1*")))
    found = compare(Comparison([*methods, "spg"], seeds=2), tmp_path)
    again = [(job.label, job.seed) for job in made_up.trained[4:]]
    assert again == [(methods[1], 0), ("spg", 0), ("wd1", 1), (methods[1], 1), ("spg", 1)]
    assert len(found["cells"][0]["runs"]) == 2


@pytest.mark.parametrize("cut", ["", "{}", "[]", "null", '{"curve": []}', '{"curve": [{"updates": 0,', '{"error": 5}'])
def test_what_a_full_disk_has_cut_is_run_again(made_up: MadeUp, tmp_path: Path, cut: str) -> None:
    methods = ["wd1", "wd1:optimizer.lr=2"]
    whole = compare(Comparison(methods, seeds=2), tmp_path)
    (result,) = (tmp_path / "cells").glob("wd1-seed1-*/result.json")
    (error,) = (tmp_path / "cells").glob("*lr=2-seed0-*/error.json")
    for path in (result, error):
        path.write_text(cut)
    with pytest.warns(UserWarning, match="is truncated or damaged") as told:
        assert compare(Comparison(methods, seeds=2), tmp_path) == whole
    assert {str(each.message).split(" is truncated")[0] for each in told} == {str(result), str(error)}
    again = [(job.label, job.seed) for job in made_up.trained[4:]]
    assert again == [(methods[1], 0), ("wd1", 1), (methods[1], 1)]


def test_an_outcome_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(*arguments: Any) -> None:
        raise full

    write_json(tmp_path / "results.json", [1])
    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "results.json", [2])
    assert json.loads((tmp_path / "results.json").read_text()) == [1]
    monkeypatch.setattr(compare_worker, "_train_cell", fails)
    monkeypatch.setattr("os.dup2", lambda *handles: None)
    with pytest.raises(OSError, match="No space"):
        compare_worker.run_cell(str(tmp_path / "cell"), {}, False, {}, lambda message: None)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cell", "log.txt", "results.json"]


def test_a_process_evaluates_what_is_the_same_before_training_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same outcome; what differs where nothing has been learnt yet, and what is kept, is evaluated."""
    made, starts = list[int](), dict[str, Any]()
    evaluate = Evaluator.evaluate
    monkeypatch.setattr(Evaluator, "evaluate", lambda *args: made.append(1) or evaluate(*args))

    def train(name: str, method: str, *overrides: str, keep: bool = False, afresh: bool = False) -> tuple[int, list]:
        made.clear()
        data = SharedSettings(overrides=(*SHORT, *overrides)).config(MethodSpec(method)).dump()
        found = compare_worker._train_cell(tmp_path / name, data, keep, {} if afresh else starts, lambda message: None)
        told = [{key: value for key, value in point.items() if key != "seconds"} for point in found["curve"]]
        return len(made), told

    first = train("first", "wd1", "updates=1")
    learning = ("updates=2", "seed=1", "optimizer.lr=1e-3", "prompts=3", "eval.every=1")
    other = train("other", "agrpo", *learning)
    assert (first[0], other[0]) == (2, 2) and first[1][0] == other[1][0]
    assert train("kept", "wd1", "updates=1", keep=True) == (2, first[1])
    assert train("cooler", "wd1", "updates=1", "rollout.temperature=0.5")[0] == 2
    assert train("more", "wd1", "updates=1", "eval.samples=3")[0] == 2
    assert train("alone", "agrpo", *learning, afresh=True) == (3, other[1])


def test_time_left_is_what_is_ahead_at_the_pace_so_far(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # a second every time it is looked at: when the study begins, and at every event
    monkeypatch.setattr(compare_module.time, "monotonic", lambda: float(next(clock)))
    seen: list[compare_module.ComparisonProgress] = []
    compare(Comparison(["wd1"], ["none"], seeds=4, rates=[1e-4]), tmp_path, on_progress=seen.append)
    assert [now.stage for now in seen] == ["learning rates"] * 4 + ["cells"] * 8
    assert [now.done for now in seen] == [0, 1, 1, 2, 0, 1, 1, 2, 2, 3, 3, 4]
    # 80 updates each; a run that chooses a rate is evaluated twice, a cell five times; told of at its half and its end
    cost = cost_of(SharedSettings().config(MethodSpec("wd1")))
    halves = [(80 * cost.update + times * cost.evaluation) / 2 for times in [2] * 4 + [5] * 8]
    for number, now in enumerate(seen, 1):
        done, ahead = sum(halves[:number]), sum(halves[number:])
        assert now.share == pytest.approx(done / sum(halves))
        assert now.left == pytest.approx(number * ahead / done, abs=1e-6)


def test_a_curve_says_what_had_been_spent() -> None:
    solved = {"eval/solved_sampled": 0.5, "eval/solved_greedy": 0.6, "eval/pass@2": 0.7, "eval/reward": 0.1}
    rows: list[dict[str, float]] = [{"step": 0, **solved}]
    for step in (1, 2, 3):
        cost = {"cost/forwards": 10.0 * step, "time/rollout": 2.0, "time/update": 1.0 + (step == 1)}
        rows.append({"step": step, "train/reward": step, **cost})
    rows.insert(3, {"step": 2, **solved})
    rows.append({"step": 3, **solved})
    found = result_of(rows)
    assert [(p["updates"], p["forwards"], p["seconds"]) for p in found["curve"]] == [(0, 0, 0), (2, 20, 7), (3, 30, 10)]
    assert found["curve"][0]["pass@2"] == 0.7
    assert found["seconds_per_update"] == 3.0 and found["tail"] == {"train/reward": 2.0}


# --- bad input ------------------------------------------------------------------------------------------------------

GOOD = {"--methods": "wd1", "--out": "out"}


@pytest.mark.parametrize(
    ("changed", "extra", "names"),
    [
        ({"--methods": "wd2"}, [], ["method", "wd2", "wd1"]),
        ({"--with": "none,dacca"}, [], ["dacca", "daca"]),
        ({"--methods": "wd1,"}, [], ["--methods"]),
        ({"--methods": "wd1,wd1"}, [], ["wd1", "twice"]),
        ({"--methods": "wd1:drawz=3"}, [], ["wd1", "drawz"]),
        ({"--budget": "epochs=3"}, [], ["--budget", "epochs=3", "updates=N", "forwards=N", "seconds=S"]),
        ({"--budget": "updates=0"}, [], ["--budget", "updates=0"]),
        ({"--budget": "updates=2.5"}, [], ["--budget", "updates=2.5"]),
        ({"--budget": "forwards=many"}, [], ["--budget", "forwards=many"]),
        ({"--budget": "forwards=1"}, [], ["wd1", 1]),
        ({"--budget": "updates=5"}, ["updates=7"], ["updates=", "--budget"]),
        ({"--seeds": "0"}, [], ["--seeds", 0]),
        ({"--jobs": "0"}, [], ["--jobs", 0]),
        ({"--lr": "1e-4,fast"}, [], ["--lr", "1e-4,fast"]),
        ({"--lr": "1e-4,-1"}, [], ["--lr"]),
        ({"--lr": "1e-4"}, ["optimizer.lr=1e-5"], ["--lr", "optimizer.lr"]),
        ({"--task": "sudoko"}, [], ["task", "sudoko", "sudoku"]),
        ({}, ["seed=3"], ["seed", "--seeds"]),
        ({"--methods": "wd1:seed=3"}, [], ["seed", "--seeds"]),
        ({}, ["daca.strata=8"], ["daca"]),
        ({}, ["nothing.yaml"], ["nothing.yaml"]),
        ({"--out": "full"}, [], ["full", "--out"]),
        ({"--device": "cuda:99"}, [], ["device", "cuda:99"]),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(unmask, tmp_path: Path, changed: dict, extra: list[str], names: list) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    code, _, err = unmask("compare", *(text for pair in (GOOD | changed).items() for text in pair), *extra)
    assert code == 2 and mentions(err, *names) and err.count("\n") == 1


def test_what_is_needed_is_said(unmask) -> None:
    code, _, err = unmask("compare", "--methods", "wd1")
    assert code == 2 and mentions(err, "--methods", "--out")
    code, _, err = unmask("compare", "--redraw", "nowhere")
    assert code == 2 and mentions(err, "nowhere/results.json")


def test_two_comparisons_do_not_share_a_folder(made_up: MadeUp, tmp_path: Path) -> None:
    with compare_module._lock(tmp_path), pytest.raises(ValueError, match="another comparison"):
        compare(Comparison(["wd1"]), tmp_path)
    assert compare(Comparison(["wd1"], seeds=1), tmp_path)["seeds"] == 1


def test_a_budget_is_read_as_it_is_written() -> None:
    assert str(budget_of("forwards=2e5")) == "200,000 forwards"
    assert str(budget_of("seconds=1.5")) == "1.5 seconds"


def test_what_all_rows_have_is_said_of_all_rows_only(made_up: MadeUp, tmp_path: Path) -> None:
    same = compare(Comparison(["wd1"], ["none"], seeds=1), tmp_path)
    assert same["budget"] == "80 updates" and same["problems"] == 256
    found = compare(Comparison(["wd1", "wd1:updates=160"], seeds=1), tmp_path)
    assert found["budget"] == "the updates of its row"
    assert [row["planned_updates"] for row in found["cells"]] == [80, 160]
