"""Long loads: `make soak`, or one of

    python benchmarks/soak.py train --updates 10000      one run of the tiny model, watched from its own process
    python benchmarks/soak.py sandbox --programs 1000    a queue of sandboxed programs, right, wrong and hostile
    python benchmarks/soak.py resume --cases 1000        runs killed anywhere and gone on with (soak_resume.py)
    python benchmarks/soak.py torchrun                   SIGTERM to the launcher of two processes
    python benchmarks/soak.py viewer --lines 1000000     a run with so long a log, exported as a page

All print their figures, and exit with 1 where a promise does not hold: memory that is held within 2 %, handles and
processes as they were, updates a second of computing within 5 %, medians of the first quarter after the warm-up and of
the last.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import soak_resume


class Reading(NamedTuple):
    """Of this process, at one moment."""

    update: int
    seconds: float
    """Of computing, by this process: what else the machine does makes no difference."""
    resident: float
    """MiB, as the system counts them: with what the allocator keeps for the next tensor."""
    held: float
    """MiB once the allocator has given back what it does not use: what grows here is a leak."""
    handles: int
    threads: int


def mebibytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def reading(update: int) -> Reading:
    resident = mebibytes()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return Reading(
        update,
        time.process_time(),
        resident,
        mebibytes(),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def train(updates: int) -> dict[str, float]:
    """One run; a reading every hundredth of it."""
    import torch

    from unmask.config import DEMO, read_config
    from unmask.training.loop import train as run_training
    from unmask.training.run.folder import RunFolder

    torch.set_num_threads(1)
    every = max(1, updates // 100)
    overrides = ["model=tiny", f"updates={updates}", "prompts=4", "group=4", "eval.prompts=16", "eval.samples=1"]
    config = read_config(DEMO, [*overrides, "save_every=50", "optimizer.lr=1e-6"])
    found: list[Reading] = []

    def report(step: int, metrics: object) -> None:
        if step and step % every == 0 and (not found or found[-1].update != step):
            found.append(reading(step))

    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        run_training(config, lambda: RunFolder(Path(folder) / "run", config.dump()), report)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    warm = found[len(found) // 10 :]  # caches and the allocator fill first
    speed = [(b.update - a.update) / (b.seconds - a.seconds) for a, b in pairwise(warm)]
    quarter = max(1, len(speed) // 4)
    first, last = (statistics.median(part) for part in (speed[:quarter], speed[-quarter:]))
    held = [statistics.median(one.held for one in part) for part in (warm[:quarter], warm[-quarter:])]
    resident = [statistics.median(one.resident for one in part) for part in (warm[:quarter], warm[-quarter:])]
    print("update  held MiB  resident MiB  handles  threads  updates/s")
    for place in range(0, len(speed), max(1, len(speed) // 10)):
        one = warm[place]
        told = f"{one.update:6}  {one.held:8.1f}  {one.resident:12.1f}  {one.handles:7}  {one.threads:7}"
        print(f"{told}  {speed[place]:9.2f}")
    return {
        "updates": updates,
        "minutes": (time.monotonic() - begun) / 60,
        "folder MiB": size / 2**20,
        "held MiB first": held[0],
        "held MiB last": held[1],
        "memory grew": held[1] / held[0] - 1,
        "resident grew": resident[1] / resident[0] - 1,
        "handles grew": warm[-1].handles - warm[0].handles,
        "threads grew": warm[-1].threads - warm[0].threads,
        "updates/s first": first,
        "updates/s last": last,
        "speed changed": last / first - 1,
    }


PROGRAMS = {
    "def answer(x): return x": True,
    "def answer(x): return x + 1": False,
    "def answer(x": False,
    "import os\ndef answer(x): os._exit(0)": False,
    "import os\ndef answer(x): return os.fork()": False,
    "import os\ndef answer(x):\n    while True: os.pipe()": False,
    "def answer(x): return 'x' * (1 << 30)": False,
    "import ctypes\ndef answer(x): return ctypes.string_at(0)": False,
    "import threading\ndef answer(x):\n    while True: threading.Thread(target=answer, args=(x,)).start()": False,
    "def answer(x):\n    while True: pass": False,
}


def queue(programs: int) -> dict[str, float]:
    from unmask import sandbox

    if told := sandbox.problem():
        sys.exit(f"no sandbox: {told}")
    kinds = [list(PROGRAMS)[number % len(PROGRAMS)] for number in range(programs)]
    # each text once: nothing is remembered, but nothing could be either
    jobs = [
        sandbox.ProgramJob(f"{text}\nnumber = {number}", ["assert answer(3) == 3"], timeout=1.0)
        for number, text in enumerate(kinds)
    ]
    half, begun = programs // 2, time.monotonic()

    def judged(some: slice) -> int:
        """Wrong verdicts; nothing else of them is held."""
        found = sandbox.run_many(jobs[some])
        return sum(one[0].passed != PROGRAMS[kind] for one, kind in zip(found, kinds[some], strict=True))

    wrong = judged(slice(half))
    before = reading(half)
    wrong += judged(slice(half, None))
    minutes = (time.monotonic() - begun) / 60
    time.sleep(2.0)  # the kernel takes threads and processes away a moment after they end
    after = reading(programs)
    mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "programs": programs,
        "minutes": minutes,
        "wrong verdicts": wrong,
        "handles grew": after.handles - before.handles,
        "threads grew": after.threads - before.threads,
        "processes left": len(mine),
        "memory grew": after.held / before.held - 1,
    }


def viewed(lines: int) -> dict[str, float]:
    """The log of the demo's first updates over and over, and the page that shows it."""
    from unmask.config import DEMO, read_config
    from unmask.training.loop import train as run_training
    from unmask.training.run.folder import RunFolder
    from unmask.view.page import export

    few = ["updates=8", "prompts=2", "group=4", "eval.prompts=4", "eval.samples=1", "eval.every=2"]
    config = read_config(DEMO, few)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        run_training(config, lambda: RunFolder(folder, config.dump()))
        log = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        with log.open("w") as file:
            for number in range(lines):
                file.write(json.dumps({**rows[number % len(rows)], "step": number}) + "\n")
        before, begun = reading(0), time.monotonic()
        page = export(folder, Path(home) / "page.html")
        seconds, after = time.monotonic() - begun, reading(1)
        sizes = {"log MiB": log.stat().st_size / 2**20, "page MiB": page.stat().st_size / 2**20}
    return {"lines": lines, **sizes, "seconds": seconds, "held MiB more": after.held - before.held}


