"""The version of the lines of traces.jsonl, which a run writes and `unmask view` reads without loading torch."""

from typing import Any

TraceLine = dict[str, Any]
VERSION = 1
"""Of the lines of traces.jsonl and of the index of `unmask view`."""
