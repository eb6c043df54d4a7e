"""The record of a call through the proxy, the spans it becomes, and their way to the store.

The recorder brings the calls of a proxy to its store, and counts what became of each.

A call is handed over before the last byte of its answer, which waits until the store has the call: so what the agent
does next has a higher sequence id, and whoever reads a finished rollout finds its calls. A store that is away or slow
costs a caller a moment once; then answers go out at once, and the calls wait: as many as memory is given for. A call
that could not be stored is counted for its attempt, with the reason.

A record is plain data: texts and numbers, and the bytes of the request and of the response as they were. Spans have
names that scripts look for: `litellm_request` holds the messages, settings, token ids and usage as tracers write them,
`raw_gen_ai_request` beneath it the bodies as they were sent and received. Both have the sequence id of their call.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from agentlightning.dialects import Dialect
from agentlightning.dialects.failures import read_json
from agentlightning.dialects.sse import SseParser
from agentlightning.errors import PayloadTooLarge
from agentlightning.semconv import (
    CALL_SPAN,
    IS_CUT,
    PROXY,
    RAW_SPAN,
    SPAN_AGENT,
    TIME_TO_FIRST_TOKEN,
    VERSION_ATTRIBUTE,
)
from agentlightning.store.base import LightningStore
from agentlightning.tracer.shipper import PendingItem, Shipper, ShipperLimits
from agentlightning.types import OtelResource, Span, TraceStatus
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)


Outcome = Literal["open", "answered", "failed", "cancelled", "refused"]
"""`cancelled`: the caller left before the end. `refused`: no backend was called."""

_UNSET: Final = TraceStatus(status_code="UNSET")
_RESOURCE: Final = OtelResource(attributes={"service.name": "agentlightning.llm_proxy"}, schema_url="")


@dataclass(frozen=True)
class Origin:
    """On whose behalf a call is made."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None

    @property
    def attempt(self) -> "Origin":
        """The same, whichever agent calls."""
        return self if self.agent is None else Origin(self.rollout_id, self.attempt_id)


@dataclass
class CallRecord:
    """One call."""

    origin: Origin
    dialect: Dialect
    """The caller's."""
    trace_id: str
    span_id: str
    raw_span_id: str
    parent_id: str | None = None
    """The caller's own span, from its header `traceparent`."""
    sequence_id: int = 0
    """0 lets the store number it."""
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    first_part_seconds: float | None = None
    """From the request to the first part of a streamed response."""
    model: str = ""
    """The requested name."""
    outcome: Outcome = "open"
    status: int = 0
    """The HTTP status that the caller got."""
    error: str | None = None
    is_stream: bool = False
    provider: str = ""
    backend: str = ""
    backend_dialect: Dialect | None = None
    """None if no backend was called."""
    version: str | None = None
    """Version of the model, by the model list when the call was sent."""
    tries: int = 0
    waited_seconds: float = 0.0
    token_ids: Literal["given", "not given", "not asked"] = "not asked"
    replayed_from: str | None = None
    """The span whose response was given again."""
    request: bytes = b""
    """As the caller sent it."""
    sent: bytes = b""
    """As it went to the backend; empty if that is the request."""
    response: bytes = b""
    """As the backend sent it; of a call that broke off, what had come until then."""
    sent_json: Any = field(default=None, repr=False, compare=False)
    answer: Any = field(default=None, repr=False, compare=False)
    """The response as JSON, put together from the events of a stream."""
    usage: tuple[int, int] | None = None
    """Prompt and completion tokens, where the backend said."""
    started_at: float = field(default_factory=time.perf_counter, compare=False)
    """When the request came, for durations."""


def spans_of(record: CallRecord, *, with_raw: bool = False) -> list[Span]:
    """The span of a call and, on request, that of its bodies."""
    answer = _answer_of(record)
    spans = [_span(record, CALL_SPAN, record.span_id, record.parent_id, _call_attributes(record, answer))]
    if with_raw:
        spans.append(_span(record, RAW_SPAN, record.raw_span_id, record.span_id, _raw_attributes(record, answer)))
    return spans


