"""What the real litellm package does with a caller's request: which server it asks, with which key, for what.

A caller may write anything into a request. One server on loopback is the provider, another belongs to the caller.
"""

import gc
import inspect
import os
import warnings
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it downloads its prices when it is imported
litellm = pytest.importorskip("litellm", reason="litellm needs an environment of its own: make test-litellm")

from litellm.types.utils import all_litellm_params  # noqa: E402

from agentlightning.errors import ProxyError  # noqa: E402
from agentlightning.llm_proxy.backends import Backend, BackendPool, PreparedRequest  # noqa: E402
from tests.llm_proxy.backends.conftest import MakePool, Serve  # noqa: E402
from tests.llm_proxy.backends.fake_clock import request_for  # noqa: E402
from tests.stub_model.raw import whole  # noqa: E402
from tests.stub_model.server import StubModel  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:Item 'summary' on TypedDict class:UserWarning",
    "ignore:unclosed:ResourceWarning",  # it does not close its clients
)
KEY = "sk-the-key-of-the-provider"
HELLO = [{"role": "user", "content": "Hello"}]
CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hi"}}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
ANSWER = {
    "id": "c-1",
    "object": "chat.completion",
    "created": 1,
    "model": "llama",
    "service_tier": "auto",
    "choices": [CHOICE],
    "usage": USAGE,
}
VECTOR = {"object": "embedding", "index": 0, "embedding": [1.0]}
EMBEDDING = {"object": "list", "model": "e", "data": [VECTOR], "usage": USAGE}
ORDINARY: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["."],
    "max_tokens": 7,
    "seed": 3,
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
}
ARGUMENTS = {
    *("api_base", "api_key", "aws_profile_name", "aws_bedrock_runtime_endpoint", "callbacks", "custom_llm_provider"),
    *("default_headers", "extra_body", "extra_query", "failure_callback", "fallbacks", "headers", "http_client"),
    *("input_callback", "metadata", "mock_response", "mock_tool_calls", "mock_delay", "organization", "proxy"),
    *("success_callback", "vertex_credentials", "vertex_project", "context_window_fallbacks", "litellm_params"),
    *all_litellm_params,
    *(name for call in (litellm.completion, litellm.acompletion) for name in inspect.signature(call).parameters),
}
OF_THE_DIALECT = {
    *("messages", "temperature", "top_p", "n", "stop", "max_tokens", "max_completion_tokens", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "seed", "response_format", "tools", "modalities"),
    *("tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort", "verbosity", "audio"),
    *("user", "stream_options", "service_tier", "prompt_cache_key", "safety_identifier", "thinking"),
}
FOREIGN = sorted(ARGUMENTS - OF_THE_DIALECT - {"model", "stream"})
PARTS = 8
"""In which the arguments are tried, since each takes a call."""


@pytest.fixture(scope="module", autouse=True)
def forgotten_clients() -> Iterator[None]:
    """What the library did not close is not blamed on the tests that come after."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm.in_memory_llm_clients_cache.flush_cache()
        gc.collect()


class Loopback:
    """A provider that the library knows the way to, and a server of the caller's."""

    def __init__(self, provider: StubModel, caller: StubModel, pool: BackendPool) -> None:
        self.provider = provider
        self.caller = caller
        self.pool = pool

    async def call(self, body: Any, *, model: str = "m", dialect: Any = "chat", **headers: str) -> tuple[int, Any]:
        def prepare(backend: Backend) -> PreparedRequest:
            return PreparedRequest(dialect, orjson.dumps(body), stream=False, headers=headers)

        async with await self.pool.send(request_for(model=model, prepare=prepare)) as answer:
            return answer.status, orjson.loads(await answer.read())

    @property
    def sent(self) -> list[Any]:
        """What the provider was asked for; that it shall not stream, the library says or leaves out."""
        bodies = [request.body for request in self.provider.requests]
        return [{name: value for name, value in body.items() if name != "stream"} for body in bodies]

    def forget(self) -> None:
        for server in (self.provider, self.caller):
            server.requests.clear()
            server.gets.clear()

    @property
    def caller_was_asked(self) -> bool:
        return bool(self.caller.requests or self.caller.gets)


