"""Whether two answers in LaTeX are equal, by math-verify in a process that can be ended.

The answer is untrusted: an exponent tower keeps sympy busy for ever. So each comparison has SECONDS of computing, after
which the process ends and the answer counts as wrong. Seconds of computing, not of the clock, so that a verdict does
not depend on what else the machine does; the clock is a second limit, for a process that does nothing.
"""

import atexit
import json
import select
import subprocess
import sys
import threading
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO

SECONDS = 5.0
PATIENCE = 12  # the limit by the clock, in limits of computing
STARTING = 120.0  # seconds; imports sympy, perhaps from a slow disk
WORKER = Path(__file__).parent / "math_worker.py"
LONGEST = 400  # characters of an answer that are compared; the longest of MATH500 has 53


def check_installed() -> None:
    if find_spec("math_verify") is None:
        raise ValueError(
            "answers are compared by the package math-verify: pip install 'unmask[math]', "
            "or grade as d1 does, which needs no package, with math500.protocol=d1"
        )


class Verifier:
    """The process, started when it is first asked and again after one that had to be ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def equal(self, gold: str, answer: str) -> bool:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.end()
                self._start()
            return self._reply(json.dumps([gold, answer, SECONDS]), PATIENCE * SECONDS) == "true"

    def _start(self) -> None:
        check_installed()
        # -P: the folder of the file, with its modules of common names, is no place to import from
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        if self._reply(None, STARTING) != "ready":
            raise ValueError("math-verify is installed but does not start: try python -c 'import math_verify'")

    def _reply(self, line: str | None, seconds: float) -> str | None:
        """The line that the process answers with; None where it did not in time or has ended, and is then gone."""
        try:
            if line is not None:
                print(line, file=self._pipe("stdin"), flush=True)
            if select.select([self._pipe("stdout")], [], [], seconds)[0]:
                reply = self._pipe("stdout").readline().strip()
                if reply:
                    return reply
        except BrokenPipeError:
            pass
        self.end()
        return None

    def _pipe(self, name: str) -> IO[str]:
        pipe: IO[str] | None = getattr(self.process, name)
        assert pipe is not None
        return pipe

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


VERIFIER = Verifier()
atexit.register(VERIFIER.end)


@lru_cache(maxsize=65536)
def equal(gold: str, answer: str) -> bool:
    """Whether math-verify takes the answer for equal to the gold one. Remembered: reward and verdict both ask."""
    return len(answer) <= LONGEST and VERIFIER.equal(gold, answer)
