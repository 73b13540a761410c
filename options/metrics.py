"""The page `/metrics` of a program: histograms that requests update, and rows that become Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

TEXT_FORMAT: Final = "text/plain; version=0.0.4; charset=utf-8"

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Histogram:
    """Histogram of a metric, exported in the format of Prometheus. Counts become cumulative only when exported."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: inclusive upper bounds of the buckets, ascending. A last bucket without a bound is added."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values in each bucket."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper bound of each bucket, and how many values are at most that. The last bound is "+Inf"."""
        upper_bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        cumulative_counts = map(float, accumulate(self.counts))
        return list(zip(upper_bounds, cumulative_counts))


class Row(NamedTuple):
    """One metric: its name, its help text, and a figure for each combination of labels."""

    name: str
    help_text: str
    values: Mapping[Any, float | Histogram]
    """Figures by the values of their labels. The key is a tuple, or a string if there is one label."""
    labels: tuple[str, ...] = ()


def make_total(name: str, help_text: str, value: float | Histogram) -> Row:
    """Return the row of a metric without labels."""
    return Row(name, help_text, {(): value})


def build_families(
    family_type: type[Any], rows: Iterable[Row], prefix: str, common_labels: Mapping[str, str] | None = None
) -> Iterator[Family]:
    """Yield a metric family of `family_type` for each row. `common_labels`: labels that every figure has too."""
    common_labels = common_labels or {}
    for row in rows:
        family = family_type(prefix + row.name, row.help_text, labels=[*common_labels, *row.labels])
        for key, value in row.values.items():
            label_values = (*common_labels.values(), *((key,) if isinstance(key, str) else key))
            figures = (value.buckets(), value.total) if isinstance(value, Histogram) else (value,)
            family.add_metric(label_values, *figures)
        yield family


def render_metrics(families: Iterable[Family]) -> bytes:
    """Write families in Prometheus' text format."""
    registry: Any = SimpleNamespace(collect=lambda: families)  # all that the text writer uses of a registry
    return generate_latest(registry)
