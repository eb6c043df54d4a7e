"""A client's life: loops, threads, processes, subscriptions over restarts, servers without WebSockets."""

import asyncio
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.store import LightningStoreClient, LightningStoreServer
from agentlightning.store.http import connection, websocket
from agentlightning.store.http.service import gather_notices
from agentlightning.types import Notice

both_transports = pytest.mark.parametrize("transport", ["http", "ws"])


# ---------------------------------------------------------------------- making and copying


def test_address_without_a_scheme_is_refused() -> None:
    for address in ("127.0.0.1:4747", "ftp://x", ""):
        with pytest.raises(ConfigurationError, match="http://"):
            LightningStoreClient(address)


async def test_pickled_client_speaks_to_the_same_server(serve: Any, connect: Any) -> None:
    server = await serve(token="secret")
    client = connect(server.endpoint + "/", token="secret", transport="ws", outage_seconds=3.0)
    await client.enqueue_rollout("a")

    copied = pickle.loads(pickle.dumps(client))
    claimed = await copied.dequeue_rollout()
    await copied.close()

    assert claimed.input == "a"
    assert copied.server_address == server.endpoint
    assert "secret" not in repr(copied)
    assert (copied._policy, copied._address) == (client._policy, client._address)


# ---------------------------------------------------------------------- loops and threads


