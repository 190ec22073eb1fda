"""Whether two answers in LaTeX are equal, by math-verify in a process that can be ended.

The answer is untrusted: an exponent tower keeps sympy busy for ever. So each comparison has SECONDS of computing, after
which the process ends and the answer counts as wrong. Seconds of computing, not of the clock, so that a verdict does
not depend on what else the machine does; the clock is a second limit, for a process that does nothing.

There are as many processes as processors, up to eight, each started when it is first needed: `ahead` compares many
answers at once.
"""

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from queue import LifoQueue

from unmask.tasks.support.process import Ended, Process, Unstarted

SECONDS = 5.0
PATIENCE = 12  # the limit by the clock, in limits of computing
STARTING = 120.0  # seconds; imports sympy, perhaps from a slow disk
WORKER = Path(__file__).parent / "math_worker.py"
LONGEST = 400  # characters of an answer that are compared; the longest of MATH500 has 53
# -P: the folder of the file, with its modules of common names, is no place to import from
COMMAND = [sys.executable, "-P", str(WORKER)]
WORKERS = min(8, len(os.sched_getaffinity(0)))
IDLE: LifoQueue[Process] = LifoQueue()
"""The processes that nobody is asking; the last that was asked comes first, so that one answer needs one process."""
for _ in range(WORKERS):
    IDLE.put(Process(COMMAND, STARTING, bare=True))


def check_installed() -> None:
    if find_spec("math_verify") is None:
        raise ValueError(
            "answers are compared by the package math-verify: pip install 'unmask[math]', "
            "or grade as d1 does, which needs no package, with math500.protocol=d1"
        )


def _verified(gold: str, answer: str) -> bool:
    check_installed()
    process = IDLE.get()
    try:
        return process.ask([gold, answer, SECONDS], PATIENCE * SECONDS) is True
    except Unstarted:
        raise ValueError("math-verify is installed but does not start: try python -c 'import math_verify'") from None
    except Ended:
        return False
    finally:
        IDLE.put(process)


@lru_cache(maxsize=65536)
def equal(gold: str, answer: str) -> bool:
    """Whether math-verify takes the answer for equal to the gold one. Remembered: reward and verdict both ask."""
    return len(answer) <= LONGEST and _verified(gold, answer)


def ahead(pairs: Iterable[tuple[str, str]]) -> None:
    """Compare pairs of gold answer and answer side by side, so that `equal` then knows them."""
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda pair: equal(*pair), dict.fromkeys(pairs)))
