"""Whether the calls of an attempt are stored: what proxies say of them, and what is made of those that cannot say."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agentlightning.llm_proxy.flush import FlushedCalls, flush_calls
from agentlightning.types import ProxyLLM, Rollout
from agentlightning.types.resources import PROXY_SECRET_PREFIX

ROLLOUT = Rollout(rollout_id="ro-1", input=None, start_time=0.0)
PLACE = "/rollout/ro-1/attempt/at-1/agl/flush"


class Asked:
    """A proxy that always answers the same, and notes who asked."""

    def __init__(self, status: int, told: dict[str, Any]) -> None:
        self.status = status
        self.told = told
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((request.method, request.path, request.headers.get("Authorization")))
        return web.json_response(self.told, status=self.status)


@asynccontextmanager
async def served(status: int = 200, **told: Any) -> AsyncIterator[Asked]:
    asked = Asked(status, told)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", asked.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    asked.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield asked
    finally:
        await runner.cleanup()


def llm(url: str, **fields: Any) -> ProxyLLM:
    return ProxyLLM(endpoint=url, model="m", **fields)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_proxy_is_asked_for_the_attempt_with_the_key_of_it(suffix: str) -> None:
    async with served(stored=3) as asked:
        flushed = await flush_calls([llm(asked.url + suffix, api_key="key-of-the-attempt")], ROLLOUT, "at-1")

    assert flushed == FlushedCalls(stored=3)
    assert asked.requests == [("POST", PLACE, "Bearer key-of-the-attempt")]


async def test_the_secret_of_a_proxy_is_not_what_is_sent() -> None:
    secret = PROXY_SECRET_PREFIX + "0123456789abcdef"
    async with served() as asked:
        await flush_calls([llm(asked.url, api_key=secret)], ROLLOUT, "at-1")

    (_, _, authorization) = asked.requests[0]
    assert authorization is not None
    assert "0123456789abcdef" not in authorization


async def test_what_several_proxies_say_is_added_up() -> None:
    async with (
        served(stored=2, lost={"too large": 1}, waiting=1, in_flight=1) as one,
        served(stored=1, lost={"too large": 2, "odd": 1}, waiting=0, in_flight=2) as other,
    ):
        flushed = await flush_calls([llm(one.url), llm(other.url)], ROLLOUT, "at-1")

    lost = {"too large": 3, "odd": 1, "not stored yet": 1}
    assert flushed == FlushedCalls(stored=3, lost=lost, unanswered=3)


async def test_a_proxy_of_two_models_is_asked_once() -> None:
    async with served(stored=2) as asked:
        flushed = await flush_calls([llm(asked.url), llm(f"{asked.url}/v1")], ROLLOUT, "at-1")

    assert (flushed.stored, len(asked.requests)) == (2, 1)


@pytest.mark.parametrize("status", [404, 405])
async def test_a_gateway_of_another_make_has_nothing_to_say(status: int) -> None:
    async with served(status) as asked:
        flushed = await flush_calls([llm(asked.url)], ROLLOUT, "at-1")

    assert flushed == FlushedCalls(unknown_proxies=1)


async def test_a_proxy_that_refuses_is_told_as_one_that_could_not_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    async with served(401) as asked, served(stored=1) as other:
        flushed = await flush_calls([llm(asked.url), llm(other.url)], ROLLOUT, "at-1")

    assert flushed == FlushedCalls(stored=1, lost={"the proxy could not be asked: OSError: it answered 401": 0})
    assert "cannot say whether its calls are stored" in caplog.text


async def test_a_proxy_that_has_gone_is_told_as_one_that_could_not_be_asked() -> None:
    async with served() as asked:
        gone = asked.url
    flushed = await flush_calls([llm(gone)], ROLLOUT, "at-1")

    assert [reason.startswith("the proxy could not be asked: Client") for reason in flushed.lost] == [True]


async def test_a_proxy_that_does_not_answer_is_waited_for_no_longer_than_patience_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentlightning.llm_proxy.flush.TIMEOUT_SECONDS", 0.05)
    left = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the caller has gone
        writer.close()
        left.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server:
        flushed = await flush_calls([llm(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")], ROLLOUT, "at-1")
        await asyncio.wait_for(left.wait(), 30)

    (reason,) = flushed.lost
    assert reason.startswith("the proxy could not be asked: ")
    assert "Timeout" in reason
    assert not reason.endswith(": ")
