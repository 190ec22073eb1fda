"""What `unmask view` opens: run folders, folders of runs, comparisons, results of `unmask eval` and `unmask grade`."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from unmask.util.trace_lines import RESULTS
from unmask.view.index import RunReader
from unmask.view.results import results_of

MARKS = ("config.yaml", RESULTS)
"""A folder with one of these files is a run, or the results of an evaluation."""
DEPTH = 4
"""Levels of folders in which runs are searched."""
CELL = re.compile(r"cells/(.+-seed\d+)-[0-9a-f]{12}(/run)?")
"""The folder of a cell of a comparison, which is called after its method and seed."""
MOST = 1000
"""Runs that one page shows."""


def find_runs(paths: Sequence[Path], known: Collection[Path] = ()) -> list[RunReader]:
    """The runs at these paths, without those whose folder is known; ValueError for a path without any."""
    runs = list[RunReader]()
    for path in paths:
        if path.is_file() or not path.is_dir() or any((path / name).is_file() for name in MARKS):
            runs += [] if path in known else _readers(path)
            continue
        folders = list(_run_folders(path))
        if not folders:
            raise ValueError(f"{path} is not a run folder and has none in it: no {' or '.join(MARKS)} was found")
        for folder in folders:
            with suppress(ValueError):  # a config.yaml that is not a run's, or not yet
                name = str(folder.relative_to(path))
                runs += [] if folder in known else _readers(folder, CELL.sub(r"\1", name))
    if len(runs) > MOST:
        raise ValueError(f"{len(runs)} runs are more than the {MOST} that a page shows: name fewer folders")
    return runs


def _readers(path: Path, name: str = "") -> list[RunReader]:
    """The run at a path, or the results in a file or folder."""
    if path.is_file() or (path / RESULTS).is_file():
        return results_of(path, name)
    return [RunReader(path, name)]


def _run_folders(top: Path) -> Iterator[Path]:
    """Folders of runs and of results. A comparison's runs that only chose a learning rate or measured the time are left
    out."""
    for place, folders, files in os.walk(top):
        folder = Path(place)
        found = not {*MARKS}.isdisjoint(files)
        if found:
            yield folder
        if found or len(folder.relative_to(top).parts) >= DEPTH:
            folders.clear()
        skipped = {"rates", "pilots"} if "cells" in folders else set()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
