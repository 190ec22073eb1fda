"""A curve of bounded size for a run of any length. Each bin keeps its minimum and maximum, so no spike is lost."""

import math

import numpy as np
from numpy.typing import NDArray

BINS = 1000
"""Each with at most two points."""
PENDING = 8192
"""New points that are collected before they are binned."""

Numbers = NDArray[np.float64]


class Series:
    """Points are added at the end. All bins span equally many points; if there are too many bins, pairs are merged."""

    def __init__(self) -> None:
        self.count, self.width = 0, 1
        self.points: tuple[NDArray[np.int64], Numbers, Numbers] = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
        self.xs: list[float] = []
        self.ys: list[float] = []

    def add(self, x: float, y: float) -> None:
        self.xs.append(x)
        self.ys.append(y)
        if len(self.xs) >= PENDING:
            self._settle()

    def data(self, bins: int = BINS) -> dict[str, list[float | None]]:
        """At most two points per bin, in order; None where the value is not finite."""
        self._settle()
        number_K, x_K, y_K = self.points
        if self.count > bins * self.width:
            width = self.width
            while self.count > bins * width:
                width *= 2
            chosen = _extremes(number_K // width, y_K)
            x_K, y_K = x_K[chosen], y_K[chosen]
        return {"x": x_K.tolist(), "y": [y if math.isfinite(y) else None for y in y_K.tolist()]}

    def _settle(self) -> None:
        if not self.xs:
            return
        number_K = np.concatenate([self.points[0], self.count + np.arange(len(self.xs))])
        x_K = np.concatenate([self.points[1], np.array(self.xs, dtype=np.float64)])
        y_K = np.concatenate([self.points[2], np.array(self.ys, dtype=np.float64)])
        self.count += len(self.xs)
        self.xs, self.ys = [], []
        while self.count > BINS * self.width:
            self.width *= 2
        chosen = _extremes(number_K // self.width, y_K)
        self.points = number_K[chosen], x_K[chosen], y_K[chosen]


def _extremes(bin_K: NDArray[np.int64], y_K: Numbers) -> NDArray[np.int64]:
    """The indices of the minimum and the maximum of each bin, in order."""
    return np.union1d(_least(bin_K, y_K), _least(bin_K, -y_K))


def _least(bin_K: NDArray[np.int64], y_K: Numbers) -> NDArray[np.int64]:
    """The first index of the minimum of each bin; nan counts as infinity."""
    y_K = np.where(np.isnan(y_K), np.inf, y_K)
    starts = np.flatnonzero(np.diff(bin_K, prepend=bin_K[0] - 1))
    least_K = np.repeat(np.minimum.reduceat(y_K, starts), np.diff(starts, append=len(bin_K)))
    places = np.flatnonzero(y_K == least_K)
    return places[np.diff(bin_K[places], prepend=bin_K[0] - 1) != 0]
