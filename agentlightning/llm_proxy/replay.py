"""Answering calls from the record, so that a run can be repeated, or forked at one of its calls.

A call is answered from the record if an identical one was: of an earlier attempt of the same rollout, or of the attempt
that the rollout's metadata names,

    {"replay_of": {"rollout_id": "ro-1", "attempt_id": "at-1", "calls": 3}}

where `calls` says how many calls are taken from there before the model is asked again. Identical are calls that say the
same in the same dialect, whatever the order of their fields. The first of several identical calls gets the first
answer, the second the second; when the record has no more, the model is asked. Calls that were not answered are not
repeated. What an attempt was answered is on its own record, which can be replayed in turn.
"""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import orjson
from typing_extensions import Self

from agentlightning.dialects import DialectName
from agentlightning.dialects.failures import Failure
from agentlightning.dialects.sse import InvalidStream, SseParser
from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.llm_proxy.attempts import Attempts
from agentlightning.llm_proxy.attribution import Refused
from agentlightning.llm_proxy.records import Origin
from agentlightning.llm_proxy.spans import CALL_SPAN, DIALECTS, RAW_SPAN
from agentlightning.store.base import LightningStore
from agentlightning.types import Span

__all__ = ["REPLAY_OF", "RecordedAnswer", "Replays"]

logger = logging.getLogger(__name__)

REPLAY_OF: Final = "replay_of"
"""Key of a rollout's metadata."""
MOST_ATTEMPTS: Final = 1000
"""Whose records are kept; those that called least lately go first."""
_HERE: Final = "agentlightning.proxy"
_DONE: Final = b"[DONE]"


@dataclass
class RecordedAnswer:
    """An answer that was given before, in the form of one that comes from a backend."""

    span_id: str
    sent: bytes
    body: bytes
    dialect: DialectName
    provider: str
    headers: Mapping[str, str]
    backend: str = ""
    """Who gave it."""
    version: str | None = None
    """Of the model that gave it."""
    status: int = 200
    waited_seconds: float = 0.0
    tries: list[Any] = field(default_factory=list)

    async def read(self, limit: int | None = None) -> bytes:
        return self.body

    def use_tokens(self, count: int) -> None:
        """Nothing was used."""

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.body

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


@dataclass
class _Record:
    """What an attempt may be answered from."""

    answers: dict[bytes, deque[RecordedAnswer]]
    most: int | None
    asked: int = 0


