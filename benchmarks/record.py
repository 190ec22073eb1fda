"""Record what the program computes, bit for bit, and compare two records: a check that a refactoring changes nothing.

    python benchmarks/record.py write before.json --jobs 2
    python benchmarks/record.py compare before.json after.json

A case is one or more calls of `python -m unmask` with one thread on the CPU. Only the command line and the files of a
run are used, so the same script works before and after modules move. A record holds numbers as hex floats, the sha256
of every weight tensor, and the sha256 of every column of samples.jsonl and traces.jsonl. It holds no times, paths,
versions or sentences. It depends on the CPU and on the version of torch: compare records of one machine only, and do
not commit them.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

RENAMED: dict[str, str] = {
    "train/nats": "train/nll",
    "train/late_ends": "train/late_eos",
}
"""Names that changed, old to new: metrics, JSON keys, columns. Applied to the old record of a comparison."""

BASES = ("diffu_grpo", "unigrpo", "coupled_grpo", "wd1", "spg", "gspo", "espo", "reinforce_pp", "agrpo")
SMALL = (
    "model=tiny",
    "prompts=3",
    "group=4",
    "eval.prompts=4",
    "eval.samples=2",
    "trace_every=2",
    "sudoku.partial=0.5",
)
THREE = (*SMALL, "updates=3", "inner=2", "optimizer.lr=1e-3")
LEFT_OUT = ("seconds", "seconds_per_update", "times", "wall", "threads", "versions", "config", "card")
"""Keys that hold times, versions or settings."""
LOGS = ("samples.jsonl", "traces.jsonl", "warnings.jsonl", "errors.jsonl")

Case = Callable[[Path], dict[str, Any]]


# --- running ---------------------------------------------------------------------------------------------------------


def call(folder: Path, *arguments: str, module: tuple[str, ...] = ("unmask",)) -> str:
    """Run a command in a folder; returns its standard output. RuntimeError if it fails."""
    done = subprocess.run(command(*arguments, module=module), **settings(folder), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    return str(done.stdout)


def command(*arguments: str, module: tuple[str, ...] = ("unmask",)) -> list[str]:
    return [sys.executable, "-m", *module, *arguments]


def settings(folder: Path) -> dict[str, Any]:
    """One thread, no GPU, no network, and the package beside this script."""
    package = str(Path(__file__).resolve().parent.parent)
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": package}
    return {"cwd": folder, "env": {**os.environ, **fixed}}


def run_case(*arguments: str, command: str = "train", module: tuple[str, ...] = ("unmask",)) -> Case:
    """One run, with its whole folder."""

    def case(folder: Path) -> dict[str, Any]:
        call(folder, command, *arguments, "--out", "run", module=module)
        return run_record(folder / "run")

    return case


def json_case(*arguments: str) -> Case:
    """A command that prints JSON."""

    def case(folder: Path) -> dict[str, Any]:
        return {"values": numbers(json.loads(call(folder, *arguments, "--json")))}

    return case


def audit_case(folder: Path) -> dict[str, Any]:
    small = ("--problems", "3", "--group", "4", "--draws", "2", "--states", "2000", "sudoku.partial=0.5")
    call(folder, "audit", "tiny", *small, "--out", "audit")
    return {"values": numbers(json.loads((folder / "audit" / "audit.json").read_text()))}


def compare_case(folder: Path) -> dict[str, Any]:
    grid = ("--methods", "diffu_grpo,agrpo", "--seeds", "1", "--budget", "updates=3", "--jobs", "1", "--keep")
    call(folder, "compare", *grid, *SMALL, "--out", "study")
    cells = {path.name.rpartition("-")[0]: path for path in (folder / "study" / "cells").iterdir()}  # without its hash
    runs = {name: run_record(path / "run") for name, path in sorted(cells.items())}
    return {"values": numbers(json.loads((folder / "study" / "results.json").read_text())), "runs": runs}


def resumed_case(folder: Path) -> dict[str, Any]:
    """A run that is stopped and resumed; RuntimeError if it does not end as the run that is not stopped."""
    how = ("train", "--method", "agrpo", *SMALL, "updates=24", "save_every=5", "eval.every=10", "optimizer.lr=1e-3")
    call(folder, *how, "--out", "whole")
    log = folder / "cut" / "metrics.jsonl"
    quiet = subprocess.DEVNULL
    running = subprocess.Popen(command(*how, "--out", "cut"), **settings(folder), stdout=quiet, stderr=quiet)
    while running.poll() is None and (not log.is_file() or log.read_text().count("\n") < 8):
        time.sleep(0.01)
    (folder / "cut" / "stop").touch()
    running.wait()
    if (folder / "cut" / "finished.json").exists():
        raise RuntimeError("the run ended before it could be stopped; give it more updates")
    call(folder, "train", "--resume", "cut")
    whole, cut = run_record(folder / "whole"), run_record(folder / "cut")
    if whole != cut:
        raise RuntimeError("a resumed run does not end as one that was not stopped")
    return cut


def merge_case(folder: Path) -> dict[str, Any]:
    """An adapter, trained and merged into its base."""
    adapter = run_case(*THREE, "--method", "diffu_grpo", "full=false", "lora.rank=4", "lora.alpha=8")(folder)
    call(folder, "merge", "run", "--out", "merged")
    return {**adapter, "merged": weights(folder / "merged")}


def pretrain_case(folder: Path) -> dict[str, Any]:
    """A model from nothing, in a few steps."""
    shape = {"width": 16, "layers": 1, "heads": 2, "hidden": 16, "max_length": 64}
    lesson = {"task": "sudoku", "options": {"holes": [9, 12]}, "batch": 8, "wrong": 0.5, "noise": 0.3}
    data = {"seed": 0, "threads": 1, "steps": 5, "learning_rate": 2e-3, "warmup": 2, "weight_decay": 0.01}
    (folder / "pretrain.yaml").write_text(json.dumps({**data, "shape": shape, "lessons": [lesson]}))
    call(folder, "pretrain", "pretrain.yaml", "--out", "model")
    return {"weights": weights(folder / "model")}


def cases() -> dict[str, Case]:
    """Every case by name, the longest first."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "unmask")
    more = {
        "demo": run_case(),
        "compare": compare_case,
        "resumed": resumed_case,
        "two processes": run_case(*THREE, "--with", "daca,dispo", module=launcher),
        "audit": audit_case,
        "merge": merge_case,
        "sft": run_case("tiny", "--data", "countdown", "updates=3", "tokens=512", "eval.prompts=4", command="sft"),
        "pretrain": pretrain_case,
        "eval": json_case("eval", "tiny", "--problems", "16", "--samples", "4"),
        "eval steps": json_case("eval", "tiny", "--steps", "4,8", "--problems", "8", "--samples", "2"),
        "dry run": json_case("train", "--dry-run", "--hardware", "h200"),
        "cache": run_case(*THREE, "rollout.cache=dual", "rollout.block=8", "rollout.correction=2"),
        "threshold": run_case(*THREE, "--method", "wd1", "rollout.threshold=0.7", "rollout.block=8"),
        "bfloat16": run_case(*THREE, "--method", "espo", "dtype=bfloat16", "full=true"),
        "adapter": run_case(*THREE, "--with", "daca,dispo", "full=false", "lora.rank=4", "checkpointing=true"),
        "best": run_case(*THREE, "--method", "agrpo", "eval.every=1", "eval.best=true", "idle_groups=resample"),
        "countdown": run_case(*SMALL[:-1], "--task", "countdown", "--with", "sml,dispo", "updates=3", "rows=5"),
        "orders": run_case(*THREE, "--method", "gspo", "--with", "dps", "rollout.order=margin", "rollout.top_k=5"),
    }
    bases = {
        f"{base}+{plugin}" if plugin else base: run_case(*THREE, "--method", base, *(("--with", plugin) * bool(plugin)))
        for base in BASES
        for plugin in ("", "daca", "dispo")
    }
    return more | bases


