"""Answering calls from the record, so that a run can be repeated, or forked at one of its calls.

A call is answered from the record if an identical one was: of an earlier attempt of the same rollout, or of the attempt
that the rollout's metadata names,

    {"replay_of": {"rollout_id": "ro-1", "attempt_id": "at-1", "calls": 3}}

where `calls` says how many calls are taken from there before the model is called again. Identical are calls with the
same content in the same dialect, whatever the order of their fields. The first of several identical calls gets the
first answer, the second the second; when the record has no more, the model is called. Calls that were not answered are
not repeated. What an attempt got is on its own record, which can be replayed in turn.
"""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from agentlightning.dialects import DIALECTS, Dialect, TranslatedDialect
from agentlightning.dialects.failures import Failure
from agentlightning.dialects.sse import InvalidStream, SseParser
from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.llm_proxy.attribution import Attempts, Refused
from agentlightning.llm_proxy.recorder import Origin
from agentlightning.semconv import CALL_SPAN, PROXY, RAW_SPAN
from agentlightning.store.base import LightningStore
from agentlightning.types import Span

logger = logging.getLogger(__name__)

REPLAY_OF: Final = "replay_of"
"""Key of a rollout's metadata."""
MOST_ATTEMPTS: Final = 1000
"""Whose records are kept; those that called least lately go first."""


@dataclass
class RecordedResponse:
    """A response that was given before, in the form of one that comes from a backend."""

    span_id: str
    sent: bytes
    body: bytes
    dialect: Dialect
    provider: str
    headers: Mapping[str, str]
    backend: str = ""
    version: str | None = None
    """Of the model that gave it."""
    status: int = 200

    async def read(self, limit: int | None = None) -> bytes:
        return self.body

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.body


_Responses = dict[bytes, deque[RecordedResponse]]
"""By the digest of the call."""


@dataclass
class _Record:
    """What an attempt may be answered from."""

    responses: _Responses
    most_calls: int | None = None
    calls: int = 0


