"""Counting and timing, kept apart from where the figures are shown.

Code that measures registers each metric once, with the names of its labels, and then counts or observes; it never knows
where the figures end. All methods are synchronous, quick and safe to call from any thread; to register a metric again
changes nothing.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.utils.deprecation import missing_name
from agentlightning.utils.installation import install_command

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MetricsBackend", "PrometheusMetricsBackend"]


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


class PrometheusMetricsBackend(MetricsBackend):
    """Keeps the figures in a Prometheus registry, its own unless one is given, from which an exporter serves them.

    Dots in names become underscores. A figure of a metric that is not registered, or with other labels than those it
    was registered with, raises what the mapping or `prometheus_client` does.
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
        self._registering = threading.Lock()  # lets one thread register at a time
        self._collectors: dict[str, Any] = {}

    def register_counter(self, name: str, label_names: Sequence[str] | None = None) -> None:
        self._register(self._prometheus.Counter, name, label_names, {})

    def register_histogram(
        self, name: str, label_names: Sequence[str] | None = None, buckets: Sequence[float] | None = None
    ) -> None:
        self._register(self._prometheus.Histogram, name, label_names, {} if buckets is None else {"buckets": buckets})

    def _register(self, kind: Any, name: str, label_names: Sequence[str] | None, options: Mapping[str, Any]) -> None:
        with self._registering:
            if name not in self._collectors:
                shown = name.replace(".", "_")
                self._collectors[name] = kind(shown, name, tuple(label_names or ()), registry=self.registry, **options)

    def inc_counter(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        self._series(name, labels).inc(amount)

    def observe_histogram(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        self._series(name, labels).observe(value)

    def _series(self, name: str, labels: Mapping[str, str] | None) -> Any:
        collector = self._collectors[name]
        return collector.labels(**labels) if labels else collector


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name)
