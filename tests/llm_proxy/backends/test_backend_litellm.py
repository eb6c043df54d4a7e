"""Providers that are reached through the litellm library, with a library of the tests in its place."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentlightning.errors import ProxyError
from agentlightning.llm_proxy.backends import Backend, BackendBroken, BackendPool, PreparedRequest, backend_of
from tests.llm_proxy.backends.conftest import MakePool
from tests.llm_proxy.backends.fake_clock import request_for

SECRET = "aws-very-secret"
LIBRARY = """
import os

calls = []
prices_were_local = os.environ.get("LITELLM_LOCAL_MODEL_COST_MAP")


class Said:
    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self, mode, exclude_unset, exclude_none):
        return {name: value for name, value in self.fields.items() if value is not None or not exclude_none}


class RateLimitError(Exception):
    status_code = 429
    message = "slow down, aws-very-secret"

    class response:
        headers = {"retry-after-ms": "1500"}


async def stream(broken):
    yield Said(delta="one", role=None)
    yield Said(delta="two")
    if broken:
        raise ValueError("gone with aws-very-secret")


async def acompletion(**arguments):
    calls.append(arguments)
    said = arguments["messages"][0]["content"]
    if said == "limit":
        raise RateLimitError("no")
    if said == "crash":
        raise ValueError("odd")
    if arguments["stream"]:
        return stream(said == "break")
    return Said(said=said, tools=None)


async def aembedding(**arguments):
    calls.append(arguments)
    return Said(embedding=[1.0])
"""

ENTRY = {
    "model_name": "m",
    "litellm_params": {
        "model": "bedrock/claude",
        "aws_secret_access_key": SECRET,
        "temperature": 0.5,
        "extra_headers": {"X-Team": "one"},
        "timeout": 30,
    },
}


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the library's name, first on the path."""
    (tmp_path / "litellm.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "litellm", raising=False)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "")
    monkeypatch.delenv("LITELLM_LOCAL_MODEL_COST_MAP")
    yield
    sys.modules.pop("litellm", None)


def saying(text: str, *, stream: bool = False, **fields: Any) -> Any:
    def prepare(backend: Backend) -> PreparedRequest:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        return PreparedRequest("chat", orjson.dumps(body), stream=stream)

    return request_for(prepare=prepare)


async def passed_on(pool: BackendPool, **fields: Any) -> dict[str, Any]:
    """What the library is called with for a request with these fields."""
    async with await pool.send(saying("hello", **fields)) as answer:
        await answer.read()
    arguments: dict[str, Any] = sys.modules["litellm"].calls[-1]
    return arguments


def test_credentials_are_no_defaults_of_the_request() -> None:
    backend = backend_of(ENTRY, 0)

    assert (backend.provider, backend.model, backend.dialects) == ("litellm", "bedrock/claude", ("chat", "embeddings"))
    assert backend.defaults == {"temperature": 0.5}
    assert backend.options == {"aws_secret_access_key": SECRET}
    assert SECRET not in repr(backend)
    assert "litellm" not in sys.modules


async def test_whole_answer_is_made_of_what_the_library_gives(make_pool: MakePool) -> None:
    pool = make_pool(ENTRY)

    async with await pool.send(saying("hello")) as answer:
        assert (answer.status, await answer.read()) == (200, b'{"said":"hello","tools":null}')

    library = sys.modules["litellm"]
    assert library.prices_were_local == "True"
    assert library.calls == [
        {
            "model": "bedrock/claude",
            "messages": [{"role": "user", "content": "hello"}],
            "aws_secret_access_key": SECRET,
            "timeout": 30.0,
            "num_retries": 0,
            "max_retries": 0,
            "extra_headers": {"X-Team": "one"},
            "stream": False,
        }
    ]
    assert pool.describe()[0]["in_flight"] == 0


async def test_streamed_answer_is_events(make_pool: MakePool) -> None:
    async with await make_pool(ENTRY).send(saying("hello", stream=True)) as answer:
        chunks = [chunk async for chunk in answer.chunks()]

    assert chunks == [b'data: {"delta":"one"}\n\n', b'data: {"delta":"two"}\n\n', b"data: [DONE]\n\n"]
    assert answer.headers["content-type"] == "text/event-stream"


async def test_stream_that_breaks_is_told_without_secrets(make_pool: MakePool) -> None:
    pool = make_pool(ENTRY)

    async with await pool.send(saying("break", stream=True)) as answer:
        with pytest.raises(BackendBroken, match=r"ValueError: gone with \[redacted\]"):
            await answer.read()
    assert pool.describe()[0]["in_flight"] == 0


async def test_stream_left_half_read_is_closed(make_pool: MakePool) -> None:
    pool = make_pool(ENTRY)

    async with await pool.send(saying("hello", stream=True)) as answer:
        assert await anext(answer.chunks()) == b'data: {"delta":"one"}\n\n'

    assert await answer.read() == b""
    assert pool.describe()[0]["in_flight"] == 0


async def test_error_of_the_library_is_an_answer(make_pool: MakePool) -> None:
    pool = make_pool(ENTRY)

    async with await pool.send(saying("limit")) as answer:
        told = orjson.loads(await answer.read())

    assert answer.status == 429
    assert told["error"] == {
        "message": "slow down, [redacted]",
        "type": "RateLimitError",
        "param": None,
        "code": 429,
    }
    assert pool.describe()[0]["on_hold_seconds"] == pytest.approx(1.5, abs=0.5)


async def test_error_without_a_status_is_one_of_the_server(make_pool: MakePool) -> None:
    async with await make_pool(ENTRY).send(saying("crash")) as answer:
        assert (answer.status, orjson.loads(await answer.read())["error"]["message"]) == (500, "odd")


async def test_embeddings_go_through_the_library_too(make_pool: MakePool) -> None:
    ask = request_for(prepare=lambda backend: PreparedRequest("embeddings", b'{"input":"x"}', stream=False))

    async with await make_pool(ENTRY).send(ask) as answer:
        assert await answer.read() == b'{"embedding":[1.0]}'

    assert sys.modules["litellm"].calls[0]["input"] == "x"


async def test_a_field_that_is_none_of_the_dialect_is_dropped_with_one_warning(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(ENTRY)

    with caplog.at_level(logging.WARNING, logger="agentlightning"):
        passed = [await passed_on(pool, api_base="http://elsewhere", seed=3) for _ in range(2)]

    assert ["api_base" in arguments for arguments in passed] == [False, False]
    assert [arguments["seed"] for arguments in passed] == [3, 3]
    assert [("'api_base'" in told, "litellm_params" in told) for told in caplog.messages] == [(True, True)]


async def test_a_caller_cannot_fill_the_log_with_names_of_fields(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    names = {f"field-{number}\n" + "x" * 1000: 1 for number in range(500)}

    with caplog.at_level(logging.WARNING, logger="agentlightning"):
        await passed_on(make_pool(ENTRY), **names)

    assert len(caplog.messages) == 20
    assert max(map(len, caplog.messages)) < 500
    assert not any("\n" in told for told in caplog.messages)


async def test_what_the_entry_sets_is_passed_on_also_where_a_caller_may_not_set_it(make_pool: MakePool) -> None:
    tool = {"googleSearch": {}}
    params = {"model": "gemini/flash", "tools": [tool], "extra_body": {"safety": "high"}}
    pool = make_pool({"model_name": "m", "litellm_params": params})

    passed = await passed_on(pool, tools=[tool], safety="low")  # the proxy puts defaults into the request

    assert (passed["tools"], passed["safety"]) == ([tool], "high")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "mcp", "server_url": "http://elsewhere"}]},
        {"tools": [{"googleSearch": {}}]},
        {"tools": "all"},
        {"tools": [{"type": "function", "function": {"parameters": {"$ref": "http://elsewhere"}}}]},
        {"functions": [{"name": "f", "parameters": {"properties": {"x": {"$ref": "file:///etc/passwd"}}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"$ref": "x.json"}]}}}},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"role": "user", "content": {"type": "text"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://elsewhere"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "gs://bucket/a"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "assistant", "thinking_blocks": [{"type": "image"}]}]},
    ],
    ids=lambda fields: orjson.dumps(fields).decode()[:60],
)
async def test_the_library_is_not_given_what_is_not_known(make_pool: MakePool, fields: dict[str, Any]) -> None:
    pool = make_pool(ENTRY)

    with pytest.raises(ProxyError, match="litellm library") as refusal:
        await pool.send(saying("hello", **fields))

    assert refusal.value.http_status == 400
    assert (pool.describe()[0]["in_flight"], pool.describe()[0]["failures"]) == (0, 0)