def _answer_of(record: CallRecord) -> Mapping[str, object]:
    """The whole answer; empty for a call that failed before it had one."""
    if record.answer is None and record.response and (record.is_stream or record.outcome == "answered"):
        assembler = (record.backend_dialect or record.dialect).assembler()
        if not record.is_stream or record.response.lstrip().startswith(b"{"):
            record.answer = read_json(record.response)
        elif assembler is not None:
            for event in SseParser().feed(record.response):
                chunk = read_json(event.data)
                if isinstance(chunk, Mapping):
                    assembler.add(chunk)
            record.answer = assembler.response()
    return record.answer if isinstance(record.answer, Mapping) else {}


def _call_attributes(record: CallRecord, answer: Mapping[str, object]) -> dict[str, Any]:
    if record.sent_json is None:
        record.sent_json = read_json(record.sent or record.request)
    dialect = record.backend_dialect or record.dialect
    attributes: dict[str, Any] = {}
    # A call of a shape we do not know is still a call.
    with log_failures(logger, "A call of model '%s' could not be read; its span says little of it.", record.model):
        attributes.update(dialect.request_attributes(record.sent_json if isinstance(record.sent_json, Mapping) else {}))
        if answer:
            attributes.update(dialect.response_attributes(answer))
    if record.version is not None:
        attributes.setdefault(VERSION_ATTRIBUTE, record.version)
    if record.first_part_seconds is not None:
        attributes[TIME_TO_FIRST_TOKEN] = record.first_part_seconds
    if record.outcome == "cancelled":
        attributes[IS_CUT] = True
    if record.origin.agent is not None:
        attributes[SPAN_AGENT] = record.origin.agent
    own: dict[str, Any] = {
        "dialect": record.dialect.name,
        "requested_model": record.model,
        "outcome": record.outcome,
        "http_status": record.status,
        "token_ids": record.token_ids,
        "tries": record.tries,
    }
    for name in ("backend", "provider", "version", "replayed_from", "waited_seconds"):
        if value := getattr(record, name):
            own[name] = value
    if record.backend_dialect is not None and record.backend_dialect is not record.dialect:
        own["backend_dialect"] = record.backend_dialect.name
    return attributes | {f"{PROXY}.{name}": value for name, value in own.items()}


def _raw_attributes(record: CallRecord, answer: Mapping[str, object]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    if record.outcome in ("answered", "cancelled"):
        for name in ("id", "model", "prompt_token_ids", "choices"):
            value = answer.get(name)
            if value is not None and value != []:
                shown = value if isinstance(value, str) else orjson.dumps(value).decode()
                raw[f"llm.{record.provider or 'none'}.{name}"] = shown
    bodies = {"request_body": record.sent or record.request, "response_body": record.response}
    if record.sent and record.sent != record.request:
        bodies["received_body"] = record.request
    # Bytes that are not UTF-8 are shown escaped: a span holds text.
    texts = {name: body.decode("utf-8", "backslashreplace") for name, body in bodies.items()}
    return raw | {f"{PROXY}.{name}": text for name, text in texts.items()}


def _span(record: CallRecord, name: str, span_id: str, parent_id: str | None, attributes: dict[str, Any]) -> Span:
    is_error = record.outcome in ("failed", "refused")
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=record.origin.rollout_id,
        attempt_id=record.origin.attempt_id,
        sequence_id=record.sequence_id,
        name=name,
        trace_id=record.trace_id,
        span_id=span_id,
        parent_id=parent_id,
        start_time=record.started,
        end_time=record.ended,
        resource=_RESOURCE,
        status=TraceStatus(status_code="ERROR", description=record.error) if is_error else _UNSET,
    )


# ---------------------------------------------------------------------- recorder


