"""One HTTP request on the bare ASGI interface: headers, query, and a body that is limited in size and time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

from agentlightning.asgi.compression import too_large
from agentlightning.errors import AgentLightningError, InvalidValue
from agentlightning.utils.deadline import within

ResultT = TypeVar("ResultT")
Message = MutableMapping[str, Any]
ConnectionScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

IDLE_SECONDS: Final = 60.0
"""How long a caller may send nothing before its body is complete."""


class RequestTimeout(AgentLightningError, TimeoutError):
    """The body did not arrive in time."""

    http_status = 408


class Disconnected(AgentLightningError, ConnectionError):
    """The caller left; there is nobody to answer."""

    http_status = 400


@dataclass(frozen=True)
class Request:
    """A request, or the handshake of a WebSocket, as the ASGI server hands it over."""

    scope: ConnectionScope
    receive: Receive

    def header(self, name: bytes) -> str:
        """A header's value by its name in lower case; empty if it was not sent."""
        for key, value in self.scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return ""

    @property
    def raw_path(self) -> bytes:
        """The path as it was sent, still escaped."""
        raw: bytes | None = self.scope.get("raw_path")
        return raw if raw is not None else self.scope["path"].encode()

    @property
    def query(self) -> list[tuple[str, str]]:
        text = self.scope["query_string"]
        return parse_qsl(text.decode("latin-1"), keep_blank_values=True) if text else []

    @property
    def is_compressed(self) -> bool:
        """Whether the body is in gzip; `InvalidValue` if it is in another encoding."""
        encoding = self.header(b"content-encoding").strip().lower()
        if encoding not in ("", "identity", "gzip"):
            raise InvalidValue(f"Content-Encoding is '{encoding}'; send gzip, or nothing.")
        return encoding == "gzip"

    async def body(
        self,
        *,
        max_bytes: int,
        timeout_seconds: float | None = None,
        check: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """The whole body as it was sent; `Bodies.read` also decompresses it, and bounds the memory of all.

        Args:
            max_bytes: The limit of the body.
            check: Called with each part as it comes; what it raises refuses the body.
            timeout_seconds: Within which all of it must arrive; each part must within `IDLE_SECONDS`.
        """
        announced = self.header(b"content-length")
        if announced.isdigit() and int(announced) > max_bytes:
            raise too_large(max_bytes)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        parts: list[bytes] = []
        size, is_complete = 0, False
        while not is_complete:
            left = IDLE_SECONDS if deadline is None else min(IDLE_SECONDS, deadline - time.monotonic())
            try:
                message = await within(left, self.receive())
            except RequestTimeout:
                raise
            except TimeoutError as error:
                limit = f"within {timeout_seconds:g} s" if deadline is not None else f"for {IDLE_SECONDS:g} s"
                raise RequestTimeout(f"Nothing more of the request came {limit}.") from error
            if message["type"] == "http.disconnect":
                raise Disconnected("The caller left before the request was complete.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise too_large(max_bytes)
            if check is not None:
                check(parts[-1])
            is_complete = not message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def unless_disconnected(self, awaited: Awaitable[ResultT]) -> ResultT:
        """Await something that may take long; `Disconnected`, and its end, if the caller leaves meanwhile.

        To be called once the body was read.
        """
        work, leaving = asyncio.ensure_future(awaited), asyncio.ensure_future(self._until_disconnect())
        try:
            await asyncio.wait([work, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Disconnected("The caller left before the answer.")
            return work.result()
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)

    async def _until_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
