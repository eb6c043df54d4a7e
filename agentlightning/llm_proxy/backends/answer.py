"""What a backend answers: a status and headers at once, and a body that is handed on as it arrives.

An answer holds a place at its backend and a connection until its body has come to an end or it is closed; whoever
gets one closes it, whatever happens. What becomes of the body is told to the backend's breaker.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Protocol

from agentlightning.llm_proxy.backends.backend import Backend
from agentlightning.llm_proxy.backends.errors import BackendBroken, Try
from agentlightning.llm_proxy.backends.lane import Lane

__all__ = ["Answer", "Body", "Reply"]

_SERVER_ERRORS: Final = 500


class Body(Protocol):
    """The bytes of an answer, wherever they come from."""

    async def next(self) -> bytes:
        """The bytes that came since the last time, at least one; b"" at the end. Raises BackendBroken."""
        ...

    async def close(self) -> None:
        """Give up what is left of it, and the connection with it."""
        ...


class Reply:
    """The beginning of an answer, as the sender found it."""

    __slots__ = ("body", "headers", "reason", "status")

    def __init__(self, status: int, headers: Mapping[str, str], body: Body, *, reason: str = "") -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.reason = reason


class Answer:
    """The answer to one ask."""

    __slots__ = ("_body", "_is_over", "_lane", "backend", "headers", "status", "tries", "waited_seconds")

    def __init__(
        self, reply: Reply, lane: Lane, *, backend: Backend, tries: Sequence[Try], waited_seconds: float
    ) -> None:
        self.status = reply.status
        self.headers = reply.headers
        """Names in lower case."""
        self.backend = backend
        """Who answered, under the name that was asked for."""
        self.tries = list(tries)
        """Every try of the call, first to last; the last is this answer."""
        self.waited_seconds = waited_seconds
        """Time spent in line for a backend."""
        self._body = reply.body
        self._lane = lane
        self._is_over = False

    async def read(self, limit: int | None = None) -> bytes:
        """The whole body, or what has not been taken of it yet; above `limit` bytes it is a BackendBroken."""
        parts: list[bytes] = []
        size = 0
        while part := await self._next():
            parts.append(part)
            size += len(part)
            if limit is not None and size > limit:
                await self.close()
                raise BackendBroken(
                    f"Backend '{self.backend.name}' answered with more than {limit} bytes, which is the limit.",
                    tries=self.tries,
                )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, never empty parts; BackendBroken if it does not come to its end.

        Bytes that come at the very moment of a break may be lost with it.
        """
        while part := await self._next():
            yield part

    def use_tokens(self, count: int) -> None:
        """Tell what the call used up, for backends with a limit of tokens per minute."""
        self._lane.gate.use_tokens(count)

    async def close(self) -> None:
        """Let go of the place and the connection; a body that was left half-read takes its connection with it."""
        if not self._is_over:
            self._end()
            await self._body.close()

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _next(self) -> bytes:
        if self._is_over:
            return b""
        try:
            part = await self._body.next()
        except BackendBroken as error:
            error.tries = [*self.tries]
            if not self._is_over:  # else it was closed under the reader
                self._lane.failed(str(error), curable=False)
                self._end()
            raise
        if not part and not self._is_over:
            if self.status < _SERVER_ERRORS:
                self._lane.breaker.completed()
            self._end()
        return part

    def _end(self) -> None:
        self._is_over = True
        self._lane.gate.leave()
