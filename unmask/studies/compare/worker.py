"""A process that trains one cell after the other: `python -m unmask.studies.compare.worker`.

It reads one JSON object per line, {"folder", "config", "keep"}. It writes {"share": part of the updates done}, and at
the end of a cell {"done": true} or {"error": ...}. It exits when its input ends, because its parent has ended then.
"""

import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

TAIL = 20
"""Updates over which training metrics are averaged at the end of a run."""

LEARNING = ("seed", "updates", "prompts", "group", "inner_steps", "idle_groups", "optimizer")
"""Configuration keys that, like the method's, do not change the evaluation before training."""

Send = Callable[[dict[str, Any]], None]


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
    Thread(target=_listen, args=(orders,), daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")

    starts: dict[str, Any] = {}
    while True:
        run_cell(**orders.get(), starts=starts, send=send)


def _listen(orders: "SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)


def run_cell(folder: str, config: dict[str, Any], keep: bool, starts: dict[str, Any], send: Send) -> None:
    """Train a cell in its folder from the start and write result.json or error.json at the end.

    `starts` caches this process's evaluations before training by `start_key`.
    """
    home = Path(folder)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with (home / "log.txt").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        message: dict[str, Any] = {"done": True}
        try:
            name, outcome = "result.json", _train_cell(home, config, keep, starts, send)
        except Exception as error:  # the other cells are still trained
            traceback.print_exc()
            message = {"error": f"{type(error).__name__}: {error}"}
            name, outcome = "error.json", message
        from unmask.studies.compare.cells import write_json

        write_json(home / name, outcome)
        sys.stdout.flush()
        sys.stderr.flush()
    send(message)


def _train_cell(home: Path, data: dict[str, Any], keep: bool, starts: dict[str, Any], send: Send) -> dict[str, Any]:
    import torch

    from unmask.config import parse_config
    from unmask.training.loop import train
    from unmask.training.run.base_run import Hooks
    from unmask.training.run.folder import RunFolder, read_metrics
    from unmask.util.versions import versions

    class CellRun(RunFolder):
        def draw(self) -> None:
            """Draw nothing: the comparison draws all curves."""

    config = parse_config(data)
    sent_at = 0.0

    def on_metrics(step: int, metrics: dict[str, float]) -> None:
        nonlocal sent_at
        if time.monotonic() - sent_at > 0.5:
            sent_at = time.monotonic()
            spent = metrics.get("cost/forwards", 0.0) / config.max_forwards if config.max_forwards else 0.0
            send({"share": min(1.0, max(step / config.updates, spent))})

    start, key = time.perf_counter(), start_key(data)
    known = None if keep else starts.get(key)  # a run folder that is kept records its own, for the viewer
    starts[key] = train(config, lambda: CellRun(home / "run", config.dump()), Hooks(on_metrics), before=known).before
    wall = time.perf_counter() - start
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the next cell may run in another process
    result = result_of(read_metrics(home / "run"))
    if not keep:
        for name in ("config.yaml", "metrics.jsonl"):
            (home / "run" / name).rename(home / name)
        shutil.rmtree(home / "run")
    return {**result, "wall": wall, "threads": torch.get_num_threads(), "versions": versions(), "config": config.dump()}


def start_key(data: dict[str, Any]) -> str:
    """The same for cells that do not differ before training."""
    from unmask.config.parse import without_method
    from unmask.studies.compare.cells import key_of

    rest = {key: value for key, value in without_method(data).items() if key not in LEARNING}
    return key_of({**rest, "eval": {**rest["eval"], "every": 0}})


def result_of(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The evaluations with the cost so far, and the last training metrics."""
    spent, curve = {"forwards": 0.0, "seconds": 0.0}, []
    updates = [row for row in rows if "cost/forwards" in row]
    for row in rows:
        if "cost/forwards" in row:
            spent["forwards"] = row["cost/forwards"]
            spent["seconds"] += row["time/rollout"] + row["time/update"]
        if "eval/solved_sampled" in row:
            passes = {key.removeprefix("eval/"): row[key] for key in row if key.startswith("eval/pass@")}
            solved = {"sampled": row["eval/solved_sampled"], "greedy": row["eval/solved_greedy"], **passes}
            curve.append({"updates": row["step"], **spent, **solved, "reward": row["eval/reward"]})
    last = updates[-TAIL:]
    names = [name for name in last[-1] if name.startswith("train/") and all(name in row for row in last)]
    later = [row["time/rollout"] + row["time/update"] for row in updates[1:] or updates]
    return {
        "curve": curve,
        "seconds_per_update": sum(later) / len(later),
        "tail": {name: sum(row[name] for row in last) / len(last) for name in names},
    }


if __name__ == "__main__":
    main()
