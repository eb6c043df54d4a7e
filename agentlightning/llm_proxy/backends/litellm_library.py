"""Providers the proxy does not speak to itself, reached through the litellm library.

The library is imported with the first such call and told to use the prices it brings along, so that the import does
not reach for the network. It is given the arguments of the entry and, of the caller's request, what `library_request`
lets pass; no header of the caller. What it gives is made into the bytes of OpenAI's dialect, and what it raises into
an answer with the status and the error shape of that dialect.
"""

import asyncio
import importlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import orjson

from agentlightning.llm_proxy.backends.answer import Reply
from agentlightning.llm_proxy.backends.asking import Outgoing
from agentlightning.llm_proxy.backends.backend import Backend
from agentlightning.llm_proxy.backends.errors import BackendBroken
from agentlightning.llm_proxy.backends.lane import Lane
from agentlightning.llm_proxy.backends.library_request import library_fields, library_request
from agentlightning.llm_proxy.backends.sending import Failure

__all__ = ["LibrarySender"]

logger = logging.getLogger(__name__)

_LOCAL_PRICES_VARIABLE: Final = "LITELLM_LOCAL_MODEL_COST_MAP"
_SERVER_ERROR: Final = 500
_DONE: Final = b"data: [DONE]\n\n"
_PASSED_ON: Final = ("retry-after", "retry-after-ms", "x-should-retry")
_UNSEEN: Final = frozenset({"accept-encoding"})
_SET_BY_US: Final = frozenset({"model", "stream"})
_MOST_WARNINGS: Final = 20
"""Callers choose the names of fields, and could fill the log with them."""


class _Whole:
    """A body that is there at once."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def next(self) -> bytes:
        content, self._content = self._content, b""
        return content

    async def close(self) -> None:
        self._content = b""


class _Events:
    """A body of events, one for each chunk of the library."""

    def __init__(self, chunks: AsyncIterator[Any], backend: Backend) -> None:
        self._chunks = chunks
        self._backend = backend
        self._is_over = False

    async def next(self) -> bytes:
        if self._is_over:
            return b""
        try:
            chunk = await asyncio.wait_for(self._chunks.__anext__(), self._backend.timeout)
        except StopAsyncIteration:
            self._is_over = True
            return _DONE
        except Exception as error:  # noqa: BLE001  # the library raises whatever its providers raise
            words = self._backend.redacted(f"{type(error).__name__}: {error}".partition("\n")[0])
        else:
            return b"data: " + _json_of(chunk, is_part=True) + b"\n\n"
        self._is_over = True
        raise BackendBroken(f"Backend '{self._backend.name}' broke off in the middle of an answer ({words}).")

    async def close(self) -> None:
        self._is_over = True
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()


class LibrarySender:
    """Sends what goes through the litellm library."""

    def __init__(self) -> None:
        self._dropped: set[str] = set()
        """Names of fields of which the log tells already."""

    async def send(self, lane: Lane, backend: Backend, outgoing: Outgoing) -> Reply | Failure:
        """Have the library answer; never a Failure, since the library tells errors of the way as statuses too.

        Raises:
            UntranslatableRequest: The request holds what the library must not be given.
        """
        arguments = self._arguments_of(lane, backend, outgoing)
        try:
            library = await asyncio.to_thread(_library)
            function = library.aembedding if outgoing.dialect == "embeddings" else library.acompletion
            result = await function(**arguments)
        except Exception as error:  # noqa: BLE001  # the library raises whatever its providers raise
            return _reply_to(error, backend)
        if outgoing.stream:
            return Reply(200, {"content-type": "text/event-stream"}, _Events(aiter(result), backend), reason="OK")
        return Reply(200, {"content-type": "application/json"}, _Whole(_json_of(result)), reason="OK")

    def _arguments_of(self, lane: Lane, backend: Backend, outgoing: Outgoing) -> dict[str, Any]:
        body: dict[str, Any] = orjson.loads(outgoing.body)
        fields = library_fields(outgoing.dialect)
        # What the entry sets is the operator's, also where it is none of the fields that a caller may set.
        own = {
            name: value
            for name, value in backend.defaults.items()
            if name in body and (name not in fields or body[name] == value)
        }
        asked = {name: value for name, value in body.items() if name not in own}
        self._warn_of(asked.keys() - fields - _SET_BY_US, backend)
        arguments = {**library_request(outgoing.dialect, asked), **own, **backend.options, "model": backend.model}
        arguments |= {"timeout": backend.timeout, "num_retries": 0, "max_retries": 0}
        headers = {name: value for name, value in lane.headers.items() if name.lower() not in _UNSEEN}
        headers.pop("Authorization", None)  # the library makes its own from the key
        if headers:
            arguments["extra_headers"] = headers
        if outgoing.dialect != "embeddings":
            arguments["stream"] = outgoing.stream
        return arguments

    def _warn_of(self, dropped: set[str], backend: Backend) -> None:
        for name in sorted(dropped - self._dropped)[: _MOST_WARNINGS - len(self._dropped)]:
            self._dropped.add(name)
            logger.warning(
                "The field %.80r of requests is not passed on to backend %s, since it goes through the litellm "
                "library, to which fields are arguments; set it in litellm_params of the entry if you want it.",
                name,
                backend,
            )


def _library() -> Any:
    os.environ.setdefault(_LOCAL_PRICES_VARIABLE, "True")
    library: Any = importlib.import_module("litellm")
    library.suppress_debug_info = True  # it prints advice to the terminal otherwise
    return library


def _json_of(value: Any, *, is_part: bool = False) -> bytes:
    """The JSON of a model of the library; parts of a stream leave out what they do not say."""
    if isinstance(value, Mapping):
        return orjson.dumps(value)
    return orjson.dumps(value.model_dump(mode="json", exclude_unset=True, exclude_none=is_part))


def _reply_to(error: Exception, backend: Backend) -> Reply:
    """The error as OpenAI would tell it."""
    status = getattr(error, "status_code", None)
    if isinstance(status, bool) or not isinstance(status, int) or not 400 <= status < 600:
        status = _SERVER_ERROR
    told = {
        "message": backend.redacted(str(getattr(error, "message", None) or error)),
        "type": type(error).__name__,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or status,
    }
    given = getattr(getattr(error, "response", None), "headers", None) or {}
    headers = {name: given[name] for name in _PASSED_ON if given.get(name) is not None}
    body = _Whole(orjson.dumps({"error": told}, default=str))
    return Reply(status, {"content-type": "application/json", **headers}, body, reason=type(error).__name__)
