"""Counting and timing, kept apart from where the figures are shown.

Code that measures registers each metric once, with the names of its labels, and then counts or observes; it never knows
whether the figures end in the log, in Prometheus, or in both. All methods are synchronous, quick and safe to call from
any thread. A metric that was not registered, or labels other than the registered ones, are mistakes of the measuring
code and raise a `ConfigurationError`; registering the same metric again is no mistake.
"""

import logging
import math
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from agentlightning.errors import ConfigurationError
from agentlightning.utils.installation import install_command

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

__all__ = ["MetricsBackend", "ConsoleMetricsBackend", "PrometheusMetricsBackend", "MultiMetricsBackend"]

_Kind: TypeAlias = Literal["counter", "histogram"]
_LabelValues: TypeAlias = tuple[str, ...]

_RESERVOIR_SIZE: Final = 1024
"""Observations kept per series and interval; percentiles are estimated from them."""


class MetricsBackend(ABC):
    """Where figures go."""

    @abstractmethod
    def register_counter(self, name: str, label_names: Sequence[str] | None = None) -> None:
        """Announce a figure that only grows."""

    @abstractmethod
    def register_histogram(
        self, name: str, label_names: Sequence[str] | None = None, buckets: Sequence[float] | None = None
    ) -> None:
        """Announce a figure with a distribution; `buckets` are upper bounds, for back ends that count in buckets."""

    @abstractmethod
    def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        """Add to a counter."""

    @abstractmethod
    def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Record one observation."""


@dataclass(frozen=True)
class _Metric:
    """A registered metric."""

    kind: _Kind
    name: str
    label_names: tuple[str, ...]
    buckets: tuple[float, ...] | None = None

    def __str__(self) -> str:
        buckets = "" if self.buckets is None else f" and buckets {list(self.buckets)}"
        return f"{self.kind} with labels {list(self.label_names)}{buckets}"

    def label_values(self, labels: Mapping[str, str] | None) -> _LabelValues:
        """The values in the registered order."""
        given = labels or {}
        if len(given) != len(self.label_names) or any(name not in given for name in self.label_names):
            raise ConfigurationError(
                f"Metric {self.name!r} has the labels {list(self.label_names)}; it was given {sorted(given)}."
            )
        return tuple([str(given[name]) for name in self.label_names])


class _Metrics:
    """The metrics registered with one back end; its owner sees to it that one thread registers at a time."""

    def __init__(self) -> None:
        self._metric_by_name: dict[str, _Metric] = {}

    def has(self, metric: _Metric) -> bool:
        """Whether this very metric is registered; a different one of the same name is an error."""
        known = self._metric_by_name.get(metric.name)
        if known is not None and known != metric:
            raise ConfigurationError(
                f"Metric {metric.name!r} is already registered as a {known}, so not as a {metric}."
            )
        return known is not None

    def add(self, metric: _Metric) -> None:
        if not self.has(metric):
            self._metric_by_name[metric.name] = metric

    def get(self, kind: _Kind, name: str) -> _Metric:
        metric = self._metric_by_name.get(name)
        if metric is None:
            raise ConfigurationError(f"Metric {name!r} is not registered; call register_{kind}({name!r}, ...) first.")
        if metric.kind != kind:
            raise ConfigurationError(f"Metric {name!r} is a {metric.kind}, not a {kind}.")
        return metric


def _counter(name: str, label_names: Sequence[str] | None) -> _Metric:
    return _Metric("counter", name, tuple(label_names or ()))


def _histogram(name: str, label_names: Sequence[str] | None, buckets: Sequence[float] | None) -> _Metric:
    return _Metric("histogram", name, tuple(label_names or ()), None if buckets is None else tuple(buckets))


def _check_amount(name: str, amount: float) -> None:
    if not amount >= 0:
        raise ConfigurationError(f"Counter {name!r} only grows; it was given {amount!r}.")


@dataclass
class _Series:
    """One metric with one set of label values; what it gathers is since the last line, except `total`."""

    metric: _Metric
    label_values: _LabelValues
    total: float = 0.0
    count: int = 0
    sum: float = 0.0
    sample: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.total += value
        self.sum += value
        self.count += 1

    def observe(self, value: float, chance: random.Random) -> None:
        """Keep every observation with equal probability once there are more than fit (reservoir sampling)."""
        self.add(value)
        if len(self.sample) < _RESERVOIR_SIZE:
            self.sample.append(value)
            return
        place = chance.randrange(self.count)
        if place < _RESERVOIR_SIZE:
            self.sample[place] = value

    def start_over(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.sample.clear()


class ConsoleMetricsBackend(MetricsBackend):
    """Writes a summary to the log: one line per metric and label values that moved, at most once in an interval.

    Lines appear when something is measured after the interval has passed; `report` writes what is still unwritten.
    """

    def __init__(
        self,
        log_interval_seconds: float = 10.0,
        logger: logging.Logger | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_interval_seconds = log_interval_seconds
        self._logger = logger or logging.getLogger(__name__)
        self._clock = clock
        self._chance = random.Random()
        self._lock = threading.Lock()  # protects everything below
        self._metrics = _Metrics()
        self._series_by_key: dict[tuple[str, _LabelValues], _Series] = {}
        self._last_report_time = clock()

    def register_counter(self, name: str, label_names: Sequence[str] | None = None) -> None:
        with self._lock:
            self._metrics.add(_counter(name, label_names))

    def register_histogram(
        self, name: str, label_names: Sequence[str] | None = None, buckets: Sequence[float] | None = None
    ) -> None:
        with self._lock:
            self._metrics.add(_histogram(name, label_names, buckets))

    def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        _check_amount(name, amount)
        with self._lock:
            self._series("counter", name, labels).add(amount)
            lines = self._due_lines()
        self._write(lines)

    def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        with self._lock:
            self._series("histogram", name, labels).observe(value, self._chance)
            lines = self._due_lines()
        self._write(lines)

    def report(self) -> None:
        """Write the lines now, whether or not the interval has passed."""
        with self._lock:
            lines = self._take_lines(self._clock())
        self._write(lines)

    def _series(self, kind: _Kind, name: str, labels: Mapping[str, str] | None) -> _Series:
        metric = self._metrics.get(kind, name)
        label_values = metric.label_values(labels)
        series = self._series_by_key.get((name, label_values))
        if series is None:
            series = self._series_by_key[name, label_values] = _Series(metric, label_values)
        return series

    def _due_lines(self) -> list[str]:
        now = self._clock()
        return self._take_lines(now) if now - self._last_report_time >= self._log_interval_seconds else []

    def _take_lines(self, now: float) -> list[str]:
        seconds = now - self._last_report_time
        self._last_report_time = now
        moved = [series for series in self._series_by_key.values() if series.count]
        lines = [_line(series, seconds) for series in moved]
        for series in moved:
            series.start_over()
        return lines

    def _write(self, lines: Sequence[str]) -> None:
        """Outside the lock, because a log handler may do anything."""
        for line in lines:
            self._logger.info("%s", line)


def _line(series: _Series, seconds: float) -> str:
    metric = series.metric
    labels = ", ".join(f'{name}="{value}"' for name, value in zip(metric.label_names, series.label_values, strict=True))
    title = f"{metric.name}{{{labels}}}" if labels else metric.name
    if metric.kind == "counter":
        return f"{title}: total={series.total:g} rate={_per_second(series.sum, seconds)}"
    ordered = sorted(series.sample)
    percentiles = " ".join(f"p{percent}={_percentile(ordered, percent):.6g}" for percent in (50, 95, 99))
    rate = _per_second(series.count, seconds)
    return f"{title}: count={series.count} rate={rate} mean={series.sum / series.count:.6g} {percentiles}"


def _per_second(amount: float, seconds: float) -> str:
    return f"{amount / seconds:.2f}/s" if seconds > 0 else "n/a"


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


class PrometheusMetricsBackend(MetricsBackend):
    """Keeps the figures in a Prometheus registry, its own unless one is given, from which an exporter serves them.

    Dots in names become underscores.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(
                f"PrometheusMetricsBackend needs the package prometheus_client; run `{install_command('prometheus')}`."
            ) from error
        self.registry = registry if registry is not None else prometheus_client.CollectorRegistry()
        self._prometheus = prometheus_client
        self._lock = threading.Lock()  # lets one thread register at a time; the collectors are safe by themselves
        self._metrics = _Metrics()
        self._counter_by_name: dict[str, Counter] = {}
        self._histogram_by_name: dict[str, Histogram] = {}
        self._series: dict[tuple[str, _LabelValues], Counter | Histogram] = {}  # found once, for finding takes a lock

    def register_counter(self, name: str, label_names: Sequence[str] | None = None) -> None:
        metric = _counter(name, label_names)
        with self._lock:
            if not self._metrics.has(metric):
                self._counter_by_name[name] = self._new_counter(metric)
                self._metrics.add(metric)

    def register_histogram(
        self, name: str, label_names: Sequence[str] | None = None, buckets: Sequence[float] | None = None
    ) -> None:
        metric = _histogram(name, label_names, buckets)
        with self._lock:
            if not self._metrics.has(metric):
                self._histogram_by_name[name] = self._new_histogram(metric)
                self._metrics.add(metric)

    def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        _check_amount(name, amount)
        values = self._metrics.get("counter", name).label_values(labels)
        counter: Counter = self._series_of(self._counter_by_name[name], name, values)
        counter.inc(amount)

    def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        values = self._metrics.get("histogram", name).label_values(labels)
        histogram: Histogram = self._series_of(self._histogram_by_name[name], name, values)
        histogram.observe(value)

    def _series_of(self, collector: Any, name: str, values: _LabelValues) -> Any:
        series = self._series.get((name, values))
        if series is None:
            series = self._series[name, values] = collector.labels(*values) if values else collector
        return series

    def _new_counter(self, metric: _Metric) -> "Counter":
        with _refusal_of(metric):
            return self._prometheus.Counter(
                _prometheus_name(metric), metric.name, metric.label_names, registry=self.registry
            )

    def _new_histogram(self, metric: _Metric) -> "Histogram":
        buckets = self._prometheus.Histogram.DEFAULT_BUCKETS if metric.buckets is None else metric.buckets
        with _refusal_of(metric):
            return self._prometheus.Histogram(
                _prometheus_name(metric), metric.name, metric.label_names, registry=self.registry, buckets=buckets
            )


def _prometheus_name(metric: _Metric) -> str:
    return metric.name.replace(".", "_")


@contextmanager
def _refusal_of(metric: _Metric) -> Iterator[None]:
    """Say which metric it was that Prometheus refused."""
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(f"Prometheus refuses metric {metric.name!r} as a {metric}: {error}") from error


class MultiMetricsBackend(MetricsBackend):
    """Sends every figure to several back ends, in their order."""

    def __init__(self, backends: Sequence[MetricsBackend]) -> None:
        self._backends = tuple(backends)

    def register_counter(self, name: str, label_names: Sequence[str] | None = None) -> None:
        for backend in self._backends:
            backend.register_counter(name, label_names)

    def register_histogram(
        self, name: str, label_names: Sequence[str] | None = None, buckets: Sequence[float] | None = None
    ) -> None:
        for backend in self._backends:
            backend.register_histogram(name, label_names, buckets)

    def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        for backend in self._backends:
            backend.inc_counter(name, amount, labels)

    def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        for backend in self._backends:
            backend.observe_histogram(name, value, labels)