CALL_LIMITS: Final = ShipperLimits(
    queued_bytes=256 * 1024**2, batch_items=100, batch_bytes=8 * 1024**2, linger_seconds=0.0, patience_seconds=3.0
)
CLOSE_SECONDS: Final = 10.0
MOST_ATTEMPTS: Final = 10_000
"""Whose calls are counted; idle ones are forgotten first."""
MOST_REASONS: Final = 16
"""Remembered for an attempt, since callers choose the ids that stand in them."""


@dataclass(slots=True)
class CallCounts:
    """The calls of one attempt, or of all."""

    in_flight: int = 0
    waiting: int = 0
    """Finished, and not stored yet."""
    stored: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """By reason."""

    def lose(self, reason: str) -> None:
        self.waiting -= 1
        self.lost[reason if reason in self.lost or len(self.lost) < MOST_REASONS else "other reasons"] += 1


class PendingCall(PendingItem):
    """One finished call."""

    def __init__(self, recorder: "Recorder", record: CallRecord) -> None:
        super().__init__(len(record.request) + len(record.sent) + len(record.response))
        self.record = record
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it is settled."""
        self.is_stored = False
        self.with_raw = recorder.raw_spans
        self._recorder = recorder

    @property
    def owner(self) -> Origin:
        return self.record.origin

    @property
    def ended(self) -> float:
        return self.record.ended

    def make_spans(self) -> Sequence[Span]:
        return spans_of(self.record, with_raw=self.with_raw)

    def store(self, stored: Sequence[Span | None]) -> None:
        self.is_stored = True
        self._settle()
        self._recorder.note_stored(self.record)

    def lose(self, reason: str, error: Exception | None = None) -> None:
        if self.is_settled:
            return
        self._settle()
        self._recorder.note_lost(self.record, reason if error is None else f"{type(error).__name__}: {error}")

    def _settle(self) -> None:
        self.is_settled = True
        if not self.done.done():
            self.done.set_result(None)


class _CallShipper(Shipper):
    """Numbers calls itself if they have two spans, which share a number; drops the second if it is too large."""

    def __init__(self, recorder: "Recorder", limits: ShipperLimits) -> None:
        super().__init__(recorder.store, limits)
        self._recorder = recorder

    async def _store(self, items: Sequence[PendingItem]) -> None:
        if self._recorder.raw_spans:
            fresh = [item.record for item in items if isinstance(item, PendingCall) and not item.record.sequence_id]
            owners = [(record.origin.rollout_id, record.origin.attempt_id) for record in fresh]
            for record, number in zip(fresh, await self.store.get_many_span_sequence_ids(owners), strict=True):
                record.sequence_id = number
        await super()._store(items)

    async def _sort_out(self, items: Sequence[PendingItem], error: Exception) -> None:
        call = items[0]
        if len(items) > 1 or not (
            isinstance(call, PendingCall) and call.with_raw and isinstance(error, PayloadTooLarge)
        ):
            await super()._sort_out(items, error)
            return
        logger.warning("A model call of %s is recorded without its raw span: %s", call.record.origin, error)
        call.with_raw = False
        await self.ship(items)

    def _note_progress(self) -> None:
        super()._note_progress()
        self._recorder.note_progress()


class Recorder:
    """Records the calls of one proxy. Lives in the loop that serves; used from there only."""

    def __init__(
        self,
        store: LightningStore,
        limits: ShipperLimits = CALL_LIMITS,
        *,
        raw_spans: bool = False,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.store = store
        self.raw_spans = raw_spans
        self.totals = CallCounts()
        """The calls of all attempts."""
        self.unattributed = 0
        """Calls that were served for no rollout, and are recorded nowhere."""
        self._close_seconds = close_seconds
        self._shipper = _CallShipper(self, limits)
        self._counts: dict[Origin, CallCounts] = {}
        self._progress = asyncio.Event()  # set, and replaced, when something was settled

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Store calls while the block lasts, and at its end what is left."""
        shipping = asyncio.create_task(self._shipper.run(), name="agl-proxy-spans")
        try:
            yield
        finally:
            is_complete = await self.flush(timeout=self._close_seconds)
            shipping.cancel()
            await asyncio.gather(shipping, return_exceptions=True)
            if not is_complete:
                for call in self._shipper.outstanding():
                    call.lose("the proxy stopped before the store could be reached")
            if lost := sum(self.totals.lost.values()):
                logger.error("The spans of %d model calls are lost: the store did not take them.", lost)

    # ------------------------------------------------------------------ calls

    def begin(self, origin: Origin) -> None:
        """A call has come in."""
        for counts in self._counts_of(origin):
            counts.in_flight += 1

    def finish(self, record: CallRecord) -> PendingCall:
        """A call is over."""
        record.ended = time.time()
        for counts in self._counts_of(record.origin):
            counts.in_flight -= 1
            counts.waiting += 1
        call = PendingCall(self, record)
        if not self._shipper.has_room:
            call.lose("too many calls wait for the store")
            self.note_progress()
            return call
        if self._shipper.is_stalled:
            record.sent_json = record.answer = None  # it will wait, and takes less memory unread
        self._shipper.append(call)
        return call

    @property
    def will_record(self) -> bool:
        """Whether a call that begins now will be recorded, as far as can be known."""
        return not self._shipper.is_stalled

    async def wait_stored(self, call: PendingCall | None) -> bool:
        """Wait until a call is stored; False if it is of no rollout, lost, or still waits after a moment."""
        if call is None:
            return False
        if not call.is_settled and not self._shipper.is_stalled:
            await asyncio.wait([call.done], timeout=self._shipper.limits.patience_seconds)
            if not call.is_settled:
                self._shipper.is_stalled = True
        return call.is_stored

    async def flush(self, origin: Origin | None = None, *, timeout: float = 10.0, grace: float = 0.5) -> bool:
        """Wait until the finished calls of an attempt, or all, are settled; False if that took too long.

        Args:
            grace: How long calls that are still being answered are waited for.
        """
        loop = asyncio.get_running_loop()
        deadline, grace_deadline = loop.time() + timeout, loop.time() + min(grace, timeout)
        while True:
            counts = self.totals if origin is None else self.counts_of(origin)
            left = (deadline if counts.waiting else grace_deadline) - loop.time()
            if left <= 0 or not (counts.waiting or counts.in_flight):
                return not counts.waiting
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._progress.wait(), left)

    # ------------------------------------------------------------------ what became of calls

    def counts_of(self, origin: Origin) -> CallCounts:
        """The calls of one attempt; zero, if nothing is known of it."""
        return self._counts.get(origin.attempt) or CallCounts()

    def _counts_of(self, origin: Origin) -> tuple[CallCounts, CallCounts]:
        """The counts of an attempt, which are kept from now on, and of all."""
        origin = origin.attempt
        counts = self._counts.get(origin)
        if counts is None:
            if len(self._counts) >= MOST_ATTEMPTS:
                # A tenth at once, so that not every new attempt has to look for one to forget.
                idle = [key for key, known in self._counts.items() if not (known.in_flight or known.waiting)]
                for key in idle[: MOST_ATTEMPTS // 10]:
                    del self._counts[key]
            counts = self._counts[origin] = CallCounts()
        return counts, self.totals

    def note_stored(self, record: CallRecord) -> None:
        for counts in self._counts_of(record.origin):
            counts.waiting -= 1
            counts.stored += 1

    def note_lost(self, record: CallRecord, reason: str) -> None:
        counts, totals = self._counts_of(record.origin)
        if not counts.lost:
            logger.warning(
                "A model call of rollout '%s', attempt '%s', is not recorded (%s); further ones are counted only.",
                *(record.origin.rollout_id, record.origin.attempt_id, reason),
            )
        counts.lose(reason)
        totals.lose(reason.partition(":")[0])  # the kind of reason, without what the caller chose

    def note_progress(self) -> None:
        """Something was settled: wake those who wait for it."""
        self._progress.set()
        self._progress = asyncio.Event()
