"""OpenAI's API over an engine and a codec, as an ASGI application.

POST  [/v1]/chat/completions, [/v1]/completions, /tokenize
GET   [/v1]/models, [/v1]/models/{name}
POST  /agl/weights       {"version": 3, "path": "/…/weights.safetensors"}: sample from these, from the next step on;
                         takes a key of its own, and files of the named folders only
GET   /agl/status, /health

`serve` runs it in this very process: for `agl serve`, and as the child of `EngineServer`. The child, `python -m
agentlightning.engine.server`, reads its settings, a line of JSON, from its standard input, since they hold keys and
every user of the machine can read command lines. It writes one line of JSON with its port to its standard output and
errors to its standard error, and ends on SIGTERM or when its parent is gone, however that ended.
"""

import asyncio
import hmac
import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import torch

from agentlightning.asgi.bodies import Bodies
from agentlightning.asgi.caller import CallerCheck
from agentlightning.asgi.request import ConnectionScope, Receive, Request, Send
from agentlightning.asgi.response import NOSNIFF, Response, json_response
from agentlightning.asgi.routes import RouteTable
from agentlightning.dialects import CHAT, COMPLETIONS
from agentlightning.dialects.completions import ChoicesDialect
from agentlightning.dialects.failures import Failure
from agentlightning.engine.base import ServerOptions, TokenEngine
from agentlightning.engine.checkpoint import load
from agentlightning.engine.codec import ChatCodec
from agentlightning.engine.completions import CompletionRequest, Responses, event, json_object, parse_request
from agentlightning.engine.sampling import Sampling
from agentlightning.engine.scheduler import Call, CallbackQueue, InferenceEngine
from agentlightning.engine.weights import DESCRIPTION_SUFFIX, SharedReader, gpu_of, read_weights
from agentlightning.errors import AgentLightningError, ConfigurationError, EngineError, InvalidRequest, NotAllowed
from agentlightning.logging import setup
from agentlightning.utils.child_process import leave_with_parent
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.server_launcher import (
    ENDING_SIGNALS,
    PythonServerLauncher,
    PythonServerLauncherArgs,
    ending_signal,
    tune_process,
)

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS: Final = 75
"""Longer than pooled clients keep a connection, so that they close it first and never write into a closed one."""
WEIGHTS_PATH: Final = b"/agl/weights"
MAX_BODY_BYTES: Final = 32 * 1024**2

Endpoint = Callable[[Request, Send, dict[str, str]], Awaitable[Response | None]]
"""Returns a response, or None if it has sent one."""


