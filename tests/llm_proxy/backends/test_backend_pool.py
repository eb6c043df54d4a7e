"""A pool over its life: calls in numbers, calls that are given up, lists that change, and the end."""

import asyncio
import gc
import logging
from collections.abc import Awaitable
from typing import Any

import aiohttp
import pytest

from agentlightning.llm_proxy.backends import (
    Backend,
    BackendBroken,
    BackendError,
    BackendPool,
    BackendUnavailable,
    PreparedRequest,
)
from tests.llm_proxy.backends.conftest import MakePool, Serve
from tests.llm_proxy.backends.fake_clock import chat, request_for, until
from tests.stub_model.raw import Connection, after, drop, halve, hang, trickle, whole
from tests.stub_model.script import Request, Script

SECRET = "sk-very-secret-0123"


async def call(pool: BackendPool, who: str = "", **fields: Any) -> bytes:
    async with await pool.send(request_for(who=who, **fields)) as answer:
        return await answer.read()


def in_flight(pool: BackendPool) -> int:
    return sum(entry["in_flight"] + entry["waiting"] for entry in pool.describe())


async def cut(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


# ---------------------------------------------------------------------- numbers


async def test_cap_is_never_exceeded_and_nobody_is_starved(serve: Serve, make_pool: MakePool) -> None:
    async def in_company(request: Request, connection: Connection) -> None:
        await until(lambda: server.most_in_flight >= 3)
        await asyncio.sleep(0.002)  # time for one too many to arrive
        await whole()(request, connection)

    server = await serve(in_company)
    pool = make_pool(server.entry(max_parallel_requests=3))
    admitted: list[str] = []  # in their order; answers may come in another

    def one(who: str) -> Awaitable[bytes]:
        def prepared(backend: Backend) -> PreparedRequest:
            admitted.append(who)
            return chat(backend)

        return call(pool, who, prepare=prepared)

    await asyncio.gather(*(one(who) for who in ["busy"] * 50 + ["quiet"] * 5))

    assert server.most_in_flight == 3
    assert admitted[:13] == ["busy"] * 3 + ["busy", "quiet"] * 5
    assert in_flight(pool) == 0


def responses() -> int:
    gc.collect()
    return sum(type(thing) is aiohttp.ClientResponse for thing in gc.get_objects())


async def test_answer_that_is_cut_under_its_reader_is_kept_by_nobody(serve: Serve, make_pool: MakePool) -> None:
    server, of_others = await serve(trickle), responses()
    pool = make_pool(server)
    answer = await pool.send(request_for())
    parts = answer.chunks()
    assert await anext(parts) == b"first"

    reading = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    await pool.close()
    (error,) = await asyncio.gather(reading, return_exceptions=True)

    assert isinstance(error, BackendBroken)
    del error, reading, parts, answer
    await until(lambda: responses() == of_others)


async def test_time_in_line_is_told(serve: Serve, make_pool: MakePool) -> None:
    go = asyncio.Event()
    pool = make_pool((await serve(after(go, whole()))).entry(max_parallel_requests=1))
    first, second = (asyncio.create_task(pool.send(request_for())) for _ in range(2))
    await until(lambda: in_flight(pool) == 2)

    go.set()
    async with await first as answer:
        assert answer.call.waited_seconds == 0
    async with await second as answer:
        assert answer.call.waited_seconds > 0


# ---------------------------------------------------------------------- giving up


async def test_cancelled_calls_leak_no_place(serve: Serve, make_pool: MakePool) -> None:
    server = await serve(hang)
    pool = make_pool(server.entry(max_parallel_requests=4))

    for _ in range(3):
        tasks = [asyncio.create_task(pool.send(request_for(who=f"r{number}"))) for number in range(20)]
        await until(lambda: in_flight(pool) == 20)
        await cut(*tasks)
        assert in_flight(pool) == 0
    await until(lambda: server.open_connections == 0)

    server.script = Script([whole()], repeats_last=True)
    await asyncio.gather(*(call(pool) for _ in range(12)))
    await until(lambda: server.in_flight == 0)
    assert server.most_in_flight <= 8  # four of the pool, and four of whose end the server has not heard yet


async def test_reader_cancelled_in_mid_body_closes_its_connection(serve: Serve, make_pool: MakePool) -> None:
    server = await serve(trickle)
    pool = make_pool(server.entry(max_parallel_requests=1))
    came: list[bytes] = []

    async def take() -> None:
        async with await pool.send(request_for()) as answer:
            async for chunk in answer.chunks():
                came.append(chunk)  # noqa: PERF401 # what came before the end counts

    task = asyncio.create_task(take())
    await until(lambda: came == [b"first"])
    await cut(task)

    await until(lambda: server.open_connections == 0)
    assert in_flight(pool) == 0
    assert pool.describe()[0]["failures"] == 0


async def test_answer_closed_under_its_reader_gives_its_place_back_once(serve: Serve, make_pool: MakePool) -> None:
    pool = make_pool(await serve(trickle))
    answer = await pool.send(request_for())
    assert await anext(answer.chunks()) == b"first"
    reading = asyncio.create_task(answer.read())
    await asyncio.sleep(0)

    await answer.close()

    with pytest.raises(BackendBroken):
        await reading
    assert (in_flight(pool), pool.describe()[0]["failures"]) == (0, 0)


async def test_answer_read_to_its_end_gives_its_place_and_connection_back(serve: Serve, make_pool: MakePool) -> None:
    server = await serve()
    pool = make_pool(server)

    for _ in range(5):
        answer = await pool.send(request_for())
        assert await answer.read() == b'{"ok": true}'
        assert in_flight(pool) == 0
        await answer.close()

    assert in_flight(pool) == 0
    assert server.open_connections == 1


async def test_preparation_that_fails_gives_the_place_back(serve: Serve, make_pool: MakePool) -> None:
    pool = make_pool((await serve()).entry(max_parallel_requests=1))

    def prepare(backend: Backend) -> PreparedRequest:
        raise KeyError("messages")

    for _ in range(3):
        with pytest.raises(KeyError):
            await pool.send(request_for(prepare=prepare))
    assert in_flight(pool) == 0


# ---------------------------------------------------------------------- lists that change


async def test_call_in_flight_ends_on_the_old_list_and_the_next_sees_the_new(serve: Serve, make_pool: MakePool) -> None:
    go = asyncio.Event()
    old, new = await serve(after(go, whole(b"old"))), await serve(whole(b"new"))
    pool = make_pool({**old.entry(max_parallel_requests=1), "version": "1"})
    sent, queued = (asyncio.create_task(pool.send(request_for())) for _ in range(2))
    await until(lambda: in_flight(pool) == 2)

    pool.replace([{**new.entry(), "version": "2"}])
    async with await pool.send(request_for()) as answer:
        assert (await answer.read(), answer.backend.version) == (b"new", "2")
    go.set()
    for task in (sent, queued):
        async with await task as answer:
            assert (await answer.read(), answer.backend.version) == (b"old", "1")


async def test_backend_in_both_lists_keeps_what_is_known_of_it(serve: Serve, make_pool: MakePool) -> None:
    server, other = await serve(whole(status=500)), await serve()
    pool = make_pool(server)
    for _ in range(5):
        await call(pool)

    pool.replace([other.entry(), server.entry()])

    assert [(entry["name"], entry["breaker"]) for entry in pool.describe()] == [
        (f"m#0 at {other.openai_url}", "closed"),
        (f"m#1 at {server.openai_url}", "open"),
    ]
    assert server.open_connections == 1
    pool.replace([other.entry(), server.entry(weight=2)])
    assert [entry["breaker"] for entry in pool.describe()] == ["closed", "closed"]


@pytest.mark.parametrize(
    "changed", [{"version": 2}, {"model": "hosted_vllm/policy-v2"}], ids=["version", "name of the model"]
)
async def test_backend_of_a_new_version_keeps_what_is_known_of_it(
    serve: Serve, make_pool: MakePool, changed: dict[str, Any]
) -> None:
    server, other = await serve(whole(status=500)), await serve()
    pool = make_pool({**server.entry(), "version": 1}, other.entry("other"))
    for _ in range(5):
        await call(pool)

    params = {"model": changed.get("model", "hosted_vllm/up")}
    pool.replace([other.entry("other"), {**server.entry(**params), "version": changed.get("version", 1)}])

    updated = pool.describe()[1]
    assert (updated["breaker"], updated["failures"], server.open_connections) == ("open", 5, 1)
    assert (updated["version"], updated["upstream_model"]) == (
        str(changed.get("version", 1)),
        params["model"].removeprefix("hosted_vllm/"),
    )


async def test_rollouts_stay_with_their_backends_when_one_is_added(serve: Serve, make_pool: MakePool) -> None:
    servers = [await serve() for _ in range(3)]
    pool = make_pool(*servers[:2])
    whos = [f"r{number}" for number in range(60)]

    async def homes() -> dict[str, str]:
        found = {}
        for who in whos:
            async with await pool.send(request_for(who=who)) as answer:
                found[who] = answer.backend.base_url
        return found

    before = await homes()
    pool.replace([server.entry() for server in reversed(servers)])
    now = await homes()

    assert {now[who] for who in whos if now[who] != before[who]} == {servers[2].openai_url}


async def test_retry_goes_to_the_new_list(serve: Serve, make_pool: MakePool) -> None:
    go = asyncio.Event()
    old, new = await serve(after(go, drop)), await serve(whole(b"new"))
    pool = make_pool(old, num_retries=1)
    task = asyncio.create_task(call(pool))
    await until(lambda: old.in_flight == 1)

    pool.replace([new.entry()])
    go.set()

    assert await task == b"new"


async def test_lists_change_under_load_without_a_lost_call(serve: Serve, make_pool: MakePool) -> None:
    servers = [await serve() for _ in range(3)]
    pool = make_pool(servers[0])
    stop = asyncio.Event()
    answered = 0

    async def load(who: str) -> None:
        nonlocal answered
        while not stop.is_set():
            assert await call(pool, who) == b'{"ok": true}'
            answered += 1

    loads = [asyncio.create_task(load(f"r{number}")) for number in range(8)]
    for number in range(12):
        pool.replace([servers[number % 3].entry(max_parallel_requests=1 + number % 4)])
        target = answered + 10
        await until(lambda target=target: answered >= target)
    stop.set()

    await asyncio.gather(*loads)
    assert in_flight(pool) == 0


# ---------------------------------------------------------------------- the end


async def test_close_ends_calls_in_flight_and_in_line_with_an_error(serve: Serve, make_pool: MakePool) -> None:
    hanging, streaming = await serve(hang), await serve(trickle)
    pool = make_pool(hanging.entry(max_parallel_requests=1), streaming.entry("s"), num_retries=3)
    read, unread = await pool.send(request_for("s")), await pool.send(request_for("s"))
    assert await anext(read.chunks()) == b"first"
    reading = asyncio.create_task(read.read())
    calls = [asyncio.create_task(pool.send(request_for())) for _ in range(3)]
    await until(lambda: hanging.in_flight == 1 and in_flight(pool) == 5)

    await pool.close()

    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BackendUnavailable] * 3
    assert "The proxy is closing" in str(outcomes[2])
    for ending in (reading, unread.read()):
        with pytest.raises(BackendBroken, match="in the middle of an answer"):
            await ending
    assert in_flight(pool) == 0
    with pytest.raises(BackendUnavailable, match="The proxy is closing"):
        await pool.send(request_for())
    await until(lambda: hanging.open_connections == streaming.open_connections == 0)


