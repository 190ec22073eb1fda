"""Rollouts timed by another checkout of this repository, for speed.py's --baseline.

It runs with that checkout's package, reads a cell a line (JSON) and answers with the seconds of one rollout.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from speed_bench import SpeedBench

from unmask.rollout.cache import Cache


class Baseline:
    """The other checkout in a process of its own, which waits while it is not asked."""

    def __init__(self, folder: Path, bench: SpeedBench) -> None:
        arguments = ["--toy"] * bench.toy + ["--eager"] * (not bench.policy.compiled)
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**os.environ, "PYTHONPATH": f"{folder.resolve()}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, cell: dict[str, Any]) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise RuntimeError("the baseline ended; its error is above")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def roll(bench: SpeedBench, cell: dict[str, Any]) -> Any:
    """The rollouts of a cell: {"rows", "blocks", "cached", "copies"}."""
    cache = Cache() if cell["cached"] else None
    return bench.roll_blocks(cell["rows"], cell["blocks"], copies=cell.get("copies", 1), cache=cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    bench = SpeedBench(arguments.toy)
    if find_spec("unmask.rollout.graphs"):  # kept, or every rollout would capture its steps again
        bench.graphs = import_module("unmask.rollout.graphs").Graphs()
    if not arguments.eager:
        bench.policy.compile_layers()
    for line in sys.stdin:
        cell = json.loads(line)
        print(bench.seconds(lambda c=cell: roll(bench, c), warm=False), flush=True)


if __name__ == "__main__":
    main()
