"""The lines of traces.jsonl: a run writes them, `unmask view` reads them without loading torch."""

from typing import Any

TraceLine = dict[str, Any]
VERSION = 1
"""Version of these lines and of the index of `unmask view`."""
