"""Whether two LaTeX answers are equal, by math-verify in a process that can be killed.

The answer is untrusted: sympy never finishes with an exponent tower. So each comparison has SECONDS of CPU time; then
the process ends and the answer is wrong. The limit is CPU time, so a verdict does not depend on the machine's load;
wall time is a second limit, for a process that hangs.

There are as many processes as processors, up to eight, started on first use; `compare` uses all.
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
LONGEST = 400  # characters of an answer that is compared; the longest of MATH500 has 53
# -P: do not import modules from the file's folder
COMMAND = [sys.executable, "-P", str(WORKER)]
WORKERS = min(8, len(os.sched_getaffinity(0)))


def check_installed() -> None:
    if find_spec("math_verify") is None:
        raise ValueError(
            "comparing answers needs the package math-verify: pip install 'unmask[math]'; "
            "math500.protocol=d1 grades without it"
        )


@cache
def idle_processes() -> LifoQueue[Process]:
    """The idle processes; the last used comes first, so single answers need one process."""
    idle: LifoQueue[Process] = LifoQueue()
    for _ in range(WORKERS):
        idle.put(Process(COMMAND, STARTING, bare=True))
    return idle


@lru_cache(maxsize=65536)
def equal(gold: str, answer: str) -> bool:
    """Cached, because reward and solved both need it."""
    if len(answer) > LONGEST:
        return False
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


def compare(pairs: Iterable[tuple[str, str]]) -> None:
    """Compare pairs of gold and answer in parallel, which fills the cache of `equal`."""
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda pair: equal(*pair), dict.fromkeys(pairs)))
