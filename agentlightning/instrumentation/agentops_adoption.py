"""AgentOps beside us: its decorators write to the provider of this process, and its service is not contacted.

`agentops.init` would fetch a token, install a provider that exports to AgentOps' service, and apply instrumentors for
libraries that we record ourselves. All that its decorators and its other instrumentors need is a tracing core with a
provider, so the core is given ours. A program that has started AgentOps itself keeps what it has set up; only what
would reach the service is withheld, and a model call that its own instrumentor has begun a span for is left to it.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from opentelemetry import trace

from agentlightning.instrumentation.imports import is_installed
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.registry import Instrumentation

__all__ = [
    "AgentOpsStatePatch",
    "agentops_instrumentors",
    "agentops_management",
    "is_recorded_by_agentops",
    "service",
]

logger = logging.getLogger(__name__)

RECORDED_BY_US: Final = frozenset({"openai", "anthropic", "crewai", "autogen", "agents", "smolagents", "langgraph"})
"""Libraries, by the names AgentOps knows them, whose calls would become two spans each."""
_PROVIDERS: Final = "agentops.instrumentation.providers"
_SCOPES: Final = ("openai", "anthropic")
"""Scopes in which AgentOps writes the spans of model calls."""
_TABLES: Final = ("PROVIDERS", "AGENTIC_LIBRARIES", "TARGET_PACKAGES")
_CONFIG: Final = {"service_name": "agentlightning", "api_key": None, "project_id": None}
_TOKEN: Final = {"token": "dummy", "project_id": "dummy"}


@dataclass
class Service:
    """AgentOps' hosted service."""

    is_enabled: bool = False
    """Whether it may be contacted while AgentOps is managed."""


@functools.cache
def service() -> Service:
    """One for the process, as AgentOps' client is."""
    return Service()


@functools.cache
def agentops_management() -> Instrumentation:
    """AgentOps adopted, and its service out of reach, for as long as a tracer of this process wants it."""
    return Instrumentation((_Offline(), _Adoption()))


@functools.cache
def agentops_instrumentors() -> Instrumentation:
    """AgentOps' instrumentors for the libraries that only it knows, for as long as a tracer wants them."""
    return Instrumentation((_ForeignInstrumentors(),))


def is_recorded_by_agentops(span_name: str) -> bool:
    """Whether a model call that is being made here is one that AgentOps has begun a span for.

    Args:
        span_name: How we would call the span; theirs begins alike.
    """
    if _PROVIDERS not in sys.modules:
        return False
    span: Any = trace.get_current_span()
    scope = getattr(span, "instrumentation_scope", None)
    if scope is None or scope.name not in _SCOPES or not span.is_recording():
        return False
    name: str = span.name
    return name.startswith(span_name)


class _BorrowedProvider(trace.TracerProvider):
    """A provider that AgentOps may use, but not shut down, which it does when the process ends."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        tracer: trace.Tracer = self._provider.get_tracer(*args, **kwargs)
        return tracer

    def shutdown(self) -> None:
        """Nothing: it is not AgentOps' to end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)


class AgentOpsStatePatch(Patch):
    """A patch of what AgentOps keeps in attributes."""

    name = "AgentOps"
    module = "agentops"

    def set(self, owner: Any, **values: Any) -> None:
        """Give attributes values until the patch is undone; those that the program sets meanwhile stay."""
        for attribute, value in values.items():
            before = getattr(owner, attribute)
            setattr(owner, attribute, value)
            self.when_undone(functools.partial(_put_back, owner, attribute, value, before))


def _put_back(owner: Any, attribute: str, value: Any, before: Any) -> None:
    if getattr(owner, attribute) is value:
        setattr(owner, attribute, before)


class _Adoption(AgentOpsStatePatch):
    """Gives AgentOps' tracing core the provider of this process, unless the program has started AgentOps."""

    def change(self, module: ModuleType) -> None:
        core = importlib.import_module("agentops.sdk.core").tracer
        client = module.get_client()
        if core.initialized:
            logger.info("The program has started AgentOps itself; it is left as it is.")
            return
        provider, config = _BorrowedProvider(trace.get_tracer_provider()), core._config or dict(_CONFIG)
        self.set(core, provider=provider, _config=config, _initialized=True)
        self.set(client, _initialized=True)
        self.set(client.config, log_session_replay_url=False)  # there will be nothing to see at that address


class _ForeignInstrumentors(AgentOpsStatePatch):
    """Applies AgentOps' instrumentors where it was adopted, except for libraries that we record."""

    def change(self, module: ModuleType) -> None:
        core = importlib.import_module("agentops.sdk.core").tracer
        if not isinstance(core.provider, _BorrowedProvider):
            return
        instrumentation = importlib.import_module("agentops.instrumentation")
        for table in _TABLES:
            self.set(instrumentation, **{table: _without_ours(getattr(instrumentation, table))})
        # Its hook costs something at every import, so it is not set for nothing.
        if any(is_installed(package) for package in instrumentation.TARGET_PACKAGES):
            instrumentation.instrument_all()
            self.when_undone(instrumentation.uninstrument_all)


def _without_ours(table: Any) -> Any:
    if isinstance(table, dict):
        return {name: value for name, value in table.items() if name not in RECORDED_BY_US}
    return set(table) - RECORDED_BY_US


class _Offline(AgentOpsStatePatch):
    """Withholds what AgentOps would send to its service, while that is not enabled."""

    def change(self, module: ModuleType) -> None:
        exporters = importlib.import_module("agentops.sdk.exporters")
        versions = importlib.import_module("agentops.client.api.versions.v3")
        uploads = importlib.import_module("agentops.client.api.versions.v4")
        core = importlib.import_module("agentops.sdk.core")
        export_result = importlib.import_module("opentelemetry.sdk.trace.export").SpanExportResult
        metric_result = importlib.import_module("opentelemetry.sdk.metrics.export").MetricExportResult

        def is_agentops(exporter: Any) -> bool:
            endpoint = (core.tracer._config or {}).get("metrics_endpoint")
            return endpoint is not None and getattr(exporter, "_endpoint", None) == endpoint

        self.replace(exporters.AuthenticatedOTLPExporter, "export", _withheld(export_result.SUCCESS))
        self.replace(core.OTLPMetricExporter, "export", _withheld(metric_result.SUCCESS, is_agentops))
        self.replace(versions.V3Client, "fetch_auth_token", _fetch_no_token)
        self.replace(uploads.V4Client, "upload_object", _withheld({}))
        self.replace(uploads.V4Client, "upload_logfile", _withheld({}))


def _withheld(result: Any, concerns: Callable[[Any], bool] = lambda owner: True) -> Callable[..., Any]:
    """A wrapper that gives a result without making the call."""

    def wrapper(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if service().is_enabled or not concerns(owner):
            return original(owner, *args, **kwargs)
        return result

    return wrapper


async def _fetch_no_token(original: Any, client: Any, api_key: str) -> Any:
    return await original(client, api_key) if service().is_enabled else dict(_TOKEN)
