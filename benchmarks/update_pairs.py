"""Seconds of one update of the default run on one CPU thread, in alternation with another checkout.

    python benchmarks/update_pairs.py --other FOLDER --pairs 5 --updates 8

FOLDER is another checkout of this repository (git worktree add FOLDER COMMIT). Every run is a process of its own, and
the two take turns. A figure is the median over the updates after the first; CPU time is independent of other work on
the machine. Says whether the metrics of the two are equal.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

RUN = """
import json, sys, tempfile, time
from pathlib import Path
import torch
import unmask.training.loop as loop
from unmask.config import parse_config
from unmask.training.run.folder import RunFolder

torch.set_num_threads(1)
RunFolder.draw = lambda self: None
config = parse_config({"updates": int(sys.argv[1]), "eval": {"prompts": 2, "samples": 1}, "device": "cpu"})
starts, collect = [], loop.collect

def timed(*arguments):
    starts.append((time.process_time(), time.perf_counter()))
    return collect(*arguments)

loop.collect = timed
with tempfile.TemporaryDirectory() as folder:
    loop.train(config, lambda: RunFolder(Path(folder) / "run", config.dump()))
    rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
apart = [[b - a for a, b in zip(*pair)] for pair in zip(starts[1:], starts[2:])]
metrics = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
print(json.dumps({"cpu": [cpu for cpu, _ in apart], "wall": [wall for _, wall in apart], "metrics": metrics}))
"""


def run(folder: Path, updates: int) -> dict[str, list[float]]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(updates)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--updates", type=int, default=8)
    arguments = parser.parse_args()
    folders = {"other": arguments.other.resolve(), "this": Path(__file__).resolve().parent.parent}
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in folders}
    for _ in range(arguments.pairs):
        for name, folder in folders.items():
            found[name].append(run(folder, arguments.updates))
    for clock in ("cpu", "wall"):
        middles = {name: [median(each[clock]) for each in runs] for name, runs in found.items()}
        ratios = [other / this for other, this in zip(middles["other"], middles["this"], strict=True)]
        row = {name: {"median": median(each), "spread": [min(each), max(each)]} for name, each in middles.items()}
        print(json.dumps({"clock": clock, **row, "speedup": median(ratios), "spread": [min(ratios), max(ratios)]}))
    print(json.dumps({"metrics equal": found["other"][0]["metrics"] == found["this"][0]["metrics"]}))


if __name__ == "__main__":
    main()