class Replays:
    """The records of attempts that run."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._records: dict[tuple[str, str], asyncio.Task[_Record]] = {}

    async def find(
        self, attempts: Attempts, origin: Origin, dialect: DialectName, request: Mapping[str, Any]
    ) -> RecordedAnswer | None:
        """The answer to an identical call; None if there is none, or none left."""
        record = await self._record_of(attempts, origin)
        record.asked += 1
        if record.most is not None and record.asked > record.most:
            return None
        answers = record.answers.get(_digest(dialect, request))
        return answers.popleft() if answers else None

    async def _record_of(self, attempts: Attempts, origin: Origin) -> _Record:
        place = (origin.rollout_id, origin.attempt_id)
        loading = self._records.pop(place, None)
        if loading is None:
            loading = asyncio.create_task(self._load(attempts, origin), name="agl-proxy-replay")
            loading.add_done_callback(lambda loaded: self._forget_failed(place, loaded))
            if len(self._records) >= MOST_ATTEMPTS:
                del self._records[next(iter(self._records))]
        self._records[place] = loading  # at the end of the line
        return await asyncio.shield(loading)

    def _forget_failed(self, place: tuple[str, str], loaded: "asyncio.Task[_Record]") -> None:
        """Have the next call try again; what went wrong is told to those who waited, if they still do."""
        if (loaded.cancelled() or loaded.exception() is not None) and self._records.get(place) is loaded:
            del self._records[place]

    async def _load(self, attempts: Attempts, origin: Origin) -> _Record:
        facts = await attempts.facts(origin)
        if facts.rollout is None:
            return _Record({}, None)
        told = (facts.rollout.metadata or {}).get(REPLAY_OF)
        if told is None:
            return _Record(await self._earlier_attempts(origin), None)
        if not isinstance(told, Mapping) or not isinstance(told.get("rollout_id"), str):
            raise Refused(Failure(400, f"The metadata '{REPLAY_OF}' must name a rollout_id; it is {told!r}.", None))
        most, attempt_id = told.get("calls"), told.get("attempt_id") or "latest"
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise Refused(
                Failure(400, f"'calls' of the metadata '{REPLAY_OF}' must be a number; it is {most!r}.", None)
            )
        try:
            spans = await self._store.query_spans(told["rollout_id"], attempt_id)
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise Refused(
                Failure(400, f"What the metadata '{REPLAY_OF}' names cannot be read: {error}", None)
            ) from error
        return _Record(_answers_in(spans), most)

    async def _earlier_attempts(self, origin: Origin) -> dict[bytes, deque[RecordedAnswer]]:
        """Those of the last attempt before this one that has any."""
        earlier: list[str] = []
        for attempt in await self._store.query_attempts(origin.rollout_id):
            if attempt.attempt_id == origin.attempt_id:
                break
            earlier.append(attempt.attempt_id)
        for attempt_id in reversed(earlier):
            answers = _answers_in(await self._store.query_spans(origin.rollout_id, attempt_id))
            if answers:
                return answers
        return {}


def _answers_in(spans: Iterable[Span]) -> dict[bytes, deque[RecordedAnswer]]:
    ordered = sorted(spans, key=lambda span: (span.sequence_id, span.start_time or 0.0))
    calls = {span.span_id: span for span in ordered if span.name == CALL_SPAN}
    answers: dict[bytes, deque[RecordedAnswer]] = {}
    unreadable: list[Span] = []
    if calls and not any(span.name == RAW_SPAN for span in ordered):
        logger.warning(
            "The %d model calls of attempt '%s' of rollout '%s' were recorded without their bodies, so they are not "
            "replayed; record with LLMProxy(raw_spans=True).",
            *(len(calls), ordered[0].attempt_id, ordered[0].rollout_id),
        )
    for raw in [span for span in ordered if span.name == RAW_SPAN]:
        call = calls.get(raw.parent_id or "")
        if call is not None and call.attributes.get(f"{_HERE}.outcome") == "answered":
            try:
                digest, answer = _recorded(call, raw)
            except (InvalidStream, TypeError, ValueError):
                unreadable.append(raw)
                continue
            answers.setdefault(digest, deque()).append(answer)
    if unreadable:
        first = unreadable[0]
        logger.warning(
            "%d spans of attempt '%s' of rollout '%s' have the names of the proxy's own and cannot be read as calls; "
            "they are not replayed. The first is '%s'.",
            *(len(unreadable), first.attempt_id, first.rollout_id, first.span_id),
        )
    return answers


def _recorded(call: Span, raw: Span) -> tuple[bytes, RecordedAnswer]:
    """A call and its answer; InvalidStream, TypeError or ValueError if the spans hold none, as spans of agents may."""
    sent = str(raw.attributes.get(f"{_HERE}.request_body") or "")
    received = str(raw.attributes.get(f"{_HERE}.received_body") or sent)
    dialect: Any = call.attributes.get(f"{_HERE}.dialect")
    backend_dialect: Any = call.attributes.get(f"{_HERE}.backend_dialect") or dialect
    if dialect not in DIALECTS or backend_dialect not in DIALECTS:
        raise ValueError(f"There is no dialect {dialect!r} or {backend_dialect!r}.")
    version = call.attributes.get(f"{_HERE}.version")
    _object(sent)
    request = _object(received)
    is_stream = request.get("stream") is True
    body = str(raw.attributes.get(f"{_HERE}.response_body") or "").encode()
    for part in [event.data for event in SseParser().feed(body)] if is_stream else [body]:
        if not (is_stream and part.strip() == _DONE):
            _object(part)
    answer = RecordedAnswer(
        span_id=call.span_id,
        sent=sent.encode(),
        body=body,
        dialect=backend_dialect,
        provider=str(call.attributes.get(f"{_HERE}.provider") or ""),
        backend=str(call.attributes.get(f"{_HERE}.backend") or ""),
        version=None if version is None else str(version),
        headers={"content-type": "text/event-stream" if is_stream else "application/json"},
    )
    return _digest(dialect, request), answer


def _object(text: str | bytes) -> dict[str, Any]:
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"This is no JSON object: {text[:80]!r}")
    return value


def _digest(dialect: DialectName, request: Mapping[str, Any]) -> bytes:
    """What identical calls have in common: everything."""
    said = orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
    return dialect.encode() + b":" + hashlib.sha256(said).digest()
