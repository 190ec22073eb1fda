"""Whether two LaTeX answers are equal, by math_worker.py in a process that can be killed.

The answer is untrusted, and a comparison in sympy may not finish. So each has SECONDS of CPU time; then the process
ends and the answer is wrong. The limit is CPU time, so a verdict does not depend on the machine's load; wall time is a
second limit, for a process that hangs.

There are as many processes as processors, up to eight, started on first use; `compare` uses all.
"""

import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from importlib.util import find_spec
from queue import LifoQueue

from unmask.util.json_process import Process, ProcessEnded, ProcessNotStarted

SECONDS = 5.0
PATIENCE = 12  # the limit of wall time, in limits of CPU time
STARTING = 120.0  # seconds; imports sympy, perhaps from a slow disk
# Like multiprocessing: the other process finds modules in the same places.
WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import unmask.tasks.support.math_worker as w; w.main()"
)
LONGEST = 400  # characters of an answer that is compared; the longest of MATH500 has 53
COMMAND = [sys.executable, "-c", WORKER, json.dumps(sys.path)]
WORKERS = min(8, len(os.sched_getaffinity(0)))


def check_installed() -> None:
    if find_spec("sympy") is None:
        raise ValueError(
            "comparing answers needs the package sympy: pip install 'unmask[math]'; "
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
        raise ValueError("sympy is installed but does not start: try python -c 'import sympy'") from None
    except ProcessEnded:
        return False
    finally:
        idle_processes().put(process)


def compare(pairs: Iterable[tuple[str, str]]) -> None:
    """Compare pairs of gold and answer in parallel, which fills the cache of `equal`."""
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda pair: equal(*pair), dict.fromkeys(pairs)))
