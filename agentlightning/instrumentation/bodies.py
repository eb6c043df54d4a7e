"""Reading along: the body of a response is recorded while its reader reads it.

The SDKs read every body through `iter_bytes` or `aiter_bytes` of an httpx response, be it a stream of events, a raw
response, or JSON. Those of this one response are replaced by readers that pass each piece on unchanged.
"""

import json
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final

import orjson

from agentlightning.instrumentation.model_calls import ModelCall

__all__ = ["read_along", "read_whole"]

logger = logging.getLogger(__name__)

_End = Callable[..., None]
"""Called once or more when nothing more will be read, with the error if there was one."""
_EVENT_STREAM: Final = "text/event-stream"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_LAST_EVENTS: Final = ("message_stop", "response.completed", "response.incomplete", "response.failed")
"""By which dialects without `[DONE]` say that an event is the last."""


def read_whole(call: ModelCall, response: Any) -> None:
    """Finish a call with a response whose body has been read already."""
    body = _Body(call, response)
    body.take(response.content)
    body.end()


def read_along(call: ModelCall, response: Any) -> None:
    """Finish a call when the body of its response has been read, or the response is closed or forgotten."""
    body = _Body(call, response)
    ours: dict[str, Any] = {}

    def end(error: BaseException | None = None) -> None:
        for name, reader in ours.items():
            if vars(response).get(name) is reader:  # a response that was read is as it would have been
                delattr(response, name)
        body.end(error)

    ours |= {**_readers(response, body, end), **_async_readers(response, body, end)}
    vars(response).update(ours)
    weakref.finalize(response, body.end).atexit = False


class _Body:
    """What has been read of a body so far, as the events or the JSON it consists of."""

    def __init__(self, call: ModelCall, response: Any) -> None:
        self._call = call
        self._is_stream = _EVENT_STREAM in response.headers.get("content-type", "")
        self._pieces: list[bytes] = []
        self._data: list[bytes] = []
        self._is_done = False
        self.is_being_read = False

    def take(self, piece: bytes) -> None:
        """The next piece of the body."""
        try:
            self._pieces.append(piece)
            if self._is_stream and (b"\n" in piece or b"\r" in piece):
                self._take_lines()
        except Exception:  # the reader gets the piece all the same
            logger.exception("A model's answer could not be read along.")

    def _take_lines(self) -> None:
        """Lines end with CR, LF or both; a CR at the end of a piece may be half of both."""
        lines = b"".join(self._pieces).splitlines(keepends=True)
        self._pieces = [] if lines[-1].endswith(b"\n") else [lines.pop()]
        for line in lines:
            self._take_line(line.rstrip(b"\r\n"))

    def _take_line(self, line: bytes) -> None:
        if line.startswith(_DATA):
            self._data.append(line[len(_DATA) :].strip())
            self._is_done |= self._data == [_DONE]
        elif not line:
            data, self._data = b"\n".join(self._data), []
            if data and data != _DONE:
                self._take_event(data)

    def _take_event(self, data: bytes) -> None:
        try:
            event = _parsed(data)
        except ValueError:
            logger.exception("An event of a model's answer is not JSON.")
            return
        if isinstance(event, Mapping):
            self._note_end(event)
            self._call.add_event(event)

    def _note_end(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if kind in _LAST_EVENTS:
            self._is_done = True
        if event.get("error") or kind == "error":
            error = event.get("error") or event
            self._call.finish(error=str(error.get("message") if isinstance(error, Mapping) else error))

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will be read."""
        rest, self._pieces = b"".join(self._pieces), []
        if self._is_stream:
            for line in rest.splitlines():
                self._take_line(line)
            self._call.finish(error=error, is_cut=not self._is_done)
            return
        try:
            response = _parsed(rest)
        except ValueError:
            self._call.finish(error=error, is_cut=True)
        else:
            self._call.finish(response if isinstance(response, Mapping) else None, error=error)


def _parsed(text: bytes) -> Any:
    """JSON, also where it has infinite numbers or halves of characters, as the SDKs read it."""
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text)


def _readers(response: Any, body: _Body, end: _End) -> dict[str, Any]:
    read, close = response.iter_bytes, response.close

    def iter_bytes(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        pieces = read(*args, **kwargs)
        try:
            while True:
                body.is_being_read = True
                try:
                    piece = next(pieces, None)
                finally:
                    body.is_being_read = False
                if piece is None:
                    break
                body.take(piece)
                yield piece
        except GeneratorExit:
            end()
            raise
        except BaseException as error:
            end(error)
            raise
        end()

    def close_too() -> None:
        try:
            close()
        finally:
            if not body.is_being_read:  # the last piece may come after the body closed itself
                end()

    return {"iter_bytes": iter_bytes, "close": close_too}


def _async_readers(response: Any, body: _Body, end: _End) -> dict[str, Any]:
    read, close = response.aiter_bytes, response.aclose

    async def aiter_bytes(*args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
        pieces = read(*args, **kwargs).__aiter__()
        try:
            while True:
                body.is_being_read = True
                try:
                    piece = await anext(pieces, None)
                finally:
                    body.is_being_read = False
                if piece is None:
                    break
                body.take(piece)
                yield piece
        except GeneratorExit:
            end()
            raise
        except BaseException as error:
            end(error)
            raise
        end()

    async def close_too() -> None:
        try:
            await close()
        finally:
            if not body.is_being_read:
                end()

    return {"aiter_bytes": aiter_bytes, "aclose": close_too}