BOUNDS = {
    "memory grew": (-1.0, 0.02),
    "handles grew": (0, 0),
    "threads grew": (0, 0),
    "speed changed": (-0.05, 0.05),
    "wrong verdicts": (0, 0),
    "processes left": (0, 0),
    "not alike": (0, 0),
    "state not kept": (0, 0),
    "command not told": (0, 0),
    "page MiB": (0, 16),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", choices=("train", "sandbox", "resume", "torchrun", "viewer"))
    options.add_argument("--updates", type=int, default=10_000)
    options.add_argument("--programs", type=int, default=1000)
    options.add_argument("--lines", type=int, default=1_000_000)
    options.add_argument("--cases", type=int, default=1000, help="of the resume matrix, drawn if not all")
    options.add_argument("--seed", type=int, default=0, help="of what is drawn")
    chosen = options.parse_args()
    loads = {
        "train": lambda: train(chosen.updates),
        "sandbox": lambda: queue(chosen.programs),
        "resume": lambda: soak_resume.matrix(chosen.cases, chosen.seed),
        "torchrun": soak_resume.launcher,
        "viewer": lambda: viewed(chosen.lines),
    }
    found = loads[chosen.what]()
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))
    broken = [name for name, (low, high) in BOUNDS.items() if name in found and not low <= found[name] <= high]
    if broken:
        sys.exit(f"out of bounds: {', '.join(broken)}")


if __name__ == "__main__":
    main()
