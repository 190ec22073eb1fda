"""Many items in portions of a bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def portions(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Consecutive items whose sizes sum to at most `most`; a larger item is alone."""
    portion, total = list[Item](), 0
    for item in items:
        size = size_of(item)
        if portion and total + size > most:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += size
    if portion:
        yield portion