# --- reading ---------------------------------------------------------------------------------------------------------


def run_record(run: Path) -> dict[str, Any]:
    """What a run folder holds: metrics, weights, the content of its logs, and how it ended."""
    logs = {name: columns(run / name) for name in LOGS if (run / name).is_file()}
    places = {path.name: weights(path) for path in sorted(run.glob("checkpoint*"))}
    metrics = [numbers(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    finished = numbers(json.loads((run / "finished.json").read_text()))
    return {"metrics": metrics, "weights": places.pop("checkpoint"), **places, "logs": logs, "finished": finished}


def numbers(data: Any) -> Any:
    """The numbers of JSON data as hex floats, under their keys; text, times, versions and settings are left out."""
    if isinstance(data, dict):
        inside = {key: numbers(value) for key, value in data.items() if not left_out(key)}
        return {key: value for key, value in inside.items() if value is not None}
    if isinstance(data, list):
        return [numbers(value) for value in data]
    if isinstance(data, bool) or not isinstance(data, int | float):
        return data if isinstance(data, bool) else None
    return float(data).hex()


def left_out(key: str) -> bool:
    return key in LEFT_OUT or key.startswith("time/")


def weights(folder: Path) -> dict[str, str]:
    """The sha256 of every tensor of a checkpoint, its type and shape included."""
    sums = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                kind = json.dumps([entry["dtype"], entry["shape"]]).encode()
                sums[name] = hashlib.sha256(kind + data[start + first : start + last]).hexdigest()
    return sums


def columns(path: Path) -> dict[str, str]:
    """The sha256 of every column of a JSONL file, so that the name of one can change without touching the others."""
    sums: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        for key, value in leaves(json.loads(line)):
            sums.setdefault(".".join(key), hashlib.sha256()).update(json.dumps(value).encode() + b"\n")
    return {key: value.hexdigest() for key, value in sums.items()}


def leaves(data: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with its keys; items of a list have no key of their own."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from leaves(value, (*key, name))
    elif isinstance(data, list):
        for value in data:
            yield from leaves(value, key)
    else:
        yield key, data


# --- the two commands ------------------------------------------------------------------------------------------------


def chosen(names: list[str] | None, known: dict[str, Any]) -> list[str]:
    if strange := sorted({*(names or [])} - {*known}):
        sys.exit(f"no such case: {', '.join(strange)}. Cases: {', '.join(known)}")
    return names or list(known)


def write(path: Path, only: list[str] | None, jobs: int) -> None:
    """Run the cases and write the record."""
    every, begun, record = cases(), time.monotonic(), dict[str, Any]()
    names = chosen(only, every)

    def run(name: str) -> tuple[dict[str, Any], float]:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            return every[name](Path(folder)), time.monotonic() - start

    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, name): name for name in names}
        for number, future in enumerate(as_completed(running), 1):
            try:
                record[running[future]], seconds = future.result()
            except Exception:  # of whatever kind: name the case, stop the others, and raise it
                pool.shutdown(cancel_futures=True)
                print(f"case {running[future]!r} failed", file=sys.stderr)
                raise
            print(f"{number:3}/{len(names)}  {running[future]:24} {seconds:6.1f} s", flush=True)
    path.write_text(json.dumps({name: record[name] for name in names}, indent=1) + "\n")
    print(f"{len(names)} cases in {time.monotonic() - begun:.0f} s: {path}")


def compare(old: Path, new: Path, only: list[str] | None) -> int:
    """Print every value that differs; returns how many do."""
    records = [json.loads(path.read_text()) for path in (old, new)]
    names = chosen(only, records[0] | records[1])
    before = {(name, *key): value for name in names for key, value in named(renamed(records[0].get(name)))}
    after = {(name, *key): value for name in names for key, value in named(records[1].get(name))}
    differing = [key for key in before | after if before.get(key) != after.get(key)]
    rows = [(key[0], " ".join(key[1:]), *difference(before.get(key), after.get(key))) for key in differing]
    table = [("case", "value", "old", "new", "relative difference"), *rows] if rows else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(f"{len(rows)} of {len(before | after)} values in {len(names)} cases differ")
    return len(rows)


def renamed(data: Any) -> Any:
    if isinstance(data, dict):
        return {RENAMED.get(key, key): renamed(value) for key, value in data.items()}
    return [renamed(value) for value in data] if isinstance(data, list) else data


def named(data: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with the keys and places that lead to it."""
    if isinstance(data, dict | list):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from named(value, (*key, str(name)))
    elif data is not None:
        yield key, data


def difference(old: Any, new: Any) -> tuple[str, str, str]:
    """Both values as they are shown, and how far they are apart."""
    one, other = decimal(old), decimal(new)
    if one is None or other is None:
        return shown(old), shown(new), ""
    largest = max(abs(one), abs(other))
    return shown(old), shown(new), f"{abs(other - one) / largest:.2g}" if 0 < largest < math.inf else ""


def decimal(value: Any) -> float | None:
    is_number = isinstance(value, str) and ("0x" in value or value in ("nan", "inf", "-inf"))
    return float.fromhex(value) if is_number else None


def shown(value: Any) -> str:
    number = decimal(value)
    return "missing" if value is None else str(value)[:12] if number is None else repr(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="run the cases and write a record")
    writing.add_argument("file", type=Path)
    writing.add_argument("--jobs", type=int, default=1, help="cases side by side")
    comparing = commands.add_parser("compare", help="print what differs; exit code 1 if anything does")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    for each in (writing, comparing):
        each.add_argument("--only", nargs="+", metavar="NAME", help="these cases; default: all")
    given = parser.parse_args()
    if given.command == "write":
        write(given.file, given.only, given.jobs)
    elif compare(given.old, given.new, given.only):
        sys.exit(1)


if __name__ == "__main__":
    main()
