"""Clients of the vendors' SDKs, whoever made them: errors pass through them unchanged, and nobody notices us."""

import asyncio
import json
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import anthropic
import openai
import pytest
from opentelemetry import context as otel_context

from agentlightning.tracer import OtelTracer
from tests.instrumentation.sdk_calls import (
    CHAT,
    CHAT_WAYS,
    HTTP,
    IDS,
    MESSAGE_WAYS,
    PARAMETERS,
    USER,
    WEATHER,
    Asking,
    AskingAnthropic,
    AskingOpenAI,
    Verdict,
    call_of,
    read,
)
from tests.instrumentation.traces import observed
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel, running

MESSAGE: dict[str, Any] = {**CHAT, "max_tokens": 99}
ANTHROPIC_TOOLS: Any = [{"name": "weather", "description": "It says.", "input_schema": PARAMETERS}]


@dataclass(frozen=True)
class Sdk:
    """A vendor's SDK, and the plainest call with it."""

    package: Any
    asking: type[Asking]
    method: str
    arguments: dict[str, Any]
    span: str


OPENAI = Sdk(openai, AskingOpenAI, "chat.completions.create", CHAT, "openai.chat.completion")
ANTHROPIC = Sdk(anthropic, AskingAnthropic, "messages.create", MESSAGE, "anthropic.messages")
each_sdk = pytest.mark.parametrize("sdk", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
each_kind = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])

# ---------------------------------------------------------------------- errors

ERRORS = {
    "400": (Failure(400, "no"), "BadRequestError"),
    "429": (Failure(429, "no"), "RateLimitError"),
    "500": (Failure(500, "no"), "InternalServerError"),
    "too late": (Answer("late", latency_seconds=5), "APITimeoutError"),
}


@pytest.mark.parametrize(("turn", "kind"), ERRORS.values(), ids=ERRORS)
@each_kind
@each_sdk
def test_an_error_is_raised_unchanged_and_told(
    stub_model: StubModel, sdk: Sdk, is_async: bool, turn: Any, kind: str
) -> None:
    stub_model.script = Script([turn])
    options = {"timeout": 0.3} if isinstance(turn, Answer) else {}

    trace = sdk.asking(stub_model, is_async=is_async)(sdk.method, **sdk.arguments, client=options)

    assert type(trace.error) is getattr(sdk.package, kind)
    (call,) = trace.spans
    assert (call.name, call.status.status_code) == (sdk.span, "ERROR")
    assert (call.status.description or "").startswith(f"{kind}: ")
    assert call.attributes["gen_ai.prompt.0.content"] == "Hello there"
    assert "gen_ai.completion.0.role" not in call.attributes


@each_sdk
def test_a_call_that_is_tried_again_is_one_span(stub_model: StubModel, sdk: Sdk) -> None:
    again = {"retry_after_seconds": 0.01}
    stub_model.script = Script([Failure(429, **again), Failure(500, **again), "at last"])

    trace = sdk.asking(stub_model, is_async=False)(sdk.method, **sdk.arguments, client={"max_retries": 2})

    assert call_of(trace, sdk.span)["gen_ai.completion.0.content"] == "at last"
    assert len(stub_model.requests) == 3


@each_sdk
async def test_a_cancelled_call_is_told(stub_model: StubModel, sdk: Sdk) -> None:
    stub_model.script = Script([Answer("late", latency_seconds=5)])
    with OtelTracer().lifespan() as tracer:
        made = sdk.asking(stub_model, is_async=True).async_client()
        async with made as client, tracer.trace_context() as recorder:
            task = asyncio.create_task(attrgetter(sdk.method)(client)(**sdk.arguments))
            while not stub_model.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    assert [(span.name, span.status.description) for span in recorder.spans()] == [(sdk.span, "CancelledError: ")]


@pytest.mark.parametrize("method", ["with_raw_response.create", "with_streaming_response.create"])
def test_an_error_of_a_raw_response_is_told(ask: Asking, method: str) -> None:
    ask.model.script = Script([Failure(400, "no")])
    trace = ask(f"chat.completions.{method}", **CHAT)
    assert isinstance(trace.error, openai.BadRequestError)
    assert [span.status.status_code for span in trace.spans] == ["ERROR"]


def test_a_request_that_the_sdk_refuses_raises_what_it_did(ask: Asking) -> None:
    trace = ask("chat.completions.create", model="stub-model")
    assert isinstance(trace.error, TypeError)
    assert trace.spans == []


# ---------------------------------------------------------------------- clients


def test_clients_made_before_are_seen(stub_model: StubModel) -> None:
    with AskingOpenAI(stub_model, is_async=False).client() as client:
        create = client.chat.completions.create
        trace = observed(lambda: create(**CHAT).choices[0].message.content)
    assert (trace.result, call_of(trace)["gen_ai.completion.0.content"]) == ("Hello there", "Hello there")


