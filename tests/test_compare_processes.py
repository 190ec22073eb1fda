"""unmask compare with processes: grids that are killed or asked to stop, and processes that die."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_compare import DIES, SHORT

from unmask.config.method_names import MethodSpec
from unmask.studies.compare import compare as compare_module, pool as compare_pool, report as compare_report
from unmask.studies.compare.cells import SharedSettings
from unmask.studies.compare.compare import Comparison, compare
from unmask.studies.compare.pool import CellJob, run_jobs, threads_of
from unmask.studies.compare.report import markdown, redraw

GRID = {"methods": ["wd1"], "plugins": ["none", f"dps:{DIES}"]}


def command(out: Path) -> list[str]:
    grid = ["--methods", ",".join(GRID["methods"]), "--with", ",".join(GRID["plugins"]), "--seeds", "2"]
    return ["compare", *grid, "--budget", "updates=3", "--jobs", "1", "--out", str(out), *SHORT]


def timeless(table: str) -> list[list[str]]:
    """A table's cells, less the column of seconds."""
    lines = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("|")]
    at = lines[0].index("seconds")
    return [line[:at] + line[at + 1 :] for line in lines]


def untimed(path: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def test_a_process_ends_when_whoever_gave_it_orders_is_gone(tmp_path: Path) -> None:
    """A time limit kills one process: no other may go on writing into the folders."""
    config = SharedSettings(overrides=(*SHORT, "updates=100000")).config(MethodSpec("wd1")).dump()
    with subprocess.Popen(
        [sys.executable, "-m", "unmask.studies.compare.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write(json.dumps({"folder": str(tmp_path / "cell"), "config": config, "keep": False}) + "\n")
        process.stdin.flush()
        assert "share" in json.loads(process.stdout.readline())
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "cell").is_dir() and not (tmp_path / "cell" / "result.json").exists()


def test_a_grid_that_is_killed_goes_on_and_says_the_same(
    unmask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """And cells that fail, here half of them, stop none of the others."""
    monkeypatch.setattr(compare_report, "draw", lambda *_: None)  # which takes longer than the cells
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    cells = killed / "cells"
    process = subprocess.Popen([sys.executable, "-m", "unmask", *command(killed)], start_new_session=True)
    while not (list(cells.glob("*/result.json")) and len(list(cells.glob("*"))) > 1):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in cells.glob("*/result.json")}
    assert len(finished) == 1
    code, out, err = unmask(*command(killed))
    assert code == 0 and {path: path.stat().st_mtime_ns for path in finished} == finished
    request.getfixturevalue("cells_here")
    plan = Comparison(**GRID, seeds=2, budget="updates=3", settings=SharedSettings(overrides=SHORT))
    compare(plan, whole, jobs=1, keep=True)

    tables = [timeless((folder / "table.md").read_text()) for folder in (killed, whole)]
    assert tables[0] == tables[1] == timeless(out)
    assert len(tables[0]) == 2 + 1 + 2
    results = [json.loads((folder / "results.json").read_text())["cells"] for folder in (killed, whole)]
    assert [len(row["runs"]) for row in results[0]] == [2, 0]
    assert ["not finite" in error for error in results[0][1]["failed"].values()] == [True, True]
    assert err.count("FAILED") == 2 and err.count(" left\n") == 4 - len(finished)
    ends = [[run["curve"][-1]["forwards"] for row in rows for run in row["runs"].values()] for rows in results]
    assert ends[0] == ends[1] and all(ends[0])

    # A cell is the run that `unmask train` makes of its configuration, whatever its process trained before it.
    (last,) = cells.glob("wd1-seed1-*")
    kept = whole / "cells" / last.name / "run"
    assert (kept / "checkpoint").is_dir() and not (last / "run").exists()
    code, _, _ = unmask("train", str(last / "config.yaml"), "--out", str(tmp_path / "alone"))
    assert code == 0
    logs = [untimed(folder / "metrics.jsonl") for folder in (last, kept, tmp_path / "alone")]
    assert logs[0] == logs[1] == logs[2] and len(logs[0]) == 3 + 4  # updates; evaluations before, between and after

    # Cells of both, put together by copying, are a whole grid: nothing is left to run but what failed.
    merged, wanted = tmp_path / "merged", list[CellJob]()
    for number, folder in enumerate(sorted(cells.iterdir())):
        shutil.copytree((killed if number % 2 else whole) / "cells" / folder.name, merged / "cells" / folder.name)
    monkeypatch.setattr(compare_module, "run_jobs", lambda jobs, workers, keep: iter(wanted.extend(jobs) or ()))
    compare(plan, merged, jobs=1)
    assert timeless((merged / "table.md").read_text()) == tables[0]
    assert [DIES in job.label for job in wanted] == [True, True]
    plan = json.loads((killed / "results.json").read_text())
    for row in plan["cells"]:
        row["runs"], row["failed"] = {}, {}
    (merged / "results.json").write_text(json.dumps(plan))
    assert timeless(markdown(redraw(merged)["summary"])) == tables[0]  # also where nothing could be run


def test_a_process_that_dies_loses_its_cell_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies_at_2 = """
import json, sys
for line in sys.stdin:
    order = json.loads(line)
    if order["config"]["seed"] == 2:
        sys.exit(7)
    print(json.dumps({"share": 0.5}), flush=True)
    print(json.dumps({"error": "odd"} if order["config"]["seed"] == 1 else {"done": True}), flush=True)
"""
    plain = subprocess.Popen

    def started(arguments: list[str], **how: Any) -> Any:
        return plain([sys.executable, "-c", dies_at_2], **how)

    monkeypatch.setattr(compare_pool.subprocess, "Popen", started)
    jobs = [CellJob("x", seed, tmp_path / str(seed), {"seed": seed}, 1.0) for seed in range(5)]
    events = list(run_jobs(jobs, 1, keep=False))
    ends = {event.job.seed: event.error for event in events if event.share == 1.0}
    assert "code 7" in ends.pop(2) and "code 7" in jobs[2].result()["error"]
    assert ends == {0: "", 1: "odd", 3: "", 4: ""}
    assert [event.job.seed for event in events if event.share == 0.5] == [0, 1, 3, 4]


@pytest.mark.parametrize(("number", "wanted"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_every_process_and_the_same_command_goes_on(
    unmask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, wanted: int
) -> None:
    """Also where it is sent to all processes: one that gives no answer to it is not a run that failed."""
    signals = f"""
import json, os, sys, time
sys.stdin.readline()
print(json.dumps({{"share": 0.5}}), flush=True)
for process in (os.getpid(), os.getppid()):
    os.kill(process, {int(number)})
time.sleep(600)
"""
    plain, started = subprocess.Popen, list[Any]()

    def start(arguments: list[str], **how: Any) -> Any:
        started.append(plain([sys.executable, "-c", signals], **how))
        return started[-1]

    def unheard(number: int, frame: Any) -> None:
        raise AssertionError("the command did not listen")

    monkeypatch.setattr(compare_pool.subprocess, "Popen", start)
    before = {each: signal.signal(each, unheard) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        code, out, err = unmask(*command(tmp_path))
        assert [signal.getsignal(each) for each in before] == [unheard, unheard]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert (code, out) == (wanted, "")
    assert err.startswith("stopped: ") and str(tmp_path) in err and err.count("\n") == 1
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    assert json.loads((tmp_path / "results.json").read_text())["cells"][0]["failed"] == {}
    assert not list(tmp_path.rglob("error.json"))


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_pool, "cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [threads_of(workers) for workers in (1, 5, 16, 40)] == [16, 3, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of(16) == 2
