"""AgentOps beside us: what its decorators and its handler for LangChain write is recorded, and goes to no service.

`agentops.init` would fetch a token, export to AgentOps' service and apply instrumentors for libraries that we record
ourselves. Its decorators write to the provider of this process as soon as they are told that AgentOps was started, so
that is all they are told. A program that has started AgentOps itself keeps what it has set up; only its spans and logs
are withheld from the service, unless it wants them there. Where the package is not installed, the tracer does what
`OtelTracer` does.
"""

import functools
import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult
from typing_extensions import Self

from agentlightning.instrumentation.imports import is_installed
from agentlightning.instrumentation.patch import Foreign, Original, Patch, Wrapper
from agentlightning.instrumentation.registry import Instrumentation
from agentlightning.store.base import LightningStore
from agentlightning.tracer.binding import unobserved
from agentlightning.tracer.otel import OtelTracer
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import LoopThread

logger = logging.getLogger(__name__)

_THREAD: Final = "otel-loop"


# ---------------------------------------------------------------------- the package


class AgentOpsPatch(Patch):
    """Has AgentOps take itself for started, unless the program has started it, and send nothing."""

    name = "AgentOps"
    module = "agentops"

    def change(self, module: ModuleType) -> None:
        exporters = importlib.import_module("agentops.sdk.exporters")
        uploads = importlib.import_module("agentops.client.api.versions.v4")
        self.replace(exporters.AuthenticatedOTLPExporter, "export", _withheld(SpanExportResult.SUCCESS))
        self.replace(uploads.V4Client, "upload_logfile", _withheld({}))
        core, client = importlib.import_module("agentops.sdk.core").tracer, module.get_client()
        if core.initialized:
            logger.info("The program has started AgentOps itself; it is left as it is.")
            return

        def mark(*, started: bool) -> None:
            core._initialized = client.initialized = started
            client.config.log_session_replay_url = not started  # there will be nothing to see at that address

        mark(started=True)
        self.when_undone(functools.partial(mark, started=False))


@functools.cache
def _service() -> threading.Event:
    """Set while AgentOps' hosted service may get what a program of its own exports."""
    return threading.Event()


def _withheld(result: Foreign) -> Wrapper:
    """A wrapper that gives a result without making the call, while the service may not be contacted."""

    def wrapper(original: Original, *args: object) -> Foreign:
        return original(*args) if _service().is_set() else result

    return wrapper


@functools.cache
def agentops_management() -> Instrumentation:
    """AgentOps started without its service, for as long as a tracer of this process wants it."""
    return Instrumentation((AgentOpsPatch(),))


@functools.cache
def _by_hand() -> AgentOpsPatch:
    """One for the process, as the package is."""
    return AgentOpsPatch()


def instrument_agentops() -> bool:
    """Have what AgentOps' decorators write recorded, without its service, as `AgentOpsTracer` does.

    True if the package is installed; a second call warns and changes nothing.
    """
    return _by_hand().turn_on()


def uninstrument_agentops() -> None:
    """Undo `instrument_agentops`; harmless if it was not called."""
    _by_hand().undo()


def enable_agentops_service(enabled: bool = True) -> None:
    """Say whether AgentOps' hosted service may get what is exported while `AgentOpsTracer` manages AgentOps; it may
    not, at first.

    It matters to a program that starts AgentOps itself, with a key of its own, before its tracer.
    """
    (_service().set if enabled else _service().clear)()


# ---------------------------------------------------------------------- recording


class LightningSpanProcessor(SpanProcessor):
    """Stores each span before its `end` returns, for one attempt at a time; `OtelTracer` does better.

    A store that fails or takes longer than a minute is logged, never raised.
    """

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []
        self._target: tuple[LightningStore, str, str] | None = None
        self._thread = LoopThread(_THREAD)

    def __enter__(self) -> Self:
        self._spans.clear()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._target = None

    @contextmanager
    def with_context(self, *, store: LightningStore, rollout_id: str, attempt_id: str) -> Iterator[Self]:
        """Spans that end inside go to this attempt; they stay readable until the next one."""
        self._target = store, rollout_id, attempt_id
        with self:
            yield self

    def spans(self) -> list[ReadableSpan]:
        """The spans since the last entry, in the order they ended."""
        return list(self._spans)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._target is not None:
            with log_failures(logger, "Span '%s' could not be stored.", span.name):  # which the agent must not notice
                storing = self._thread.start_soon(_store_quietly(*self._target, span))
                if threading.current_thread().name != _THREAD:  # it would wait for itself
                    # The end of a span waits a minute for the store.
                    storing.result(60.0)
        self._spans.append(span)

    def shutdown(self) -> None:
        """End the private loop; harmless the second time."""
        self._thread.end()

    def __reduce__(self) -> Any:
        raise TypeError("A LightningSpanProcessor owns a thread and cannot be pickled; make one in each process.")


async def _store_quietly(store: LightningStore, rollout_id: str, attempt_id: str, span: ReadableSpan) -> None:
    otel_context.attach(otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
    with unobserved():
        await store.add_otel_span(rollout_id, attempt_id, span)


class AgentOpsTracer(OtelTracer):
    """Records what AgentOps' decorators write, where the package is in use, and all that `OtelTracer` does."""

    def __init__(self, *, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True) -> None:
        """Install nothing yet.

        Args:
            agentops_managed: Have AgentOps record without its service, as soon as the program imports it. False leaves
                AgentOps to the program, as does a program that has started it before; its calls of models are recorded
                by us either way.
            instrument_managed: Apply our instrumentation in each worker.
            daemon: Accepted for scripts of the 0.2 release, which ran a local server.
        """
        super().__init__(instrument=instrument_managed)
        self.agentops_managed = agentops_managed
        self.instrument_managed = instrument_managed
        self.daemon = daemon

    def _instrumentations(self) -> Iterator[Instrumentation]:
        yield from super()._instrumentations()
        if not is_installed("agentops"):
            logger.info("AgentOps is not installed; recording with OpenTelemetry alone.")
        elif self.agentops_managed:
            yield agentops_management()

    def get_langchain_handler(self, tags: list[str] | None = None) -> Any:
        """AgentOps' callback handler for LangChain; None, with a warning, where either is not installed.

        With `instrument_managed` LangChain is recorded anyway: then the handler may be passed as ever, and records
        nothing a second time.
        """
        try:
            kind = importlib.import_module("agentops.integration.callbacks.langchain").LangchainCallbackHandler
        except ImportError:
            return super().get_langchain_handler()
        if self.instrument_managed:
            ignored = ("llm", "chain", "agent", "retriever", "chat_model", "retry", "custom_event")
            kind = type(kind.__name__, (kind,), {f"ignore_{what}": True for what in ignored})
        api_key = importlib.import_module("agentops").get_client().config.api_key or "dummy"
        return kind(api_key=api_key, tags=tags or [], auto_session=False)  # one would start AgentOps with its service

    get_langchain_callback_handler = get_langchain_handler
