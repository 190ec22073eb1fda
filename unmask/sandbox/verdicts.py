"""Runs programs: starts the two sandboxes, limits their time, and reads the verdicts from the judge."""

import math
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from unmask.sandbox import jail
from unmask.sandbox.tests import free_names, names_in, with_guards
from unmask.sandbox.wire import ProtocolError, pack, receive, send
from unmask.util.processes import ProcessLimit, end_process_group

RESTARTS = 3  # times that a program may hang or end its process before its remaining tests fail without a run
LONGEST = 1 << 20  # characters of a program
STARTING = 20.0  # seconds that a sandbox may take to start on a busy machine
RETRY = 0.2  # seconds before another try to start a sandbox


class SandboxUnavailable(ValueError):
    """Programs cannot be run here; the message says what to do."""


@dataclass(frozen=True)
class Verdict:
    passed: bool
    reason: str
    """"passed", or why not. It may quote the program, so treat it as untrusted text."""


@dataclass(frozen=True)
class ProgramJob:
    """A program with its tests.

    `names` maps a name in the tests to a name in the program; by default, all names that tests read, do not bind and
    that are not built in. The program cannot replace other names. `setup` runs before every test and sees these names.
    """

    program: str
    tests: Sequence[str]
    names: Mapping[str, str] | None = None
    setup: str = ""
    timeout: float = 5.0
    """Seconds for each test, and for loading the program."""

    def message(self, first: int) -> bytes:
        """The message to the judge: the tests from `first` on."""
        names = self.names
        if names is None:
            names = {name: name for name in free_names(self.setup, tuple(self.tests))}
        tests = [
            (with_guards(test), {name: names[name] for name in names_in(self.setup, test) if name in names})
            for test in self.tests[first:]
        ]
        return pack((self.program, self.setup, tests), _not_plain)


def _not_plain(value: Any) -> tuple[int, str]:
    raise ValueError(f"program, setup and tests must be text, not {type(value).__name__}")


def run(
    program: str,
    tests: Sequence[str],
    *,
    names: Mapping[str, str] | None = None,
    setup: str = "",
    timeout: float = 5.0,
) -> list[Verdict]:
    """A verdict for every test; ProgramJob explains the arguments. SandboxUnavailable if there is no sandbox."""
    return _judge(_interpreter(), ProgramJob(program, tests, names, setup, timeout))


def run_many(jobs: Iterable[ProgramJob], workers: int | None = None) -> list[list[Verdict]]:
    """The verdicts of many programs; by default one program per processor runs at a time."""
    interpreter = _interpreter()
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda job: _judge(interpreter, job), jobs))


def problem() -> str:
    """Why programs cannot be run here, as a sentence; empty if they can."""
    return _probe()[1]


def description() -> str:
    """What runs programs here, for `unmask doctor`."""
    interpreter, problem = _probe()
    return problem or f"{jail.bwrap_version()}, programs run by {interpreter}"


def _interpreter() -> Path:
    interpreter, problem = _probe()
    if interpreter is None:
        raise SandboxUnavailable(problem)
    return interpreter


@cache
def _probe() -> tuple[Path | None, str]:
    """The first interpreter with which a sandbox gives correct verdicts, or why there is none."""
    if problem := jail.missing_requirement():
        return None, problem
    probe = ProgramJob(
        "def grow(x):\n    x.append(1)\n    return len(x)",
        ["assert grow([1]) == 2", "assert grow([1]) == 3"],
        timeout=STARTING,
    )
    for interpreter in jail.interpreters():
        with tempfile.TemporaryFile() as errors:
            try:
                verdicts = _judge(interpreter, probe, errors.fileno())
                if [verdict.passed for verdict in verdicts] == [True, False]:
                    return interpreter, ""
                problem = verdicts[0].reason
            except SandboxUnavailable as error:
                errors.seek(0)
                problem = errors.read(1000).decode(errors="replace").strip().partition("\n")[0] or str(error)
    return None, (
        f"bubblewrap is installed, but the sandbox does not work here ({problem}); it needs bwrap 0.8 or newer and "
        "permission to create user namespaces: see docs/sandbox.md"
    )