def test_a_subclass_of_the_client_is_seen(stub_model: StubModel) -> None:
    class Mine(openai.OpenAI):
        asked = 0

        def request(self, *args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return super().request(*args, **kwargs)

    with Mine(base_url=stub_model.openai_url, api_key="any") as client:
        trace = observed(lambda: client.with_options(timeout=9).chat.completions.create(**CHAT))
        call_of(trace)


def test_the_client_of_the_module_is_seen(stub_model: StubModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "api_key", "any")
    monkeypatch.setattr(openai, "base_url", f"{stub_model.openai_url}/")
    try:
        trace = observed(lambda: openai.chat.completions.create(**CHAT))
    finally:
        openai._reset_client()

    assert call_of(trace)["gen_ai.completion.0.content"] == "Hello there"


SAID = {"id": "x", "object": "chat.completion", "created": 1, "model": "gpt"}
WHOLE = {
    **SAID,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Yes."}}],
}
CHUNK = {**SAID, "choices": [{"index": 0, "finish_reason": "stop", "delta": {"role": "assistant", "content": "Yes."}}]}


def answering(seen: list[str]) -> Any:
    """A transport that notes the path of each request and says yes."""

    def answer(request: Any) -> Any:
        seen.append(str(request.url))
        if json.loads(request.content).get("stream"):
            text = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n"
            return HTTP.Response(200, text=text, headers={"content-type": "text/event-stream"})
        return HTTP.Response(200, json=WHOLE)

    return HTTP.MockTransport(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_azure_with_a_transport_of_its_own_is_seen(stream: bool) -> None:
    seen: list[str] = []
    azure: dict[str, Any] = {
        "azure_endpoint": "https://me.openai.azure.com",
        "api_key": "any",
        "api_version": "2025-01-01",
    }
    with openai.AzureOpenAI(**azure, http_client=HTTP.Client(transport=answering(seen))) as client:
        trace = observed(lambda: read(client.chat.completions.create(model="gpt", messages=USER, stream=stream)))

    attributes = call_of(trace)
    assert attributes["gen_ai.completion.0.content"] == "Yes."
    assert attributes["server.address"].startswith("https://me.openai.azure.com")
    assert seen == ["https://me.openai.azure.com/openai/deployments/gpt/chat/completions?api-version=2025-01-01"]


def test_a_response_that_is_asked_for_as_such_is_read(stub_model: StubModel) -> None:
    with AskingOpenAI(stub_model, is_async=False).client() as client:
        trace = observed(lambda: client.post("/chat/completions", body={**CHAT}, cast_to=HTTP.Response).json())
    assert trace.result["choices"][0]["message"]["content"] == "Hello there"
    assert call_of(trace)["gen_ai.completion.0.content"] == "Hello there"


def test_calls_that_opentelemetry_is_told_to_leave_out_are_left_out(stub_model: StubModel) -> None:
    def run() -> Any:
        token = otel_context.attach(otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
        with AskingOpenAI(stub_model, is_async=False).client() as client:
            client.chat.completions.create(**CHAT)
        otel_context.detach(token)

    trace = observed(run)

    assert (trace.error, trace.spans, len(stub_model.requests)) == (None, [], 1)


# ---------------------------------------------------------------------- nothing is changed


OPENAI_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (method, {**CHAT, **options}) for name, (method, options) in CHAT_WAYS.items()},
    "choices stream": ("chat.completions.create", {**CHAT, "n": 3, "stream": True, "extra_body": IDS}),
    "parsed": ("chat.completions.parse", {**CHAT, "response_format": Verdict}),
    "response helper": ("responses.stream", {"model": "stub-model", "input": "hi"}),
    "response raw": ("responses.with_raw_response.create", {"model": "stub-model", "input": "hi"}),
    "completion stream": ("completions.create", {"model": "stub-model", "prompt": "hi", "stream": True}),
    "embeddings": ("embeddings.create", {"model": "stub-model", "input": "hi"}),
}
ANTHROPIC_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (method, {**MESSAGE, **options}) for name, (method, options) in MESSAGE_WAYS.items()},
    "tools helper": ("messages.stream", {**MESSAGE, "tools": ANTHROPIC_TOOLS}),
    "count": ("messages.count_tokens", CHAT),
}
ALL_CALLS = [
    pytest.param(sdk, *call, id=f"{sdk.package.__name__} {name}")
    for sdk, calls in ((OPENAI, OPENAI_CALLS), (ANTHROPIC, ANTHROPIC_CALLS))
    for name, call in calls.items()
]


@pytest.mark.parametrize(("sdk", "method", "arguments"), ALL_CALLS)
@each_kind
def test_the_program_gets_what_it_would_get_anyway(
    sdk: Sdk, method: str, arguments: dict[str, Any], is_async: bool
) -> None:
    before = repr(arguments)
    script = Script(lambda _: Answer("I look.", (WEATHER,) if "tools" in arguments else ()))
    with running(script) as model:
        plainly = sdk.asking(model, is_async=is_async).plainly(method, **arguments)
        sent = (model.requests + model.gets)[-1].body
    with running(script) as model:
        trace = sdk.asking(model, is_async=is_async)(method, **arguments)

    assert (trace.error, trace.result) == (None, plainly)
    assert (model.requests + model.gets)[-1].body == sent
    assert repr(arguments) == before
