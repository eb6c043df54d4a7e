"""The client's calls: what is sent again and what is not, what comes back, and what a lost answer cannot break."""

import asyncio
import logging
import math
import socket
import time
from collections import Counter
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.http import connection
from agentlightning.utils import retries

TOKEN = "a-secret-nobody-may-read"
both_transports = pytest.mark.parametrize("transport", ["http", "ws"])


@pytest.fixture
def nowhere() -> str:
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"


# ---------------------------------------------------------------------- retries


async def test_request_that_is_wrong_is_not_sent_again(scripted: Any, connect: Any) -> None:
    for status in (400, 401, 403, 404, 409, 413, 422, 429):
        address, counts = await scripted(status)
        with pytest.raises(aiohttp.ClientResponseError) as refused:
            await connect(address, transport="http").statistics()

        assert refused.value.status == status
        assert counts == {"/v1/agl/statistics": 1}


async def test_request_that_failed_in_passing_is_sent_again(scripted: Any, connect: Any) -> None:
    for status in (408, 500, 502, 503, 504):
        address, counts = await scripted(status, status, 200)
        assert await connect(address, transport="http").statistics() == {"total_rollouts": 7}
        assert counts == {"/v1/agl/statistics": 3, "/health": 2}


async def test_last_failure_is_raised_after_the_last_retry(scripted: Any, connect: Any) -> None:
    address, counts = await scripted(500)

    with pytest.raises(aiohttp.ClientResponseError) as failed:
        await connect(address, retry_delays=(0.0, 0.0, 0.0)).statistics()

    assert failed.value.status == 500
    assert counts["/v1/agl/statistics"] == 4


async def test_unhealthy_server_is_asked_only_for_its_health(scripted: Any, connect: Any) -> None:
    address, counts = await scripted(500, health=500)
    with pytest.raises(aiohttp.ClientResponseError):
        await connect(address, health_retry_delays=(0.0, 0.0), transport="http").statistics()
    assert counts == {"/v1/agl/statistics": 1, "/health": 3}


async def test_requests_go_through_get_and_post_of_the_session(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, used = await serve(), Counter[str]()
    for verb in ("get", "post"):
        original = getattr(aiohttp.ClientSession, verb)

        def counted(self: Any, *args: Any, verb: str = verb, original: Any = original, **kwargs: Any) -> Any:
            used[verb] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(aiohttp.ClientSession, verb, counted)
    client = connect(server.endpoint, transport="http")

    await client.enqueue_rollout("a", rollout_id="r")
    await client.get_rollout_by_id("r")

    assert used == {"post": 1, "get": 1}


# ---------------------------------------------------------------------- outages


@pytest.mark.parametrize("transport", ["auto", "http", "ws"])
async def test_question_that_cannot_be_asked_is_no_answer(transport: str, nowhere: str, connect: Any) -> None:
    client = connect(nowhere, transport=transport)
    for question in (client.get_latest_resources, lambda: client.get_rollout_by_id("a"), client.query_rollouts):
        with pytest.raises(StoreUnavailable, match="is the server running"):
            await question()


@pytest.mark.parametrize("transport", ["auto", "http", "ws"])
async def test_dequeue_in_an_outage_is_none_and_told_once(
    transport: str, nowhere: str, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(nowhere, transport=transport)
    assert [await client.dequeue_rollout("w") for _ in range(3)] == [None, None, None]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_calls_that_wait_for_a_server_say_so_once(
    nowhere: str, connect: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.http.connection._OUTAGE_WARNING_SECONDS", 0.1)
    client = connect(nowhere, outage_seconds=0.5, retry_delays=(0.05,), health_retry_delays=(0.05,))

    with pytest.raises(StoreUnavailable):
        await client.query_rollouts()

    [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert nowhere in told
    assert "calls wait for it" in told


async def test_dequeue_in_an_outage_does_not_wait_for_a_subscription_to_begin(nowhere: str, connect: Any) -> None:
    client = connect(nowhere, outage_seconds=60.0)
    notices = client.subscribe(["rollout"])
    assert await asyncio.wait_for(client.dequeue_rollout(), 30) is None
    await notices.aclose()


class Jumping:
    """The clock of the retries, which can be put forward."""

    offset = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.offset


@both_transports
async def test_every_outage_of_a_long_wait_has_a_patience_of_its_own(
    transport: str, serve: Any, connect: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "time", clock := Jumping())
    server = await serve()
    client = connect(server.endpoint, outage_seconds=30.0, transport=transport, retry_delays=(0.01,) * 20)
    rollout = await server.start_rollout("a")
    waiting = asyncio.gather(
        client.dequeue_many_rollouts(wait=100), client.wait_for_rollouts([rollout.rollout_id]), client.statistics()
    )

    for _ in range(2):
        await eventually(lambda: server.app.service.waiting_calls == 2 or waiting.done())
        clock.offset += 3600.0  # for so long all was well
        await server.stop()
        await asyncio.wait([waiting], timeout=0.2)
        await server.start()
    await server.enqueue_rollout("b")
    await server.update_rollout(rollout.rollout_id, status="succeeded")

    claimed, finished, _ = await asyncio.wait_for(waiting, 30)
    assert (len(claimed), len(finished)) == (1, 1)


# ---------------------------------------------------------------------- waiting


class Counting(InMemoryLightningStore):
    """Counts how often it is asked to wait."""

    waits = 0

    async def wait_for_rollouts(self, rollout_ids: Any, timeout: float | None = None) -> Any:
        self.waits += 1
        return await super().wait_for_rollouts(rollout_ids, timeout)


@pytest.mark.parametrize(("transport", "polls"), [("ws", False), ("auto", False), ("http", True)])
async def test_waiting_polls_only_without_a_live_channel(
    transport: str, polls: bool, serve: Any, connect: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LONG_POLL_SECONDS", 0.05)
    store = Counting()
    client = connect((await serve(store)).endpoint, transport=transport)
    await store.enqueue_rollout("a", rollout_id="r")

    waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=["r"]))
    await eventually(lambda: store.waits >= (3 if polls else 1))
    await asyncio.wait([waiting], timeout=0.3)
    await store.update_rollout("r", status="cancelled")
    (finished,) = await asyncio.wait_for(waiting, 30)

    assert finished.status == "cancelled"
    assert (store.waits >= 3) if polls else (store.waits == 1)


async def test_work_is_waited_for_by_long_polls(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(connection, "LONG_POLL_SECONDS", 0.05)
    server = await serve()
    client = connect(server.endpoint, transport="http")

    asking = asyncio.create_task(client.dequeue_rollout(wait=30))
    await eventually(lambda: server.app.service.waiting_calls == 1)
    await asyncio.wait([asking], timeout=0.2)
    await server.enqueue_rollout("a")

    assert (await asyncio.wait_for(asking, 30)).input == "a"
    assert await client.dequeue_rollout(wait=0.12) is None


@both_transports
async def test_any_timeout_is_accepted(transport: str, serve: Any, connect: Any) -> None:
    server = await serve()
    client = connect(server.endpoint, transport=transport)
    await server.enqueue_rollout("a", rollout_id="r")
    await server.update_rollout("r", status="cancelled")

    for timeout in (None, -1, 0, 0.2, 30, 1e12, math.inf):
        await server.enqueue_rollout("b")
        (finished,) = await asyncio.wait_for(client.wait_for_rollouts(rollout_ids=["r"], timeout=timeout), 30)
        claimed = await asyncio.wait_for(client.dequeue_rollout(wait=timeout), 30)

        assert (finished.rollout_id, claimed.input) == ("r", "b")
