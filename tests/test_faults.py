"""What goes wrong around a run: a folder that cannot be written, a clock that goes backwards."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks_cases import toy_model, toy_task

import unmask
from unmask.config import parse_config
from unmask.models import save
from unmask.run import Run, check_folder, read_metrics
from unmask.tasks import TASKS
from unmask.train import train


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
        with pytest.raises(ValueError, match=f"^{re.escape(str(closed))} cannot be written to; choose another --out"):
            check_folder(folder)


def test_a_file_in_the_way_is_refused(unmask, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = unmask("train", "model=/nowhere", "--out", "file/run")
    assert code == 2 and err == f"unmask: {tmp_path / 'file'} cannot be written to; choose another --out\n"


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are differences of a clock that only goes forwards; no name and no order comes from the time of day."""
    monkeypatch.setitem(TASKS, "toy", toy_task)
    monkeypatch.setattr(Run, "draw", lambda self: None)
    save(toy_model(), tmp_path / "model")
    base = {"model": str(tmp_path / "model"), "task": "toy", "updates": 3, "prompts": 2, "group": 3, "save_every": 1}
    config = parse_config({**base, "eval": {"prompts": 2, "samples": 1}})
    logs = []
    for name in ("forwards", "backwards"):
        result = train(config, lambda name=name: Run(tmp_path / name, config.dump()))
        rows = read_metrics(tmp_path / name)
        assert result.seconds > 0 and all(v > 0 for row in rows for k, v in row.items() if k.startswith("time/"))
        logs.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
        now = iter(range(10**9, 0, -3600))  # an hour back at every look
        monkeypatch.setattr(time, "time", lambda now=now: float(next(now)))
        monkeypatch.setattr(time, "time_ns", lambda now=now: next(now) * 10**9)
    assert logs[0] == logs[1]


def test_nothing_asks_for_the_time_of_day() -> None:
    """Only clocks that cannot go backwards: perf_counter and monotonic."""
    asked = re.compile(r"\btime\.(time|time_ns|localtime|gmtime|strftime)\(|datetime\.(now|today|utcnow)")
    sources = sorted(Path(unmask.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    assert [path.name for path in sources if asked.search(path.read_text())] == []
