"""The stub model server: a model on a free port that says what a script tells it to, in the dialects of real ones.

It runs on a thread of its own, so that ordinary and asynchronous tests use it alike:

    with running(Script(["Hello.", Failure(429, retry_after_seconds=1)])) as model:
        requests.post(f"{model.url}/v1/chat/completions", json={...})
        assert model.requests[0].text == "Hi"

Every request whose body can be read is kept in `requests`, also if it is refused.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from aiohttp import web

from agentlightning.utils.loop_thread import LoopThread
from tests.stub_model import embeddings, responses
from tests.stub_model.chat import CHAT
from tests.stub_model.completions import COMPLETIONS
from tests.stub_model.dialect import Dialect, openai_error
from tests.stub_model.messages import MESSAGES, conversation
from tests.stub_model.reply import BadRequest, Reply, TokenIdShape, Wish, answers_of, generate
from tests.stub_model.responses import RESPONSES
from tests.stub_model.script import Answer, Failure, Request, Script, echo
from tests.stub_model.words import Message, render

DIALECTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
DEFAULT_MODEL = "stub-model"
CREATED = 1_700_000_000
"""When everything the stub model says was said, in seconds."""
MAX_BODY_BYTES = 64 * 1024 * 1024
_Handler = Callable[[web.Request], Any]


class _Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class StubModel:
    """A model server; `script` may be replaced at any time."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: tuple[str, ...] = (DEFAULT_MODEL,),
        api_key: str | None = None,
        token_ids: TokenIdShape = "vllm",
    ) -> None:
        self.script = script or Script(echo)
        self.models = models
        self.api_key = api_key
        """Demanded of every request, unless None."""
        self.token_ids: TokenIdShape = token_ids
        """`vllm` returns ids on request, `instrumented` always and in the shape of the 0.2 release, `none` never."""
        self.requests: list[Request] = []
        self.url = ""
        """Root of the server; the API lives below it and below `/v1`."""
        self._numbers = count(1)
        self._conversations: dict[str, tuple[Message, ...]] = {}
        self._runner: web.AppRunner | None = None

    @property
    def openai_url(self) -> str:
        """Base URL for OpenAI's client; Anthropic's takes `url`."""
        return f"{self.url}/v1"

    async def start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for prefix in ("", "/v1"):
            for dialect in DIALECTS:
                app.router.add_post(prefix + dialect.path, self._generating(dialect))
            app.router.add_post(f"{prefix}/messages/count_tokens", self._guarded(MESSAGES.fail, self._count_tokens))
            app.router.add_post(f"{prefix}/embeddings", self._guarded(openai_error, self._embed))
            app.router.add_get(f"{prefix}/models", self._guarded(openai_error, self._list_models))
            app.router.add_get(f"{prefix}/models/{{model}}", self._guarded(openai_error, self._show_model))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ------------------------------------------------------------------ generating

    def _generating(self, dialect: Dialect) -> _Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            body = await self._opened(http, dialect.name)
            try:
                wish = self._understood(dialect, body)
            except BadRequest:
                self._keep(http, body, dialect.name)
                raise
            request = self._keep(http, body, dialect.name, wish)
            self._check_model(body)
            turn = self.script.next_turn(request)
            if isinstance(turn, Failure):
                raise _Refused(turn)
            answers = answers_of(turn, wish.choices)
            reply = self._generated(dialect, request, wish, answers)
            await asyncio.sleep(answers[0].latency_seconds)
            return await self._told(http, dialect, reply, answers[0])

        return self._guarded(dialect.fail, handle)

    def _understood(self, dialect: Dialect, body: dict[str, Any]) -> Wish:
        try:
            wish = dialect.read(body)
        except BadRequest:
            raise
        except (KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f"The request has not the shape of the API: {error!r}") from error
        earlier = body.get("previous_response_id") if dialect is RESPONSES else None
        if earlier is None:
            return wish
        if earlier not in self._conversations:
            raise BadRequest(f"Previous response with id '{earlier}' not found.", "previous_response_id")
        messages = responses.continued(body, wish, self._conversations[earlier])
        return Wish(messages, wish.tools, max_tokens=wish.max_tokens, json_schema=wish.json_schema)

    def _generated(self, dialect: Dialect, request: Request, wish: Wish, answers: list[Answer]) -> Reply:
        number = next(self._numbers)
        choices = []
        for index, answer in enumerate(answers):
            call_ids = [f"{dialect.tool_call_prefix}_{number}_{index}_{n}" for n in range(len(answer.tool_calls))]
            choices.append(generate(answer, wish, index=index, call_ids=call_ids))
        reply = Reply(f"{dialect.id_prefix}-{number}", CREATED, request, tuple(choices), self.token_ids)
        if dialect is RESPONSES:
            self._conversations[reply.id] = responses.spoken(request.body, wish.messages, choices[0])
        return reply

    async def _told(self, http: web.Request, dialect: Dialect, reply: Reply, answer: Answer) -> web.StreamResponse:
        if not reply.request.is_streaming:
            if answer.cut_after_events is not None:
                return _hang_up(http)
            return web.json_response(dialect.tell(reply), headers={"x-request-id": reply.id})
        stream = web.StreamResponse(headers={"content-type": "text/event-stream", "x-request-id": reply.id})
        await stream.prepare(http)
        with suppress(ConnectionError):  # the client has gone, which is its right
            for number, event in enumerate(dialect.stream(reply)):
                if number == answer.cut_after_events:
                    if answer.cut_with is not None:
                        await stream.write(dialect.fail_in_stream(answer.cut_with))
                        break
                    return _hang_up(http, stream)
                await stream.write(event)
                await asyncio.sleep(answer.pause_seconds)
            await stream.write_eof()
        return stream

    # ------------------------------------------------------------------ the rest of the API

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        body = await self._opened(http, "messages")
        messages = conversation(body)
        tokens = render(messages, body.get("tools") or ())
        self._keep(http, body, "messages", Wish(messages, prompt_token_ids=tuple(tokens)))
        self._check_model(body)
        return web.json_response({"input_tokens": len(tokens)})

    async def _embed(self, http: web.Request) -> web.StreamResponse:
        body = await self._opened(http, "embeddings")
        self._keep(http, body, "embeddings")
        self._check_model(body)
        return web.json_response(embeddings.tell(body))

    async def _list_models(self, http: web.Request) -> web.StreamResponse:
        self._check_key(http)
        self._keep(http, {}, "models")
        models = [_model(name) for name in self.models]
        ends = {"has_more": False, "first_id": self.models[0], "last_id": self.models[-1]}
        return web.json_response({"object": "list", "data": models, **ends})

    async def _show_model(self, http: web.Request) -> web.StreamResponse:
        self._check_key(http)
        self._keep(http, {}, "models")
        self._check_model({"model": http.match_info["model"]})
        return web.json_response(_model(http.match_info["model"]))

    # ------------------------------------------------------------------ what every request goes through

    def _guarded(self, fail: Callable[[Failure], dict[str, Any]], handle: _Handler) -> _Handler:
        async def guarded(http: web.Request) -> web.StreamResponse:
            try:
                answered: web.StreamResponse = await handle(http)
            except BadRequest as error:
                return _refusal(fail, Failure(400, str(error), param=error.param))
            except _Refused as refused:
                return _refusal(fail, refused.failure)
            return answered

        return guarded

    async def _opened(self, http: web.Request, dialect: str) -> dict[str, Any]:
        """The body of a request that shows the right key."""
        text = await http.text()
        try:
            body = json.loads(text)
        except ValueError as error:
            raise BadRequest(f"We could not parse the JSON body of your request: {error}") from error
        if not isinstance(body, dict) or not isinstance(body.get("model"), str):
            raise BadRequest("you must provide a model parameter", "model")
        try:
            self._check_key(http)
        except _Refused:
            self._keep(http, body, dialect)
            raise
        return body

    def _keep(self, http: web.Request, body: dict[str, Any], dialect: str, wish: Wish | None = None) -> Request:
        headers = {name.lower(): value for name, value in http.headers.items()}
        messages, ids = (wish.messages, wish.prompt_ids) if wish is not None else ((), ())
        request = Request(http.path_qs, headers, body, dialect, messages, ids)
        self.requests.append(request)
        return request

    def _check_key(self, http: web.Request) -> None:
        shown = http.headers.get("x-api-key") or http.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key is not None and shown != self.api_key:
            raise _Refused(Failure(401, "Incorrect API key provided."))

    def _check_model(self, body: dict[str, Any]) -> None:
        if body["model"] not in self.models:
            raise _Refused(Failure(404, f"The model `{body['model']}` does not exist.", param="model"))


def _model(name: str) -> dict[str, Any]:
    """A model as both OpenAI and Anthropic list it."""
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(CREATED))
    openai = {"id": name, "object": "model", "created": CREATED, "owned_by": "stub"}
    return {**openai, "type": "model", "display_name": name, "created_at": made}


def _refusal(fail: Callable[[Failure], dict[str, Any]], failure: Failure) -> web.Response:
    seconds = failure.retry_after_seconds
    headers = {} if seconds is None else {"retry-after": f"{seconds:g}"}
    return web.json_response(fail(failure), status=failure.status, headers=headers)


def _hang_up(http: web.Request, stream: web.StreamResponse | None = None) -> web.StreamResponse:
    """Break the connection without another byte."""
    if http.transport is not None:
        http.transport.close() if stream is not None else http.transport.abort()
    return stream or web.Response()


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