class _Refused(EngineError):
    """A request that is refused with a status and a code of OpenAI's."""

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
            name: The name of the model in requests; its own name by default.
            api_key: What callers must show; None lets everybody in.
            weights_key: What changes the weights; None lets nobody do so.
            weights_folders: Where files of new weights may lie.
        """
        for kind, key in (("API key", api_key), ("weights key", weights_key)):
            if key is not None and not key.strip():
                raise ConfigurationError(f"The engine's {kind} is empty; make one with `agl tokens new`, or give None.")
        self.engine = engine
        self.codec = codec
        self.name = name or engine.name
        self._api_key = api_key
        self._weights_key = weights_key
        self._weights_folders = [Path(os.path.realpath(folder)) for folder in weights_folders]
        self._callers = CallerCheck(has_key=api_key is not None)
        self._bodies = Bodies()
        self._responses = Responses(self.name, codec)
        self._callbacks: CallbackQueue | None = None
        self._shared = SharedReader()
        self._served = self._streams = 0
        self._routes: RouteTable[Endpoint] = RouteTable()
        for verb, path, endpoint in (
            ("POST", CHAT.path, self._complete),
            ("POST", COMPLETIONS.path, self._complete),
            ("POST", "/tokenize", self._tokenize),
            ("POST", WEIGHTS_PATH.decode(), self._take_weights),
            ("GET", "/models", self._models),
            ("GET", "/models/{name}", self._models),
            ("GET", "/agl/status", self._status),
            ("GET", "/health", self._health),
        ):
            self._routes.add(verb, path, endpoint)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The engine runs for the length of the block."""
        self._callbacks = CallbackQueue()
        self.engine.start_serving()
        try:
            yield
        finally:
            self.engine.close()

    def status(self) -> JsonObject:
        return {
            "model": self.name,
            "served": self._served,
            "streams": self._streams,
            "engine": self.engine.statistics(),
        }

    async def __call__(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        request = Request(scope, receive)
        response: Response | None
        try:
            self._callers.check(scope)
            path = _path(request)
            self._admit(path, request.header(b"authorization"))
            verb = "GET" if scope["method"] == "HEAD" else scope["method"]
            endpoint, values = self._endpoint(verb, path)
            response = await endpoint(request, send, values)
        except AgentLightningError as error:
            response = _error_response(error)
        except Exception as error:  # the boundary of a request: the caller gets the error, the server goes on
            logger.exception("A request to '%s' failed.", scope["path"])
            response = _error_response(EngineError(f"The server failed: {error!r}"))
        if response is not None:
            await response.send(send)

    def _admit(self, path: bytes, shown: str) -> None:
        key = self._weights_key if path == WEIGHTS_PATH else self._api_key
        if path == WEIGHTS_PATH and key is None:
            raise NotAllowed(
                "This server takes no new weights; start `agl serve` with --weights-folder DIR and a key in "
                "AGL_ENGINE_WEIGHTS_KEY."
            )
        if key is None or path == b"/health":
            return
        if not hmac.compare_digest(shown.encode("latin-1"), f"Bearer {key}".encode()):
            raise _Refused(401, "The key is missing or wrong.", "invalid_api_key")

    def _endpoint(self, verb: str, path: bytes) -> tuple[Endpoint, dict[str, str]]:
        found = self._routes.find(verb, path)
        if found is not None:
            return found
        shown = path.decode(errors="replace")
        if verbs := self._routes.verbs(path):
            raise _Refused(405, f"'{shown}' takes {' and '.join(verbs)}, not {verb}.")
        raise _Refused(404, f"There is nothing at '{shown}' for {verb}.")

    # ------------------------------------------------------------------ completions

    async def _complete(self, request: Request, send: Send, values: dict[str, str]) -> None:
        wanted = await self._wanted(request, CHAT if _path(request).decode() == CHAT.path else COMPLETIONS)
        if wanted.model is not None and wanted.model != f"agl/{self.name}":
            self._check_model(wanted.model)
        if self._callbacks is None:
            raise EngineError("The server is not running.")
        call = Call(wanted, self.engine, self.codec, self._callbacks)
        call.begin()
        if wanted.is_stream:
            await self._stream(call, request, send)
            return
        with _watched(call, request.receive):
            await call.done
        self._served += 1
        await json_response(self._responses.whole(call)).send(send)

    async def _stream(self, call: Call, request: Request, send: Send) -> None:
        """The status is sent with the first token, so that what fails before has a status of its own."""
        has_begun = False
        self._streams += 1
        try:
            with _watched(call, request.receive):
                async with aclosing(self._responses.stream(call)) as events:
                    async for chunk in events:
                        if not has_begun:
                            has_begun = True
                            await send(
                                {
                                    "type": "http.response.start",
                                    "status": 200,
                                    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), NOSNIFF],
                                }
                            )
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except EngineError as error:
            if not has_begun:
                raise
            failure = event(orjson.Fragment(_error_response(error).body))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        self._served += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tokenize(self, request: Request, send: Send, values: dict[str, str]) -> Response:
        [tokens] = (await self._wanted(request, CHAT)).prompts
        return json_response({"count": len(tokens), "tokens": tokens})

    async def _wanted(self, request: Request, dialect: ChoicesDialect) -> CompletionRequest:
        def parse(body: bytes) -> CompletionRequest:
            return parse_request(body, self.codec, dialect=dialect, max_length=self.engine.max_length)

        async with self._bodies.read(request, max_bytes=MAX_BODY_BYTES) as body:
            return await self._bodies.parse(body, parse)

    # ------------------------------------------------------------------ the model and its weights

    async def _models(self, request: Request, send: Send, values: dict[str, str]) -> Response:
        described = {**CHAT.described_model(self.name), "max_model_len": self.engine.max_length}
        if "name" in values:
            self._check_model(values["name"])
            return json_response(described)
        return json_response({"object": "list", "data": [described]})

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise _Refused(404, f"There is no model '{name}'; this server has '{self.name}'.", "model_not_found")

    async def _status(self, request: Request, send: Send, values: dict[str, str]) -> Response:
        return json_response(self.status())

    async def _health(self, request: Request, send: Send, values: dict[str, str]) -> Response:
        return json_response({"status": "ok"})

    async def _take_weights(self, request: Request, send: Send, values: dict[str, str]) -> Response:
        engine = self.engine
        if not isinstance(engine, InferenceEngine):
            raise NotAllowed(f"The engine of '{self.name}' takes its weights from elsewhere.")
        fields = json_object(await request.body(max_bytes=64 * 1024))  # it names a file
        version, path = fields.get("version"), fields.get("path")
        if isinstance(version, bool) or not isinstance(version, int) or not isinstance(path, str):
            raise InvalidRequest('New weights are announced as {"version": 3, "path": "/…/weights.safetensors"}.')
        real = self._checked_path(path)
        # On the device they are checked in no time, and taken over without holding up a step.
        read = self._shared.read if real.name.endswith(DESCRIPTION_SUFFIX) else read_weights
        tensors = await asyncio.to_thread(read, real, engine.model.device)
        await asyncio.wrap_future(await asyncio.to_thread(engine.load_weights, version, tensors))
        return json_response({"version": engine.version})

    def _checked_path(self, path: str) -> Path:
        """The file behind a path; what lies elsewhere is refused alike, whether it is there or not."""
        try:
            real = Path(os.path.realpath(path))
        except ValueError as error:
            raise InvalidRequest(f"{path!r} is not the path of a file: {error}.") from error
        if not any(real.is_relative_to(folder) for folder in self._weights_folders):
            raise NotAllowed(f"This server takes no weights from '{path}', only from its folder.")
        return real


