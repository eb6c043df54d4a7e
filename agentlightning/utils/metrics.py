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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from agentlightning.errors import ConfigurationError
from agentlightning.utils.installation import install_command

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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


class _CheckedBackend(MetricsBackend):
    """Refuses a metric of two kinds, and figures of metrics that are not registered or have other labels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # lets one thread register at a time
        self._metric_by_name: dict[str, _Metric] = {}

    def _prepare(self, metric: _Metric) -> None:
        """A metric is about to be registered."""

    @abstractmethod
    def _record(self, metric: _Metric, label_values: _LabelValues, value: float) -> None:
        """Add to a counter, or take one observation of a histogram."""

    def register_counter(self, name: str, label_names: Sequence[str] | None = None) -> None:
        self._register(_Metric("counter", name, tuple(label_names or ())))

    def register_histogram(
        self, name: str, label_names: Sequence[str] | None = None, buckets: Sequence[float] | None = None
    ) -> None:
        bounds = None if buckets is None else tuple(buckets)
        self._register(_Metric("histogram", name, tuple(label_names or ()), bounds))

    def _register(self, metric: _Metric) -> None:
        with self._lock:
            known = self._metric_by_name.get(metric.name)
            if known is None:
                self._prepare(metric)
                self._metric_by_name[metric.name] = metric
            elif known != metric:
                raise ConfigurationError(
                    f"Metric {metric.name!r} is already registered as a {known}, so not as a {metric}."
                )

    def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        if not amount >= 0:
            raise ConfigurationError(f"Counter {name!r} only grows; it was given {amount!r}.")
        self._take("counter", name, amount, labels or {})

    def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        self._take("histogram", name, value, labels or {})

    def _take(self, kind: _Kind, name: str, value: float, labels: Mapping[str, str]) -> None:
        metric = self._metric_by_name.get(name)
        if metric is None:
            raise ConfigurationError(f"Metric {name!r} is not registered; call register_{kind}({name!r}, ...) first.")
        if metric.kind != kind:
            raise ConfigurationError(f"Metric {name!r} is a {metric.kind}, not a {kind}.")
        if len(labels) != len(metric.label_names) or any(label not in labels for label in metric.label_names):
            raise ConfigurationError(
                f"Metric {name!r} has the labels {list(metric.label_names)}; it was given {sorted(labels)}."
            )
        self._record(metric, tuple([str(labels[label]) for label in metric.label_names]), value)


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
        """Take a figure; every observation is kept with equal probability once there are more than fit."""
        self.total += value
        self.sum += value
        self.count += 1
        if self.metric.kind == "counter":
            return
        if len(self.sample) < _RESERVOIR_SIZE:
            self.sample.append(value)
        elif (place := random.randrange(self.count)) < _RESERVOIR_SIZE:
            self.sample[place] = value


class ConsoleMetricsBackend(_CheckedBackend):
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
        super().__init__()
        self._log_interval_seconds = log_interval_seconds
        self._logger = logger or logging.getLogger(__name__)
        self._clock = clock
        self._measuring = threading.Lock()  # protects what follows
        self._series_by_key: dict[tuple[str, _LabelValues], _Series] = {}
        self._last_report_time = clock()

    def report(self) -> None:
        """Write the lines now, whether or not the interval has passed."""
        with self._measuring:
            lines = self._take_lines(self._clock())
        self._write(lines)

    def _record(self, metric: _Metric, label_values: _LabelValues, value: float) -> None:
        with self._measuring:
            series = self._series_by_key.get((metric.name, label_values))
            if series is None:
                series = self._series_by_key[metric.name, label_values] = _Series(metric, label_values)
            series.add(value)
            now = self._clock()
            is_due = now - self._last_report_time >= self._log_interval_seconds
            lines = self._take_lines(now) if is_due else []
        self._write(lines)

    def _take_lines(self, now: float) -> list[str]:
        seconds, self._last_report_time = now - self._last_report_time, now
        moved = [series for series in self._series_by_key.values() if series.count]
        lines = [_line(series, seconds) for series in moved]
        for series in moved:
            series.count, series.sum, series.sample = 0, 0.0, []
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
    # The smallest value that so many percent of the values do not exceed.
    at_percent = {percent: ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)] for percent in (50, 95, 99)}
    percentiles = " ".join(f"p{percent}={value:.6g}" for percent, value in at_percent.items())
    rate = _per_second(series.count, seconds)
    return f"{title}: count={series.count} rate={rate} mean={series.sum / series.count:.6g} {percentiles}"


def _per_second(amount: float, seconds: float) -> str:
    return f"{amount / seconds:.2f}/s" if seconds > 0 else "n/a"


class PrometheusMetricsBackend(_CheckedBackend):
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
        super().__init__()
        self.registry = registry if registry is not None else prometheus_client.CollectorRegistry()
        self._prometheus = prometheus_client
        self._collector_by_name: dict[str, Any] = {}

    def _prepare(self, metric: _Metric) -> None:
        make: Any = self._prometheus.Counter if metric.kind == "counter" else self._prometheus.Histogram
        options: dict[str, Any] = {} if metric.buckets is None else {"buckets": metric.buckets}
        try:
            collector = make(
                metric.name.replace(".", "_"), metric.name, metric.label_names, registry=self.registry, **options
            )
        except ValueError as error:
            raise ConfigurationError(f"Prometheus refuses metric {metric.name!r} as a {metric}: {error}") from error
        self._collector_by_name[metric.name] = collector

    def _record(self, metric: _Metric, label_values: _LabelValues, value: float) -> None:
        collector = self._collector_by_name[metric.name]
        series = collector.labels(*label_values) if label_values else collector
        (series.inc if metric.kind == "counter" else series.observe)(value)


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
