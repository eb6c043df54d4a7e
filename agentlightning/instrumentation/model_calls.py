"""ModelCall: one call of a model becomes one span, from its request to the end of its answer.

Several layers may see the same call: a framework, a client library, an SDK. The innermost makes the span, because it
has the exact answer; those above open a `CallWatch` if they need to know whether anyone below did.
"""

import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry.trace import SpanKind
from typing_extensions import Self

from agentlightning.instrumentation.dialects import Assembler, Dialect
from agentlightning.instrumentation.spans import Step

__all__ = ["WATCH", "CallWatch", "ModelCall"]

logger = logging.getLogger(__name__)

TIME_TO_FIRST_TOKEN: Final = "gen_ai.streaming.time_to_first_token"
"""Seconds from the request to the first part of the answer."""
IS_CUT: Final = "agentlightning.response.is_cut"
"""The stream was left before its end."""

WATCH: ContextVar["CallWatch | None"] = ContextVar("agentlightning_call_watch", default=None)


class CallWatch:
    """Notices whether a model call is recorded in its context, or in one that inherited from it, while it is open."""

    def __init__(self) -> None:
        self.has_seen = False
        self._is_open = False
        self._outer: CallWatch | None = None

    def open(self) -> Self:
        self._outer = WATCH.get()
        self._is_open = True
        WATCH.set(self)
        return self

    def close(self) -> None:
        """Harmless the second time, and in another context than it was opened in."""
        self._is_open = False
        if WATCH.get() is self:
            WATCH.set(self._outer)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @staticmethod
    def notice() -> None:
        """A call is recorded here."""
        watch = WATCH.get()
        while watch is not None:
            if watch._is_open:
                watch.has_seen = True
            watch = watch._outer


class ModelCall:
    """The span of one call. Nothing that goes wrong here reaches the caller of the model."""

    def __init__(
        self, dialect: Dialect, body: Mapping[str, Any], *, attributes: Mapping[str, Any] | None = None
    ) -> None:
        """Begin.

        Args:
            body: The request as JSON.
            attributes: To be written besides what the request says; they win.
        """
        CallWatch.notice()
        self._dialect = dialect
        self._began = time.perf_counter()
        self._assembler: Assembler | None = None
        self._first_token_seconds: float | None = None
        self._is_ended = False
        self._known: dict[str, Any] = {}  # written when the call ends, with the answer: twice would cost more
        try:
            self._known.update(dialect.request_attributes(body))
        except Exception:  # a request of a shape we do not know is still a call
            logger.exception("A request to a model could not be read; its span says nothing of it.")
        self._known.update(attributes or {})
        self.step = Step(dialect.span_name, kind=SpanKind.CLIENT)

    def add_event(self, event: Mapping[str, Any]) -> None:
        """One event of a stream."""
        if self._is_ended or self._dialect.assembler is None:
            return
        try:
            if self._assembler is None:
                self._assembler = self._dialect.assembler()
            if self._assembler.add(event) and self._first_token_seconds is None:
                self._first_token_seconds = time.perf_counter() - self._began
        except Exception:  # an event of a shape we do not know
            logger.exception("An event of a model's answer could not be read.")

    def finish(self, response: Any = None, *, error: BaseException | str | None = None, is_cut: bool = False) -> None:
        """End with a response or, if it came as a stream, with what its events gave; harmless the second time.

        Args:
            is_cut: The caller stopped reading before the end.
        """
        if self._is_ended:
            return
        self._is_ended = True
        try:
            self._known.update(self._answer(response, is_cut=is_cut))
        except Exception:
            logger.exception("A model's answer could not be read; its span says nothing of it.")
        self.step.set(self._known)
        self.step.end(error=error)

    def _answer(self, response: Any, *, is_cut: bool) -> dict[str, Any]:
        if response is None and self._assembler is not None:
            response = self._assembler.response()
        attributes = {} if response is None else self._dialect.response_attributes(response)
        if self._first_token_seconds is not None:
            attributes[TIME_TO_FIRST_TOKEN] = self._first_token_seconds
        if is_cut:
            attributes[IS_CUT] = True
        return attributes
