"""Portions of bounded size."""

import pytest

from unmask.util.portions import portions


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([], []),
        ([3], [[3]]),
        ([9], [[9]]),
        ([2, 3, 1, 4, 2], [[2, 3], [1, 4], [2]]),
        ([1, 9, 1, 1], [[1], [9], [1, 1]]),
        ([0, 5, 0, 0, 9, 0], [[0, 5, 0, 0], [9], [0]]),
    ],
)
def test_a_portion_is_full_when_the_next_item_does_not_fit(sizes: list[int], found: list[list[int]]) -> None:
    assert list(portions(sizes, lambda size: size, 5)) == found
