"""What a call does when its backend fails."""

import asyncio
import time
from email.utils import formatdate

import pytest

from agentlightning.dialects import DIALECTS
from agentlightning.llm_proxy.backends import (
    Backend,
    BackendBroken,
    BackendPool,
    BackendUnavailable,
    DeadlineExceeded,
    DialectNotServed,
    PreparedRequest,
)
from agentlightning.llm_proxy.backends.backend_call import is_retryable, requested_hold_seconds
from tests.llm_proxy.backends.conftest import MakePool, Serve
from tests.llm_proxy.backends.fake_clock import FakeClock, request_for, until
from tests.stub_model.raw import Connection, after, drop, garble, hang, whole
from tests.stub_model.script import Handler, Request


async def status_of(pool: BackendPool, who: str = "") -> int:
    async with await pool.send(request_for(who=who)) as answer:
        await answer.read()
        return answer.status


# ---------------------------------------------------------------------- without retries


async def test_refused_call_is_tried_once_more_where_another_backend_may_be_well(
    serve: Serve, make_pool: MakePool
) -> None:
    *dead, alive = [await serve() for _ in range(4)]
    for server in dead:
        await server.stop()
    pool = make_pool(dead[0], alive)

    assert [await status_of(pool) for _ in range(6)] == [200] * 6
    for servers, tries in ((dead[:1], 1), (dead, 2)):
        message = r"No backend of model 'm' answered: m#\d at .* cannot be reached"
        with pytest.raises(BackendUnavailable, match=message) as caught:
            await make_pool(*servers).send(request_for())
        assert len(caught.value.tries) == tries


async def test_kept_connection_that_was_closed_costs_no_call(serve: Serve, make_pool: MakePool) -> None:
    server = await serve(whole(), drop, whole())
    pool = make_pool(server)
    await status_of(pool)

    async with await pool.send(request_for()) as answer:
        assert answer.status == 200
        assert len(answer.call.tries) == 2
    assert pool.describe()[0]["failures"] == 0


async def test_kept_connection_to_a_backend_that_died_costs_no_call(serve: Serve, make_pool: MakePool) -> None:
    dying, other = await serve(whole(), drop), await serve()
    pool = make_pool(dying.entry(weight=1e9), other)
    await status_of(pool, "r")
    dying.stop_listening()

    async with await pool.send(request_for(who="r")) as answer:
        assert answer.status == 200
        assert [name for name, _ in answer.call.tries] == [f"m#0 at {dying.openai_url}"] * 2 + [
            f"m#1 at {other.openai_url}"
        ]


@pytest.mark.parametrize("act", [drop, garble])
async def test_new_connection_that_breaks_is_not_tried_again(serve: Serve, make_pool: MakePool, act: Handler) -> None:
    server, other = await serve(act), await serve(act)

    with pytest.raises(BackendUnavailable):
        await make_pool(server, other).send(request_for())

    assert len(server.requests) + len(other.requests) == 1


# ---------------------------------------------------------------------- with retries


@pytest.mark.parametrize(
    "first",
    [whole(status=500), whole(status=503), whole(status=408), whole(status=409), whole(status=429), drop, garble],
)
async def test_failure_that_may_pass_is_tried_at_another_backend(
    serve: Serve, make_pool: MakePool, first: Handler
) -> None:
    failing, other = await serve(first), await serve()
    pool = make_pool(failing, other, num_retries=1, clock=FakeClock())

    async with await pool.send(request_for()) as answer:
        assert answer.status == 200
        assert [name for name, _ in answer.call.tries] == [f"m#0 at {failing.openai_url}", f"m#1 at {other.openai_url}"]


async def test_backend_that_fails_fast_does_not_draw_calls(serve: Serve, make_pool: MakePool) -> None:
    failing, busy = await serve(whole(status=500)), await serve()
    pool = make_pool(failing, busy)

    answers = []
    for _ in range(6):
        answers.append(await pool.send(request_for()))
        if answers[-1].status == 500:
            await answers[-1].close()

    assert [answer.status for answer in answers] == [500, 200] * 3
    for answer in answers:
        await answer.close()


async def test_mistake_of_the_caller_is_not_tried_again(serve: Serve, make_pool: MakePool) -> None:
    statuses = [400, 401, 403, 404, 413, 422]
    server = await serve(*(whole(status=status) for status in statuses))
    pool = make_pool(server, num_retries=3)

    assert [await status_of(pool) for _ in statuses] == statuses
    assert len(server.requests) == len(statuses)


