"""What every test runs under. The environment is set before torch, transformers or matplotlib is imported."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: more threads only cost
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["MPLBACKEND"] = "Agg"  # no test opens a window

# No deadline: the first call of a torch function takes far longer than the second.
# Derandomized: the same commit gives the same verdict.
settings.register_profile("unmask", deadline=None, derandomize=True)
settings.load_profile("unmask")


SLOW = (
    "test_ranks.py",
    "test_compile.py",
    "test_tutorial.py",
    "test_compare_processes.py",
    "test_reproducible.py",
    "test_resume.py",
    "test_examples.py",
    "test_own_method.py",
)
"""Files of a few long tests. They come first, so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Exclude imported modules from garbage collection, which takes a tenth of the time otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Do not wait for the disk: no test loses power, and waiting takes longer than most runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def undrawn() -> Iterator[Callable[..., Path | None]]:
    """curves.png takes longer than most runs of the tests: without `drawn` it is not drawn."""
    from unmask.training.run.folder import RunFolder

    plain = RunFolder.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "draw", lambda run: None)
        yield plain


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, undrawn: Callable[..., Path | None]) -> None:
    monkeypatch.setattr("unmask.training.run.folder.RunFolder.draw", undrawn)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small model, which no test writes to."""
    from helpers import SMALL
    from unmask.models import save, tiny_policy

    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(SMALL, seed=1), folder)
    return str(folder)


@pytest.fixture
def cells_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison trains its cells in this process: to start another one takes longer than a few cells."""
    from unmask.studies.compare import compare, worker
    from unmask.studies.compare.pool import CellJob, JobEvent

    def run_jobs(jobs: list[CellJob], workers: int, keep: bool) -> Iterator[JobEvent]:
        starts: dict[str, object] = {}
        for job in jobs:
            messages: list[dict[str, str]] = []
            worker.run_cell(str(job.folder), job.config, keep, starts, messages.append)
            yield JobEvent(job, error=messages[-1].get("error", ""))

    monkeypatch.setattr(compare, "run_jobs", run_jobs)
    monkeypatch.setattr(worker.os, "dup2", lambda *handles: None)  # what a cell prints is captured as elsewhere


@cache
def built_command() -> Any:
    """typer's command tree, built once instead of for every call."""
    from typer.main import get_command

    from unmask.cli.main import app

    return get_command(app)


@pytest.fixture
def unmask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The command, called in an empty folder: its exit code, and what it said to either side."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        from unmask.cli.main import main

        monkeypatch.setattr("unmask.cli.main.app", built_command())
        monkeypatch.setattr(sys, "argv", ["unmask", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call
