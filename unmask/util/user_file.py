"""A user's own Python file, named on the command line or in a configuration: their program, run with their rights.

Nothing that comes with a model or with data names one, nor does a run folder that is sampled from or measured
(commands/arguments.py); `--resume` runs what the run was trained with.
"""

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

RUN: dict[str, str] = {}
"""By its name, the digest of every file that has been run here, as it was then."""


def run_file(path: Path) -> ModuleType:
    """The file as a module, run once until it changes."""
    module, RUN[str(path)] = _run(str(path.resolve()), path.stat().st_mtime_ns)
    return module


@cache
def _run(path: str, changed: int) -> tuple[ModuleType, str]:
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
    return module, digest
