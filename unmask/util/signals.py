"""SIGTERM and SIGINT as a wish: finish the update, keep its state, leave. What Slurm sends before it takes a node back.

with wishes() as wished:                  # a second signal ends the process at once
    train(config, run_folder, stop=wished)
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

AT_ONCE = 5.0
"""Seconds within which a second signal is taken for the first: a batch system and a launcher may both send one."""


class Paused(Exception):
    """A run has stopped as it was wished to, after so many updates."""

    def __init__(self, folder: Path | None, step: int) -> None:
        super().__init__(f"stopped after update {step}")
        self.folder, self.step = folder, step


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Whether a signal has asked to stop."""
    asked: list[float] = []

    def heard(number: int, frame: FrameType | None) -> None:
        if asked and time.monotonic() > asked[0] + AT_ONCE:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        elif not asked:
            asked.append(time.monotonic())
            print("stopping after this update; once more to stop at once", file=sys.stderr, flush=True)

    before = {int(number): signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deaf() -> Iterator[None]:
    """Processes started here never hear SIGTERM and SIGINT. They are sent to all of a job, and what judges a completion
    would end without a verdict; it is ended by SIGKILL or with its parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