def _judge(interpreter: Path, job: ProgramJob, errors: int = subprocess.DEVNULL) -> list[Verdict]:
    if not 0 < job.timeout < math.inf:
        raise ValueError(f"timeout: must be a number of seconds above 0, not {job.timeout}")
    if len(job.program) > LONGEST:
        return [Verdict(False, f"the program is longer than {LONGEST} characters")] * len(job.tests)
    verdicts: list[Verdict] = []
    restarts = tries = RESTARTS
    while len(verdicts) < len(job.tests) and restarts:
        message = job.message(len(verdicts))
        try:
            with _SandboxPair(interpreter, job.timeout, len(job.tests) + 1, errors) as pair:
                verdicts += pair.verdicts(message, len(job.tests) - len(verdicts))
                restarts -= 1
        except (_NotStarted, ProcessLimit) as error:
            tries -= 1
            if not tries:
                raise SandboxUnavailable(f"a sandbox could not be started, {RESTARTS} times: {error}") from None
            time.sleep(RETRY)
    rest = len(job.tests) - len(verdicts)
    return verdicts + [Verdict(False, f"not run: the program hung or ended {RESTARTS} times")] * rest


class _NotStarted(Exception):
    """The sandbox did not start; not the program's fault."""


@dataclass
class _SandboxPair:
    """A judge and a worker, each in its sandbox, connected by two pipes; both are killed when it closes."""

    interpreter: Path
    timeout: float
    turns: int
    errors: int
    closing: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "_SandboxPair":
        cpu = math.ceil(self.timeout * self.turns) + 1
        # `passed` closes the ends that belong to the sandboxes: an open copy here would block readers.
        with ExitStack() as passed, ExitStack() as closing:

            def pipe() -> tuple[int, int]:
                ends = os.pipe()
                for end in ends:
                    passed.callback(os.close, end)
                return ends

            def start(role: str, stdin: int, stdout: int, fds: tuple[int, ...] = ()) -> None:
                process = jail.start(self.interpreter, role, cpu, stdin, stdout, fds, self.errors)
                closing.callback(end_process_group, process)

            requests, answers, jobs, verdicts = pipe(), pipe(), pipe(), pipe()
            self.jobs, self.verdict_pipe = os.dup(jobs[1]), os.dup(verdicts[0])
            closing.callback(os.close, self.jobs)
            closing.callback(os.close, self.verdict_pipe)
            start("worker", requests[0], answers[1])
            start("judge", jobs[0], verdicts[1], (answers[0], requests[1]))
            self.closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.close()

    def verdicts(self, message: bytes, count: int) -> list[Verdict]:
        """Verdicts in order, up to and including the first test in which the program hung or ended."""
        try:
            send(self.jobs, message)
            self._listen("begin -1", STARTING)
        except (ProtocolError, OSError) as error:  # a TimeoutError is an OSError
            raise _NotStarted(str(error) or f"no answer within {STARTING:g} s") from None
        ending, reason = self._ending(-1)
        if ending != "passed":
            return [Verdict(False, reason)] * count
        verdicts: list[Verdict] = []
        for index in range(count):
            ending, reason = self._ending(index)
            verdicts.append(Verdict(ending == "passed", reason or ending))
            if ending == "over":
                break
        return verdicts

    def _ending(self, index: int) -> tuple[str, str]:
        """How a test ended, and why: passed, failed, or over, which ends the messages."""
        try:
            if index >= 0:
                self._listen(f"begin {index}", STARTING)
            ending, _, reason = self._listen(f"end {index}", self.timeout).partition(" ")
            return ending, reason
        except TimeoutError:
            return "over", f"no answer within {self.timeout:g} s"
        except (ProtocolError, OSError):
            return "over", "the judge ended without a verdict"

    def _listen(self, expected: str, seconds: float) -> str:
        """The rest of the judge's next message, after the expected words."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.verdict_pipe, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise TimeoutError
        message = receive(self.verdict_pipe).decode("ascii")
        if not message.startswith(expected):
            raise ProtocolError(f"the judge sent {message!r} and not {expected!r}")
        return message[len(expected) + 1 :]
