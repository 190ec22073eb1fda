"""Child processes."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from unmask.util.signals import block_signals


class ProcessLimit(ValueError):
    """No more processes can be started."""


def start_process(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """A child that does not receive the signals of a job (`block_signals`)."""
    try:
        with block_signals():
            return subprocess.Popen(command, **options)
    except BlockingIOError:
        raise ProcessLimit(
            f"{command[0]} cannot be started: there are too many processes; "
            "raise the limit (ulimit -u, or the pids limit of the container)"
        ) from None


def end_process_group(process: "subprocess.Popen[Any]") -> None:
    """Kill a child that leads its own session, and its children. PID 1 adopts them; if this is PID 1, it reaps them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-process.pid, 0)  # its process group only, so no other child's exit status is taken
