"""OpenAI's dialect over an engine and a codec, as an ASGI application.

    POST  [/v1]/chat/completions, [/v1]/completions
    GET   [/v1]/models, [/v1]/models/{name}
    POST  /agl/weights       {"version": 3, "path": "/…/weights.safetensors"}: sample from these, from the next step on;
                             takes a key of its own, and files of the named folders only
    GET   /agl/status, /health

It is written to ASGI directly: a framework's routing and validation would cost more than the steps of a small model.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import orjson

from agentlightning.asgi.caller import CallerCheck
from agentlightning.asgi.request import ConnectionScope, Receive, Request, Send
from agentlightning.asgi.response import NOSNIFF
from agentlightning.engine.answering import Answers
from agentlightning.engine.asking import Asked, read_chat, read_text
from agentlightning.engine.base import TokenEngine
from agentlightning.engine.calls import Call, Mailbox, Repetitions
from agentlightning.engine.codec import ChatCodec
from agentlightning.engine.scheduler import InferenceEngine
from agentlightning.engine.shared_weights import DESCRIPTION_SUFFIX, SharedReader
from agentlightning.engine.streaming import event, events_of
from agentlightning.engine.weights import read_weights
from agentlightning.errors import AgentLightningError, ConfigurationError, EngineError, InvalidRequest, NotAllowed

__all__ = ["EngineApp"]

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS: Final = 75
"""Longer than pooled clients keep a connection, so that they close it first and never write into a closed one."""
WEIGHTS_PATH: Final = "/agl/weights"
MAX_BODY_BYTES: Final = 32 * 1024**2
WATCH_AFTER_SECONDS: Final = 0.05
"""After which a caller who waits is watched for leaving; most have their answer by then, and need no watching."""
_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = (b"content-type", b"text/event-stream; charset=utf-8")
_RETRY_COUNT: Final = b"x-stainless-retry-count"
_IDEMPOTENCY_KEY: Final = b"idempotency-key"


class _Refused(EngineError):
    """A request that is answered with an error of OpenAI's shape."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class EngineApp:
    """Serves one model. `running()` is entered in the loop that serves."""

    def __init__(
        self,
        engine: TokenEngine,
        codec: ChatCodec,
        *,
        name: str | None = None,
        api_key: str | None = None,
        weights_key: str | None = None,
        weights_folders: Sequence[Path | str] = (),
    ) -> None:
        """Prepare to serve.

        Args:
            engine: Not started yet; it runs while `running()` does.
            name: What callers call the model; its own name by default.
            api_key: What callers must show; None lets everybody in.
            weights_key: What those must show who change the weights; None lets nobody.
            weights_folders: Where files of new weights may lie.
        """
        self.engine = engine
        self.codec = codec
        self.name = name or engine.name
        self._api_key = _authorization("API key", api_key)
        self._weights_key = _authorization("weights key", weights_key)
        self._weights_folders = [Path(os.path.realpath(folder)) for folder in weights_folders]
        self._callers = CallerCheck(has_key=api_key is not None)
        self._answers = Answers(self.name, codec)
        self._repetitions = Repetitions()
        self._mailbox: Mailbox | None = None
        self._shared = SharedReader()
        self._served = 0
        self._streams = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The engine runs for the length of the block."""
        self._mailbox = Mailbox()
        self.engine.start_serving()
        try:
            yield
        finally:
            self.engine.close()

    def status(self) -> dict[str, Any]:
        """How the server is."""
        return {
            "model": self.name,
            "served": self._served,
            "streams": self._streams,
            "joined": self._repetitions.joined,
            "engine": self.engine.statistics(),
        }

    async def __call__(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        path: str = scope["path"]
        path = path[3:] if path.startswith("/v1/") else path
        headers = dict(scope["headers"])
        try:
            self._callers.check(scope)
            self._admit(path, headers)
            if path == "/chat/completions" or path == "/completions":
                _demand_post(scope["method"], path)
                body = await _body(receive, headers)
                await self._complete(path, headers, body, receive=receive, send=send)
                return
            status, answer = await self._other(scope["method"], path, receive, headers)
        except NotAllowed as error:
            status, answer = error.http_status, _error(str(error), "permission_error")
        except EngineError as error:
            status, answer = _refusal(error)
        except Exception as error:  # the boundary of a request: the caller hears of it, the server goes on
            logger.exception("A request to '%s' failed.", path)
            status, answer = 500, _error(f"The server failed: {error!r}", "server_error")
        await _send(send, status, answer)

    # ------------------------------------------------------------------ completions

    async def _complete(
        self, path: str, headers: dict[bytes, bytes], body: bytes, *, receive: Receive, send: Send
    ) -> None:
        key = path.encode() + (headers.get(_IDEMPOTENCY_KEY) or body)
        if headers.get(_RETRY_COUNT, b"0") != b"0" and (running := self._repetitions.join(key)) is not None:
            await self._answer(running, receive, send)
            return
        reading = read_chat if path == "/chat/completions" else read_text
        asked = reading(body, self.codec, self.engine.max_length)
        call = self._begun(asked)
        if asked.is_stream:
            await self._stream(call, receive, send)
            return
        self._repetitions.add(key, call)
        try:
            await self._answer(call, receive, send)
        finally:
            self._repetitions.remove(key, call)

    def _begun(self, asked: Asked) -> Call:
        if asked.model is not None and asked.model not in (self.name, f"agl/{self.name}"):
            raise _Refused(404, f"There is no model '{asked.model}'; this server has '{self.name}'.", "model_not_found")
        if self._mailbox is None:
            raise EngineError("The server is not running.")
        call = Call(asked, self.engine, self.codec, self._mailbox)
        call.begin()
        return call

    async def _answer(self, call: Call, receive: Receive, send: Send) -> None:
        with _watched(call, receive):
            await asyncio.shield(call.done)
        self._served += 1
        await _send(send, 200, orjson.dumps(self._answers.whole(call)))

    async def _stream(self, call: Call, receive: Receive, send: Send) -> None:
        """The status is sent with the first token, so that what fails before has a status of its own."""
        has_begun = False
        self._streams += 1
        try:
            with _watched(call, receive):
                async with aclosing(events_of(call, self._answers)) as events:
                    async for chunk in events:
                        if not has_begun:
                            has_begun = True
                            await send({"type": "http.response.start", "status": 200, "headers": [_EVENTS, NOSNIFF]})
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except EngineError as error:
            if not has_begun:
                raise
            failure = event(orjson.Fragment(_refusal(error)[1]))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        self._served += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    # ------------------------------------------------------------------ the rest

    def _admit(self, path: str, headers: dict[bytes, bytes]) -> None:
        wanted = self._api_key
        if path == WEIGHTS_PATH:
            wanted = self._weights_key
            if wanted is None:
                raise NotAllowed(
                    "This server takes no new weights; start `agl serve` with --weights-folder DIR and a key in "
                    "AGL_ENGINE_WEIGHTS_KEY."
                )
        if wanted is None or path == "/health":
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), wanted):
            raise _Refused(401, "The key is missing or wrong.", "invalid_api_key")

    async def _other(self, method: str, path: str, receive: Receive, headers: dict[bytes, bytes]) -> tuple[int, bytes]:
        is_get = method in ("GET", "HEAD")
        if path == "/health" and is_get:
            return 200, b'{"status":"ok"}'
        if path == "/models" and is_get:
            return 200, orjson.dumps({"object": "list", "data": [self._described()]})
        if path.startswith("/models/") and is_get:
            return self._model(unquote(path.removeprefix("/models/")))
        if path == "/agl/status" and is_get:
            return 200, orjson.dumps(self.status())
        if path == "/tokenize":
            _demand_post(method, path)
            asked = read_chat(await _body(receive, headers), self.codec, self.engine.max_length)
            return 200, orjson.dumps({"count": len(asked.prompts[0]), "tokens": asked.prompts[0]})
        if path == WEIGHTS_PATH:
            _demand_post(method, path)
            return 200, await self._take_weights(await _body(receive, headers))
        raise _Refused(404, f"There is nothing at '{path}' for {method}.")

    def _model(self, name: str) -> tuple[int, bytes]:
        if name != self.name:
            raise _Refused(404, f"There is no model '{name}'; this server has '{self.name}'.", "model_not_found")
        return 200, orjson.dumps(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "agentlightning",
            "max_model_len": self.engine.max_length,
        }

    async def _take_weights(self, body: bytes) -> bytes:
        engine = self.engine
        if not isinstance(engine, InferenceEngine):
            raise NotAllowed(f"The engine of '{self.name}' takes its weights from elsewhere.")
        version, path = _read_weights_request(body)
        real, device = self._checked_path(path), engine.model.device
        # On the device they are looked through in no time, and taken over without holding up a step.
        read = self._shared.read if real.name.endswith(DESCRIPTION_SUFFIX) else read_weights
        tensors = await asyncio.to_thread(read, real, device)
        await asyncio.wrap_future(await asyncio.to_thread(engine.load_weights, version, tensors))
        return orjson.dumps({"version": engine.version})

    def _checked_path(self, path: str) -> Path:
        """The file behind a path; what lies elsewhere is refused alike, whether it is there or not."""
        try:
            real = Path(os.path.realpath(path))
        except ValueError as error:
            raise InvalidRequest(f"{path!r} is not the path of a file: {error}.") from error
        if not any(real.is_relative_to(folder) for folder in self._weights_folders):
            raise NotAllowed(f"This server takes no weights from '{path}', only from its folder.")
        return real


class _watched:  # noqa: N801 # used as a block, like contextlib's
    """Ends a call whose client leaves while the block runs, or whose block fails: nobody will read the rest.

    A class, because a generator costs more.
    """

    def __init__(self, call: Call, receive: Receive) -> None:
        self._call = call
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._begin)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if kind is not None:
            self._call.leave()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="agl-engine-watch")

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._call.leave()


def _read_weights_request(body: bytes) -> tuple[int, str]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The request is not JSON: {error}.") from error
    version = fields.get("version") if isinstance(fields, dict) else None
    path = fields.get("path") if isinstance(fields, dict) else None
    if isinstance(version, bool) or not isinstance(version, int) or not isinstance(path, str):
        raise InvalidRequest('New weights are announced as {"version": 3, "path": "/…/weights.safetensors"}.')
    return version, path


def _authorization(what: str, key: str | None) -> bytes | None:
    """The header that shows a key."""
    if key is not None and not key.strip():
        raise ConfigurationError(f"The engine's {what} is empty; make one with `agl tokens new`, or give None.")
    return None if key is None else f"Bearer {key}".encode()


def _demand_post(method: str, path: str) -> None:
    if method != "POST":
        raise _Refused(405, f"'{path}' takes POST, not {method}.")


async def _body(receive: Receive, headers: dict[bytes, bytes]) -> bytes:
    try:
        return await Request({"headers": headers.items()}, receive).body(max_bytes=MAX_BODY_BYTES)
    except AgentLightningError as error:
        raise _Refused(error.http_status, str(error)) from error


def _refusal(error: EngineError) -> tuple[int, bytes]:
    if isinstance(error, _Refused):
        return error.status, _error(str(error), "invalid_request_error", error.code)
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    return error.http_status, _error(str(error), kind)


def _error(message: str, kind: str, code: str | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


async def _send(send: Send, status: int, body: bytes) -> None:
    headers = [_JSON, NOSNIFF, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