@both_transports
def test_client_serves_the_loops_of_several_threads(transport: str, server: LightningStoreServer) -> None:
    client, answers = LightningStoreClient(server.endpoint, transport=transport), []

    async def work(name: str) -> None:
        enqueued = await asyncio.gather(*[client.enqueue_rollout(name) for _ in range(20)])
        answers.extend(rollout.input for rollout in enqueued)

    threads = [threading.Thread(target=asyncio.run, args=(work(f"t{n}"),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(client.close())

    assert sorted(answers) == sorted([f"t{n}" for n in range(4)] * 20)


@both_transports
def test_loops_that_ended_leave_nothing_behind(transport: str, server: LightningStoreServer) -> None:
    client = LightningStoreClient(server.endpoint, transport=transport)

    for _ in range(10):
        asyncio.run(client.statistics())
    gc.collect()

    assert len(client._connections) <= 1
    asyncio.run(client.close())


def test_close_from_another_loop_closes_every_connection(server: LightningStoreServer, eventually: Any) -> None:
    client, has_connected, may_end = (
        LightningStoreClient(server.endpoint, transport="ws"),
        threading.Event(),
        threading.Event(),
    )

    async def stay() -> None:
        await client.statistics()
        has_connected.set()
        await asyncio.to_thread(may_end.wait, 20)

    thread = threading.Thread(target=asyncio.run, args=(stay(),))
    thread.start()
    assert has_connected.wait(10)
    asyncio.run(client.close())

    asyncio.run(eventually(lambda: server.app.service.live_connections == 0))
    may_end.set()
    thread.join()


FORKED = """
    import asyncio, os, sys, threading, time
    from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
    from agentlightning.utils.loop_thread import LoopThread

    def in_child(work):
        child = os.fork()
        if child == 0:
            try:
                began = time.monotonic()
                asyncio.run(work())
                os._exit(0 if time.monotonic() - began < 4 else 7)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    thread = LoopThread("parent")
    store = InMemoryLightningStore()
    server = LightningStoreServer(store, "127.0.0.1", 0, token="secret")
    thread.run(server.start())

    client = LightningStoreClient(server.endpoint, token="secret", transport="ws")
    thread.run(client.enqueue_rollout("parent"))

    async def work():
        claimed = await client.dequeue_rollout("child")
        assert claimed.input == "parent"
        await client.update_attempt(claimed.rollout_id, "latest", status="succeeded")
        await client.close()

    assert (code := in_child(work)) == 0, code
    (finished,) = thread.run(client.wait_for_rollouts([thread.run(store.query_rollouts())[0].rollout_id], 5))
    assert finished.status == "succeeded"
    thread.run(client.close())

    async def work():
        rollout = await server.enqueue_rollout("child")
        assert (await server.get_rollout_by_id(rollout.rollout_id)).input == "child"
        try:
            await server.stop()
        except RuntimeError as error:
            assert "process" in str(error)
        else:
            raise AssertionError("a child may not stop its parent's server")
        await server.close()

    assert (code := in_child(work)) == 0, code
    assert [rollout.input for rollout in thread.run(store.query_rollouts())] == ["parent", "child"]
    thread.run(server.stop())
"""


async def test_forked_child_speaks_to_the_parents_server() -> None:
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", textwrap.dedent(FORKED)],
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert (ended.returncode, ended.stderr) == (0, "")


# ---------------------------------------------------------------------- subscriptions


async def told(notices: AsyncIterator[Notice], count: int) -> list[str | None]:
    """The ids of the next notices."""
    return [(await asyncio.wait_for(notices.__anext__(), 30)).rollout_id for _ in range(count)]


@both_transports
async def test_subscription_goes_on_behind_its_cursor_after_a_restart(
    transport: str, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "POLL_SECONDS", 0.2)
    server = await serve()
    client = connect(server.endpoint, transport=transport, outage_seconds=20.0)
    notices = client.subscribe(["rollout"])
    await client.enqueue_rollout("a", rollout_id="1")
    before = await told(notices, 1)

    await server.enqueue_rollout("a", rollout_id="2")
    await server.stop()
    await server.enqueue_rollout("a", rollout_id="3")
    await server.start()
    await server.enqueue_rollout("a", rollout_id="4")

    assert before + await told(notices, 3) == ["1", "2", "3", "4"]
    await notices.aclose()  # type: ignore[attr-defined]


@both_transports
async def test_subscription_notices_that_the_store_was_replaced_by_an_empty_one(
    transport: str, serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "POLL_SECONDS", 0.2)
    server = await serve()
    client = connect(server.endpoint, transport=transport, outage_seconds=20.0)
    notices = client.subscribe(["rollout"])
    for n in range(5):
        await client.enqueue_rollout(n)
    await told(notices, 5)

    await server.stop()
    replacement = await serve(port=server.port)
    await replacement.enqueue_rollout("new", rollout_id="new")

    first = await asyncio.wait_for(anext(notices), 30)
    await replacement.enqueue_rollout("newer", rollout_id="newer")
    last = await asyncio.wait_for(anext(notices), 30)
    while last.rollout_id == "new":
        last = await asyncio.wait_for(anext(notices), 30)

    # A gap asks to query afresh, which finds the new rollout; without one its notice comes.
    assert (first.kind, first.rollout_id) in [("gap", None), ("rollout", "new")]
    assert last.rollout_id == "newer"
    await notices.aclose()  # type: ignore[attr-defined]


async def test_dropped_subscription_is_ended(serve: Any, connect: Any, eventually: Any) -> None:
    server = await serve()
    client = connect(server.endpoint, transport="ws")
    await client.enqueue_rollout("a")

    async for _ in client.subscribe(["rollout"], after=0):
        break
    gc.collect()

    channel = client._connection()._channel
    await eventually(lambda: not channel._notices)


async def test_notice_that_comes_as_the_poll_ends_is_not_lost() -> None:
    class Late(AsyncIterator[Notice]):
        """Its one notice arrives at the very moment the reader gives up, as `asyncio.wait_for` allows."""

        is_told = False

        async def __anext__(self) -> Notice:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if self.is_told:
                    raise
                self.is_told = True
            return Notice("rollout", 1)

    assert await gather_notices(Late(), 0.01) == [Notice("rollout", 1)]


async def test_reader_that_falls_behind_asks_for_the_rest_again(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(websocket, "MOST_UNREAD_NOTICES", 5)
    server = await serve()
    client = connect(server.endpoint, transport="ws")
    notices: Any = client.subscribe(["rollout"])
    for n in range(20):
        await client.enqueue_rollout("a", rollout_id=str(n))
    await eventually(lambda: notices._source._queue.qsize() >= 5)

    unread = notices._source._queue.qsize()

    assert unread <= 6
    assert await told(notices, 20) == [str(n) for n in range(20)]
    await notices.aclose()


# ---------------------------------------------------------------------- servers without WebSockets


async def test_client_uses_plain_http_behind_a_proxy_that_knows_no_websocket(scripted: Any, connect: Any) -> None:
    for status in (400, 403, 404, 426, 501, 502):
        address, counts = await scripted(200, upgrade=status)
        client = connect(address)

        for _ in range(3):
            assert await client.statistics() == {"total_rollouts": 7}
        assert (counts["/v1/agl/statistics"], counts["/v1/agl/live"]) == (3, 1)


async def test_handshake_refused_during_an_outage_decides_nothing(scripted: Any, connect: Any) -> None:
    address, counts = await scripted(200, upgrade=503, health=503)

    with pytest.raises(aiohttp.ClientResponseError):
        await connect(address).statistics()

    assert counts["/v1/agl/statistics"] == 0


async def test_every_call_uses_the_one_live_connection(serve: Any, connect: Any) -> None:
    server = await serve()
    client = connect(server.endpoint)

    await asyncio.gather(*[client.enqueue_rollout("a") for _ in range(5)])

    assert server.app.service.live_connections == 1


@both_transports
async def test_subscription_of_a_closed_client_says_so(transport: str, serve: Any) -> None:
    client = LightningStoreClient((await serve()).endpoint, transport=transport)
    notices = client.subscribe(["rollout"])
    await client.enqueue_rollout("a")
    await told(notices, 1)

    await client.close()

    with pytest.raises(StoreUnavailable, match="was closed"):
        await asyncio.wait_for(anext(notices), 30)
