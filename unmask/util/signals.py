"""A request to stop: finish the update, save, exit. It comes as SIGTERM (Slurm sends it before it ends a job), as
Ctrl-C, or because nobody reads the output any more: SIGHUP, a closed pipe.

with stop_requests() as should_stop:  # a second signal ends the process at once
    train(config, make_folder, Hooks(should_stop=should_stop))
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AT_ONCE = 5.0
"""Seconds within which a second signal counts as the first: a batch system and a launcher may both send one."""
DOUBLE = 0.2
"""The same for Ctrl-C without a launcher."""


class Paused(Exception):
    """A run has stopped on request after this step."""

    def __init__(self, folder: Path | None, step: int) -> None:
        super().__init__(f"stopped after update {step}")
        self.folder, self.step = folder, step


class GuardedStream:
    """A standard stream. If nobody reads it any more, `on_closed` is called, and output goes to the next descriptor."""

    def __init__(self, stream: TextIO, descriptors: list[int], on_closed: Callable[[], None]) -> None:
        self.stream, self.descriptors, self.on_closed = stream, descriptors, on_closed

    def write(self, text: str) -> int:
        return cast(int, self._guarded(self.stream.write, text))

    def flush(self) -> None:
        self._guarded(self.stream.flush)

    def _guarded(self, act: Callable[..., Any], *arguments: Any) -> Any:
        while True:
            try:
                return act(*arguments)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO) or not self.descriptors:  # a pipe, a terminal
                    raise
                os.dup2(self.descriptors.pop(0), self.stream.fileno())
                self.on_closed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """A function that says whether a signal or a closed output has asked to stop. Output that was closed goes to
    standard error, or nowhere."""
    received: list[float] = []

    def request() -> None:
        if not received:
            received.append(time.monotonic())
            print("stopping after this update; a second signal (Ctrl-C) stops at once", file=sys.stderr, flush=True)

    def on_signal(number: int, frame: FrameType | None) -> None:
        double = DOUBLE if number == signal.SIGINT and "WORLD_SIZE" not in os.environ else AT_ONCE
        if received and time.monotonic() > received[0] + double:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        request()

    hangup = signal.getsignal(signal.SIGHUP)
    numbers = SIGNALS[:2] if hangup is signal.SIG_IGN else SIGNALS  # nohup has it ignored
    before = {int(number): signal.signal(number, on_signal) for number in numbers}
    streams, nowhere = (sys.stdout, sys.stderr), os.open(os.devnull, os.O_WRONLY)
    if sys.stderr is not None:
        sys.stderr = cast(TextIO, GuardedStream(sys.stderr, [nowhere], request))
    if sys.stdout is not None:
        sys.stdout = cast(TextIO, GuardedStream(sys.stdout, [2, nowhere], request))
    try:
        yield lambda: bool(received)
    finally:
        sys.stdout, sys.stderr = streams
        os.close(nowhere)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def block_signals() -> Iterator[None]:
    """Processes started here never receive the signals, which a batch system sends to all processes of a job: a grader
    would end without a verdict. SIGKILL or the end of its parent ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