async def test_only_backend_is_tried_again_after_a_pause(
    serve: Serve, make_pool: MakePool, fake_clock: FakeClock
) -> None:
    server = await serve(whole(status=500), whole(status=500), whole())
    pool = make_pool(server, num_retries=5, clock=fake_clock)

    call = asyncio.create_task(status_of(pool))
    pauses = []
    for expected in (1, 2):
        await until(lambda expected=expected: len(server.requests) == expected and fake_clock.alarms)
        pauses.append(fake_clock.alarms[0].rings_at - fake_clock.now())
        fake_clock.turn(pauses[-1])

    assert await call == 200
    assert 0.25 <= pauses[0] <= 0.5 <= pauses[1] <= 1.0


async def test_last_answer_is_handed_on_when_retries_are_used_up(serve: Serve, make_pool: MakePool) -> None:
    server = await serve(whole(status=500))
    other = await serve(whole(status=502))
    pool = make_pool(server, other, num_retries=1)

    async with await pool.send(request_for()) as answer:
        assert {happened for _, happened in answer.call.tries} == {"answered 500 Word", "answered 502 Word"}


async def test_each_try_is_prepared_for_its_backend(serve: Serve, make_pool: MakePool) -> None:
    failing, other = await serve(whole(status=500)), await serve()
    prepared: list[str] = []

    def prepare(backend: Backend) -> PreparedRequest:
        prepared.append(backend.base_url)
        return PreparedRequest(backend.url_of(DIALECTS["completions"]), backend.name.encode(), {"X-Try": "yes"})

    pool = make_pool(failing, other, num_retries=1)
    async with await pool.send(request_for(prepare=prepare)) as answer:
        assert answer.status == 200

    assert prepared == [failing.openai_url, other.openai_url]
    assert other.requests[0].path == "/v1/completions"
    assert other.requests[0].content.decode() == f"m#1 at {other.openai_url}"
    assert other.requests[0].headers["x-try"] == "yes"
    assert other.requests[0].headers["accept-encoding"] == "identity"
    assert other.requests[0].headers["content-type"] == "application/json"


async def test_backend_of_another_dialect_is_passed_over(serve: Serve, make_pool: MakePool) -> None:
    first, second = await serve(), await serve()
    only_messages = {**first.entry(), "model_info": {"dialects": ["messages"]}}
    pool = make_pool(only_messages, second)

    def prepare(backend: Backend) -> PreparedRequest:
        return PreparedRequest(backend.url_of(backend.serving(DIALECTS["embeddings"])), b"{}")

    for _ in range(4):
        async with await pool.send(request_for(prepare=prepare)) as answer:
            assert answer.backend.base_url == second.openai_url
    assert [entry["in_flight"] for entry in pool.describe()] == [0, 0]
    with pytest.raises(DialectNotServed, match="does not serve the embeddings dialect"):
        await make_pool(only_messages, num_retries=2).send(request_for(prepare=prepare))


# ---------------------------------------------------------------------- rate limits


async def test_backend_that_wants_a_rest_is_left_alone_by_everybody(
    serve: Serve, make_pool: MakePool, fake_clock: FakeClock
) -> None:
    limited = await serve(whole(b"", 429, "Retry-After: 7"), whole())
    pool = make_pool(limited, clock=fake_clock)

    assert await status_of(pool, "a") == 429
    waiting = asyncio.create_task(status_of(pool, "b"))
    await until(lambda: pool.describe()[0]["waiting"] == 1)
    fake_clock.turn(6.9)
    assert len(limited.requests) == 1

    fake_clock.turn(0.1)
    assert await waiting == 200


async def test_other_backend_serves_while_one_rests(serve: Serve, make_pool: MakePool) -> None:
    limited, other = await serve(whole(b"", 429, "Retry-After: 60")), await serve()
    pool = make_pool(limited, other, num_retries=1)

    assert [await status_of(pool, f"r{number}") for number in range(20)] == [200] * 20
    assert len(limited.requests) == 1
    assert pool.describe()[0]["on_hold_seconds"] > 50


