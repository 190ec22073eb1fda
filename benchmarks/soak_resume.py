"""Runs that are killed anywhere and gone on with, against runs that never were: `python benchmarks/soak.py resume`.

Every case is a method with plug-ins and a place: SIGKILL comes at a random moment of a rollout, an update, an
evaluation or the writing of a state, and once more in some place after the run has been resumed. What is left at the
end must be what the whole run left, but for times: logs, samples, traces, weights, bit for bit. Cases are forked from a
process that has imported everything, so that each takes seconds and not a minute.
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLUGINS: tuple[tuple[str, ...], ...] = ((), ("daca",), ("dispo",), ("daca", "dispo"))
PLACES = {
    "rollout": "train.collect",
    "update": "train.inner_updates",
    "state": "run.write_state",
    "evaluation": "evaluator.evaluate",
}
CALLS = {"rollout": 4, "update": 4, "state": 2, "evaluation": 2}
"""Which call is not survived: after the first state, and before the end."""
FORK = multiprocessing.get_context("fork")


def settings(model: str, method: str, plugins: tuple[str, ...]) -> dict[str, Any]:
    """Six updates; states and evaluations after the second and the fourth, and at the end."""
    return {
        "model": model,
        "method": method,
        "with": list(plugins),
        "updates": 6,
        "prompts": 3,
        "group": 4,
        "save_every": 2,
        "optimizer": {"lr": 1e-2, "schedule": "linear"},
        "eval": {"prompts": 3, "samples": 2, "every": 2, "best": True},
        "sudoku": {"partial": 0.5},
    }


def arm(place: str, call: int, luck: random.Random) -> None:
    """SIGKILL at a random moment of the `call`-th call of a function, or just after it."""
    import unmask.training.loop
    import unmask.training.run.base_run
    from unmask.evaluation.evaluate import Evaluator

    module, name = PLACES[place].split(".")
    where: Any = {"train": unmask.training.loop, "run": unmask.training.run.base_run, "evaluator": Evaluator}[module]
    plain, took = getattr(where, name), list[float]()

    def armed(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        if len(took) == call - 1:
            usual = took[-1] if took else 0.02
            threading.Timer(luck.uniform(0, usual), os.kill, (os.getpid(), signal.SIGKILL)).start()
        found = plain(*given, **named)
        took.append(time.perf_counter() - start)
        return found

    setattr(where, name, armed)


def finished(work: Callable[[], object]) -> int:
    """The exit code of a process that does this: -9 where it was killed."""

    def quietly() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()

    process = FORK.Process(target=quietly)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def left(folder: Path) -> dict[str, object]:
    """What a run leaves behind, but for times."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = {path.name: path.read_bytes() for path in folder.glob("*.json*") if path.name != "metrics.jsonl"}
    weights = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.glob("*/*.safetensors")}
    rows = [{key: value for key, value in row.items() if not key.startswith("time/")} for row in metrics]
    return {**kept, **weights, "metrics": rows, **{f"{path.name} is there": True for path in folder.iterdir()}}


def matrix(most: int, seed: int) -> dict[str, float]:
    """Every method with every set of plug-ins, killed in every place; `most` of them, drawn, if not all."""
    import torch

    from unmask.config import Config, parse_config
    from unmask.methods import BASES
    from unmask.models import save, tiny_policy
    from unmask.models.tiny import TinyShape
    from unmask.training.loop import resume, train
    from unmask.training.run.folder import RunFolder

    torch.set_num_threads(1)
    RunFolder.draw = lambda self: None  # type: ignore[assignment, method-assign, return-value]  # no picture of each run
    luck, wrong, killed, begun = random.Random(seed), list[str](), 0, time.monotonic()

    def start(config: Config, folder: Path) -> None:
        train(config, lambda: RunFolder(folder, config.dump()))

    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=48), seed=1), home / "model")
        cases = {
            (method, plugins): parse_config(settings(str(home / "model"), method, plugins))
            for method, plugins in itertools.product(BASES, PLUGINS)
        }
        every = list(itertools.product(cases, PLACES))
        wholes = dict[tuple[str, tuple[str, ...]], dict[str, object]]()
        for number, (case, place) in enumerate(luck.sample(every, min(most, len(every)))):
            name, config = f"{'+'.join([case[0], *case[1]])}, killed in: {place}", cases[case]
            if case not in wholes:
                whole = home / "whole" / str(len(wholes))
                assert finished(lambda config=config, whole=whole: start(config, whole)) == 0, name
                wholes[case] = left(whole)
            folder, again = home / str(number), luck.choice(list(PLACES))

            def first(config: Config = config, folder: Path = folder, place: str = place) -> None:
                arm(place, CALLS[place], luck)
                start(config, folder)

            def second(folder: Path = folder, again: str = again) -> None:
                arm(again, 1, luck)
                resume(folder)

            codes = [finished(first), finished(second)]
            killed += codes.count(-signal.SIGKILL)
            codes.append(finished(lambda folder=folder: resume(folder)))
            there, wanted = left(folder), wholes[case]
            other = sorted(key for key in there.keys() | wanted.keys() if there.get(key) != wanted.get(key))
            good = codes == [-signal.SIGKILL, -signal.SIGKILL, 0] and not other
            told = "as the whole run" if good else f"NOT ALIKE: exit codes {codes}, {', '.join(other)}"
            print(f"{name}, then in: {again}: {told}", flush=True)
            if not good:
                wrong.append(name)
    minutes = (time.monotonic() - begun) / 60
    return {"cases": number + 1, "kills": killed, "minutes": minutes, "not alike": len(wrong)}


def launcher() -> dict[str, float]:
    """SIGTERM to torchrun, which passes it on: the update is finished and kept, and the run can be gone on with."""
    options = ["method=agrpo", "full=false", "lora.rank=2", "device=cpu", "updates=200", "prompts=2", "save_every=0"]
    options += ["eval.prompts=2", "eval.samples=1", "optimizer.lr=1e-5", "--out", "run"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "unmask"]
    with tempfile.TemporaryDirectory() as scratch:
        metrics = Path(scratch) / "run" / "metrics.jsonl"
        process = subprocess.Popen(
            [*launch, "train", *options], cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while process.poll() is None and not (metrics.is_file() and len(metrics.read_text().splitlines()) > 3):
            time.sleep(0.05)
        asked = time.monotonic()
        process.terminate()
        said = process.communicate(timeout=120)[0]
        seconds = time.monotonic() - asked
        updates = len(metrics.read_text().splitlines()) - 1
        kept = (metrics.parent / "state" / str(updates) / "state.json").is_file()
        return {
            "updates": updates,
            "seconds to stop": seconds,
            "launcher's exit code": process.returncode,
            "state not kept": float(not kept),
            "command not told": float("To resume: unmask train --resume run" not in said),
        }
