"""Child processes."""

import subprocess
from collections.abc import Sequence
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
