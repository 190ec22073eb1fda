"""Whether two answers in LaTeX are equal, by math-verify in a process that can be killed.

The answer is untrusted: an exponent tower keeps sympy busy for ever. So each comparison has SECONDS of CPU time, after
which the process ends and the answer counts as wrong. CPU time, so that a verdict does not depend on what else the
machine does; wall time is a second limit, for a process that does nothing.

There are as many processes as processors, up to eight, each started when it is first needed: `compare` uses all.
"""

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from queue import LifoQueue

from unmask.tasks.support.process import Process, ProcessEnded, ProcessNotStarted

SECONDS = 5.0
PATIENCE = 12  # the limit of wall time, in limits of CPU time
STARTING = 120.0  # seconds; imports sympy, perhaps from a slow disk
WORKER = Path(__file__).parent / "math_worker.py"
LONGEST = 400  # characters of an answer that are compared; the longest of MATH500 has 53
# -P: the folder of the file, with its modules of common names, is no place to import from
COMMAND = [sys.executable, "-P", str(WORKER)]
WORKERS = min(8, len(os.sched_getaffinity(0)))


def check_installed() -> None:
    if find_spec("math_verify") is None:
        raise ValueError(
            "answers are compared by the package math-verify: pip install 'unmask[math]', "
            "or grade as d1 does, which needs no package, with math500.protocol=d1"
        )


@cache
def idle_processes() -> LifoQueue[Process]:
    """The processes that are free; the last that was busy comes first, so that one answer needs one process."""
    idle: LifoQueue[Process] = LifoQueue()
    for _ in range(WORKERS):
        idle.put(Process(COMMAND, STARTING, bare=True))
    return idle


def _verify(gold: str, answer: str) -> bool:
    check_installed()
    process = idle_processes().get()
    try:
        return process.ask([gold, answer, SECONDS], PATIENCE * SECONDS) is True
    except ProcessNotStarted:
        raise ValueError("math-verify is installed but does not start: try python -c 'import math_verify'") from None
    except ProcessEnded:
        return False
    finally:
        idle_processes().put(process)


@lru_cache(maxsize=65536)
def equal(gold: str, answer: str) -> bool:
    """Whether the answer equals the gold one for math-verify. Cached: reward and solved both need it."""
    return len(answer) <= LONGEST and _verify(gold, answer)


def compare(pairs: Iterable[tuple[str, str]]) -> None:
    """Compare pairs of gold answer and answer in parallel, so that `equal` then has them in its cache."""
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda pair: equal(*pair), dict.fromkeys(pairs)))
