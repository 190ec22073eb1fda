"""Rows of a data set: from a JSONL file (gzip or not) that is given, or from the Hugging Face hub."""

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from unmask.tasks.support.split import split_rng
from unmask.tasks.task import Row

Wanted = Mapping[str, type | tuple[type, ...]]
"""The fields a row must have, with their types."""


def read_rows(path: str | Path, wanted: Wanted, shaped: Callable[[Row], Row] = lambda row: row) -> list[Row]:
    """The objects of a JSONL file, checked and `shaped`; ValueError with file and line for what is not one."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no data file {path}")
    opened = gzip.open if path.suffix == ".gz" else open
    rows = []
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_checked(line, wanted, shaped, f"{path} line {number}"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def _checked(line: str, wanted: Wanted, shaped: Callable[[Row], Row], where: str) -> Row:
    try:
        row = json.loads(line)
        if "\\ud" in line.lower():  # half a surrogate pair, which no tokenizer reads and no terminal shows
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object")
    for field, kind in wanted.items():
        if not isinstance(row.get(field), kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wants = " or ".join(k.__name__ for k in kinds)
            told = "missing" if field not in row else f"{type(row[field]).__name__}, not {wants}"
            raise ValueError(f"{where}: {field!r} is {told}")
    try:
        return shaped(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@cache
def hub_rows(name: str, config: str | None, split: str) -> tuple[Row, ...]:
    """The rows of a data set on the hub, through the `datasets` package."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"the data set {name} is read from the hub by the package datasets: pip install 'unmask[data]', "
            "or give a file with --data FILE.jsonl"
        ) from None
    try:
        return tuple(dict(row) for row in load_dataset(name, config, split=split))
    except (OSError, ValueError) as error:  # no connection, no such set or split
        raise ValueError(f"the data set {name} ({split}) cannot be read from the hub: {error}") from None


def drawn_rows(source: Callable[[str], Sequence[Row]], task: str) -> Callable[[str, int, int], list[Row]]:
    """Task.rows over a fixed set: the first n of the test split in their order; n of the training split, shuffled by
    the seed and begun anew where they are too few."""

    def rows(split: str, n: int, seed: int) -> list[Row]:
        rng, order = split_rng(task, split, seed), list[int]()
        found = source(split)
        if split == "test":
            return list(found[:n])
        while len(order) < n:
            order += rng.sample(range(len(found)), len(found))
        return [found[i] for i in order[:n]]

    return rows
