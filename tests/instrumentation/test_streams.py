"""Streams that do not go well: each call ends its span once, with what had come, and the reader is not disturbed."""

import asyncio
import gc
import pickle
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.frameworks.fresh_process import told_by
from tests.instrumentation.sdk_calls import USER, Asking, AskingAnthropic, AskingOpenAI
from tests.instrumentation.traces import Trace, observed, observed_async
from tests.stub_model.raw import held_until_read
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel

LONG = Answer("One two three four five six.", pause_seconds=0.01)
CHAT: tuple[str, dict[str, Any]] = (
    "chat.completions.create",
    {"model": "stub-model", "messages": USER, "stream": True},
)
RESPONSE: tuple[str, dict[str, Any]] = ("responses.create", {"model": "stub-model", "input": "Hello", "stream": True})
MESSAGE: tuple[str, dict[str, Any]] = (
    "messages.create",
    {"model": "stub-model", "messages": USER, "max_tokens": 99, "stream": True},
)
STREAMS = {
    "chat": (AskingOpenAI, CHAT, 3),
    "response": (AskingOpenAI, RESPONSE, 6),
    "message": (AskingAnthropic, MESSAGE, 5),
}
"""SDK, call, and how many events bring two words."""
each_stream = pytest.mark.parametrize(("sdk", "call", "events"), STREAMS.values(), ids=STREAMS)
both_ways = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def told(trace: Trace) -> tuple[str | None, bool]:
    """What the only span says was said, and whether it says that the stream was cut."""
    assert len(trace.spans) == 1, [span.name for span in trace.spans]
    attributes = trace.spans[0].attributes
    return attributes.get("gen_ai.completion.0.content"), bool(attributes.get("agentlightning.response.is_cut"))  # type: ignore[return-value]


@each_stream
@both_ways
def test_a_stream_that_the_server_cuts(
    stub_model: StubModel, sdk: type[Asking], call: Any, events: int, is_async: bool
) -> None:
    stub_model.script = Script([Answer(LONG.text, cut_after_events=events)])

    trace = sdk(stub_model, is_async=is_async)(call[0], **call[1])

    assert trace.error is not None
    assert told(trace) == ("One two", True)
    assert trace.spans[0].status.status_code == "ERROR"


@each_stream
@both_ways
def test_an_error_inside_a_stream(
    stub_model: StubModel, sdk: type[Asking], call: Any, events: int, is_async: bool
) -> None:
    stub_model.script = Script([Answer(LONG.text, cut_after_events=events, cut_with=Failure(529, "too busy"))])

    trace = sdk(stub_model, is_async=is_async)(call[0], **call[1])

    assert told(trace)[0] == "One two"
    assert (trace.spans[0].status.status_code, trace.spans[0].status.description) == ("ERROR", "too busy")
    if sdk is AskingAnthropic or call is CHAT:
        assert isinstance(trace.error, (openai.APIError, anthropic.APIError))


# ---------------------------------------------------------------------- readers that leave


def leave_by_break(stream: Any) -> None:
    for number, _ in enumerate(stream):
        if number == 3:
            break
    stream.close()
    stream.close()


def leave_by_context(stream: Any) -> None:
    with stream:
        next(iter(stream))


def leave_unread(stream: Any) -> None:
    stream.close()


def leave_by_error(stream: Any) -> None:
    def fail() -> None:
        with stream:
            assert next(iter(stream)) is None

    with pytest.raises(AssertionError):
        fail()


LEAVING = (leave_by_break, leave_by_context, leave_unread, leave_by_error)


@each_stream
@pytest.mark.parametrize("leave", LEAVING)
def test_a_reader_that_leaves(
    stub_model: StubModel, sdk: type[Asking], call: Any, events: int, leave: Callable[[Any], None]
) -> None:
    stub_model.script = Script([LONG])
    with sdk(stub_model, is_async=False).client() as client:
        trace = observed(lambda: leave(_method(client, call[0])(**call[1])))

    assert trace.error is None
    text, is_cut = told(trace)
    assert is_cut
    assert LONG.text.startswith(text or "")
    assert trace.spans[0].status.status_code == "UNSET"


def _method(client: Any, path: str) -> Any:
    for name in path.split("."):
        client = getattr(client, name)
    return client


async def aleave_by_context(stream: Any) -> None:
    async with stream:
        async for _ in stream:
            break


async def aleave_unread(stream: Any) -> None:
    await stream.close()


async def aleave_by_aclose(stream: Any) -> None:
    await anext(stream.__aiter__())
    await stream.response.aclose()


async def aleave_by_cancellation(stream: Any) -> None:
    async def read() -> None:
        async for _ in stream:
            is_reading.set()
        await asyncio.sleep(60)

    is_reading = asyncio.Event()
    task = asyncio.create_task(read())
    await is_reading.wait()
    task.cancel()
    await asyncio.wait([task])
    await stream.close()


ALEAVING = (aleave_by_context, aleave_unread, aleave_by_aclose, aleave_by_cancellation)


@each_stream
@pytest.mark.parametrize("leave", ALEAVING)
async def test_an_asynchronous_reader_that_leaves(
    stub_model: StubModel, sdk: type[Asking], call: Any, events: int, leave: Callable[[Any], Awaitable[None]]
) -> None:
    stub_model.script = Script([LONG])

    async with sdk(stub_model, is_async=True).async_client() as client:

        async def run() -> None:
            await leave(await _method(client, call[0])(**call[1]))

        trace = await observed_async(run)

    assert trace.error is None
    text, is_cut = told(trace)
    assert is_cut
    assert LONG.text.startswith(text or "")


