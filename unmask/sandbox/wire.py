"""How the judge and the worker communicate: plain values as bytes, and bytes in frames.

The program controls what a worker sends: it is rebuilt here as exact built-in types, bounded in size and depth, or
refused with a ProtocolError. The codec is our own: `pickle` and `marshal` are not safe to read from a program, and
loading `json` takes longer than most programs. This file also runs inside the sandboxes, with only the standard library
of a Python that may be another release.
"""

from __future__ import annotations

import os
import sys
from _collections import deque  # type: ignore[import-not-found]

TYPE_CHECKING = False  # loading `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LARGEST = 8 << 20  # bytes of one message
DEEPEST = 100  # levels of nesting of a value
LONGEST_ERROR = 200  # characters of an error message

SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"l": list, "t": tuple, "S": set, "Z": frozenset, "q": deque}
MUTABLE = (list, dict, set, bytearray, deque)
COUNTS = {"c": 2, "r": 3, "R": 2, "M": 1, "y": 1, "h": 2}  # parts: complex, range, Fraction, Decimal, type, object
NAMED = (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
TYPES: dict[str, type] = {kind.__name__: kind for kind in NAMED}


class ProtocolError(BaseException):
    """The other side ended or broke the protocol. Not an Exception, so that no test catches it by accident."""


def pack(value: Any, opaque: Callable[[Any], tuple[int, str]]) -> bytes:
    """A value as bytes; `opaque(value)` gives the number and the type name of what is not plain data.

    A letter for the type, then for most types the length or count in four bytes, then the content.
    """
    out = bytearray()
    _pack_into(value, out, opaque, DEEPEST)
    return bytes(out)


def _part(out: bytearray, letter: bytes, content: bytes) -> None:
    out += letter + len(content).to_bytes(4, "big") + content


def _pack_into(value: Any, out: bytearray, opaque: Callable[[Any], tuple[int, str]], depth: int) -> None:
    if depth == 0 or len(out) > LARGEST:
        raise ValueError("the value is nested too deeply or is too large")
    if value is None or value is True or value is False:
        out += {None: b"N", True: b"T", False: b"F"}[value]
    elif isinstance(value, int):
        _part(out, b"i", b"%x" % int(value))
    elif isinstance(value, float):
        _part(out, b"f", float.__repr__(value).encode())
    elif isinstance(value, str):
        _part(out, b"s", str.encode(value, "utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        _part(out, b"b" if isinstance(value, bytes) else b"B", bytes(value))
    elif isinstance(value, dict):
        out += b"d" + len(value).to_bytes(4, "big")
        for pair in value.items():
            for item in pair:
                _pack_into(item, out, opaque, depth - 1)
    else:
        letter, items = _shape(value)
        if letter == "h":
            items = opaque(value)
        out += letter.encode() if letter in COUNTS else letter.encode() + len(items).to_bytes(4, "big")
        for item in items:
            _pack_into(item, out, opaque, depth - 1)


def _shape(value: Any) -> tuple[str, Any]:
    """The letter and the parts of a container or a number; `h` for what is not plain data."""
    for letter, kind in SEQUENCES.items():
        if isinstance(value, kind):  # type: ignore[arg-type]
            return letter, value
    if isinstance(value, complex):
        return "c", (value.real, value.imag)
    if isinstance(value, range):
        return "r", (value.start, value.stop, value.step)
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return "y", (value.__name__,)
    # these modules are slow to load, and without them there are no numbers of their types
    if "fractions" in sys.modules and isinstance(value, sys.modules["fractions"].Fraction):
        return "R", (value.numerator, value.denominator)
    if "decimal" in sys.modules and isinstance(value, sys.modules["decimal"].Decimal):
        return "M", (str(value),)
    return "h", ()


def unpack(data: bytes, opaque: Callable[[int, str], Any]) -> Any:
    """The value of some bytes; `opaque(number, name)` gives what is not plain data. ProtocolError if it is invalid."""
    try:
        value, end = _unpack_at(data, 0, opaque, DEEPEST)
    except Exception as error:
        raise ProtocolError(f"the program's answer is not a value: {type(error).__name__}") from None
    if end != len(data):
        raise ProtocolError("the program's answer is followed by something else")
    return value


def _unpack_at(data: bytes, at: int, opaque: Callable[[int, str], Any], depth: int) -> tuple[Any, int]:
    letter, at = data[at : at + 1].decode(), at + 1
    if depth == 0 or not letter:
        raise ValueError("nested too deeply, or cut off")
    if letter in "NTF":
        return {"N": None, "T": True, "F": False}[letter], at
    if letter in COUNTS:
        items, at = _unpack_items(data, at, opaque, depth, COUNTS[letter])
        return _rebuild(letter, items, opaque), at
    size, at = int.from_bytes(data[at : at + 4], "big"), at + 4
    if letter in "ifsbB":
        content = data[at : at + size]
        if len(content) != size:
            raise ValueError("cut off")
        return _scalar(letter, content), at + size
    if letter == "d":
        items, at = _unpack_items(data, at, opaque, depth, 2 * size)
        return dict(zip(items[::2], items[1::2], strict=True)), at
    items, at = _unpack_items(data, at, opaque, depth, size)
    return SEQUENCES[letter](items), at


def _unpack_items(
    data: bytes, at: int, opaque: Callable[[int, str], Any], depth: int, count: int
) -> tuple[list[Any], int]:
    items = []
    for _ in range(count):
        item, at = _unpack_at(data, at, opaque, depth - 1)
        items.append(item)
    return items, at


def _scalar(letter: str, content: bytes) -> Any:
    if letter == "i":
        return int(content, 16)
    if letter == "f":
        return float(content)
    if letter == "s":
        return content.decode("utf-8", "surrogatepass")
    return content if letter == "b" else bytearray(content)


def _rebuild(letter: str, items: list[Any], opaque: Callable[[int, str], Any]) -> Any:
    if letter == "h":
        number, name = items
        if type(number) is not int or type(name) is not str:
            raise ValueError("not an object")
        return opaque(number, name)
    if letter == "c":
        return complex(*items)
    if letter == "r":
        return range(*items)
    if letter == "y":
        return TYPES[items[0]]
    if letter == "R":
        from fractions import Fraction

        return Fraction(*items)
    from decimal import Decimal

    return Decimal(*items)


def send(fd: int, data: bytes) -> None:
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> bytes:
    size = int.from_bytes(_exactly(fd, 4), "big")
    if size > LARGEST:
        raise ProtocolError("the program's answer is too large")
    return _exactly(fd, size)


def _exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(fd, min(size - len(data), 1 << 16))
        if not piece:
            raise ProtocolError("the program ended its process")
        data += piece
    return bytes(data)
