"""Somebody else's code in a process that can be ended: asked by a line of JSON, answers by a line of JSON.

A process is the only limit that holds for everything Python can do: a loop, a sleep, or a regular expression, which
runs in C and notices no signal. It has a session of its own, so that what it has started itself is ended with it.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import weakref
from collections.abc import Sequence
from typing import IO, Any

from unmask.util.signals import deaf

NEEDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HOME", "LANG", "LC_ALL", "TMPDIR")


class Ended(Exception):
    """The process has not answered, and is gone; the message goes on from its name."""


class Unstarted(Ended):
    """The process has not come to where it can be asked."""


class Process:
    """Started when it is first asked and again after one that has ended.

    Its first line must be `true`, within `starting` seconds; then it answers every line it is given by one. One that is
    `bare` says nothing to the terminal, and of the environment has only what Python itself needs: no keys of the user.
    """

    def __init__(self, command: Sequence[str], starting: float, bare: bool = False) -> None:
        self.command, self.starting, self.bare = list(command), starting, bare
        self.running: subprocess.Popen[str] | None = None
        self.killed: weakref.finalize[Any, Any] | None = None
        self.lock = threading.Lock()

    def ask(self, request: Any, seconds: float) -> Any:
        """What it answers; Ended where it does not within so many seconds by the clock."""
        with self.lock:
            if self.running is None or self.running.poll() is not None:
                self.end()
                self._start()
            return self._reply(json.dumps(request), seconds)

    def _start(self) -> None:
        with deaf():
            self.running = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if self.bare else None,
                env={name: os.environ[name] for name in NEEDED if name in os.environ} if self.bare else None,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        self.killed = weakref.finalize(self, _kill, self.running)  # at the latest when Python ends
        try:
            found = self._reply(None, self.starting)
        except Ended as ended:
            found = str(ended)
        if found is not True:
            self.end()
            raise Unstarted(f"does not start: {found}")

    def _reply(self, line: str | None, seconds: float) -> Any:
        assert self.running is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which what it leaves behind says too
                if line is not None:
                    print(line, file=_pipe(self.running.stdin), flush=True)
            replies = _pipe(self.running.stdout)
            if not select.select([replies], [], [], seconds)[0]:
                raise Ended(f"took more than {seconds:g} seconds and was ended")
            if not (reply := replies.readline()):
                raise Ended(_farewell(self.running))
            return json.loads(reply)
        except BaseException:  # also when interrupted: a late answer would be taken for that of the next question
            self.end()
            raise

    def end(self) -> None:
        if self.killed is not None:
            self.killed()
        self.running = self.killed = None


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _farewell(running: subprocess.Popen[str]) -> str:
    try:
        code = running.wait(1)
    except subprocess.TimeoutExpired:
        return "closed its pipe, and was ended"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"ended its process with {how}"


def _kill(running: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
