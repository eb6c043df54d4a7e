"""What is known of one call through the proxy, from its request to the end of its answer.

A record is plain data, so that it can be kept in a journal and read again after a crash: texts and numbers, and the
bytes of the request and of the answer as they were. Spans are made from it afterwards.
"""

import time
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

import orjson

from agentlightning.dialects import DialectName

__all__ = ["CallRecord", "Origin", "Outcome", "TokenIds"]

Outcome = Literal["open", "answered", "failed", "cancelled", "refused"]
"""`cancelled`: the caller left before the end. `refused`: no backend was asked."""
TokenIds = Literal["given", "not given", "not asked"]

_BODIES: Final = ("request", "sent", "response")
_NOT_KEPT: Final = ("asked", "answer", "started_at")


@dataclass(frozen=True)
class Origin:
    """On whose behalf a call is made."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None


@dataclass
class CallRecord:
    """One call."""

    origin: Origin
    dialect: DialectName
    """What the caller speaks."""
    trace_id: str
    span_id: str
    raw_span_id: str
    parent_id: str | None = None
    """Of the caller's own span, if it told us."""
    sequence_id: int = 0
    """0 lets the store number it."""
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    first_part_seconds: float | None = None
    """From the request to the first part of an answer that came as a stream."""
    model: str = ""
    """What was asked for."""
    outcome: Outcome = "open"
    status: int = 0
    """What the caller was told, in HTTP."""
    error: str | None = None
    is_stream: bool = False
    provider: str = ""
    backend: str = ""
    backend_dialect: DialectName | None = None
    """What was spoken to the backend; None if none was asked."""
    version: str | None = None
    """Of the model, by the list of models when the call was sent."""
    tries: int = 0
    waited_seconds: float = 0.0
    token_ids: TokenIds = "not asked"
    replayed_from: str | None = None
    """The span whose answer was given again."""
    request: bytes = b""
    """As the caller sent it."""
    sent: bytes = b""
    """As it went to the backend."""
    response: bytes = b""
    """As the backend sent it; of a call that broke off, what had come until then."""
    asked: Any = field(default=None, repr=False, compare=False)
    """What was sent, read."""
    answer: Any = field(default=None, repr=False, compare=False)
    """The response, read, or put together from the events of a stream."""
    usage: tuple[int, int] | None = None
    """Tokens read and written, where the backend said."""
    started_at: float = field(default_factory=time.perf_counter, compare=False)
    """When the request came, for durations."""

    def to_bytes(self) -> tuple[bytes, bytes, bytes, bytes]:
        """The record as a header and its three bodies; what can be read again from these is left out."""
        header = {name: getattr(self, name) for name in _HEADER}
        header["origin"] = [self.origin.rollout_id, self.origin.attempt_id, self.origin.agent]
        return orjson.dumps(header), self.request, self.sent, self.response

    @classmethod
    def from_bytes(cls, header: bytes, *bodies: bytes) -> "CallRecord":
        known: dict[str, Any] = orjson.loads(header)
        known["origin"] = Origin(*known["origin"])
        known["usage"] = None if known["usage"] is None else tuple(known["usage"])
        known.update(zip(_BODIES, bodies, strict=True))
        return cls(**known)


_HEADER: Final = tuple(part.name for part in fields(CallRecord) if part.name not in (*_BODIES, *_NOT_KEPT))
