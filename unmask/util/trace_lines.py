"""The files that `unmask view` reads without loading torch: traces.jsonl of a run, and the results of an evaluation."""

from pathlib import Path
from typing import Any

TraceLine = dict[str, Any]
"""A line of traces.jsonl."""
VERSION = 1
"""Version of these lines and of the index of `unmask view`."""
RESULTS = "evaluation.json"
"""The file in a folder that `unmask eval` writes."""


def results_file(out: Path) -> Path:
    """The file that `unmask eval --out` writes: the named one, or one in the named folder."""
    return out if out.suffix == ".json" else out / RESULTS
