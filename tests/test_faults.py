"""What goes wrong around a run: a folder that cannot be written, a clock that goes backwards."""

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks_cases import toy_model, toy_task

import unmask
from unmask.config import parse_config
from unmask.models import save
from unmask.tasks import TASKS
from unmask.training.loop import train
from unmask.training.run.folder import RunFolder, lock_run, read_metrics
from unmask.training.run.state import newest_state, write_state
from unmask.util.files import check_folder


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that may be read and not written: by root too, who is somebody else meanwhile."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(closed: Path) -> None:
    for folder in (closed / "run", closed / "deep" / "run", closed):
        with pytest.raises(ValueError, match=f"^{re.escape(str(closed))} .*--out"):
            check_folder(folder)


def test_a_file_in_the_way_is_refused(unmask, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = unmask("train", "model=/nowhere", "--out", "file/run")
    assert code == 2 and err.startswith(f"unmask: {tmp_path / 'file'} ") and "--out" in err and err.count("\n") == 1


def test_a_kill_while_a_state_is_replaced_loses_neither(tmp_path: Path) -> None:
    """Between the two renames: the state is there under its other name only, and is found."""
    write_state(tmp_path, 2, {"a": torch.tensor([2.0])}, {})
    write_state(tmp_path, 4, {"a": torch.tensor([4.0])}, {})
    (tmp_path / "4").rename(tmp_path / ".4.partial.old")
    state, passed_over = newest_state(tmp_path)
    assert state.step == 4 and state.tensors["a"].tolist() == [4.0] and passed_over == []
    write_state(tmp_path, 4, {"a": torch.tensor([5.0])}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
    assert newest_state(tmp_path)[0].tensors["a"].tolist() == [5.0]


def test_a_kill_while_weights_are_saved_leaves_nothing_lying_about(tmp_path: Path) -> None:
    for name, text in {
        "checkpoint/a": "last", ".checkpoint.new-7/a": "half", ".checkpoint.old-8/a": "before",
        ".checkpoint-best.old-7/a": "best", ".checkpoint-best.new-7/a": "half",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    RunFolder.reopen(tmp_path, {})
    there = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("a")}
    assert there == {"checkpoint/a": "last", "checkpoint-best/a": "best"}
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "checkpoint-best"}


def test_a_disk_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with lock_run(tmp_path):
        with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))} .*another process"):
            with lock_run(tmp_path):
                pass
        monkeypatch.setattr("fcntl.flock", none)
        with lock_run(tmp_path):
            pass


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are differences of a clock that only goes forwards; no name and no order comes from the time of day."""
    monkeypatch.setitem(TASKS, "toy", toy_task)
    save(toy_model(), tmp_path / "model")
    base = {"model": str(tmp_path / "model"), "task": "toy", "updates": 3, "prompts": 2, "group": 3, "save_every": 1}
    config = parse_config({**base, "eval": {"prompts": 2, "samples": 1}})
    logs = []
    for name in ("forwards", "backwards"):
        result = train(config, lambda name=name: RunFolder(tmp_path / name, config.dump()))
        rows = read_metrics(tmp_path / name)
        assert result.seconds > 0 and all(v > 0 for row in rows for k, v in row.items() if k.startswith("time/"))
        logs.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
        now = iter(range(10**9, 0, -3600))  # an hour back at every look
        monkeypatch.setattr(time, "time", lambda now=now: float(next(now)))
        monkeypatch.setattr(time, "time_ns", lambda now=now: next(now) * 10**9)
    assert logs[0] == logs[1]


def test_nothing_asks_for_the_time_of_day() -> None:
    """Only clocks that cannot go backwards, perf_counter and monotonic; run.jsonl says when a run started, and a
    chat template may print the date."""
    asked = re.compile(r"\btime\.(time|time_ns|localtime|gmtime|strftime)\(|datetime\.(now|today|utcnow)")
    sources = sorted(Path(unmask.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    assert [path.name for path in sources if asked.search(path.read_text())] == ["trial_worker.py", "provenance.py"]
