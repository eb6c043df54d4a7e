"""Where calls go: each context has its own address, whoever shares the client with it."""

import asyncio
import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import openai
import pytest
from opentelemetry import context as otel_context

from agentlightning.errors import ConfigurationError
from agentlightning.instrumentation.model_sdks import OpenAIPatch
from agentlightning.instrumentation.redirect import (
    ModelRequest,
    Target,
    current_router,
    exclude_from_redirect,
    is_secret,
    not_redirected,
    redirected,
)
from agentlightning.tracer import OtelTracer
from tests.instrumentation.sdk_calls import CHAT, read, read_async
from tests.instrumentation.traces import observed, observed_async
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel, running

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def elsewhere() -> Iterator[StubModel]:
    """A second model, where calls are sent; it knows another model, and asks for another key."""
    with running(models=("mine", "stub-model"), api_key="theirs") as model:
        yield model


def to(there: StubModel, /, **target: Any) -> Any:
    """A router that sends every call there."""

    def route(request: ModelRequest) -> Target:
        return Target(there.openai_url if request.sdk == "openai" else there.url, api_key="theirs", **target)

    return route


def noting(seen: list[ModelRequest], router: Any) -> Any:
    """A router that keeps what it was asked."""

    def route(request: ModelRequest) -> Any:
        seen.append(request)
        return router(request)

    return route


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    """It would reach nobody."""
    with openai.OpenAI(base_url=f"{NOWHERE}/v1", api_key="mine", max_retries=0) as client:
        yield client


