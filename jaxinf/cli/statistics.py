"""Statistics of a stored array, read piece by piece.

Invariant: memory does not grow with the array; all sums are kept in float64.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinf.store import LeafRecord, StateRecord, StepReader
from jaxinf.typing import Array

__all__ = ["Histogram", "Statistics", "measure_array"]

_NUM_BINS = 16
_MAX_DECADES = 16.0
_SIGMAS = 4.0


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite elements by value.

    Attributes:
      scale: ``"linear"``, or ``"log10"`` for an array without negative elements; zeros
        are then in no bin, but in `Statistics.num_zeros`.
      edges: the bins' edges, one more than `counts`, ascending.
      counts: elements in each bin; the last bin includes its upper edge.
      num_below: elements under the first edge, without the zeros of a log scale.
      num_above: elements over the last edge.
    """

    scale: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    num_below: int
    num_above: int

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "scale": self.scale,
            "edges": list(self.edges),
            "counts": list(self.counts),
            "num_below": self.num_below,
            "num_above": self.num_above,
        }


@dataclass(frozen=True)
class Statistics:
    """Statistics of the elements of one array.

    `mean`, `std` (of the population), `minimum`, `maximum` and `histogram` are of the
    finite elements, and None if there are none.
    """

    num_elements: int
    num_zeros: int
    num_non_finite: int
    mean: float | None
    std: float | None
    minimum: float | None
    maximum: float | None
    histogram: Histogram | None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "num_elements": self.num_elements,
            "num_zeros": self.num_zeros,
            "num_non_finite": self.num_non_finite,
            "mean": self.mean,
            "std": self.std,
            "min": self.minimum,
            "max": self.maximum,
            "histogram": self.histogram and self.histogram.to_json(),
        }


def measure_array(
    reader: StepReader, record: LeafRecord, state: StateRecord
) -> Statistics:
    """Reads an array twice, for its moments and its histogram; blocks.

    Args:
      reader: the step's reader.
      record: the leaf.
      state: the name of one of its states.

    Raises:
      StoreCorruptError: a chunk is damaged.
      StoreIOError: a chunk is missing, too short, or the drive failed.
    """
    moments = _Moments()
    for piece in _pieces(reader, record, state):
        moments.add(piece)
    histogram = None
    if moments.num_finite:
        counter = _Counter(moments)
        for piece in _pieces(reader, record, state):
            counter.add(piece)
        histogram = counter.result()
    return moments.result(histogram)


def _pieces(
    reader: StepReader, record: LeafRecord, state: StateRecord
) -> Iterator[Array]:
    """Yields the decoded elements as float64, piece by piece."""
    for piece in reader.pieces(record, state):
        yield piece.values.astype(np.float64)


class _Moments:
    """Mean and variance by pairwise merging (Chan, Golub and LeVeque, 1983)."""

    def __init__(self) -> None:
        self.num_elements = 0
        self.num_zeros = 0
        self.num_finite = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared distances to the mean
        self.minimum = math.inf
        self.maximum = -math.inf
        self.min_positive = math.inf

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.num_finite)

    def add(self, values: Array) -> None:
        self.num_elements += values.size
        values = values[np.isfinite(values)]
        if not values.size:
            return
        self.num_zeros += values.size - np.count_nonzero(values)
        self.minimum = min(self.minimum, float(values.min()))
        self.maximum = max(self.maximum, float(values.max()))
        positive = values[values > 0]
        if positive.size:
            self.min_positive = min(self.min_positive, float(positive.min()))
        mean = float(values.mean())
        total = self.num_finite + values.size
        delta = mean - self.mean
        self.squares += float(np.square(values - mean).sum())
        self.squares += delta * delta * self.num_finite * values.size / total
        self.mean += delta * values.size / total
        self.num_finite = total

    def result(self, histogram: Histogram | None) -> Statistics:
        found = self.num_finite > 0
        return Statistics(
            num_elements=self.num_elements,
            num_zeros=int(self.num_zeros),
            num_non_finite=self.num_elements - self.num_finite,
            mean=self.mean if found else None,
            std=self.std if found else None,
            minimum=self.minimum if found else None,
            maximum=self.maximum if found else None,
            histogram=histogram,
        )


class _Counter:
    """Counts elements in bins that depend on the moments."""

    def __init__(self, moments: _Moments) -> None:
        self._is_log = moments.minimum >= 0 and moments.maximum > 0
        self._edges = _log_edges(moments) if self._is_log else _linear_edges(moments)
        self._counts = np.zeros(len(self._edges) - 1, np.int64)
        self._num_below = self._num_above = 0

    def add(self, values: Array) -> None:
        values = values[np.isfinite(values)]
        if self._is_log:
            values = values[values > 0]
        self._counts += np.histogram(values, self._edges)[0]
        self._num_below += int(np.count_nonzero(values < self._edges[0]))
        self._num_above += int(np.count_nonzero(values > self._edges[-1]))

    def result(self) -> Histogram:
        return Histogram(
            scale="log10" if self._is_log else "linear",
            edges=tuple(map(float, self._edges)),
            counts=tuple(map(int, self._counts)),
            num_below=self._num_below,
            num_above=self._num_above,
        )


def _linear_edges(moments: _Moments) -> Array:
    """Spans at most four standard deviations each way, so outliers flatten nothing."""
    low = max(moments.minimum, moments.mean - _SIGMAS * moments.std)
    high = min(moments.maximum, moments.mean + _SIGMAS * moments.std)
    return _spaced(low, high)


def _log_edges(moments: _Moments) -> Array:
    high = math.log10(moments.maximum)
    low = max(math.log10(moments.min_positive), high - _MAX_DECADES)
    edges = 10.0 ** _spaced(low, high)
    edges[-1] = max(edges[-1], moments.maximum)
    if low > high - _MAX_DECADES:
        edges[0] = min(edges[0], moments.min_positive)
    return edges


def _spaced(low: float, high: float) -> Array:
    """Returns edges of equal bins; of a single bin if all values are equal."""
    edges = np.linspace(low, high, _NUM_BINS + 1)
    if not np.all(np.diff(edges) > 0):
        return np.array([low, np.nextafter(high, math.inf)])
    return edges