class Replays:
    """The records of attempts that run."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._records: dict[Origin, asyncio.Task[_Record]] = {}

    async def find(
        self, attempts: Attempts, origin: Origin, dialect: Dialect, request: Mapping[str, object]
    ) -> RecordedResponse | None:
        """The response to an identical call; None if there is none, or none left."""
        record = await self._record_of(attempts, origin.attempt)
        record.calls += 1
        if record.most_calls is not None and record.calls > record.most_calls:
            return None
        responses = record.responses.get(_digest(dialect, request))
        return responses.popleft() if responses else None

    async def _record_of(self, attempts: Attempts, attempt: Origin) -> _Record:
        loading = self._records.pop(attempt, None)
        if loading is None:
            loading = asyncio.create_task(self._load(attempts, attempt), name="agl-proxy-replay")
            loading.add_done_callback(lambda loaded: self._forget_failed(attempt, loaded))
            if len(self._records) >= MOST_ATTEMPTS:
                del self._records[next(iter(self._records))]
        self._records[attempt] = loading  # the newest
        return await asyncio.shield(loading)

    def _forget_failed(self, attempt: Origin, loaded: "asyncio.Task[_Record]") -> None:
        """Have the next call try again; those who wait get the error."""
        if (loaded.cancelled() or loaded.exception() is not None) and self._records.get(attempt) is loaded:
            del self._records[attempt]

    async def _load(self, attempts: Attempts, attempt: Origin) -> _Record:
        facts = await attempts.facts(attempt)
        if facts.rollout is None:
            return _Record({})
        source = (facts.rollout.metadata or {}).get(REPLAY_OF)
        if source is None:
            return _Record(await self._of_earlier_attempt(attempt))
        if not isinstance(source, Mapping) or not isinstance(source.get("rollout_id"), str):
            raise _refused(f"The metadata '{REPLAY_OF}' must name a rollout_id; it is {source!r}.")
        most = source.get("calls")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise _refused(f"'calls' of the metadata '{REPLAY_OF}' must be a number; it is {most!r}.")
        try:
            spans = await self._store.query_spans(source["rollout_id"], source.get("attempt_id") or "latest")
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise _refused(f"What the metadata '{REPLAY_OF}' names cannot be read: {error}") from error
        return _Record(_responses_in(spans), most)

    async def _of_earlier_attempt(self, attempt: Origin) -> _Responses:
        """Those of the last attempt before this one that has any."""
        earlier: list[str] = []
        for one in await self._store.query_attempts(attempt.rollout_id):
            if one.attempt_id == attempt.attempt_id:
                break
            earlier.append(one.attempt_id)
        for attempt_id in reversed(earlier):
            responses = _responses_in(await self._store.query_spans(attempt.rollout_id, attempt_id))
            if responses:
                return responses
        return {}


def _responses_in(spans: Iterable[Span]) -> _Responses:
    ordered = sorted(spans, key=lambda span: (span.sequence_id, span.start_time or 0.0))
    calls = {span.span_id: span for span in ordered if span.name == CALL_SPAN}
    raws = [span for span in ordered if span.name == RAW_SPAN]
    if calls and not raws:
        logger.warning(
            "The %d model calls of attempt '%s' of rollout '%s' were recorded without their bodies, so they are not "
            "replayed; record with LLMProxy(raw_spans=True).",
            *(len(calls), ordered[0].attempt_id, ordered[0].rollout_id),
        )
    responses: _Responses = {}
    unreadable: list[Span] = []
    for raw in raws:
        call = calls.get(raw.parent_id or "")
        if call is None or call.attributes.get(f"{PROXY}.outcome") != "answered":
            continue
        try:
            digest, response = _recorded(call, raw)
        except (InvalidStream, TypeError, ValueError):
            unreadable.append(raw)
        else:
            responses.setdefault(digest, deque()).append(response)
    if unreadable:
        first = unreadable[0]
        logger.warning(
            "%d spans of attempt '%s' of rollout '%s' have the names of the proxy's own and cannot be read as calls; "
            "they are not replayed. The first is '%s'.",
            *(len(unreadable), first.attempt_id, first.rollout_id, first.span_id),
        )
    return responses


def _recorded(call: Span, raw: Span) -> tuple[bytes, RecordedResponse]:
    """A call and its response; InvalidStream, TypeError or ValueError if the spans hold none, as an agent's own may."""
    attributes = {name: value for span in (call, raw) for name, value in span.attributes.items()}

    def text(name: str) -> str:
        return str(attributes.get(f"{PROXY}.{name}") or "")

    sent = text("request_body")
    dialect = DIALECTS.get(text("dialect"))
    backend_dialect = DIALECTS.get(text("backend_dialect")) if text("backend_dialect") else dialect
    is_translated = isinstance(dialect, TranslatedDialect) and isinstance(backend_dialect, TranslatedDialect)
    if dialect is None or backend_dialect is None or not (dialect is backend_dialect or is_translated):
        raise ValueError(f"A {text('dialect')!r} call has no answer in {text('backend_dialect')!r}.")
    _object(sent)
    request = _object(text("received_body") or sent)
    is_stream = request.get("stream") is True
    body = text("response_body").encode()
    for part in [event.data for event in SseParser().feed(body)] if is_stream else [body]:
        if not (is_stream and part.strip() == b"[DONE]"):
            _object(part)
    response = RecordedResponse(
        span_id=call.span_id,
        sent=sent.encode(),
        body=body,
        dialect=backend_dialect,
        provider=text("provider"),
        backend=text("backend"),
        version=text("version") or None,
        headers={"content-type": "text/event-stream" if is_stream else "application/json"},
    )
    return _digest(dialect, request), response


def _object(body: str | bytes) -> dict[str, object]:
    value = orjson.loads(body)
    if not isinstance(value, dict):
        raise ValueError(f"This is no JSON object: {body[:80]!r}")
    return value


def _digest(dialect: Dialect, request: Mapping[str, object]) -> bytes:
    """What identical calls have in common: everything."""
    content = orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
    return dialect.name.encode() + b":" + hashlib.sha256(content).digest()


def _refused(message: str) -> Refused:
    return Refused(Failure(400, message, None))
