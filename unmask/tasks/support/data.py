"""Rows of a data set, from JSONL files (gzip or not) or from the Hugging Face hub."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import islice
from pathlib import Path

from unmask.tasks.support.split import hashed_split, split_rng
from unmask.tasks.task import Row, Task

FieldType = type | tuple[type, ...]
STREAMED = 10_000
"""Rows that are read of a split on the hub if your own task names it as its data."""


def read_rows(
    path: str | Path, fields: Mapping[str, FieldType], parse: Callable[[Row], Row] = lambda row: row
) -> list[Row]:
    """The parsed objects of a JSONL file; ValueError with file and line for an object without these fields."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no data file {path}")
    open_file = gzip.open if path.suffix == ".gz" else open
    rows = []
    try:
        with open_file(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_parse_line(line, fields, parse, f"{path} line {number}"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _parse_line(line: str, fields: Mapping[str, FieldType], parse: Callable[[Row], Row], where: str) -> Row:
    try:
        row = json.loads(line)
        if "\\ud" in line.lower():  # half a surrogate pair cannot be encoded
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object")
    for field, kind in fields.items():
        if not isinstance(row.get(field), kind):
            kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            problem = "missing" if field not in row else f"{type(row[field]).__name__}, not {kinds}"
            raise ValueError(f"{where}: {field!r} is {problem}")
    try:
        return parse(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class HubUnavailable(ValueError):
    """A data set cannot be read from the hub."""


def hub_rows(name: str, config: str | None = None, split: str = "train", limit: int | None = None) -> tuple[Row, ...]:
    """The rows of a data set on the hub, read by the package `datasets`. With a limit the first rows are streamed, and
    the rest of the data set is not downloaded."""
    return deepcopy(_hub_rows(name, config, split, limit))


@cache
def _hub_rows(name: str, config: str | None, split: str, limit: int | None) -> tuple[Row, ...]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise HubUnavailable(
            f"reading the data set {name} from the hub needs the package datasets: pip install 'unmask[data]', "
            "or give a file with --data FILE.jsonl"
        ) from None
    try:
        rows = load_dataset(name, config, split=split, streaming=limit is not None)
        return tuple(dict(row) for row in islice(rows, limit))
    except (OSError, ValueError) as error:  # no connection, no such set or split
        raise HubUnavailable(f"the data set {name} ({split}) cannot be read from the hub: {error}") from None


def is_hub_data(source: str) -> bool:
    """Whether the data of your own task are the name of a data set on the hub: ORG/NAME, and not a file."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source, re.ASCII) is not None
    return named and not source.endswith((".jsonl", ".json", ".gz")) and not Path(source).is_file()


def hub_data(
    name: str, split: str, fields: Mapping[str, FieldType], parse: Callable[[Row], Row] = lambda row: row
) -> list[Row]:
    """The parsed first STREAMED rows of a data set on the hub, with the checks of `read_rows`."""
    rows = []
    for number, row in enumerate(hub_rows(name, None, split, STREAMED), 1):
        where = f"row {number} of {name} ({split})"
        try:
            line = json.dumps(row)
        except TypeError as error:
            raise ValueError(f"{where} does not consist of texts, numbers, lists and dictionaries: {error}") from None
        rows.append(_parse_line(line, fields, parse, where))
    return rows


class DataTask(Task):
    """A task whose rows come from files, or from `published_rows` for a split without a file.

    `data` alone is for both splits. Training rows that share a key with a test row are left out, also if rows name
    their split.
    """

    fixed = True
    row_fields: Mapping[str, FieldType] = {}
    """The fields that a row of a file must have, with their types."""
    names_split: bool = False
    """Whether a row may name its split."""
    section: str = ""
    """The section of the task's options in a configuration, if not its name."""
    hub_names: bool = False
    """Whether `data` and `test_data` may name a data set on the hub."""
    place: str = "the hub"
    """The source of `published_rows`."""

    def __init__(self, data: str = "", test_data: str = "") -> None:
        for path in (data, test_data):
            if path and not Path(path).is_file() and not (self.hub_names and is_hub_data(path)):
                raise ValueError(f"there is no data file {path}")
        self.data, self.test_data = data, test_data
        self._split_rows: dict[str, list[Row]] = {}

    def parse_row(self, row: Row) -> Row:
        """The row in the form that the task uses; ValueError for a bad one."""
        return row

    def key(self, row: Row) -> str:
        """A training row must not share this with a test row."""
        raise NotImplementedError

    def keys(self, row: Row) -> set[str]:
        """All keys of a row, if it may have several."""
        return {self.key(row)}

    def split_of(self, row: Row) -> str | None:
        """The split of a row in a file for both; None: neither."""
        return (self.names_split and row.get("split")) or hashed_split(self.key(row))

    def published_rows(self, split: str) -> Sequence[Row]:
        """The rows of a split for which no file is given."""
        raise NotImplementedError

    def stored_row(self, line: Row) -> Row:
        return self.parse_row(line)

    def rows(self, split: str, n: int, seed: int) -> list[Row]:
        """The first n test rows in order; n training rows shuffled by the seed, repeated if there are too few."""
        rng, order = split_rng(self.name, split, seed), list[int]()
        rows = self.split_rows(split)
        if not rows:
            mark = f', mark some with "split": "{split}"' if self.names_split else ""
            advice = "add rows" if self.test_data else f"add rows{mark}, or give {self.section or self.name}.test_data"
            place = self.data or self.test_data or self.place
            raise ValueError(f"{place} leaves no rows for the split {split!r}: {advice}")
        if split == "test":
            return rows[:n]
        while len(order) < n:
            order += rng.sample(range(len(rows)), len(rows))
        return [rows[i] for i in order[:n]]

    def split_rows(self, split: str) -> list[Row]:
        """All rows of a split, read once."""
        if split not in self._split_rows:
            if path := self.data if split == "train" else self.test_data or self.data:
                if self.hub_names and is_hub_data(path):
                    hub_split = "test" if path == self.test_data and split == "test" else "train"
                    rows = hub_data(path, hub_split, self.row_fields, self.parse_row)
                else:
                    rows = read_rows(path, self.row_fields, self.parse_row)
                if not self.test_data:
                    rows = [row for row in rows if self.split_of(row) == split]
            else:
                rows = [self.parse_row(row) for row in self.published_rows(split)]
            self._split_rows[split] = self.without_test_keys(rows) if split == "train" else rows
        return self._split_rows[split]

    def without_test_keys(self, rows: Iterable[Row]) -> list[Row]:
        held_out = {key for row in self.split_rows("test") for key in self.keys(row)}
        return [row for row in rows if held_out.isdisjoint(self.keys(row))]
