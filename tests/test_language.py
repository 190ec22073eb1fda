"""benchmarks/language.py: every world can be configured, and starts are chosen as the study says."""

import json
import re
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from unmask.config import read_config
from unmask.core.order import ORDERS
from unmask.rollout.decoding import Decoding
from unmask.sft.config import read_sft_config
from unmask.studies.compare.cells import method_grid, own_sections
from unmask.tasks import TASKS

FOLDER = Path(__file__).parents[1] / "benchmarks"
ORDER_OF = {"surest": "surest_position", "random": "random"}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "language.py"))


def given(tmp_path: Path, **more: Any) -> Namespace:
    blank = {"part": "rl"} | dict.fromkeys(("seeds", "forwards", "lines", "only", "asks"))
    return Namespace(out=tmp_path, work=tmp_path, toy=False, device="cpu", start="tiny", jobs=1, **{**blank, **more})


def test_every_world_has_a_configuration_for_each_line_and_decodings_that_fit(study, tmp_path: Path) -> None:
    for name, world in study["WORLDS"].items():
        here = study["Study"](given(tmp_path, world=name))
        settings, grid = (
            study["settings_of"](here, world),
            method_grid(list(study["lines_of"](here, world).values()), ["none"]),
        )
        assert not own_sections(grid)
        settings.check(grid)
        for spec in grid:
            config = settings.config(spec, f"optimizer.lr={study['chosen_rate'](here, spec.label):g}")
            assert (config.rollout.length, config.eval.every, config.save_every) == (world.ask.length, 0, 0)
            config.build_task()
        for ask in study["after_asks"](here, world):
            TASKS[ask.task](**ask.options)
            assert Decoding(ask.length, ask.steps, ask.block, threshold=ask.threshold).commit_counts()
            assert ask.order in ORDERS
        assert config.rollout.order == ORDER_OF.get(name, "low_confidence")
        assert study["after_asks"](here, world)[0].order == "low_confidence"


def test_asks_of_trained_models_can_be_chosen(study, tmp_path: Path) -> None:
    def names(*chosen: str, **more: Any) -> list[str]:
        here = study["Study"](given(tmp_path, asks=list(chosen) or None))
        return [ask.name for ask in study["after_asks"](here, study["WORLDS"]["sudoku"], **more)]

    assert names("fp8", "usual") == ["usual", "fp8"]
    assert names("usual", "values", ceiling=True) == ["usual"]
    assert set(names()) - set(names(ceiling=True)) == {"values"}
    with pytest.raises(SystemExit, match="there is no fp9"):
        names("fp9")


def test_starts_teach_what_they_say(study) -> None:
    for plan in study["ADAPTATIONS"].values():
        config = read_sft_config(FOLDER / "starts" / plan.file, [f"behaviours.careless={plan.share}"], model="tiny")
        assert [(each.task, each.options) for each in config.data] == [(ask.task, ask.options) for ask in plan.asks]
        assert [each.canvas for each in config.data] == [ask.length for ask in plan.asks]
        assert config.behaviours == {"careless": plan.share} and config.updates % config.save_every == 0


def test_a_planted_start_is_the_last_within_bounds_and_another_is_where_samples_differ_most(study) -> None:
    def adaptation(*found: tuple[int, float, float]) -> dict[str, Any]:
        return {"checkpoints": {str(at): {"x": {"greedy": [greedy], "mixed": [mixed]}} for at, greedy, mixed in found}}

    choice = study["choice"]
    early, low, middle, late = (800, 0.0, 0.1), (1200, 0.2, 0.8), (1600, 0.4, 0.6), (10000, 0.9, 0.7)
    assert choice("planted", adaptation(late, middle, low, early)) == "planted/1600"
    assert choice("planted", adaptation(early, low, late)) == "planted/1200"
    assert choice("planted", adaptation(early, late)) == "planted/800"  # none fits: the nearest to the middle
    assert choice("careful", adaptation(early, low, middle, late)) == "careful/1200"