@each_stream
@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the SDKs, whose stream is never closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_that_is_forgotten(
    stub_model: StubModel, sdk: type[Asking], call: Any, events: int, count: int
) -> None:
    stub_model.script = Script([LONG])
    with sdk(stub_model, is_async=False).client() as client:

        def run() -> None:
            stream = _method(client, call[0])(**call[1])
            for _ in range(count):
                next(stream)
            del stream
            gc.collect()

        trace = observed(run)

    assert told(trace)[1]


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_asynchronous_stream_that_is_forgotten(stub_model: StubModel, count: int) -> None:
    stub_model.script = Script([LONG])
    async with AskingOpenAI(stub_model, is_async=True).async_client() as client:

        async def run() -> None:
            stream = await client.chat.completions.create(**CHAT[1])
            for _ in range(count):
                await anext(stream)
            del stream
            for _ in range(2):  # what the first finds lets go of others
                gc.collect()
                await asyncio.sleep(0.01)

        trace = await observed_async(run)

    assert told(trace)[1]


def test_a_stream_that_is_read_in_another_thread_belongs_to_where_it_began(stub_model: StubModel) -> None:
    stub_model.script = Script([LONG])
    with AskingOpenAI(stub_model, is_async=False).client() as client:

        def run() -> None:
            stream = client.chat.completions.create(**CHAT[1])
            thread = threading.Thread(target=list, args=(stream,))
            thread.start()
            thread.join()

        trace = observed(run)

    assert told(trace) == (LONG.text, False)


def test_two_streams_that_are_read_in_turns_do_not_mix(stub_model: StubModel) -> None:
    stub_model.script = Script(["One two three.", "Four five six."])
    with AskingOpenAI(stub_model, is_async=False).client() as client:

        def run() -> None:
            streams = [client.chat.completions.create(**CHAT[1]) for _ in range(2)]
            for pair in zip(*streams, strict=True):
                assert len(pair) == 2
            for stream in streams:
                assert list(stream) == []

        trace = observed(run)

    contents = {span.attributes["gen_ai.completion.0.content"] for span in trace.spans}
    assert contents == {"One two three.", "Four five six."}


# ---------------------------------------------------------------------- raw responses


def test_a_raw_response_that_is_read_in_lines(ask: Asking) -> None:
    with AskingOpenAI(ask.model, is_async=False).client() as client:

        def run() -> Any:
            with client.chat.completions.with_streaming_response.create(**CHAT[1]) as response:
                return [line for line in response.iter_lines() if line]

        trace = observed(run)

    assert told(trace) == ("Hello there", False)
    assert trace.result[-1] == "data: [DONE]"


def test_a_raw_response_that_is_not_read(stub_model: StubModel) -> None:
    with AskingOpenAI(stub_model, is_async=False).client() as client:

        def run() -> Any:
            with client.chat.completions.with_streaming_response.create(**CHAT[1]) as response:
                return response.status_code

        trace = observed(run)

    assert trace.result == 200
    assert told(trace) == (None, True)


def test_a_raw_response_can_be_parsed_twice(stub_model: StubModel) -> None:
    with AskingOpenAI(stub_model, is_async=False).client() as client:

        def run() -> list[Any]:
            raw = client.chat.completions.with_raw_response.create(model="stub-model", messages=USER)
            return [raw.parse().choices[0].message.content, raw.parse().id, raw.http_response.json()["id"]]

        trace = observed(run)

    assert trace.result == ["Hello there", "chatcmpl-1", "chatcmpl-1"]
    assert told(trace) == ("Hello there", False)


def test_a_response_that_was_read_can_be_pickled(stub_model: StubModel) -> None:
    with AskingOpenAI(stub_model, is_async=False).client() as client:

        def run() -> Any:
            with client.chat.completions.with_streaming_response.create(model="stub-model", messages=USER) as response:
                response.read()
                return pickle.loads(pickle.dumps(response.http_response)).json()["id"]

        trace = observed(run)

    assert (trace.error, trace.result) == (None, "chatcmpl-1")


# ---------------------------------------------------------------------- the first stream of a process

READER = """
import asyncio, json, sys
from agentlightning.tracer import OtelTracer

async def main(url):
    import anthropic, openai
    first = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x")
    second = anthropic.AsyncAnthropic(base_url=url, api_key="x")
    asked = {"model": "stub-model", "messages": [{"role": "user", "content": "hi"}]}
    streams = [
        first.chat.completions.create(stream=True, **asked),
        first.responses.create(model="stub-model", input="hi", stream=True),
        second.messages.create(max_tokens=9, stream=True, **asked),
    ]
    for pending in streams:
        async for _ in await pending:
            await first.chat.completions.create(**asked)
    return len(streams)

tracer = OtelTracer()
with tracer.lifespan(), tracer._trace_context_sync():
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
"""


def test_the_first_stream_of_a_process_is_live(stub_model: StubModel) -> None:
    stub_model.script = Script([held_until_read()], repeats_last=True)
    assert told_by(READER, stub_model.url) == 3
