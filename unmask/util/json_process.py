"""Untrusted code in a process that can be killed: one line of JSON in, one line of JSON out.

Only killing a process ends everything that Python can do: a loop, a sleep, or a regular expression, which runs in C and
ignores signals. The process has its own session, so its children are killed with it.
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
from typing import Any

from unmask.util.processes import end_process_group, start_process

NEEDED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
)


class ProcessEnded(Exception):
    """The process ended without an answer. The message continues a sentence that begins with its name. `code` is its
    exit code, minus a signal's number if one ended it; None if it was killed here."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class ProcessNotStarted(ProcessEnded):
    """The process ended before its first answer."""


class Process:
    """Started at the first request, and again after it has ended.

    Its first line must be `true`, within `starting` seconds; then it answers every line with one line. A `bare` process
    prints nothing on the terminal, and its environment has only what Python needs: none of the user's keys.
    """

    def __init__(self, command: Sequence[str], starting: float, bare: bool = False) -> None:
        self.command, self.starting, self.bare = list(command), starting, bare
        self.running: subprocess.Popen[str] | None = None
        self.killed: weakref.finalize[Any, Any] | None = None
        self.lock, self.owner = threading.Lock(), os.getpid()

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer; ProcessEnded if there is none within `seconds` of wall time."""
        if self.owner != os.getpid():
            self._forget()
        with self.lock:
            if self.running is None or self.running.poll() is not None:
                self.end()
                self._start()
            return self._reply(json.dumps(request), seconds)

    def _start(self) -> None:
        self.running = start_process(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self.bare else None,
            env={name: os.environ[name] for name in NEEDED if name in os.environ} if self.bare else None,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self.killed = weakref.finalize(self, _kill, self.running, os.getpid())  # at the latest when Python ends
        try:
            reply = self._reply(None, self.starting)
        except ProcessEnded as ended:
            reply = str(ended)
        if reply is not True:
            self.end()
            raise ProcessNotStarted(f"does not start: {reply}")

    def _reply(self, line: str | None, seconds: float) -> Any:
        assert self.running is not None and self.running.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which reading its output also shows
                if line is not None:
                    print(line, file=self.running.stdin, flush=True)
            poll = select.poll()  # `select` cannot wait for file descriptors from 1024 on
            poll.register(self.running.stdout, select.POLLIN)
            if not poll.poll(1000 * seconds):
                raise ProcessEnded(f"took more than {seconds:g} seconds and was killed")
            reply = self.running.stdout.readline()
            if not reply.endswith("\n"):
                raise _ended(self.running)
            return json.loads(reply)
        except BaseException:  # also when interrupted: the next request must not read a late answer
            self.end()
            raise

    def _forget(self) -> None:
        """After a fork: the running process answers the parent, and must not be killed here."""
        if self.killed is not None:
            self.killed.detach()
        self.running = self.killed = None
        self.lock, self.owner = threading.Lock(), os.getpid()

    def end(self) -> None:
        if self.killed is not None:
            self.killed()
        self.running = self.killed = None


def _ended(running: subprocess.Popen[str]) -> ProcessEnded:
    try:
        code = running.wait(1)
    except subprocess.TimeoutExpired:
        return ProcessEnded("closed its pipe and was killed")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return ProcessEnded(f"ended its process with {how}", code)


def _kill(running: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:  # a forked process ends; the parent still uses it
        return
    end_process_group(running)
    running.communicate()  # closes its pipes
