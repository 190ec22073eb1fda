"""The judge: executes the tests, in a sandbox in which no line of the program runs.

A name of the program is a `Remote` in a test, which asks the worker. Arguments are sent as bytes, and results are
rebuilt from bytes as exact built-in types: no `__eq__` can lie, nothing is patched, no frame can be inspected. A test
passes if its code ran to the end and every answer followed the protocol.
"""

from __future__ import annotations

import builtins

from unmask.sandbox.wire import LONGEST_ERROR, MUTABLE, ProtocolError, pack, receive, send, unpack

TYPE_CHECKING = False  # loading `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class ProgramError(Exception):
    """The program failed, and no built-in exception fits."""


class Link:
    """The judge's end of the pipes to the worker. A broken protocol stays broken, whatever a test catches."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self.broken = ""
        self.holding = 0
        self.waiting: list[tuple[Any, Any]] = []

    def ask(self, *request: Any) -> Any:
        if self.broken:
            raise ProtocolError(self.broken)
        data = pack(request, _number)
        try:
            send(self.sink, data)
            answer = receive(self.source)
            if answer[:1] == b"=":
                return unpack(answer[1:], lambda number, name: Remote(self, number, name))
            error = unpack(answer[1:], lambda number, name: None)
            if answer[:1] != b"!" or type(error) is not tuple or [type(part) for part in error] != [str, str]:
                raise ProtocolError("the program's answer does not follow the protocol")
        except OSError:
            self.broken = "the program ended its process"
            raise ProtocolError(self.broken) from None
        except ProtocolError as error:
            self.broken = str(error)
            raise
        name, message = error
        raise _exception(name, message)

    def exactly(self, kind: type, *request: Any) -> Any:
        answer = self.ask(*request)
        if type(answer) is not kind:
            raise ProgramError(f"the program returned a {type(answer).__name__} instead of a {kind.__name__}")
        return answer

    def call(self, function: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = self.exactly(tuple, "call", function, args, kwargs)
        if len(answer) != 2 or type(answer[1]) is not list:
            raise ProgramError("the program's answer does not follow the protocol")
        given = [*args, *kwargs.values()]
        for position, new in answer[1]:
            if type(given[position]) in MUTABLE and type(given[position]) is type(new):
                self.waiting.append((given[position], new))
        if not self.holding:
            self.release()
        return answer[0]

    def release(self) -> None:
        """Apply the program's changes to its arguments."""
        for old, new in self.waiting:
            old.clear()
            (old.update if isinstance(old, dict | set) else old.extend)(new)
        self.waiting.clear()

    def __enter__(self) -> None:
        """Hold changes back while an assertion is evaluated: in `f(x) == sorted(x)` the program must not be able to
        empty x and return nothing."""
        self.holding += 1

    def __exit__(self, *_: object) -> None:
        self.holding -= 1
        if not self.holding:
            self.release()


def _number(value: Any) -> tuple[int, str]:
    if type(value) is not Remote:
        raise TypeError(f"a test can pass plain data to the program, not a {type(value).__name__}")
    return value._number, ""


def _exception(name: str, message: str) -> Exception:
    """The program's exception, as the built-in type that a test may expect. Not passed on are StopIteration, with which
    `all(map(...))` would stop early and be true, and AssertionError, which only the test may raise."""
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, NOT_PASSED_ON):
        kind = ProgramError
    try:
        error = kind(message)
    except TypeError:
        error = ProgramError(message)  # some kinds need more arguments
    error.by_program = name  # type: ignore[attr-defined]
    return error


NOT_PASSED_ON = (StopIteration, StopAsyncIteration, AssertionError)


class Remote:
    """An object of the program that is not plain data, for example a function. It can be called, read and iterated
    over. Comparing it fails the test, because the program itself would decide the result."""

    __slots__ = ("_link", "_name", "_number")

    def __init__(self, link: Link, number: int, name: str) -> None:
        for key, value in (("_link", link), ("_name", name), ("_number", number)):
            object.__setattr__(self, key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("assign", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __len__(self) -> int:
        return self._link.exactly(int, "length", self)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._link.exactly(Remote, "iterate", self)
        while item := self._link.exactly(tuple, "next", iterator):
            yield item[0]

    def __next__(self) -> Any:
        for item in self._link.exactly(tuple, "next", self):
            return item
        raise StopIteration

    def __bool__(self) -> bool:
        return self._link.exactly(bool, "truth", self)

    def __str__(self) -> str:
        return self._link.exactly(str, "text", self)

    def _incomparable(self, other: object) -> bool:
        raise TypeError(f"the program returned a {self._name}, which is not plain data and cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _incomparable
    __hash__ = None  # type: ignore[assignment]


def serve(jobs: int, verdicts: int, source: int, sink: int) -> None:
    """Report `begin N`, then `end N passed`, `end N failed` or `end N over` with the reason, for every test until the
    link breaks; N is -1 for loading the program."""

    def report(*words: object) -> None:
        send(verdicts, " ".join(map(str, words)).encode("ascii", "backslashreplace"))

    program, setup, tests = unpack(receive(jobs), lambda number, name: None)
    link = Link(source, sink)
    link.ask("truth", 1)  # the worker has started: only the program can end it from now on
    report("begin", -1)
    report("end", -1, _verdict(link, link.ask, "load", program))
    for index, (test, names) in enumerate(tests):
        if not link.broken:
            report("begin", index)
            report("end", index, _verdict(link, _execute, link, setup, names, test))


def _execute(link: Link, setup: str, names: dict[str, str], test: str) -> None:
    space: dict[str, Any] = {"__name__": "test", "__held__": link}
    for name, defined in names.items():
        if not link.exactly(bool, "defines", defined):
            raise ProgramError(f"the program does not define {defined}")
        space[name] = link.ask("get", defined)
    for text in (setup, test):
        exec(compile(text, "test", "exec"), space)


def _verdict(link: Link, act: Callable[..., object], *args: Any) -> str:
    """A broken protocol is a failure even if the test caught the exception."""
    verdict = "passed"
    try:
        act(*args)
    except BaseException as error:
        by = getattr(error, "by_program", None)
        named = f"the program raised {by}" if by else type(error).__name__
        verdict = f"failed {named}: {str(error)[:LONGEST_ERROR]}".rstrip(": ")
    return f"over {link.broken}" if link.broken else verdict
