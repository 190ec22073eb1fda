"""A user's own Python file, named on the command line or in a configuration, run with the user's rights.

A model, a data file or a run folder that is sampled or evaluated cannot name one (cli/arguments.py); `--resume` runs
the files that the run was trained with.
"""

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class UserFile(NamedTuple):
    module: ModuleType
    digest: str
    """sha256 of the source."""


def run_file(path: Path) -> UserFile:
    """Run the file as a module: once, and again when it has changed."""
    return _run(str(path.resolve()), path.stat().st_mtime_ns)


@cache
def _run(path: str, changed: int) -> UserFile:
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    name = f"unmask_own_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look a class up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{Path(path).name} cannot be run: {type(error).__name__}: {error}") from error
    return UserFile(module, digest)