async def test_a_conversation_with_tools_is_passed_on_as_it_is(make_pool: MakePool) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fields = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        "messages": [
            {
                "role": "system",
                "content": [{"type": "text", "text": "Be kind", "cache_control": {"type": "ephemeral"}}],
            },
            {"role": "user", "name": "ada", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "assistant", "tool_calls": [{**call, "provider_specific_fields": {"thought_signature": "s"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ],
    }

    passed = await passed_on(make_pool(ENTRY), **fields)

    assert (passed["tools"], passed["messages"]) == (fields["tools"], fields["messages"])


@pytest.mark.parametrize("given", ["gs://bucket/file", ["text", " S3://bucket/file"], [{"image": "http://elsewhere"}]])
async def test_what_is_embedded_is_text_and_no_stored_object(make_pool: MakePool, given: Any) -> None:
    body = orjson.dumps({"input": given})

    with pytest.raises(ProxyError, match=r"'input"):
        await make_pool(ENTRY).send(
            request_for(prepare=lambda backend: PreparedRequest("embeddings", body, stream=False))
        )


@pytest.mark.parametrize("name", ["http://elsewhere/v1", "../../files?x=", "a/../b", "arn:aws:bedrock:x/y", "a b", ""])
@pytest.mark.parametrize("model", ["huggingface/*", "azure/*"])
async def test_a_name_in_place_of_a_wildcard_is_a_plain_name(make_pool: MakePool, model: str, name: str) -> None:
    entry = {"model_name": "any/*", "litellm_params": {"model": model, "api_base": "http://127.0.0.1:9"}}
    pool = make_pool(entry)

    with pytest.raises(ProxyError, match="There is no model") as refusal:
        await pool.send(request_for(model=f"any/{name}"))

    assert refusal.value.http_status == 404
    assert (pool.describe()[0]["in_flight"], pool.describe()[0]["failures"]) == (0, 0)


@pytest.mark.parametrize("name", ["llama", "meta-llama/Llama-3.1-8B", "qwen2.5:7b-instruct_q4", "a@b+c"])
def test_names_of_models_may_stand_for_a_wildcard(name: str) -> None:
    backend = backend_of({"model_name": "any/*", "litellm_params": {"model": "huggingface/*"}}, 0)

    assert backend.named(f"any/{name}").model == f"huggingface/{name}"
