"""Spans of a LiteLLM proxy on their way to the store.

For those who run LiteLLM's own proxy, with its OpenTelemetry callback, behind `x-rollout-id`, `x-attempt-id` and
`x-sequence-id` headers: LiteLLM notes the headers of a request on its spans. Our own gateway does not need this.
"""

import ast
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agentlightning.errors import StoreError
from agentlightning.llm_proxy.proxy import get_active_llm_proxy
from agentlightning.store.base import LightningStore
from agentlightning.utils.json_values import JsonMapping, JsonObject
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.utils.once import fork_handlers

logger = logging.getLogger(__name__)

HEADERS_ATTRIBUTE: Final = "metadata.requester_custom_headers"
_THREAD: Final = "agl-llm-proxy-exporter"


class LightningSpanExporter(SpanExporter):
    """Stores the spans of one call together, under one sequence id, once the call's root span has come.

    Args:
        _store: Where to; by default that of the active LLM proxy.
    """

    def __init__(self, _store: LightningStore | None = None) -> None:
        self._store = _store
        self._buffer: list[ReadableSpan] = []
        self._exporting = threading.Lock()  # protects the buffer: spans of many threads end here
        self._loop_thread = LoopThread(_THREAD)
        fork_handlers().add(self, LightningSpanExporter.leave_to_parent)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take spans in; FAILURE if those of a whole call could not be stored."""
        with self._exporting:
            self._buffer.extend(spans)
            calls = [self._pop_subtrees(root) for root in list(self._get_root_span_ids())]
        result = SpanExportResult.SUCCESS
        for call in calls:
            try:
                place = _place_of(call)
                store = self._store or get_active_llm_proxy().get_store()
                if place is not None and store is None:
                    logger.warning("The active LLM proxy has no store, so %d spans are dropped.", len(call))
                elif place is not None and store is not None:
                    self._loop_thread.run(_add(store, place, call))
            except (StoreError, ValueError, OSError) as error:
                logger.error("The spans of a model call could not be stored: %s", error)
                result = SpanExportResult.FAILURE
        return result

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here but spans whose root has not come."""
        return True

    def shutdown(self) -> None:
        self._loop_thread.stop()

    def leave_to_parent(self) -> None:
        """Called in a forked child: the spans in the buffer are stored by the parent."""
        self._buffer = []
        self._exporting = threading.Lock()
        self._loop_thread = LoopThread(_THREAD)

    def _get_root_span_ids(self) -> Iterator[int]:
        for span in self._buffer:
            if span.parent is None and span.context is not None:
                yield span.context.span_id

    def _get_subtrees(self, root_span_id: int) -> Iterator[int]:
        """The ids of a span and of everything below it that has come."""
        children: dict[int, list[int]] = {}
        for span in self._buffer:
            if span.parent is not None and span.context is not None:
                children.setdefault(span.parent.span_id, []).append(span.context.span_id)
        waiting = [root_span_id]
        while waiting:
            span_id = waiting.pop()
            yield span_id
            waiting.extend(reversed(children.pop(span_id, [])))

    def _pop_subtrees(self, root_span_id: int) -> list[ReadableSpan]:
        """Take a span and everything below it out of the buffer."""
        ids = set(self._get_subtrees(root_span_id))
        taken = [span for span in self._buffer if span.context is not None and span.context.span_id in ids]
        self._buffer = [span for span in self._buffer if span.context is None or span.context.span_id not in ids]
        return taken


async def _add(store: LightningStore, place: JsonMapping, call: Sequence[ReadableSpan]) -> None:
    for span in call:
        await store.add_otel_span(**place, readable_span=span)


def _place_of(call: Sequence[ReadableSpan]) -> JsonMapping | None:
    """Where the headers on a call's spans say it belongs; None, and a line in the log, if they do not."""
    headers: JsonObject = {}
    for span in call:
        headers.update(_headers_on(span))
    rollout_id, attempt_id, number = (headers.get(f"x-{name}-id") for name in ("rollout", "attempt", "sequence"))
    if not (isinstance(rollout_id, str) and isinstance(attempt_id, str) and isinstance(number, str)):
        logger.warning(
            "%d spans of a model call name no rollout, attempt and sequence id; they are dropped.", len(call)
        )
        return None
    if not number.isascii() or not number.isdigit():
        logger.warning("A model call has the sequence id %r, which is no number; its spans are dropped.", number)
        return None
    return {"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": int(number)}


def _headers_on(span: ReadableSpan) -> JsonMapping:
    """LiteLLM writes them as the text of a dictionary."""
    text = (span.attributes or {}).get(HEADERS_ATTRIBUTE)
    if not isinstance(text, str) or not text:
        return {}
    try:
        headers = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        headers = None
    if not isinstance(headers, dict):
        logger.warning("The headers that a span of LiteLLM notes cannot be read: %.100r", text)
        return {}
    return headers