CALLS: dict[str, Any] = {
    "chat": lambda client: client.chat.completions.create(**CHAT),
    "chat stream": lambda client: client.chat.completions.create(**CHAT, stream=True),
    "chat helper": lambda client: client.chat.completions.stream(**CHAT),
    "raw": lambda client: client.chat.completions.with_raw_response.create(**CHAT),
    "streamed response": lambda client: client.chat.completions.with_streaming_response.create(**CHAT),
    "response": lambda client: client.responses.create(model="stub-model", input="Hello"),
    "completion": lambda client: client.completions.create(model="stub-model", prompt="Hello"),
    "embeddings": lambda client: client.embeddings.create(model="stub-model", input="Hello"),
    "copied client": lambda client: client.with_options(timeout=5).chat.completions.create(**CHAT),
    "whole address": lambda client: client.post(f"{NOWHERE}/v1/chat/completions", body={**CHAT}, cast_to=object),
    "model in extra body": lambda client: client.chat.completions.create(**CHAT, extra_body={"model": "other"}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_goes_where_the_router_says(client: openai.OpenAI, elsewhere: StubModel, call: Any) -> None:
    def run() -> Any:
        with redirected(to(elsewhere, model="mine", headers={"x-rollout": "ro-1"})):
            return read(call(client))

    trace = observed(run)

    assert trace.error is None
    [request] = elsewhere.requests
    assert (request.body["model"], request.headers["x-rollout"]) == ("mine", "ro-1")
    assert request.headers["authorization"] == "Bearer theirs"
    [span] = trace.spans
    assert span.attributes["server.address"] == elsewhere.openai_url
    assert span.attributes["gen_ai.request.model"] == "mine"
    assert span.attributes["agentlightning.requested_model"] in ("stub-model", "other")


COUNTS: dict[str, Any] = {
    "plain": lambda client: client.messages.count_tokens(model="stub-model", messages=CHAT["messages"]),
    "beta": lambda client: client.beta.messages.count_tokens(model="stub-model", messages=CHAT["messages"]),
    "whole address": lambda client: client.post(
        f"{NOWHERE}/v1/messages/count_tokens", body={**CHAT}, cast_to=anthropic.types.MessageTokensCount
    ),
}


@pytest.mark.parametrize("call", COUNTS.values(), ids=COUNTS)
def test_tokens_are_counted_where_the_call_would_go_and_nothing_is_recorded(elsewhere: StubModel, call: Any) -> None:
    def run() -> Any:
        with (
            redirected(to(elsewhere, model="mine")),
            anthropic.Anthropic(base_url=NOWHERE, api_key="sk-mine", max_retries=0) as client,
        ):
            return call(client).input_tokens

    trace = observed(run)

    assert (trace.error, trace.spans) == (None, [])
    [request] = elsewhere.requests
    assert trace.result == len(request.prompt_token_ids)
    path = request.path.partition("?")[0]  # anthropic 1.0 adds `beta=true`
    assert (path, request.body["model"]) == ("/v1/messages/count_tokens", "mine")
    assert "sk-mine" not in str(request)


def test_neither_client_nor_arguments_are_changed(client: openai.OpenAI, elsewhere: StubModel) -> None:
    arguments = {**copy.deepcopy(CHAT), "extra_headers": {"x-mine": "1"}, "extra_body": {"seed": 1}}
    before, known = copy.deepcopy(arguments), {**vars(client)}

    def run() -> None:
        with redirected(to(elsewhere, model="mine", headers={"x-theirs": "2"})):
            client.chat.completions.create(**arguments)

    assert observed(run).error is None
    assert arguments == before
    assert {name: value for name, value in vars(client).items() if name in known} == known
    assert (str(client.base_url), client.api_key) == (f"{NOWHERE}/v1/", "mine")
    headers = elsewhere.requests[0].headers
    assert (headers["x-mine"], headers["x-theirs"]) == ("1", "2")


def test_what_the_target_leaves_open_stays(client: openai.OpenAI) -> None:
    with running() as model:

        def run() -> None:
            with redirected(lambda _: Target(f"{model.url}/v1/")):
                client.chat.completions.create(**CHAT)

        trace = observed(run)

    assert trace.error is None
    assert (model.requests[0].body["model"], model.requests[0].headers["authorization"]) == (
        "stub-model",
        "Bearer mine",
    )
    assert model.requests[0].path == "/v1/chat/completions"


def test_every_try_goes_there(client: openai.OpenAI, elsewhere: StubModel) -> None:
    elsewhere.script = Script([Failure(429, retry_after_seconds=0.01), Failure(500, retry_after_seconds=0.01), "there"])
    asked: list[ModelRequest] = []

    def run() -> Any:
        with redirected(noting(asked, to(elsewhere))):
            return client.with_options(max_retries=2).chat.completions.create(**CHAT).choices[0].message.content

    trace = observed(run)

    assert (trace.result, len(elsewhere.requests), len(asked), len(trace.spans)) == ("there", 3, 1, 1)


def test_a_router_may_let_a_call_go_on(stub_model: StubModel, elsewhere: StubModel) -> None:
    def run(client: openai.OpenAI) -> None:
        with redirected(lambda request: to(elsewhere)(request) if request.path == "/responses" else None):
            client.chat.completions.create(**CHAT)
            client.responses.create(model="stub-model", input="Hello")

    with openai.OpenAI(base_url=stub_model.openai_url, api_key="mine") as client:
        trace = observed(run, client)

    assert ([r.dialect for r in stub_model.requests], [r.dialect for r in elsewhere.requests]) == (
        ["chat"],
        ["responses"],
    )
    assert "agentlightning.requested_model" not in trace.model_calls[0].attributes


def test_what_a_router_raises_reaches_the_caller_and_nothing_is_sent(stub_model: StubModel) -> None:
    """A call that cannot be sent where it belongs must not go to where it does not."""

    def run(client: openai.OpenAI) -> None:
        with redirected(lambda _: 1 / 0):  # type: ignore[arg-type, return-value]
            client.chat.completions.create(**CHAT)

    with openai.OpenAI(base_url=stub_model.openai_url, api_key="mine") as client:
        trace = observed(run, client)

    assert isinstance(trace.error, ZeroDivisionError)
    assert stub_model.requests == []


def test_calls_without_a_dialect_are_not_redirected(stub_model: StubModel, elsewhere: StubModel) -> None:
    def run(client: openai.OpenAI) -> None:
        with redirected(to(elsewhere)):
            list(client.models.list())

    with openai.OpenAI(base_url=stub_model.openai_url, api_key="mine") as client:
        observed(run, client)

    assert (len(stub_model.gets), len(elsewhere.gets)) == (1, 0)


def test_after_undoing_calls_go_where_their_client_sends_them(stub_model: StubModel, elsewhere: StubModel) -> None:
    with OtelTracer().lifespan():
        pass

    with redirected(to(elsewhere)), openai.OpenAI(base_url=stub_model.openai_url, api_key="mine") as client:
        client.chat.completions.create(**CHAT)

    assert (len(stub_model.requests), len(elsewhere.requests)) == (1, 0)


# ---------------------------------------------------------------------- other clients


@pytest.mark.parametrize("stream", [False, True])
def test_azure_goes_there_too_and_keeps_its_key(elsewhere: StubModel, stream: bool) -> None:
    azure: dict[str, Any] = {"azure_endpoint": NOWHERE, "api_key": "secret", "api_version": "2025-01-01"}

    def run() -> Any:
        with openai.AzureOpenAI(**azure) as client, redirected(to(elsewhere, model="mine")):
            return read(client.chat.completions.create(**CHAT, stream=stream))

    trace = observed(run)

    assert trace.error is None
    [request] = elsewhere.requests
    assert request.path.partition("?")[0] == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer theirs"
    assert "secret" not in request.headers.values()


@pytest.mark.parametrize("method", ["create", "stream", "beta"])
def test_anthropic_goes_there_too(elsewhere: StubModel, method: str) -> None:
    ask = {**CHAT, "max_tokens": 9}

    def run() -> Any:
        with anthropic.Anthropic(base_url=NOWHERE, api_key="mine", max_retries=0) as client:
            messages: Any = client.beta.messages if method == "beta" else client.messages
            with redirected(to(elsewhere, model="mine")):
                return read(messages.stream(**ask) if method == "stream" else messages.create(**ask))

    trace = observed(run)

    assert trace.error is None
    [request] = elsewhere.requests
    assert (request.body["model"], request.headers["x-api-key"]) == ("mine", "theirs")
    assert [span.name for span in trace.spans] == ["anthropic.messages"]


async def test_asynchronous_clients_go_there_too(elsewhere: StubModel) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=NOWHERE, api_key="mine") as client:
            with redirected(to(elsewhere, model="mine")):
                await read_async(await client.chat.completions.create(**CHAT, stream=True))
        async with anthropic.AsyncAnthropic(base_url=NOWHERE, api_key="mine") as other:
            with redirected(to(elsewhere, model="mine")):
                await read_async(other.messages.stream(**CHAT, max_tokens=9))

    trace = await observed_async(run)

    assert trace.error is None
    assert [request.dialect for request in elsewhere.requests] == ["chat", "messages"]


# ---------------------------------------------------------------------- what is written into the request


@pytest.mark.parametrize("place", ["arguments", "extra_body"])
def test_parameters_are_written_over_those_of_the_request(
    client: openai.OpenAI, elsewhere: StubModel, place: str
) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": 5, "seed": 7}
    arguments = asked if place == "arguments" else {"extra_body": asked}

    def run() -> None:
        with redirected(to(elsewhere, parameters={"temperature": 0.25, "top_k": 4, "max_tokens": None})):
            client.chat.completions.create(**CHAT, **arguments)

    trace = observed(run)

    assert trace.error is None
    [request] = elsewhere.requests
    assert {name: request.body.get(name) for name in ("temperature", "top_k", "seed")} == {
        "temperature": 0.25,
        "top_k": 4,
        "seed": 7,
    }
    assert "max_tokens" not in request.body
    assert trace.spans[0].attributes["gen_ai.request.temperature"] == 0.25


def test_the_receiver_is_told_the_span_of_the_call(client: openai.OpenAI, elsewhere: StubModel) -> None:
    def run() -> None:
        with redirected(to(elsewhere)):
            client.chat.completions.create(**CHAT)
            client.chat.completions.create(**CHAT, stream=True).close()

    trace = observed(run)

    told = [re.fullmatch("00-(.*)-(.*)-0[13]", request.headers["traceparent"]) for request in elsewhere.requests]
    assert [match and match.groups() for match in told] == [(s.trace_id, s.span_id) for s in trace.model_calls]
    assert len(told) == 2


def test_nobody_is_told_of_spans_where_nothing_is_redirected_or_recorded(
    stub_model: StubModel, client: openai.OpenAI, elsewhere: StubModel
) -> None:
    def run() -> None:
        with openai.OpenAI(base_url=stub_model.openai_url, api_key="mine") as other:
            other.chat.completions.create(**CHAT)
        token = otel_context.attach(otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
        with redirected(to(elsewhere)):
            client.chat.completions.create(**CHAT)
        otel_context.detach(token)

    observed(run)

    assert ["traceparent" in request.headers for request in (*stub_model.requests, *elsewhere.requests)] == [False] * 2


def test_a_patch_that_does_not_record_still_redirects(client: openai.OpenAI, elsewhere: StubModel) -> None:
    with OpenAIPatch(records=False), redirected(to(elsewhere, model="mine")):
        client.chat.completions.create(**CHAT)
    assert [(r.body["model"], "traceparent" in r.headers) for r in elsewhere.requests] == [("mine", False)]


# ---------------------------------------------------------------------- secrets

SECRET = "sk-secret"
SECRET_HEADERS = {
    "authorization": f"Bearer {SECRET}",
    "X-Api-Key": SECRET,
    "X-Goog-Api-Key": SECRET,
    "Ocp-Apim-Subscription-Key": SECRET,
    "cookie": f"session={SECRET}",
    "X-Auth": SECRET,
    "x-session-token": SECRET,
}
CLIENTS: dict[str, Any] = {
    "its key": lambda **options: openai.OpenAI(api_key=SECRET, **options),
    "default headers": lambda **options: openai.OpenAI(api_key="k", default_headers=SECRET_HEADERS, **options),
    "default query": lambda **options: openai.OpenAI(api_key="k", default_query={"key": SECRET}, **options),
    "key from a function": lambda **options: openai.OpenAI(api_key=lambda: SECRET, **options),
    "its account": lambda **options: openai.OpenAI(api_key="k", organization=SECRET, project=SECRET, **options),
    "its HTTP client": lambda **options: openai.OpenAI(
        api_key="k", http_client=openai.DefaultHttpxClient(headers=SECRET_HEADERS), **options
    ),
    "Anthropic's key": lambda **options: anthropic.Anthropic(api_key=SECRET, **options),
    "Anthropic's token": lambda **options: anthropic.Anthropic(api_key=None, auth_token=SECRET, **options),
    "Anthropic's headers": lambda **options: anthropic.Anthropic(
        api_key="k", default_headers=SECRET_HEADERS, **options
    ),
}


def said_by(request: Any) -> str:
    return "\n".join([request.path, *(f"{name}: {value}" for name, value in request.headers.items())])


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_no_secret_of_the_client_goes_along(elsewhere: StubModel, make: Any) -> None:
    extra = {"extra_headers": {"x-api-key": SECRET, "X-Mine": "1"}}

    def run() -> None:
        with make(base_url=NOWHERE, max_retries=0) as client, redirected(to(elsewhere, model="mine")):
            if isinstance(client, openai.OpenAI):
                client.chat.completions.create(**CHAT, **extra)
            else:
                client.messages.create(**CHAT, max_tokens=9, **extra)

    assert observed(run).error is None
    [request] = elsewhere.requests
    assert SECRET not in said_by(request)
    assert (request.headers["authorization"], request.headers["x-mine"]) == ("Bearer theirs", "1")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Authorization", True),
        ("proxy-authorization", True),
        ("X-API-KEY", True),
        ("apikey", True),
        ("Set-Cookie", True),
        ("OpenAI-Organization", True),
        ("Idempotency-Key", False),
        ("X-Author", False),
        ("x-keyboard", False),
        ("anthropic-beta", False),
        ("Content-Type", False),
    ],
)
def test_secrets_are_known_by_their_names(name: str, expected: bool) -> None:
    assert is_secret(name) is expected


