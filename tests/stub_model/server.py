"""The stub model server: a model on a free port that answers what a script says, in the dialects of real ones.

It speaks HTTP on bare sockets, so that a script can also break, lie, drip and hang (see `raw`). It runs on a thread of
its own, for ordinary and asynchronous tests alike:

    with running(Script(["Hello.", Failure(429, retry_after_seconds=1)])) as model:
        requests.post(f"{model.url}/v1/chat/completions", json={...})
        assert model.requests[0].text == "Hi"

Every POST is kept in `requests`, also if it is refused, and every GET in `gets`.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any

from agentlightning.utils.loop_thread import LoopThread
from tests.stub_model import responses
from tests.stub_model.chat import CHAT, COMPLETIONS, embed
from tests.stub_model.dialect import Dialect
from tests.stub_model.messages import MESSAGES, conversation
from tests.stub_model.raw import LAST_CHUNK, STREAM_HEAD, Connection, chunk, response
from tests.stub_model.responses import RESPONSES
from tests.stub_model.script import (
    Answer,
    BadRequest,
    CallOptions,
    Failure,
    Reply,
    Request,
    Script,
    TokenIdShape,
    Turn,
    answers_of,
    echo,
    generate,
)
from tests.stub_model.words import Message, render

DIALECTS = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}
DEFAULT_MODEL = "stub-model"
CREATED = 1_700_000_000
"""When everything the stub model says was said, in seconds."""
_ROOT = re.compile(r"(?P<attempt>/rollout/[^/]+/attempt/[^/]+)?(/v1)?(?P<path>/[^?]*)")


class _Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class StubModel:
    """A model server; `script` may be replaced at any time.

    Args:
        api_key: Demanded of every request, unless None.
        token_ids: `vllm` returns ids on request, `instrumented` always and in the shape of the 0.2 release, `none`
            never.
        is_proxy: Serve only below the paths of attempts, as the LLM proxy does.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: tuple[str, ...] = (DEFAULT_MODEL,),
        api_key: str | None = None,
        token_ids: TokenIdShape = "vllm",
        is_proxy: bool = False,
    ) -> None:
        self.script = script or Script(echo)
        self.models = models
        self.api_key = api_key
        self.token_ids: TokenIdShape = token_ids
        self.is_proxy = is_proxy
        self.requests: list[Request] = []
        self.gets: list[Request] = []
        self.get_status = 200
        """Answered to every GET."""
        self.connections = 0
        """How many there were."""
        self.open_connections = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.port = 0
        self._numbers = count(1)
        self._conversations: dict[str, tuple[Message, ...]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Root of the server; the API lives below it and below `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        """Base URL for OpenAI's client; Anthropic's takes `url`."""
        return f"{self.url}/v1"

    def entry(self, model_name: str = "m", **params: Any) -> dict[str, Any]:
        """An entry of the LLM proxy's model list that leads here."""
        params = {"model": "hosted_vllm/up", "api_base": self.openai_url, **params}
        return {"model_name": model_name, "litellm_params": params}

    # ------------------------------------------------------------------ connections

    async def start(self) -> "StubModel":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stop_listening(self) -> None:
        """Take no new connection."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:  # closed between two steps of accepting a connection, it would leave that one open
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening)
            for _ in range(3):
                await asyncio.sleep(0)
        self.stop_listening()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also of a task that never began

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self.connections += 1
        self.open_connections += 1
        leaving = None
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                first = b""
                while not connection.is_ended:
                    method, request = await _read(first, reader)
                    # Nothing comes before the answer but the end of the connection, or the first byte of the next.
                    leaving = asyncio.ensure_future(reader.readexactly(1))
                    await self._answer_unless_left(method, request, connection, leaving)
                    if request.headers.get("connection") == "close":
                        connection.end()
                    first = b"" if connection.is_ended else await leaving
        finally:
            if leaving is not None:
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
            self.open_connections -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer_unless_left(
        self, method: str, request: Request, connection: Connection, leaving: "asyncio.Future[bytes]"
    ) -> None:
        answering = asyncio.ensure_future(self._answer(method, request, connection))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not (leaving.done() and leaving.exception() is not None):
                await answering
        finally:
            answering.cancel()
            await asyncio.wait([answering])
        if not answering.cancelled():
            answering.result()

    async def _answer(self, method: str, request: Request, connection: Connection) -> None:
        if method == "GET":
            self.gets.append(request)
            await self._get(request, connection)
            return
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self._post(request, connection)
        finally:
            self.in_flight -= 1

    # ------------------------------------------------------------------ requests

    async def _post(self, request: Request, connection: Connection) -> None:
        turns = self.script.turns
        if not callable(turns) and turns and callable(turns[-1]):
            self.requests.append(request)
            await self.script.next_turn(request)(request, connection)  # type: ignore[operator] # a handler
            return
        root = _ROOT.match(request.path)
        path = root["path"] if root is not None else ""
        dialect = DIALECTS.get(path, MESSAGES if path == "/messages/count_tokens" else CHAT)
        try:
            if root is None or self.is_proxy is (root["attempt"] is None):
                raise _Refused(Failure(404, f"There is nothing at {request.path}."))
            if path in DIALECTS:
                await self._generate(dialect, request, connection)
            elif path == "/embeddings":
                body = self._checked(replace(request, dialect="embeddings"))
                await _send_json(connection, embed(body))
            elif path == "/messages/count_tokens":
                await _send_json(connection, {"input_tokens": self._counted(replace(request, dialect="messages"))})
            else:
                raise _Refused(Failure(404, f"There is nothing at {request.path}."))
        except BadRequest as error:
            await _refuse(connection, dialect, Failure(400, str(error), param=error.param))
        except _Refused as refused:
            await _refuse(connection, dialect, refused.failure)

    async def _generate(self, dialect: Dialect, request: Request, connection: Connection) -> None:
        request = replace(request, dialect=dialect.name)
        place = len(self.requests)
        body = self._checked(request, checks_model=False)
        options = self._understood(dialect, body)
        request = self.requests[place] = replace(
            request, messages=options.messages, prompt_token_ids=options.prompt_ids
        )
        self._check_model(body["model"])
        turn = self.script.next_turn(request)
        if isinstance(turn, Failure):
            raise _Refused(turn)
        answers = answers_of(turn, options.choices)
        reply = self._reply(dialect, request, options, answers)
        await asyncio.sleep(answers[0].latency_seconds)
        if request.is_streaming:
            await _send_stream(connection, dialect, reply, answers[0])
        elif answers[0].cut_after_events is not None:
            connection.reset()
        else:
            await _send_json(connection, dialect.write(reply), f"x-request-id: {reply.id}")

    def _understood(self, dialect: Dialect, body: dict[str, Any]) -> CallOptions:
        try:
            options = dialect.read(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f"The request has not the shape of the API: {error!r}") from error
        earlier = body.get("previous_response_id") if dialect is RESPONSES else None
        if earlier is None:
            return options
        if earlier not in self._conversations:
            raise BadRequest(f"Previous response with id '{earlier}' not found.", "previous_response_id")
        return replace(options, messages=responses.continued(body, options, self._conversations[earlier]))

    def _reply(self, dialect: Dialect, request: Request, options: CallOptions, answers: list[Answer]) -> Reply:
        number = next(self._numbers)
        choices = []
        for index, answer in enumerate(answers):
            call_ids = [f"{dialect.tool_call_prefix}_{number}_{index}_{n}" for n in range(len(answer.tool_calls))]
            choices.append(generate(answer, options, index=index, call_ids=call_ids))
        reply = Reply(f"{dialect.id_prefix}-{number}", CREATED, request, tuple(choices), self.token_ids)
        if dialect is RESPONSES:
            self._conversations[reply.id] = responses.spoken(request.body, options.messages, choices[0])
        return reply

    def _counted(self, request: Request) -> int:
        body = self._checked(request)
        ids = tuple(render(conversation(body), body.get("tools") or ()))
        self.requests[-1] = replace(request, prompt_token_ids=ids)
        return len(ids)

    async def _get(self, request: Request, connection: Connection) -> None:
        try:
            self._check_key(request)
            name = request.path.partition("/models/")[2]
            if name:
                self._check_model(name)
                await _send_json(connection, _model(name))
                return
            models = [_model(name) for name in self.models]
            ends = {"has_more": False, "first_id": self.models[0], "last_id": self.models[-1]}
            await _send_json(connection, {"object": "list", "data": models, **ends}, status=self.get_status)
        except _Refused as refused:
            await _refuse(connection, CHAT, refused.failure)

    # ------------------------------------------------------------------ checks

    def _checked(self, request: Request, *, checks_model: bool = True) -> dict[str, Any]:
        """Keep a request, and return its body if it shows the right key."""
        try:
            body = request.body
        except ValueError as error:
            raise BadRequest(f"We could not parse the JSON body of your request: {error}") from error
        if not isinstance(body, dict) or not isinstance(body.get("model"), str):
            raise BadRequest("you must provide a model parameter", "model")
        self.requests.append(request)
        self._check_key(request)
        if checks_model:
            self._check_model(body["model"])
        return body

    def _check_key(self, request: Request) -> None:
        shown = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key is not None and shown != self.api_key:
            raise _Refused(Failure(401, "Incorrect API key provided."))

    def _check_model(self, name: str) -> None:
        if name not in self.models:
            raise _Refused(Failure(404, f"The model `{name}` does not exist.", param="model"))


async def _read(first: bytes, reader: asyncio.StreamReader) -> tuple[str, Request]:
    lines = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = lines[0].split(" ")
    return method, Request(path, headers, content)


def _model(name: str) -> dict[str, Any]:
    """A model as both OpenAI and Anthropic list it."""
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(CREATED))
    openai = {"id": name, "object": "model", "created": CREATED, "owned_by": "stub"}
    return {**openai, "type": "model", "display_name": name, "created_at": made}


async def _send_json(connection: Connection, content: Any, *headers: str, status: int = 200) -> None:
    await connection.send(response(json.dumps(content).encode(), status, *headers))


async def _send_stream(connection: Connection, dialect: Dialect, reply: Reply, answer: Answer) -> None:
    await connection.send(STREAM_HEAD.replace(b"\r\n\r\n", f"\r\nx-request-id: {reply.id}\r\n\r\n".encode()))
    for number, event in enumerate(dialect.stream(reply)):
        if number == answer.cut_after_events:
            if answer.cut_with is None:
                connection.end()
                return
            await connection.send(chunk(dialect.fail_in_stream(answer.cut_with)))
            break
        await connection.send(chunk(event))
        await asyncio.sleep(answer.pause_seconds)
    await connection.send(LAST_CHUNK)


async def _refuse(connection: Connection, dialect: Dialect, failure: Failure) -> None:
    seconds = failure.retry_after_seconds
    headers = () if seconds is None else (f"retry-after: {seconds:g}",)
    await _send_json(connection, dialect.fail(failure), *headers, status=failure.status)


@contextmanager
def running(script: Script | None = None, **options: Any) -> Iterator[StubModel]:
    """A stub model that is served for the length of the block; options are those of `StubModel`."""
    model = StubModel(script, **options)
    thread = LoopThread("stub-model")
    thread.run(model.start())
    try:
        yield model
    finally:
        thread.run(model.stop())
        thread.stop()


def serving(*turns: Turn) -> AbstractContextManager[StubModel]:
    """A stub model with these turns, of which the last is repeated."""
    return running(Script(turns, repeats_last=True))