@pytest.fixture
async def loopback(serve: Serve, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> Loopback:
    """The entry names no address, as most do; the library finds the provider by itself."""
    provider, caller = await serve(whole(orjson.dumps(ANSWER))), await serve()
    monkeypatch.setenv("GROQ_API_BASE", provider.openai_url)
    chat = {"model_name": "m", "litellm_params": {"model": "groq/llama", "api_key": KEY}}
    everything = {"model_name": "hf/*", "litellm_params": {"model": "huggingface/*", "api_key": KEY}}
    return Loopback(provider, caller, make_pool(chat, everything))


async def test_a_request_reaches_the_provider_with_its_fields(loopback: Loopback) -> None:
    status, answer = await loopback.call({"messages": HELLO, **ORDINARY})

    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hi")
    assert loopback.sent == [{"model": "llama", "messages": HELLO, **ORDINARY}]
    assert loopback.provider.requests[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("part", range(PARTS))
async def test_no_argument_of_the_library_is_the_callers_to_set(loopback: Loopback, part: int) -> None:
    obeyed = []
    for name in FOREIGN[part::PARTS]:
        await loopback.call({"messages": HELLO, name: loopback.caller.openai_url})
        is_as_ever = loopback.sent == [{"model": "llama", "messages": HELLO}]
        is_named = loopback.caller.openai_url in str([request.headers for request in loopback.provider.requests])
        if loopback.caller_was_asked or is_named or not is_as_ever:
            obeyed.append(name)
        loopback.forget()

    assert obeyed == []


@pytest.mark.parametrize("kind", ["text", "object", "list"])
async def test_all_arguments_at_once_change_nothing(loopback: Loopback, kind: str) -> None:
    url = loopback.caller.openai_url
    value: Any = {"text": url, "object": {"Authorization": url, "url": url}, "list": [{"url": url}]}[kind]
    await loopback.call({**dict.fromkeys(FOREIGN, value), "messages": HELLO})

    assert not loopback.caller_was_asked
    assert loopback.sent == [{"model": "llama", "messages": HELLO}]


async def test_no_header_of_the_caller_reaches_the_provider(loopback: Loopback) -> None:
    await loopback.call({"messages": HELLO}, **{"openai-beta": "callers"})

    assert "openai-beta" not in loopback.provider.requests[0].headers


@pytest.mark.parametrize("address", ["{caller}/image.png", "file:///etc/passwd", "/etc/passwd", "gs://bucket/file"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "ADDRESS"}},
        {"type": "image_url", "image_url": "ADDRESS"},
        {"type": "file", "file": {"file_id": "ADDRESS"}},
        {"type": "file", "file": {"file_data": "ADDRESS"}},
        {"type": "image", "source": {"type": "url", "url": "ADDRESS"}},
        {"type": "document", "source": {"type": "url", "url": "ADDRESS"}},
        {"type": "video_url", "video_url": {"url": "ADDRESS"}},
        {"type": "input_audio", "input_audio": {"data": "ADDRESS:", "format": "wav"}},
    ],
    ids=lambda part: "-".join(orjson.dumps(part).decode().split('"')[3::4]),
)
async def test_nothing_is_fetched_or_opened_for_a_message(loopback: Loopback, part: Any, address: str) -> None:
    address = address.format(caller=loopback.caller.openai_url)
    written = orjson.loads(orjson.dumps(part).replace(b"ADDRESS", address.encode()))

    with pytest.raises(ProxyError, match=r"messages\[0\]\.content\[0\]") as refusal:
        await loopback.call({"messages": [{"role": "user", "content": [written]}]})

    assert refusal.value.http_status == 400
    assert not loopback.caller_was_asked
    assert loopback.sent == []


async def test_an_image_within_the_request_reaches_the_provider(loopback: Loopback) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]

    status, _ = await loopback.call({"messages": messages})

    assert (status, loopback.sent) == (200, [{"model": "llama", "messages": messages}])


async def test_a_name_for_a_pattern_is_no_address(loopback: Loopback) -> None:
    with pytest.raises(ProxyError, match="There is no model") as refusal:
        await loopback.call({"messages": HELLO}, model=f"hf/{loopback.caller.openai_url}")

    assert refusal.value.http_status == 404
    assert not loopback.caller_was_asked


async def test_embeddings_are_asked_of_the_provider_alone(
    serve: Serve, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, caller = await serve(whole(orjson.dumps(EMBEDDING))), await serve()
    monkeypatch.setenv("JINA_AI_API_BASE", provider.openai_url)
    entry = {"model_name": "m", "litellm_params": {"model": "jina_ai/embed", "api_key": KEY}}
    loopback = Loopback(provider, caller, make_pool(entry))
    foreign = dict.fromkeys(set(FOREIGN) | {"api_type", "client"}, caller.openai_url)

    status, _ = await loopback.call({**foreign, "input": ["Hello"]}, dialect="embeddings")

    assert (status, loopback.caller_was_asked) == (200, False)
    assert [body["input"] for body in loopback.sent] == [["Hello"]]
    assert caller.openai_url not in str(loopback.sent)
