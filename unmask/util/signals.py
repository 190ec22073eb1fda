"""SIGTERM and SIGINT as a request: finish the update, save, exit. Slurm sends them before it ends a job.

with stop_requests() as should_stop:  # a second signal ends the process at once
    train(config, make_folder, Hooks(should_stop=should_stop))
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

AT_ONCE = 5.0
"""Seconds within which a second signal counts as the first: a batch system and a launcher may both send one."""


class Paused(Exception):
    """A run has stopped on request after this step."""

    def __init__(self, folder: Path | None, step: int) -> None:
        super().__init__(f"stopped after update {step}")
        self.folder, self.step = folder, step


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """A function that says whether a signal has asked to stop."""
    received: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received and time.monotonic() > received[0] + AT_ONCE:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        elif not received:
            received.append(time.monotonic())
            print("stopping after this update; send it again to stop at once", file=sys.stderr, flush=True)

    before = {int(number): signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def block_signals() -> Iterator[None]:
    """Processes started here never receive SIGTERM and SIGINT, which a batch system sends to all processes of a job: a
    grader would end without a verdict. SIGKILL or the end of its parent ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
