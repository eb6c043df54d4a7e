"""The bodies of one server: what all of them may take, and what one may hold."""

import asyncio
import gzip
import threading
from collections.abc import Awaitable, Callable

import orjson
import pytest

from agentlightning.asgi import bodies as asgi_bodies
from agentlightning.asgi.bodies import ROOM_BYTES, Bodies, Room, check_values
from agentlightning.asgi.request import Message, Receive, Request, RequestTimeout
from agentlightning.errors import InvalidValue, PayloadTooLarge

MEGABYTE = 1024**2


def sends(body: bytes, encoding: str = "", *, is_announced: bool = True) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-encoding", encoding.encode())] if encoding else []
    headers += [(b"content-length", b"%d" % len(body))] if is_announced else []
    receiving: Receive = receive
    return Request({"headers": headers}, receiving)


async def read(bodies: Bodies, request: Request, max_bytes: int = 100 * MEGABYTE) -> bytes:
    async with bodies.read(request, max_bytes=max_bytes) as body:
        return body


@pytest.mark.parametrize("size", [6, 3 * MEGABYTE], ids=["small", "large"])
@pytest.mark.parametrize("encoding", ["", "gzip"])
@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "chunked"])
async def test_a_body_is_read_whole_and_decompressed(size: int, encoding: str, is_announced: bool) -> None:
    plain = b"a" * size
    body = gzip.compress(plain) if encoding.lower() == "gzip" else plain
    assert await read(Bodies(), sends(body, encoding, is_announced=is_announced)) == plain


async def test_an_unknown_encoding_and_too_much_in_gzip_are_refused() -> None:
    with pytest.raises(InvalidValue, match="'br'"):
        await read(Bodies(), sends(b"", "br"))
    with pytest.raises(PayloadTooLarge):
        await read(Bodies(), sends(gzip.compress(b"a" * MEGABYTE), "gzip"), max_bytes=MEGABYTE - 1)


async def test_bodies_that_do_not_fit_wait_for_those_before_them() -> None:
    bodies, large = Bodies(), sends(b"a" * (ROOM_BYTES // 2 + 1))
    async with bodies.read(large, max_bytes=ROOM_BYTES):
        second = asyncio.create_task(read(bodies, large, ROOM_BYTES))
        assert await read(bodies, sends(b"small")) == b"small"
        await asyncio.sleep(0)
        assert not second.done()

    assert len(await second) == ROOM_BYTES // 2 + 1


def announces_everything(receive: Receive) -> Request:
    """A body that takes all the memory there is."""
    return Request({"headers": [(b"content-length", b"%d" % ROOM_BYTES)]}, receive)


def part(share: float, *, is_last: bool) -> Message:
    return {"type": "http.request", "body": b"a" * int(share * ROOM_BYTES), "more_body": not is_last}


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[Message]":
    """What the sender sends; it may be slow for a moment only."""
    monkeypatch.setattr(asgi_bodies, "GRACE_SECONDS", 0.01)
    return asyncio.Queue()


async def test_a_body_that_does_not_come_gives_its_memory_to_whoever_waits_for_it(
    arriving: "asyncio.Queue[Message]",
) -> None:
    bodies = Bodies()
    silent = asyncio.create_task(read(bodies, announces_everything(arriving.get)))
    await asyncio.sleep(0)

    assert len(await read(bodies, sends(b"a" * MEGABYTE))) == MEGABYTE
    with pytest.raises(RequestTimeout, match=r"^0 bytes of the request came in \d+ s, and others wait"):
        await silent


@pytest.mark.parametrize("waits", [False, True], ids=["nobody waits", "most has come"])
async def test_a_slow_body_is_read_where_it_harms_nobody(arriving: "asyncio.Queue[Message]", waits: bool) -> None:
    bodies = Bodies()
    slow = asyncio.create_task(read(bodies, announces_everything(arriving.get)))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(read(bodies, sends(b"a" * MEGABYTE)))] if waits else []
    arriving.put_nowait(part(0.75 if waits else 0.0, is_last=False))
    await asyncio.sleep(0.05)  # longer than it may be slow
    arriving.put_nowait(part(0.25, is_last=True))

    assert len(await slow) == (ROOM_BYTES if waits else ROOM_BYTES // 4)
    await asyncio.gather(*waiting)


async def held(room: Room, amount: int, until: Callable[[], Awaitable[object]], order: list[int]) -> None:
    async with room.taken(amount):
        order.append(amount)
        await until()


async def test_room_is_given_in_the_order_of_requests() -> None:
    room, order, end = Room(10), [], asyncio.Event()
    first = asyncio.create_task(held(room, 8, end.wait, order))
    await asyncio.sleep(0)
    others = [asyncio.create_task(held(room, amount, end.wait, order)) for amount in (5, 1, 99)]
    await asyncio.sleep(0)
    assert order == [8]  # one that would fit waits behind one that does not

    others[0].cancel()
    end.set()
    await asyncio.gather(first, *others, return_exceptions=True)

    assert order == [8, 1, 99]
    assert room.free == 10


async def test_whoever_is_cancelled_in_the_moment_of_its_turn_takes_and_gives_nothing() -> None:
    room, order, end = Room(10), [], asyncio.Event()
    tasks = [asyncio.create_task(held(room, 10, end.wait, order)) for _ in range(4)]
    await asyncio.sleep(0)

    for task in tasks[:3]:  # the first has the room; the second and the third have their turn when it leaves
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (len(order), room.free) == (2, 0)

    end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert room.free == 10


MANY = 200_001
REFUSED = (
    b"[" + b"[]," * MANY + b"[]]",
    b"[" + b"1," * MANY + b"1]",
    b"[" + b'"a",' * MANY + b"1]",
    b"[" + b'{"a":1},' * (MANY // 2 + 1) + b"1]",
    b'"' * 4 * MANY + b'""""',  # no JSON
)
TAKEN = {
    "prose": orjson.dumps({"a": "He came, he saw, [he] {left}. " * MANY}),
    "escaped quotes": orjson.dumps({"a": '\\",' * MANY}),
    "backslashes": orjson.dumps({"a": "\\" * MANY + '",' * MANY}),
    "as many as allowed": b"[" + b'"a, b",' * (MANY - 3) + b"1]",
}


def test_a_body_with_too_many_values_is_refused() -> None:
    for body in REFUSED:
        with pytest.raises(PayloadTooLarge, match="more than 200000 values"):
            check_values(body)


@pytest.mark.parametrize("body", TAKEN.values(), ids=TAKEN)
def test_what_stands_in_texts_does_not_count(body: bytes) -> None:
    for shift in range(3):
        check_values(b" " * shift + body)


async def test_a_large_body_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(body: bytes) -> threading.Thread:
        return threading.current_thread()

    bodies = Bodies()

    assert await bodies.parse(b'"a"', parse) is threading.current_thread()
    assert await bodies.parse(b'"' + b"a" * 2 * MEGABYTE + b'"', parse) is not threading.current_thread()
    monkeypatch.setenv("AGL_MAX_VALUES", "10")
    with pytest.raises(PayloadTooLarge, match="more than 10 values"):
        await Bodies().parse(b"[" + b"1," * 30 + b"1]", parse)
