"""The legacy server from the algorithm's side."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import ConfigurationError, InvalidValue
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.server import AgentLightningServer
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.types import PromptTemplate, ProxyLLM, RolloutLegacy

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


@pytest.fixture
async def server() -> AsyncIterator[AgentLightningServer]:
    server = AgentLightningServer(port=0)
    await server.start()
    yield server
    await server.stop()


async def report(server: AgentLightningServer, rollout: RolloutLegacy) -> None:
    async with AgentLightningClient(server.endpoint) as client:
        assert await client.post_rollout_async(rollout) is not None


TOKEN = "a-master-token-of-some-length"
RUNNERS_TOKEN = sign_token(TOKEN, Scope("runner"), expires_at=None)
READERS_TOKEN = sign_token(TOKEN, Scope("reader"), expires_at=None)


@pytest.fixture
async def locked() -> AsyncIterator[AgentLightningServer]:
    """A server that wants a token."""
    server = AgentLightningServer(port=0, token=TOKEN)
    await server.start()
    yield server
    await server.stop()


@pytest.mark.parametrize(
    ("method", "path", "authorization"),
    [("GET", "/task", ""), ("POST", "/task", "Bearer wrong"), ("GET", "/health", TOKEN), ("GET", "/openapi.json", "")],
    ids=["no token", "another token", "no scheme", "no route"],
)
async def test_a_server_with_a_token_serves_nobody_else(
    locked: AgentLightningServer, method: str, path: str, authorization: str
) -> None:
    headers = {"Authorization": authorization}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, locked.endpoint + path, headers=headers) as response,
    ):
        assert response.status == 401
        assert "token" in (await response.json())["detail"]


@pytest.mark.parametrize("is_from_environment", [False, True], ids=["argument", "environment"])
async def test_clients_show_the_token(is_from_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_from_environment:
        monkeypatch.setenv("AGL_STORE_TOKEN", TOKEN)
    options: Any = {} if is_from_environment else {"token": TOKEN}
    server = AgentLightningServer(port=0, **options)
    await server.start()

    async with AgentLightningClient(server.endpoint, **options) as client:
        rollout_id = await client.submit_task_async("hello")
        task = await asyncio.to_thread(client.poll_next_task)
    await server.stop()

    assert task is not None
    assert task.rollout_id == rollout_id


@pytest.mark.parametrize(
    ("token", "method", "path", "is_permitted"),
    [
        (RUNNERS_TOKEN, "GET", "/task", True),
        (RUNNERS_TOKEN, "POST", "/rollout", True),
        (RUNNERS_TOKEN, "POST", "/task", False),
        (RUNNERS_TOKEN, "POST", "/resources", False),
        (READERS_TOKEN, "GET", "/task", False),
    ],
)
async def test_a_signed_token_permits_what_a_runner_does(
    locked: AgentLightningServer, token: str, method: str, path: str, is_permitted: bool
) -> None:
    headers = {"Authorization": f"Bearer {token}"}

    async with (
        aiohttp.ClientSession() as session,
        session.request(method, locked.endpoint + path, headers=headers) as response,
    ):
        assert (response.status != 403) is is_permitted


@pytest.mark.parametrize(("token", "is_shown"), [(TOKEN, True), (RUNNERS_TOKEN, False)], ids=["master", "runner"])
async def test_a_runner_does_not_see_the_secret_of_a_locked_proxy(
    locked: AgentLightningServer, token: str, is_shown: bool
) -> None:
    proxy = ProxyLLM(endpoint="http://127.0.0.1:9", model="m", api_key="agl-proxy-of-the-operator")
    resources_id = await locked.update_resources({"main_llm": proxy})
    await locked.queue_task("a task")
    headers = {"Authorization": f"Bearer {token}"}

    async with aiohttp.ClientSession(headers=headers) as session:
        for path in ("/resources/latest", f"/resources/{resources_id}", "/task"):
            async with session.get(locked.endpoint + path) as response:
                shown = await response.text()
            assert response.status == 200
            assert ("agl-proxy-of" in shown) is (is_shown and path != "/task"), path


@pytest.mark.parametrize(
    ("host", "token", "warns"), [("0.0.0.0", None, True), ("0.0.0.0", TOKEN, False), ("127.0.0.1", None, False)]
)
def test_a_public_address_without_a_token_is_warned_of(
    host: str, token: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    AgentLightningServer(host, 0, token=token)

    assert ("asks for no token" in caplog.text) is warns


def test_a_token_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="white space"):
        AgentLightningServer(token="two words")


@pytest.mark.parametrize("is_compressed", [False, True], ids=["plain", "compressed"])
async def test_a_body_above_the_limit_is_refused(is_compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.legacy.server.MAX_BODY_BYTES", 10_000)
    server = AgentLightningServer(port=0)
    await server.start()
    body = json.dumps({"sample": "x" * 20_000}).encode()
    headers = {"Content-Type": "application/json", **({"Content-Encoding": "gzip"} if is_compressed else {})}

    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{server.endpoint}/task", data=gzip.compress(body) if is_compressed else body, headers=headers
        ) as response,
    ):
        status = response.status
    await server.stop()

    assert status == 413


async def test_a_stopped_server_is_gone_and_can_start_again() -> None:
    server = AgentLightningServer(port=0)
    await server.start()
    rollout_id = await server.queue_task("hello")
    with pytest.raises(RuntimeError, match="is running already; stop it"):
        await server.start()

    await server.stop()
    await server.stop()
    assert (server._store, server.loop, server.startup_event.is_set()) == (None, None, False)
    await server.start()

    assert await server.poll_completed_rollout(rollout_id, timeout=0) is None
    await server.stop()


def test_a_server_can_start_again_in_another_loop() -> None:
    server = AgentLightningServer(port=0)

    async def has_a_task() -> bool:
        await server.start()
        async with AgentLightningClient(server.endpoint) as client:
            has_task = await client.poll_next_task_async(timeout=0.0) is not None
        await server.queue_task("hello")
        await server.stop()
        return has_task

    assert [asyncio.run(has_a_task()) for _ in range(2)] == [False, True]


async def test_a_busy_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        server = AgentLightningServer(port=busy.getsockname()[1])

        with pytest.raises(RuntimeError, match="Another process may already be using this port"):
            await server.start()
        with pytest.raises(RuntimeError, match="Another process may already be using this port"):
            await server.run_forever()


async def test_cancelling_run_forever_stops_the_server() -> None:
    server = AgentLightningServer(port=0)
    running = asyncio.create_task(server.run_forever())
    await asyncio.to_thread(server.startup_event.wait)

    running.cancel()
    await asyncio.wait([running])

    assert running.cancelled()
    assert server._store is None


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("queue_task", ("hello",)),
        ("update_resources", ({},)),
        ("get_completed_rollout", ("rollout-1",)),
        ("poll_completed_rollout", ("rollout-1",)),
        ("retrieve_completed_rollouts", ()),
    ],
)
async def test_operations_need_a_running_server(method: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"is not running; start it with `await server.start\(\)`"):
        await getattr(AgentLightningServer(), method)(*args)


async def test_polling_waits_for_a_rollout_that_is_not_known_yet(server: AgentLightningServer) -> None:
    rollout = RolloutLegacy(rollout_id="rollout-of-an-earlier-server")
    polling = asyncio.create_task(server.poll_completed_rollout(rollout.rollout_id, timeout=10))
    await asyncio.sleep(0)

    await report(server, rollout)

    assert await polling == rollout


class Opaque:
    """Something that JSON does not know."""


@pytest.mark.parametrize(
    "sample",
    [{"deep": [Opaque()]}, {Opaque(): 1}, b"\xff", {"\ud800": 1}],
    ids=["nested object", "object as a key", "bytes", "half a character as a key"],
)
async def test_an_input_that_cannot_travel_is_refused_when_it_is_queued(
    server: AgentLightningServer, sample: Any
) -> None:
    with pytest.raises(InvalidValue, match="A task cannot be sent to clients as JSON"):
        await server.queue_task(sample)
    with pytest.raises(InvalidValue, match="A task cannot be sent to clients as JSON"):
        await server.queue_task("hello", metadata={"sample": sample})

    async with AgentLightningClient(server.endpoint) as client:
        assert await client.poll_next_task_async(timeout=0.0) is None


@pytest.mark.parametrize("sample", [(1, 2), {1: "one"}, b"text", PromptTemplate(template="{x}", engine="f-string")])
async def test_an_input_that_pydantic_writes_as_json_travels(server: AgentLightningServer, sample: Any) -> None:
    rollout_id = await server.queue_task(sample)

    async with AgentLightningClient(server.endpoint) as client:
        task = await client.poll_next_task_async()

    assert task is not None
    assert task.rollout_id == rollout_id


async def test_resources_that_cannot_travel_are_refused(server: AgentLightningServer) -> None:
    with pytest.raises(InvalidValue, match="A bundle of resources cannot be sent"):
        await server.update_resources({"prompt": PromptTemplate(template="\ud800", engine="f-string")})

    assert await server.store.get_latest_resources() is None