@contextmanager
def _watched(call: Call, receive: Receive) -> Iterator[None]:
    """A block that ends a call whose client leaves meanwhile, or that fails: nobody will read the rest."""
    watching: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.cancel()

    def begin() -> None:
        watching.append(asyncio.create_task(watch(), name="agl-engine-watch"))

    # Most callers have their response by then, and need no watching.
    timer = asyncio.get_running_loop().call_later(0.05, begin)
    try:
        yield
    except BaseException:
        call.cancel()
        raise
    finally:
        timer.cancel()
        for task in watching:
            task.cancel()


def _path(request: Request) -> bytes:
    """Without the prefix that OpenAI's clients put before it."""
    path = request.raw_path
    return path[3:] if path.startswith(b"/v1/") else path


def _error_response(error: AgentLightningError) -> Response:
    """An error as OpenAI's API has it."""
    status, code = (error.status, error.code) if isinstance(error, _Refused) else (error.http_status, None)
    kind = "permission_error" if isinstance(error, NotAllowed) else None
    return Response(status, CHAT.error_body(Failure(status, str(error), kind, code)))


# ---------------------------------------------------------------------- in this very process


@dataclass(frozen=True)
class ServedEngine:
    """A server that is ready."""

    port: int
    model_name: str
    dtype: str
    """Of the model's weights, such as "bfloat16"; new ones are published in it."""
    gpu: str | None = None
    """That the model is on."""


def serve(
    options: ServerOptions, *, on_ready: Callable[[ServedEngine], None], heeds_interrupt: bool = True
) -> signal.Signals:
    """Serve until a signal ends it, which is returned: requests in flight are finished, a second signal ends them.

    Args:
        on_ready: Called when requests are answered.
        heeds_interrupt: Whether Ctrl-C ends it, and not SIGTERM alone; a child leaves that to its parent.
    """
    tune_process()
    torch.set_num_threads(options.threads)
    model, codec = load(options.model, device=options.device, dtype=options.dtype)
    engine = InferenceEngine(model, max_sequences=options.max_sequences, max_length=options.max_length)
    app = EngineApp(
        engine,
        codec,
        name=options.name,
        api_key=options.api_key,
        weights_key=options.weights_key,
        weights_folders=options.weights_folders,
    )
    arguments = PythonServerLauncherArgs(
        host=options.host, port=options.port, timeout_keep_alive=KEEP_ALIVE_SECONDS, launch_mode="asyncio"
    )
    launcher = PythonServerLauncher(app, arguments)

    async def run() -> signal.Signals:
        with ending_signal(ENDING_SIGNALS if heeds_interrupt else (signal.SIGTERM,)) as received:
            async with app.running():
                # The first steps set up much; a model that cannot make them fails before anybody calls.
                first = engine.submit([0], Sampling(max_new_tokens=2, temperature=0.0))
                await asyncio.wait_for(asyncio.wrap_future(first), 600.0)
                try:
                    await launcher.start()
                except RuntimeError as error:
                    raise EngineError(str(error)) from error
                try:
                    dtype = str(model.dtype).removeprefix("torch.")
                    on_ready(ServedEngine(launcher.port, app.name, dtype, gpu_of(model.device)))
                    return await received
                finally:
                    await launcher.stop()

    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.run(run())
    return uvloop.run(run())


def main() -> int:
    """Serve as a child; returns the exit code."""
    # Standard output is for the line with the port; what else is printed goes to standard error.
    announcements = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    settings = orjson.loads(sys.stdin.buffer.readline())
    parent, options = settings.pop("parent"), ServerOptions(**settings)
    setup(options.log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sends SIGTERM

    def remove_folders() -> None:  # the parent made them for its weights, and cannot remove them any more
        for folder in options.weights_folders:
            shutil.rmtree(folder, ignore_errors=True)

    def announce(served: ServedEngine) -> None:
        os.write(announcements, orjson.dumps(served) + b"\n")
        os.close(announcements)

    leave_with_parent(remove_folders, is_orphaned=lambda: os.getppid() != parent)
    try:
        serve(options, on_ready=announce, heeds_interrupt=False)
    except AgentLightningError as error:
        print(error, file=sys.stderr)  # noqa: T201 # to the parent, which raises it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
