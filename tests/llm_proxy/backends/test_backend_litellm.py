"""Providers that are reached through the litellm library, with a library of the tests in its place."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentlightning.llm_proxy.backends import Backend, BackendBroken, Outgoing, backend_of
from tests.llm_proxy.backends.conftest import MakeFleet
from tests.llm_proxy.backends.scripted_server import ask_for

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
    if arguments["messages"] == "limit":
        raise RateLimitError("no")
    if arguments["messages"] == "crash":
        raise ValueError("odd")
    if arguments["stream"]:
        return stream(arguments["messages"] == "break")
    return Said(said=arguments["messages"], tools=None)


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


def saying(messages: str, *, stream: bool = False) -> Any:
    def prepare(backend: Backend) -> Outgoing:
        return Outgoing("chat", orjson.dumps({"model": "m", "messages": messages}), stream=stream)

    return ask_for(prepare=prepare)


def test_credentials_are_no_defaults_of_the_request() -> None:
    backend = backend_of(ENTRY, 0)

    assert (backend.provider, backend.model, backend.dialects) == ("litellm", "bedrock/claude", ("chat", "embeddings"))
    assert backend.defaults == {"temperature": 0.5}
    assert backend.options == {"aws_secret_access_key": SECRET}
    assert SECRET not in repr(backend)
    assert "litellm" not in sys.modules


async def test_whole_answer_is_made_of_what_the_library_gives(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(ENTRY)

    async with await fleet.ask(saying("hello")) as answer:
        assert (answer.status, await answer.read()) == (200, b'{"said":"hello","tools":null}')

    library = sys.modules["litellm"]
    assert library.prices_were_local == "True"
    assert library.calls == [
        {
            "model": "bedrock/claude",
            "messages": "hello",
            "aws_secret_access_key": SECRET,
            "timeout": 30.0,
            "num_retries": 0,
            "max_retries": 0,
            "extra_headers": {"X-Team": "one"},
            "stream": False,
        }
    ]
    assert fleet.describe()[0]["in_flight"] == 0


async def test_streamed_answer_is_events(make_fleet: MakeFleet) -> None:
    async with await make_fleet(ENTRY).ask(saying("hello", stream=True)) as answer:
        chunks = [chunk async for chunk in answer.chunks()]

    assert chunks == [b'data: {"delta":"one"}\n\n', b'data: {"delta":"two"}\n\n', b"data: [DONE]\n\n"]
    assert answer.headers["content-type"] == "text/event-stream"


async def test_stream_that_breaks_is_told_without_secrets(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(ENTRY)

    async with await fleet.ask(saying("break", stream=True)) as answer:
        with pytest.raises(BackendBroken, match=r"ValueError: gone with \[redacted\]"):
            await answer.read()
    assert fleet.describe()[0]["in_flight"] == 0


async def test_stream_left_half_read_is_closed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(ENTRY)

    async with await fleet.ask(saying("hello", stream=True)) as answer:
        assert await anext(answer.chunks()) == b'data: {"delta":"one"}\n\n'

    assert await answer.read() == b""
    assert fleet.describe()[0]["in_flight"] == 0


async def test_error_of_the_library_is_an_answer(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(ENTRY)

    async with await fleet.ask(saying("limit")) as answer:
        told = orjson.loads(await answer.read())

    assert answer.status == 429
    assert told["error"] == {
        "message": "slow down, [redacted]",
        "type": "RateLimitError",
        "param": None,
        "code": 429,
    }
    assert fleet.describe()[0]["on_hold_seconds"] == pytest.approx(1.5, abs=0.5)


async def test_error_without_a_status_is_one_of_the_server(make_fleet: MakeFleet) -> None:
    async with await make_fleet(ENTRY).ask(saying("crash")) as answer:
        assert (answer.status, orjson.loads(await answer.read())["error"]["message"]) == (500, "odd")


async def test_embeddings_go_through_the_library_too(make_fleet: MakeFleet) -> None:
    ask = ask_for(prepare=lambda backend: Outgoing("embeddings", b'{"input":"x"}', stream=False))

    async with await make_fleet(ENTRY).ask(ask) as answer:
        assert await answer.read() == b'{"embedding":[1.0]}'

    assert sys.modules["litellm"].calls[0]["input"] == "x"
