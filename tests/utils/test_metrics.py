"""Figures reach Prometheus; mistakes in measuring are loud."""

import sys
from collections.abc import Callable

import prometheus_client
import pytest

from agentlightning.utils.metrics import MetricsBackend, PrometheusMetricsBackend


@pytest.mark.parametrize(
    ("measure", "error"),
    [
        (lambda backend: backend.inc_counter("lost"), KeyError),
        (lambda backend: backend.observe_histogram("calls", 1.0, {"route": "/"}), AttributeError),
        (lambda backend: backend.inc_counter("calls", -1, {"route": "/"}), ValueError),
        (lambda backend: backend.inc_counter("calls"), ValueError),
        (lambda backend: backend.inc_counter("calls", labels={"path": "/"}), ValueError),
    ],
    ids=["not registered", "kind", "shrinks", "no label", "other label"],
)
def test_a_mistake_in_measuring_is_loud(measure: Callable[[MetricsBackend], None], error: type[Exception]) -> None:
    backend = PrometheusMetricsBackend()
    backend.register_counter("calls", ["route"])

    with pytest.raises(error):
        measure(backend)


def test_prometheus_counts_by_label_in_the_given_registry() -> None:
    backend, other = (
        PrometheusMetricsBackend(registry := prometheus_client.CollectorRegistry()),
        PrometheusMetricsBackend(),
    )
    for one in (backend, other):
        one.register_counter("agl.calls", ["route"])

    backend.inc_counter("agl.calls", 2, {"route": "/a"})
    backend.inc_counter("agl.calls", labels={"route": "/b"})

    assert registry.get_sample_value("agl_calls_total", {"route": "/a"}) == 2.0
    assert registry.get_sample_value("agl_calls_total", {"route": "/b"}) == 1.0
    assert other.registry.get_sample_value("agl_calls_total", {"route": "/b"}) is None


def test_prometheus_counts_observations_in_the_given_buckets() -> None:
    backend = PrometheusMetricsBackend()
    backend.register_histogram("seconds", buckets=[0.1, 1.0])

    backend.observe_histogram("seconds", 0.5)

    assert backend.registry.get_sample_value("seconds_bucket", {"le": "0.1"}) == 0.0
    assert backend.registry.get_sample_value("seconds_bucket", {"le": "1.0"}) == 1.0
    assert backend.registry.get_sample_value("seconds_sum") == 0.5


def test_missing_prometheus_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install .*\[prometheus\]"):
        PrometheusMetricsBackend()