async def test_calls_in_line_move_on_when_their_backend_wants_a_rest(serve: Serve, make_pool: MakePool) -> None:
    go = asyncio.Event()
    limited, other = await serve(after(go, whole(b"", 429, "Retry-After: 60"))), await serve()
    pool = make_pool(limited.entry(max_parallel_requests=1), other.entry())
    whos = [f"r{number}" for number in range(40)]
    calls = [asyncio.create_task(status_of(pool, who)) for who in whos]
    await until(lambda: pool.describe()[0]["waiting"] > 3 and limited.in_flight == 1)

    go.set()

    assert sorted(await asyncio.gather(*calls)) == [200] * 39 + [429]


async def test_rest_beyond_the_deadline_is_told_at_once(serve: Serve, make_pool: MakePool) -> None:
    pool = make_pool(await serve(whole(b"", 429, "Retry-After: 900")), num_retries=3)

    assert await status_of(pool) == 429
    with pytest.raises(BackendUnavailable, match=r"is at its rate limit for another \d+\.\d s") as caught:
        await pool.send(request_for())
    assert caught.value.retry_after_seconds == pytest.approx(900, abs=2)


async def test_calls_per_minute_are_kept(serve: Serve, make_pool: MakePool, fake_clock: FakeClock) -> None:
    server = await serve()
    pool = make_pool(server.entry(rpm=2), clock=fake_clock)

    calls = [asyncio.create_task(status_of(pool)) for _ in range(5)]
    for served in (2, 4, 5):
        await until(
            lambda served=served: len(server.requests) == served and pool.describe()[0]["waiting"] == 5 - served
        )
        fake_clock.turn(60)

    assert await asyncio.gather(*calls) == [200] * 5


async def test_tokens_that_were_told_hold_the_backend(serve: Serve, make_pool: MakePool, fake_clock: FakeClock) -> None:
    pool = make_pool((await serve()).entry(tpm=100), clock=fake_clock)

    async with await pool.send(request_for()) as answer:
        answer.use_tokens(250)

    assert pool.describe()[0]["on_hold_seconds"] == 60


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"retry-after": "3"}, 3.0),
        (429, {"retry-after-ms": "250", "retry-after": "3"}, 0.25),
        (503, {"retry-after": "2.5"}, 2.5),
        (429, {"retry-after": "1e9"}, 3600.0),
        (429, {"retry-after": "-4"}, 0.0),
        (429, {"retry-after": "nan"}, 0.0),
        (429, {"retry-after": "soon"}, 0.0),
        (429, {}, 0.0),
        (200, {"retry-after": "3"}, 0.0),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_wish_of_a_backend_is_read_in_any_form(status: int, headers: dict[str, str], seconds: float) -> None:
    assert requested_hold_seconds(status, headers) == seconds


def test_wish_of_a_backend_may_be_a_date() -> None:
    headers = {"retry-after": formatdate(time.time() + 3000, usegmt=True)}

    assert requested_hold_seconds(429, headers) == pytest.approx(3000.0, abs=60)


@pytest.mark.parametrize(
    ("status", "wish", "passing"), [(500, "false", False), (400, "true", True), (200, "true", False)]
)
def test_backend_may_say_itself_whether_to_try_again(status: int, wish: str, passing: bool) -> None:
    assert is_retryable(status, {"x-should-retry": wish}) is passing


# ---------------------------------------------------------------------- silence and breaks


async def test_silent_backend_is_left_for_another(serve: Serve, make_pool: MakePool) -> None:
    pool = make_pool((await serve(hang)).entry(timeout=0.05), await serve(), num_retries=1)

    assert await status_of(pool) == 200
    assert [entry["in_flight"] for entry in pool.describe()] == [0, 0]


async def test_deadline_ends_a_call_that_is_not_answered(serve: Serve, make_pool: MakePool) -> None:
    pool = make_pool(await serve(hang), num_retries=5, deadline_seconds=0.05)

    with pytest.raises(
        DeadlineExceeded, match=r"while waiting for backend 'm#0 at .*did not begin to answer"
    ) as caught:
        await pool.send(request_for())

    assert caught.value.http_status == 504
    assert pool.describe()[0]["in_flight"] == 0


async def test_call_may_bring_its_own_deadline(serve: Serve, make_pool: MakePool) -> None:
    server = await serve()

    with pytest.raises(DeadlineExceeded, match="before a backend of 'm' was called"):
        await make_pool(server).send(request_for(deadline=time.monotonic() - 1))

    assert server.requests == []


