"""Counting and timing, kept apart from where the figures are shown.

Code that measures registers each metric once, with the names of its labels, and then counts or observes; it never knows
where the figures end. All methods are synchronous, quick and safe to call from
any thread. A metric that was not registered, or labels other than the registered ones, are mistakes of the measuring
code and raise a `ConfigurationError`; registering the same metric again is no mistake.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from agentlightning.errors import ConfigurationError
from agentlightning.utils.deprecation import missing_name
from agentlightning.utils.installation import install_command

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MetricsBackend", "PrometheusMetricsBackend", "MultiMetricsBackend"]

_Kind: TypeAlias = Literal["counter", "histogram"]
_LabelValues: TypeAlias = tuple[str, ...]


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


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name)