async def test_close_reaches_calls_in_line_of_an_old_list(serve: Serve, make_pool: MakePool) -> None:
    server = await serve(hang)
    pool = make_pool(server.entry(max_parallel_requests=1))
    calls = [asyncio.create_task(pool.send(request_for())) for _ in range(2)]
    await until(lambda: in_flight(pool) == 2)
    pool.replace([])

    await pool.close()

    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BackendUnavailable] * 2


# ---------------------------------------------------------------------- secrets


async def test_secrets_are_in_no_error_no_state_and_no_log(
    serve: Serve, make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = await serve(drop, halve, whole(status=500), hang, whole(SECRET.encode(), 401), whole(status=500))
    pool = make_pool(
        server.entry(api_key=SECRET, timeout=0.2, extra_headers={"X-Second": SECRET + "-2"}), num_retries=0
    )
    told: list[str] = []

    for _ in range(12):
        try:
            await call(pool)
        except BackendError as error:
            told += [repr(part) + str(part) for part in (error, error.__cause__, error.__context__, error.tries)]
        told.append(repr(pool.describe()))

    assert server.requests[0].headers["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in "".join(told)
    assert SECRET not in caplog.text + repr([vars(record) for record in caplog.records])
    assert "out of use" in caplog.text


async def test_neither_a_proxy_of_the_environment_nor_cookies_are_used(
    serve: Serve, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = await serve(whole(b"x", 200, "Set-Cookie: a=b"))
    pool = make_pool(server)

    assert [await call(pool), await call(pool)] == [b"x", b"x"]
    assert "cookie" not in server.requests[1].headers
