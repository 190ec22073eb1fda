"""Where a benchmark's rows come from: one file for both splits, a file for each, the hub, or a generator."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unmask.tasks.support.data import Wanted, drawn_rows, read_rows
from unmask.tasks.task import Row

Rows = Callable[[str, int, int], list[Row]]


@dataclass(frozen=True)
class Shape:
    """What the rows of a task look like, and how they are kept apart."""

    wanted: Wanted
    row: Callable[[Row], Row]
    """A row as the task knows it; ValueError for one that is not."""
    key: Callable[[Row], Hashable]
    """What training must not share with the test split."""
    split: Callable[[Row], str | None]
    """The split of a row in a file that serves both; None: of neither."""
    several: Callable[[Row], Iterable[Hashable]] | None = None
    """All keys of a row, where it may have more than one."""
    marked: bool = False
    """Whether a row may say its split itself."""

    def keys(self, row: Row) -> set[Hashable]:
        return {self.key(row)} if self.several is None else set(self.several(row))

    def held_out(self, test: Iterable[Row]) -> set[Hashable]:
        return {key for row in test for key in self.keys(row)}

    def apart(self, rows: Iterable[Row], held_out: set[Hashable]) -> list[Row]:
        return [row for row in rows if held_out.isdisjoint(self.keys(row))]


def file_rows(path: str, shape: Shape) -> list[Row]:
    return read_rows(path, shape.wanted, shape.row)


def checked_files(*paths: str) -> None:
    for path in paths:
        if path and not Path(path).is_file():
            raise ValueError(f"there is no data file {path}")


def set_rows(
    task: str,
    data: str,
    test_data: str,
    shape: Shape,
    hub: Callable[[str], Sequence[Row]],
    section: str = "",
    place: str = "the hub",
) -> Rows:
    """Task.rows over files, and over the hub for a split that no file is given for.

    `data` alone serves both splits. Training rows that share a key with a test row are left out, also where the rows
    of a file say their split themselves. `section` is what the options of the task are called, if not by its name, and
    `place` what `hub` asks.
    """
    checked_files(data, test_data)

    @cache
    def kept(split: str) -> list[Row]:
        if data and not test_data:
            found = [row for row in file_rows(data, shape) if shape.split(row) == split]
        else:
            path = test_data if split == "test" else data
            found = file_rows(path, shape) if path else [shape.row(row) for row in hub(split)]
        return shape.apart(found, shape.held_out(kept("test"))) if split == "train" else found

    def source(split: str) -> list[Row]:
        if not kept(split):
            mark = f', mark some with "split": "{split}"' if shape.marked else ""
            ways = "add rows" if test_data else f"add rows{mark}, or give {section or task}.test_data"
            raise ValueError(f"{data or test_data or place} leaves no rows for the split {split!r}: {ways}")
        return kept(split)

    return drawn_rows(source, task)


def puzzle_rows(task: str, data: str, test_data: str, shape: Shape, generated: Rows) -> Rows:
    """Task.rows over files, or of a generator for a split that no file is given for.

    With a test file alone, generated training rows that share a key with one of its rows are left out.
    """
    if data:
        return set_rows(task, data, test_data, shape, lambda split: [])
    checked_files(test_data)
    if not test_data:
        return generated

    @cache
    def test_rows() -> list[Row]:
        return file_rows(test_data, shape)

    @cache
    def held_out() -> set[Hashable]:
        return shape.held_out(test_rows())

    def rows(split: str, n: int, seed: int) -> list[Row]:
        if split == "test":
            return test_rows()[:n]
        asked = max(n, 16)
        while True:
            kept = shape.apart(generated(split, asked, seed), held_out())
            if len(kept) >= n:
                return kept[:n]
            if asked > 64 * max(n, 16):
                raise ValueError(f"{test_data} leaves too few puzzles to train on: give a file with data=FILE.jsonl")
            asked *= 2

    return rows