def test_a_client_that_signs_its_calls_is_refused(elsewhere: StubModel) -> None:
    class Signing(anthropic.Anthropic):
        aws_region = "eu"

    def run() -> None:
        with Signing(base_url=NOWHERE, api_key="k") as client, redirected(to(elsewhere)):
            client.messages.create(**CHAT, max_tokens=9)

    trace = observed(run)

    assert isinstance(trace.error, ConfigurationError)
    assert "exclude_from_redirect" in str(trace.error)
    assert elsewhere.requests == []


# ---------------------------------------------------------------------- what is left alone


def test_an_excluded_client_and_its_copies_go_their_own_way(stub_model: StubModel, elsewhere: StubModel) -> None:
    options = {"base_url": stub_model.openai_url, "api_key": "mine"}

    def run() -> None:
        with openai.OpenAI(**options) as judge, openai.OpenAI(**options) as other, redirected(to(elsewhere)):
            assert exclude_from_redirect(judge) is judge
            judge.chat.completions.create(**CHAT)
            judge.with_options(timeout=5).chat.completions.create(**CHAT)
            other.chat.completions.create(**CHAT)

    assert observed(run).error is None
    assert (len(stub_model.requests), len(elsewhere.requests)) == (2, 1)


def test_clients_that_share_an_http_client_are_excluded_one_by_one(stub_model: StubModel, elsewhere: StubModel) -> None:
    def run() -> None:
        with openai.DefaultHttpxClient() as shared:
            options: dict[str, Any] = {"base_url": stub_model.openai_url, "api_key": "mine", "http_client": shared}
            judge, other = exclude_from_redirect(openai.OpenAI(**options)), openai.OpenAI(**options)
            with redirected(to(elsewhere)):
                judge.chat.completions.create(**CHAT)
                other.chat.completions.create(**CHAT)

    assert observed(run).error is None
    assert (len(stub_model.requests), len(elsewhere.requests)) == (1, 1)