def test_evaluations_are_reused_only_for_the_same_course_and_bytes(study, tmp_path: Path, monkeypatch) -> None:
    results, here = tmp_path / "results", study["Study"](given(tmp_path))
    before = {"loss": {"1": 0.5}, "checkpoints": {"2": "solved"}, "others": {"2": "more"}}
    model = tmp_path / "starts" / "careful" / "2"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    hashes = {"careful": study["weights_hash"](model)}
    results.mkdir()
    stored = {"chosen": {"careful": "careful/2"}, "hashes": hashes, "adaptations": {"careful": before}}
    (results / "language_starts.json").write_text(json.dumps(stored))
    monkeypatch.setattr(sys.modules["language_study"], "RESULTS", results)
    evaluations = {"checkpoints": {"2": "solved"}, "others": {"2": "more"}}
    assert here.evaluated_before("careful", {1: 0.5}) == evaluations
    assert here.evaluated_before("planted", {1: 0.5}) == here.evaluated_before("careful", {1: 0.6}) == {}
    (model / "model.safetensors").write_bytes(b"other weights")
    assert here.evaluated_before("careful", {1: 0.5}) == {}


def test_labels_of_raft_have_the_states_that_they_name(study, monkeypatch) -> None:
    """raft's default states have changed once: a label that says SML must set them."""
    shelf, vine = (runpy.run_path(str(FOLDER / f"{name}.py")) for name in ("shelf", "vine"))
    states = {"raft, SML": "sml", "raft, uniform": "uniform", "raft, best of the group": "sml"}
    for lines in (study["LINES"], shelf["SHELF"], vine["LINES"]):
        for label in lines.keys() & states.keys():
            (spec,) = method_grid([lines[label]], ["none"])
            config = read_config(overrides=spec.overrides(options_only=True), method="raft")
            assert config.options["raft"]["states"] == states[label], label
    assert not {"diffu_grpo+daca, no anchor", "raft, SML"} & set(study["WORLDS"]["sudoku"].lines)


def test_stored_lines_state_the_anchor_of_sml() -> None:
    """Its default has changed: a stored line without it would be another method today."""
    stored = [*(FOLDER / "results").glob("language_rl_*.json"), *(FOLDER / "results").glob("choosing_*.json")]
    lines = {line for path in stored for line in re.findall(r'"line": ?"([^"]*)"', path.read_text())}
    pieces = {piece for line in lines for piece in line.split("+") if piece.partition(":")[0] in ("sml", "daca")}
    assert len(pieces) > 5
    assert all("anchor=" in piece for piece in pieces), pieces
    assert not [line for line in lines if line.startswith("raft") and "states=" not in line]


@pytest.mark.parametrize("name", ["choosing", "shelf"])
def test_lines_of_older_studies_state_their_anchor(study, name: str) -> None:
    """The default of daca and sml was 0 when their runs were made."""
    module = runpy.run_path(str(FOLDER / f"{name}.py"))
    lines = module.get("SHELF", module["LINES"])
    pieces = [(label, piece) for label, line in lines.items() for piece in line.split("+")]
    with_sml = [(label, piece) for label, piece in pieces if piece.partition(":")[0] in ("sml", "daca")]
    assert len(with_sml) > 2
    for label, piece in with_sml:
        assert ("anchor=0.5" if label.endswith((" 0.1", ", anchor")) else "anchor=0") in piece.split(":"), label


def test_every_line_of_the_tiny_studies_finds_its_stored_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that changes leaves the text of a stored line behind."""
    monkeypatch.syspath_prepend(str(FOLDER))
    choosing, shelf = (runpy.run_path(str(FOLDER / f"{name}.py")) for name in ("choosing", "shelf"))
    assert choosing["chosen_rates"]().keys() == choosing["LINES"].keys()
    stored = json.loads((FOLDER / "results" / "shelf.json").read_text())
    chosen = {name: column["rates"].keys() for name, column in stored.items() if column.get("rates")}
    assert len(chosen) == 2
    for column, rates in chosen.items():
        assert set(shelf["SHELF"].values()) <= rates, column
    orders, thresholds = (runpy.run_path(str(FOLDER / f"{name}.py")) for name in ("orders", "thresholds"))
    taken = {thresholds["RATE_OF"].get(line, line) for line in thresholds["LINES"].values()}
    assert taken | set(orders["LINES"].values()) <= set.intersection(*map(set, chosen.values()))
