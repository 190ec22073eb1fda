"""The worker: executes the program and applies the judge's requests to its objects.

Runs in its own sandbox. It has no test, no expected value and no access to the verdict, so nothing in it needs
protection from the program: a program can only choose which values it returns.
"""

from __future__ import annotations

import os
import sys

from unmask.sandbox.wire import LARGEST, LONGEST_ERROR, MUTABLE, ProtocolError, pack, receive, send, unpack

TYPE_CHECKING = False  # loading `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class Worker:
    """The program, and its objects that are not plain data, by the numbers that the judge uses."""

    def __init__(self) -> None:
        self.module = type(sys)("program")
        sys.modules["program"] = self.module
        self.objects: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}

    def pack(self, value: Any) -> bytes:
        return pack(value, self._number)

    def _number(self, value: Any) -> tuple[int, str]:
        number = self.numbers.setdefault(id(value), len(self.numbers))
        self.objects[number] = value  # kept alive, so that its id stays unique
        return number, type(value).__name__[:80]

    def answer(self, request: bytes) -> Any:
        operation, *arguments = unpack(request, lambda number, _: self.objects[number])
        return getattr(self, "do_" + operation)(*arguments)

    def do_load(self, text: str) -> None:
        if "random" in text:  # the same program gets the same verdict
            import random

            random.seed(0)
        exec(compile(text, "program", "exec"), self.module.__dict__)

    def do_defines(self, name: str) -> bool:
        return name in self.module.__dict__

    def do_get(self, name: str) -> Any:
        return self.module.__dict__[name]

    def do_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The result, and the arguments that the call changed: position and new content."""
        given = [*args, *kwargs.values()]
        mutable = [i for i, value in enumerate(given) if isinstance(value, MUTABLE)]
        before = [self.pack(given[i]) for i in mutable]
        result = function(*args, **kwargs)
        changed = [(i, given[i]) for i, old in zip(mutable, before, strict=True) if self.pack(given[i]) != old]
        return result, changed

    def do_attribute(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def do_assign(self, value: Any, name: str, new: Any) -> None:
        setattr(value, name, new)

    def do_item(self, value: Any, key: Any) -> Any:
        return value[key]

    def do_length(self, value: Any) -> int:
        return len(value)

    def do_iterate(self, value: Any) -> Iterator[Any]:
        return iter(value)

    def do_next(self, value: Any) -> tuple[Any, ...]:
        """One item, or none at the end."""
        for item in value:
            return (item,)
        return ()

    def do_text(self, value: Any) -> str:
        return str(value)

    def do_truth(self, value: Any) -> bool:
        return bool(value)


def serve(source: int, sink: int) -> None:
    """Answer requests until the judge ends."""
    worker = Worker()
    while True:
        try:
            request = receive(source)
        except ProtocolError:
            os._exit(0)
        try:
            answer = b"=" + worker.pack(worker.answer(request))
            if len(answer) > LARGEST:
                raise ValueError("the value is too large")
        except BaseException as error:  # SystemExit too: the program must not end the worker
            answer = b"!" + worker.pack(_error_text(error))
        send(sink, answer)


def _error_text(error: BaseException) -> tuple[str, str]:
    """The nearest built-in type of an exception and its message."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"), "Exception")
    try:
        return name, str(error)[:LONGEST_ERROR]
    except BaseException:
        return name, ""