def test_a_block_of_code_can_be_left_alone(stub_model: StubModel, elsewhere: StubModel) -> None:
    def run(client: openai.OpenAI) -> None:
        with redirected(to(elsewhere)):
            with not_redirected():
                client.chat.completions.create(**CHAT)
            client.chat.completions.create(**CHAT)
        client.chat.completions.create(**CHAT)

    with openai.OpenAI(base_url=stub_model.openai_url, api_key="mine") as client:
        observed(run, client)

    assert (len(stub_model.requests), len(elsewhere.requests), current_router()) == (2, 1, None)


# ---------------------------------------------------------------------- many at once


def check(models: list[StubModel], count: int, calls: int) -> None:
    """Each rollout's requests, and only those, went to its own server under its own name."""
    seen = [(place, request) for place, model in enumerate(models) for request in model.requests]
    assert len(seen) == count * calls
    for place, request in seen:
        number = int(request.headers["x-rollout"])
        assert (number % len(models), request.body["model"], request.text) == (
            place,
            f"model-{number}",
            f"I am {number}",
        )
        assert request.headers["authorization"] == f"Bearer key-{number}"


@pytest.fixture
def two_models() -> Iterator[list[StubModel]]:
    names = tuple(f"model-{number}" for number in range(16))
    with ExitStack() as stack:
        slow = Script(lambda request: Answer(request.text, latency_seconds=0.005))
        yield [stack.enter_context(running(slow, models=names)) for _ in range(2)]


def router_of(models: list[StubModel], number: int) -> Any:
    url = models[number % len(models)].openai_url
    target = Target(url, f"model-{number}", f"key-{number}", {"x-rollout": str(number)})
    return lambda _: target


def said(number: int) -> dict[str, Any]:
    return {"model": "stub-model", "messages": [{"role": "user", "content": f"I am {number}"}]}


async def test_16_tasks_with_one_client_reach_their_own_servers(two_models: list[StubModel]) -> None:
    async def work(client: openai.AsyncOpenAI, tracer: OtelTracer, number: int) -> list[Any]:
        with redirected(router_of(two_models, number)):
            async with tracer.trace_context() as recorder:
                for stream in (False, True, False):
                    await read_async(await client.chat.completions.create(**said(number), stream=stream))
                return [(span.attributes or {})["gen_ai.request.model"] for span in recorder.spans()]

    with OtelTracer().lifespan() as tracer:
        async with openai.AsyncOpenAI(base_url=NOWHERE, api_key="mine") as client:
            models = await asyncio.gather(*(work(client, tracer, number) for number in range(16)))

    check(two_models, 16, 3)
    assert models == [[f"model-{number}"] * 3 for number in range(16)]
