"""What `unmask view` opens: run folders, folders of runs, comparisons, results of `unmask eval` and `unmask grade`."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from unmask.view.index import RunReader
from unmask.view.results import results_of

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
        if path.is_file():
            runs += [] if path in known else results_of(path)
        elif (path / "config.yaml").is_file() or not path.is_dir():
            runs += [] if path in known else [RunReader(path)]
        else:
            folders = list(_run_folders(path))
            if not folders:
                raise ValueError(f"{path} is not a run folder and has none in it: no config.yaml was found")
            for folder in folders:
                with suppress(ValueError):  # a config.yaml that is not a run's, or not yet
                    name = str(folder.relative_to(path))
                    runs += [] if folder in known else [RunReader(folder, CELL.sub(r"\1", name))]
    if len(runs) > MOST:
        raise ValueError(f"{len(runs)} runs are more than the {MOST} that a page shows: name fewer folders")
    return runs


def _run_folders(top: Path) -> Iterator[Path]:
    """Folders with a config.yaml. A comparison's runs that only chose a learning rate or measured the time are left
    out."""
    for place, folders, files in os.walk(top):
        folder = Path(place)
        if "config.yaml" in files:
            yield folder
        if "config.yaml" in files or len(folder.relative_to(top).parts) >= DEPTH:
            folders.clear()
        skipped = {"rates", "pilots"} if "cells" in folders else set()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