async def test_deadline_in_line_says_how_many_waited(serve: Serve, make_pool: MakePool) -> None:
    server = await serve(hang)
    pool = make_pool(server.entry(max_parallel_requests=1))
    busy = asyncio.create_task(pool.send(request_for()))
    await until(lambda: server.in_flight == 1)
    patient = asyncio.create_task(pool.send(request_for()))
    await until(lambda: pool.describe()[0]["waiting"] == 1)

    with pytest.raises(DeadlineExceeded, match=r"in line for backend 'm#0 at .*', where 2 calls were waiting"):
        await pool.send(request_for(deadline=time.monotonic() + 0.05))

    assert pool.describe()[0]["waiting"] == 1
    for task in (busy, patient):
        task.cancel()
    await asyncio.wait([busy, patient])


@pytest.mark.parametrize("ends", [True, False], ids=["broke off", "fell silent"])
async def test_break_in_mid_body_is_told_and_never_tried_again(serve: Serve, make_pool: MakePool, ends: bool) -> None:
    came: list[bytes] = []

    async def half(request: Request, connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await until(lambda: came)
        await (drop if ends else hang)(request, connection)

    server = await serve(half)
    pool = make_pool(server.entry(timeout=0.2), num_retries=3)
    answer = await pool.send(request_for())

    async def take() -> None:
        async for chunk in answer.chunks():
            came.append(chunk)  # noqa: PERF401 # what came before the break counts

    words = "broke off" if ends else r"fell silent for 0\.2 s"
    with pytest.raises(BackendBroken, match=f"'m#0 at .*' {words} in the middle of an answer") as caught:
        await take()

    assert came == [b"half"]
    assert caught.value.http_status == 502
    assert len(caught.value.tries) == 1
    assert len(server.requests) == 1
    assert (pool.describe()[0]["in_flight"], pool.describe()[0]["failures"]) == (0, 1)
    await answer.close()


async def test_large_body_goes_through_without_a_warning(serve: Serve, make_pool: MakePool) -> None:
    server = await serve()
    pool = make_pool(server)
    body = b"y" * 3_000_000

    async with await pool.send(
        request_for(prepare=lambda backend: PreparedRequest(backend.url_of(DIALECTS["chat"]), body))
    ) as answer:
        assert answer.status == 200
    assert server.requests[0].content == body


# ---------------------------------------------------------------------- breaker


async def failing(pool: BackendPool, times: int) -> None:
    for _ in range(times):
        assert await status_of(pool) == 500


async def test_breaker_opens_lets_one_probe_through_and_closes(
    serve: Serve, make_pool: MakePool, fake_clock: FakeClock
) -> None:
    go = asyncio.Event()
    sick, well = await serve(*[whole(status=500)] * 5, after(go, whole()), whole()), await serve()
    pool = make_pool(sick, clock=fake_clock)
    await failing(pool, 5)
    pool.replace([sick.entry(), well.entry()])

    async def state() -> str:
        await status_of(pool)
        return str(pool.describe()[0]["breaker"])

    assert [await state() for _ in range(5)] == ["open"] * 5
    assert len(sick.requests) == 5
    fake_clock.turn(10)
    probe = asyncio.create_task(pool.send(request_for()))
    await until(lambda: len(sick.requests) == 6)
    assert [await state() for _ in range(5)] == ["half-open"] * 5
    go.set()
    async with await probe as answer:
        assert answer.backend.base_url == sick.openai_url
    assert pool.describe()[0]["breaker"] == "closed"


async def test_only_backend_is_tried_though_it_is_out_of_use_but_not_at_once(
    serve: Serve, make_pool: MakePool, fake_clock: FakeClock
) -> None:
    sick = await serve(*[whole(status=500)] * 5, whole())
    pool = make_pool(sick, clock=fake_clock)
    await failing(pool, 5)

    with pytest.raises(BackendUnavailable, match="out of use for another") as caught:
        await pool.send(request_for())
    assert (caught.value.tries, caught.value.retry_after_seconds) == ([], 10)
    fake_clock.turn(1)

    assert await status_of(pool) == 200


async def test_calls_in_line_are_not_sent_to_a_backend_that_went_out_of_use(serve: Serve, make_pool: MakePool) -> None:
    server = await serve(whole(status=500))
    pool = make_pool(server.entry(max_parallel_requests=1))

    outcomes = await asyncio.gather(*(status_of(pool) for _ in range(30)), return_exceptions=True)

    assert outcomes.count(500) == 5
    assert len([outcome for outcome in outcomes if isinstance(outcome, BackendUnavailable)]) == 25
    assert len(server.requests) == 5
