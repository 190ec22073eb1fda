"""What a comparison says, from results made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from unmask.studies.compare.cells import write_json
from unmask.studies.compare.report import conclusion, draw, markdown, publish, redraw, summary
from unmask.util.statistics import bootstrap, t_interval
from wording import mentions


def row(label: str, ends: dict[str, float], against: str | None = None, **more: Any) -> dict[str, Any]:
    """A variant whose seeds end with so much solved, sampled; greedy is 0.1 above."""
    runs = {
        seed: {
            "curve": [
                {
                    "updates": 0, "forwards": 0.0, "seconds": 0.0,
                    "sampled": 0.4, "greedy": 0.5, "pass@2": 0.6, "pass@4": 0.7,
                },
                {
                    "updates": 10, "forwards": 1000.0 + int(seed), "seconds": 5.0,
                    "sampled": end, "greedy": end + 0.1, "pass@2": 0.8, "pass@4": 0.9,
                },
            ],
            "versions": {"torch": "2"},
        }
        for seed, end in ends.items()
    }  # fmt: skip
    base = label.partition("+")[0]
    facts = {"label": label, "base": base, "against": against, "planned_forwards": 1000.0, "rate": None}
    return {**facts, "folders": {}, "runs": runs, "failed": {}, **more}


def results(*rows: dict[str, Any], seeds: int = 5, **more: Any) -> dict[str, Any]:
    facts = {"task": "sudoku", "budget": "1,000 forwards", "seeds": seeds, "problems": 256, "rates": {}}
    return {**facts, "cells": list(rows), **more}


BASE = {"0": 0.50, "1": 0.52, "2": 0.48, "3": 0.51, "4": 0.49}
BETTER = {"0": 0.56, "1": 0.57, "2": 0.55, "3": 0.58, "4": 0.54}
LIKE = {"0": 0.51, "1": 0.50, "2": 0.50, "3": 0.50, "4": 0.50}


def test_means_intervals_and_paired_differences() -> None:
    report = summary(results(row("a", BASE), row("a+daca", BETTER, "a")))
    assert report["measures"] == ["sampled", "greedy", "pass@4"]
    assert report["start"] == pytest.approx({"sampled": 0.4, "greedy": 0.5, "pass@4": 0.7})
    alone, plugged = report["rows"]
    assert alone["sampled"] == t_interval(list(BASE.values()))._asdict() and alone["sampled difference"] is None
    assert alone["forwards"] == 1002.0 and alone["seeds"] == 5
    apart = [BETTER[seed] - BASE[seed] for seed in BASE]
    drawn, student = bootstrap(apart), t_interval(apart)
    assert plugged["sampled difference"] == {
        **drawn._asdict(), "t_low": student.low, "t_high": student.high, "seeds": 5,
    }  # fmt: skip
    assert plugged["greedy difference"]["mean"] == pytest.approx(drawn.mean)


def test_differences_are_over_the_seeds_that_both_have() -> None:
    shared = summary(results(row("a", BASE), row("a+daca", {"1": 0.62, "3": 0.71}, "a")))["rows"][1]
    assert shared["sampled difference"]["mean"] == pytest.approx(0.15) and shared["sampled difference"]["seeds"] == 2
    assert shared["seeds"] == 2
    report = summary(results(row("a", {"0": 0.5}), row("a+daca", {"1": 0.6}, "a")))
    assert report["rows"][1]["sampled difference"] is None
    assert mentions(report["conclusion"], "its base a", "seed in common")


def test_a_share_has_no_interval_beyond_zero_and_one() -> None:
    report = summary(results(row("a", {"0": 0.05, "1": 0.85}), seeds=2))["rows"][0]
    assert (report["sampled"]["low"], report["sampled"]["high"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [row("a", BASE), row("a+daca", BETTER, "a"), row("b", LIKE)],
            "a+daca solves most, 56.0 % sampled on sudoku after 1,000 forwards: +6.0 points against its base a (95 % "
            "bootstrap interval +5.2 to +6.8 excludes zero), and +5.8 points against the next best, b (95 % bootstrap "
            "interval +4.6 to +7.2 excludes zero).",
        ),
        (
            [row("a", BASE), row("b", LIKE)],
            "b solves most, 50.2 % sampled on sudoku after 1,000 forwards: +0.2 points against the next best, a (95 % "
            "bootstrap interval -1.2 to +1.4 includes zero).",
        ),
        (
            [row("a", {"0": 0.5, "1": 0.5}), row("b", {"0": 0.51, "1": 0.55})],
            "b solves most, 53.0 % sampled on sudoku after 1,000 forwards: +3.0 points against the next best, a (95 % "
            "bootstrap interval +1.0 to +5.0 excludes zero, Student's -22.4 to +28.4 includes it). With 2 seeds this "
            "is not reliable: a bootstrap needs at least 5.",
        ),
        (
            [row("a", {"0": 0.5}), row("b", {"0": 0.4})],
            "a solves most, 50.0 % sampled on sudoku after 1,000 forwards: +10.0 points against the next best, b (one "
            "seed, no interval). With one seed this is not reliable: a bootstrap needs at least 5.",
        ),
        (
            [row("a", BASE)],
            "a solves most, 50.0 % sampled on sudoku after 1,000 forwards; there is nothing to compare it with.",
        ),
        (
            [row("a", {"0": 0.5}), row("b", {"0": 0.4}), row("c", {"0": 0.5})],
            "a, c solve the same, 50.0 % sampled on sudoku after 1,000 forwards: none is the best.",
        ),
        ([row("a", {})], "No run has finished, so there is no conclusion."),
    ],
)  # fmt: skip
def test_the_conclusion_follows_from_the_numbers(rows: list[dict[str, Any]], sentence: str) -> None:
    assert summary(results(*rows))["conclusion"] == sentence


def test_the_order_of_the_grid_decides_nothing() -> None:
    rows = [row("a", BASE), row("a+daca", BETTER, "a"), row("b", LIKE)]
    backwards = summary(results(*rows[::-1]))
    assert backwards["conclusion"] == summary(results(*rows))["conclusion"]
    assert conclusion(backwards, {r["label"]: r for r in rows}) == backwards["conclusion"]


def test_the_table_shows_what_failed_and_what_was_spent() -> None:
    cells = [row("a", BASE), row("a+daca", {"0": 0.6}, "a", failed={"1": "ValueError: no"}, planned_forwards=2000.0)]
    rates = {"a": {"chosen": 1e-4, "solved": {"0.0001": [0.5, 0.7], "0.0002": [0.1, 0.3]}, "error": ""}}
    cells[0]["rate"] = cells[1]["rate"] = 1e-4
    text = markdown(summary(results(*cells, rates=rates)))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1  # aligned
    cells_of = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells_of[0][:6] == ["", "lr", "seeds", "updates", "forwards", "seconds"]
    assert cells_of[2][0] == "start" and cells_of[2][6] == "40.0"
    assert cells_of[3][:7] == ["a", "0.0001", "5", "10", "1,002", "5", "50.0 [48.0, 52.0]"]
    assert cells_of[4][2] == "1 (1 failed)" and cells_of[4][6:8] == ["60.0", "+10.0"]
    for note in (
        "- a+daca seed 1 failed: ValueError: no",
        "- a+daca: 3 of 5 seeds have not finished",
        "- a: learning rate 0.0001, by validation problems solved (0.0001: 60.0 %, 0.0002: 20.0 %); it is the smallest",
        "- a+daca used 50 % of the forward passes planned for its updates: rollouts ended early, groups",
    ):
        assert note in text


def test_a_run_that_used_more_than_was_planned_is_noted() -> None:
    (note,) = summary(results(row("a", BASE, planned_forwards=501.0)))["notes"]
    assert note.startswith("a ") and mentions(note, "200 %", "forward")


def test_versions_that_differ_are_noted() -> None:
    cells = row("a", BASE)
    assert not summary(results(cells))["notes"]
    cells["runs"]["3"]["versions"] = {"torch": "3"}
    assert "different versions" in summary(results(cells))["notes"][0]


def test_a_folder_is_redrawn_from_its_results_alone(tmp_path: Path, unmask) -> None:
    whole = publish(tmp_path, results(row("a", BASE), row("a+daca", BETTER, "a"), row("b", {})))
    table, image = (tmp_path / "table.md").read_text(), (tmp_path / "curves.png").read_bytes()
    for name in ("table.md", "curves.png"):
        (tmp_path / name).unlink()
    assert redraw(tmp_path) == json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(whole))
    assert (tmp_path / "table.md").read_text() == table and (tmp_path / "curves.png").read_bytes() == image
    code, out, _ = unmask("compare", "--redraw", str(tmp_path))
    assert code == 0 and out.startswith(table.rstrip("\n"))
    code, out, _ = unmask("compare", "--redraw", str(tmp_path), "--json")
    assert json.loads(out) == json.loads(json.dumps(whole["summary"]))


WHOLE = json.dumps(results(row("a", BASE)))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", WHOLE[:99], WHOLE.replace("label", "name"), WHOLE.replace('"curve": [', '"curve": [5, ')],
)
def test_what_is_no_comparison_is_not_redrawn(tmp_path: Path, unmask, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    code, out, err = unmask("compare", "--redraw", str(tmp_path))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert mentions(err, tmp_path / "results.json")


@pytest.mark.filterwarnings("default")
def test_a_cell_that_is_damaged_counts_as_not_finished(tmp_path: Path, unmask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.studies.compare.report.draw", lambda *_: None)  # which takes longer than the rest
    write_json(tmp_path / "results.json", results(row("a", BASE, folders={"5": "cells/a-seed5"}), seeds=6))
    (tmp_path / "cells" / "a-seed5").mkdir(parents=True)
    (tmp_path / "cells" / "a-seed5" / "result.json").write_text('{"curve": [')
    code, out, err = unmask("compare", "--redraw", str(tmp_path))
    assert code == 0 and "a: 1 of 6 seeds" in out
    damaged = tmp_path / "cells" / "a-seed5" / "result.json"
    assert mentions(err, damaged) and err.count("\n") == 1


def test_passes_are_compared_where_all_runs_have_them() -> None:
    fewer = row("b", LIKE)
    for run in fewer["runs"].values():
        for point in run["curve"]:
            del point["pass@4"]
    assert summary(results(row("a", BASE), fewer))["measures"] == ["sampled", "greedy", "pass@2"]


def test_curves_show_every_mean_against_every_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, dpi: drawn.append(figure))
    draw(results(row("a", BASE), row("a+daca", BETTER, "a")), tmp_path / "x.png")
    axes = drawn[0].axes
    assert [len(panel.lines) for panel in axes] == [2] * 6
    plugged = [[list(panel.lines[1].get_xdata()), list(panel.lines[1].get_ydata())] for panel in axes]
    wanted = {"updates": [0, 10], "forwards": [0, 1002], "seconds": [0, 5]}
    for panel, (cost, height) in zip(plugged, [(c, h) for h in (56, 66) for c in wanted], strict=True):
        assert panel[0] == wanted[cost] and panel[1][1] == pytest.approx(height)
    draw(results(row("a", {"0": 0.02, "1": 0.9}), seeds=2), tmp_path / "x.png")  # an interval wider than the axis
    bands = [band for panel in drawn[1].axes for band in panel.collections]
    heights = [y for band in bands for path in band.get_paths() for _, y in path.vertices]
    assert len(bands) == 6 and (min(heights), max(heights)) == (0, 100)
    looks = [(line.get_color(), line.get_linestyle()) for line in axes[0].lines]
    assert looks[0][0] == looks[1][0] and looks[0][1] != looks[1][1]  # a colour a base, a stroke a set of plug-ins
