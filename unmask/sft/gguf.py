"""GGUF files, the format of llama.cpp: the fields of a model, and its weights as fp32. Nothing in them is run.

Plain types (F32, F16, BF16) and the block formats Q4_0, Q4_1 and Q8_0 are read: blocks of 32 weights, w = d * q + m,
with d and m in half precision.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
BLOCK = 32
DIMENSIONS = 4


def _halves(block_NS: Bytes) -> Floats:
    return block_NS.copy().view(np.float16).astype(np.float32)


def _nibbles(block_NS: Bytes) -> Floats:
    """32 numbers of four bits: the low halves of 16 bytes, then the high halves."""
    return np.concatenate([block_NS & 15, block_NS >> 4], axis=1).astype(np.float32)


def _q4_0(block_NS: Bytes) -> Floats:
    return _halves(block_NS[:, :2]) * (_nibbles(block_NS[:, 2:]) - 8)


def _q4_1(block_NS: Bytes) -> Floats:
    return _halves(block_NS[:, :2]) * _nibbles(block_NS[:, 4:]) + _halves(block_NS[:, 2:4])


def _q8_0(block_NS: Bytes) -> Floats:
    return _halves(block_NS[:, :2]) * block_NS[:, 2:].view(np.int8).astype(np.float32)


def _bf16(block_NS: Bytes) -> Floats:
    return (block_NS.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class Kind(NamedTuple):
    """How weights are stored: so many of them in so many bytes."""

    name: str
    weights: int
    size: int
    read: Callable[[Bytes], Floats]


KINDS = {
    0: Kind("F32", 1, 4, lambda block_NS: block_NS.copy().view(np.float32)),
    1: Kind("F16", 1, 2, _halves),
    2: Kind("Q4_0", BLOCK, 18, _q4_0),
    3: Kind("Q4_1", BLOCK, 20, _q4_1),
    8: Kind("Q8_0", BLOCK, 34, _q8_0),
    30: Kind("BF16", 1, 2, _bf16),
}


class GgufTensor(NamedTuple):
    shape: tuple[int, ...]
    kind: Kind
    start: int
    """The first byte in the file."""


@dataclass(frozen=True)
class Gguf:
    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def need(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"{self.path} does not state {name}, which a model of this kind needs.")
        return self.fields[name]

    def tensor(self, name: str) -> Tensor:
        """The weights in fp32, read on demand."""
        if name not in self.tensors:
            raise ValueError(f"{self.path} holds no tensor {name}.")
        shape, kind, start = self.tensors[name]
        blocks = math.prod(shape) // kind.weights
        held = np.memmap(self.path, np.uint8, "r", start, (blocks, kind.size))
        return torch.from_numpy(kind.read(np.asarray(held)).reshape(shape))


class _Cursor:
    """A position in the header of a file; reading past the end of the file is an error, whatever length is stated."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0
        self.data = np.memmap(path, np.uint8, "r")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.place:
            raise ValueError(f"{self.path} is not a whole GGUF file: it ends too early; fetch it again.")
        self.place += size
        return self.data[self.place - size : self.place].tobytes()

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            raise ValueError(f"{self.path} holds a value of the unknown kind {kind}.")
        inner, count = self.number("I"), self.number("Q")
        if inner in NUMBERS:
            form = NUMBERS[inner]
            return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}"))))
        if inner != TEXT:
            raise ValueError(f"{self.path} holds a list of the unknown kind {inner}.")
        return [self.text() for _ in range(count)]


def read_gguf(path: str | Path) -> Gguf:
    """The fields and tensor headers of a file, every length checked against its size; weights are not read."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    cursor = _Cursor(path) if path.stat().st_size >= len(MAGIC) else None
    if cursor is None or cursor.take(len(MAGIC)) != MAGIC:
        raise ValueError(f"{path} is not a GGUF file.")
    if (version := cursor.number("I")) not in VERSIONS:
        raise ValueError(f"{path} is GGUF of version {version}; 2 and 3 are read.")
    tensors, count = cursor.number("Q"), cursor.number("Q")
    fields = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(count)}
    headers = [_header(cursor) for _ in range(tensors)]
    alignment = fields.get("general.alignment", BLOCK)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"{path} sets general.alignment to {alignment!r}; it is a number of bytes.")
    first = -(-cursor.place // alignment) * alignment
    held = {name: _tensor_at(path, name, shape, kind, first + offset) for name, shape, kind, offset in headers}
    return Gguf(path, fields, held)


def _header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.number("I")
    if not 1 <= dimensions <= DIMENSIONS:
        raise ValueError(f"{cursor.path}: {name} has {dimensions} dimensions.")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]  # stored from the innermost
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensor_at(path: Path, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
    if number not in KINDS:
        known = ", ".join(kind.name for kind in KINDS.values())
        raise ValueError(f"{path}: {name} is stored as kind {number} of GGML; {known} are read.")
    kind = KINDS[number]
    size = math.prod(shape) // kind.weights * kind.size
    if min(shape) < 1 or shape[-1] % kind.weights or start + size > path.stat().st_size:
        raise ValueError(f"{path} is not a whole GGUF file: {name} does not lie in it; fetch it again.")
    return GgufTensor(shape, kind, start)
