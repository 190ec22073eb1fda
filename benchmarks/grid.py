"""Train every cell of a study with every seed, several processes side by side, and keep the learning curves.

    python benchmarks/grid.py benchmarks/stability.yaml --workers 2 --out benchmarks/results/stability.json

A study is YAML: `seeds`, `common` (a configuration) and `cells` (a name and what it changes). One failed run does not
stop the rest; a result file that exists is added to, and runs it holds are not run again.
"""

import argparse
import json
import os
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: one core a process

import yaml


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`change` laid over `base`, sections joined."""
    out = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def run_cell(data: dict[str, Any]) -> dict[str, Any]:
    """One training run: its evaluations in order, and its processor time."""
    import torch

    from unmask.config import parse_config
    from unmask.training.loop import train
    from unmask.training.run.folder import RunFolder, read_metrics

    torch.set_num_threads(1)
    config = parse_config(data)
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        train(config, lambda: RunFolder(Path(folder) / "run", config.dump()))
        rows = read_metrics(Path(folder) / "run")
    curve = [row for row in rows if "eval/solved_sampled" in row]
    last = [row for row in rows if "train/reward" in row][-20:]
    tail = {key: sum(row[key] for row in last) / len(last) for key in last[0] if key.startswith("train/")}
    return {"seconds": time.process_time() - start, "curve": curve, "last_20_updates": tail, "config": config.dump()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", default="", help="comma-separated; all by default")
    arguments = parser.parse_args()
    study = yaml.safe_load(arguments.study.read_text())
    wanted = arguments.cells.split(",") if arguments.cells else list(study["cells"])
    results: dict[str, dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}

    with ProcessPoolExecutor(arguments.workers) as pool:
        jobs = {}
        for seed in study["seeds"]:
            for cell in wanted:
                if str(seed) not in results.setdefault(cell, {}):
                    data = merged(merged(study["common"], study["cells"][cell] or {}), {"seed": seed})
                    jobs[pool.submit(run_cell, data)] = (cell, seed)
        for done, job in enumerate(as_completed(jobs), 1):
            cell, seed = jobs[job]
            try:
                results[cell][str(seed)] = job.result()
            except Exception:  # whatever ended one run, the others go on; it is printed and can be run again
                traceback.print_exc()
                continue
            ends = results[cell][str(seed)]["curve"]
            spread = " ".join(f"{100 * row['eval/solved_sampled']:.1f}" for row in ends)
            print(f"{done}/{len(jobs)} {cell} seed {seed}: {spread}", flush=True)
            arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
