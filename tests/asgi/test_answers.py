"""The answers of one server: large ones take turns, and nobody waits for a client that reads slowly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from agentlightning.asgi import answers as asgi_answers
from agentlightning.asgi.answers import SHARE_BYTES, Answers, kind_of
from agentlightning.asgi.bodies import ROOM_BYTES
from agentlightning.asgi.protocol import Outbox
from agentlightning.asgi.request import Disconnected
from agentlightning.asgi.response import LargeResponse

MEGABYTE = 1024**2


async def test_answers_take_turns_by_the_size_that_their_kind_had_before() -> None:
    answers, inside = Answers(), list[str]()

    async def answer(kind: str, leave: asyncio.Event) -> None:
        async with answers.room_for(kind):
            inside.append(kind)
            await leave.wait()
            inside.remove(kind)

    async def most_at_once(kind: str) -> int:
        leave = asyncio.Event()
        tasks = [asyncio.create_task(answer(kind, leave)) for _ in range(4)]
        await asyncio.sleep(0)
        most = len(inside)
        leave.set()
        await asyncio.gather(*tasks)
        return most

    assert await most_at_once("spans") == 1
    answers.count("spans", ROOM_BYTES)
    assert await most_at_once("spans") == 1
    answers.count("rollouts", 1000)
    assert await most_at_once("rollouts") == 4
    for _ in range(1000):
        answers.count("spans", 1000)
    assert await most_at_once("spans") == 4


async def test_the_first_of_a_kind_does_not_wait_for_those_that_wait_to_be_made() -> None:
    answers, order, leave = Answers(), list[str](), asyncio.Event()
    answers.count("spans", ROOM_BYTES)

    async def answer(kind: str) -> None:
        async with answers.room_for(kind):
            order.append(kind)
            await leave.wait()

    tasks = [asyncio.create_task(answer(kind)) for kind in ("spans", "spans", "spans", "rollouts of few")]
    await asyncio.sleep(0)
    leave.set()
    await asyncio.gather(*tasks)

    assert order == ["spans", "rollouts of few", "spans", "spans"]


@pytest.mark.parametrize(
    ("arguments", "is_of_few"),
    [({"limit": 10}, True), ({"limit": "99"}, True), ({"limit": -1}, False), ({"limit": 100}, False), ([], False)],
)
def test_a_query_for_few_items_is_of_a_kind_of_its_own(arguments: Any, is_of_few: bool) -> None:
    assert (kind_of("query_spans", arguments) != "query_spans") == is_of_few


class Client(Outbox):
    """Reads one part after the other, when it is let; the connection has nothing or a part in its buffer."""

    def __init__(self) -> None:
        super().__init__({})
        self.parts: list[bytes] = []
        self.reads = asyncio.Semaphore(0)
        self.buffered = 0

    def unsent_bytes(self) -> int:
        return self.buffered

    async def send(self, message: Any) -> None:
        if message.get("body"):
            await self.reads.acquire()
            self.parts.append(message["body"])


@asynccontextmanager
async def sending(client: Client, answers: Answers, parts: list[bytes]) -> "AsyncIterator[asyncio.Task[None]]":
    """A large answer that is sent in the room of its kind."""

    async def send() -> None:
        async with AsyncExitStack() as memory:
            await memory.enter_async_context(answers.room_for("spans"))
            await LargeResponse(200, parts).send(
                client.send, accept_encoding="", answers=answers, outbox=client, memory=memory
            )

    task = asyncio.create_task(send())
    await asyncio.sleep(0)  # it takes its room
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_slow_reader_gives_its_room_to_others_and_still_gets_everything() -> None:
    client, answers, parts = Client(), Answers(), [b"%d" % n for n in range(9)]

    async with sending(client, answers, parts) as task:
        async with answers.room_for("rollouts"):  # all of it
            assert not client.parts
            assert answers.unsent_bytes == len(b"".join(parts))
        for _ in parts:
            client.reads.release()
        await task

    assert client.parts == parts
    assert answers.unsent_bytes == 0


@pytest.mark.parametrize(
    ("limit", "size", "words"),
    [("UNREAD_SECONDS", 10, "read nothing for"), ("GRACE_SECONDS", 2 * SHARE_BYTES, "reads less than")],
    ids=["little and not at all", "much and too slowly"],
)
async def test_a_client_that_does_not_read_is_disconnected(
    limit: str, size: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi_answers, limit, 0.01)
    client, answers = Client(), Answers()

    async with sending(client, answers, [b"x" * size]) as task:
        with pytest.raises(Disconnected, match=words):
            await task

    assert answers.unsent_bytes == 0


async def test_a_last_part_that_is_long_is_counted_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    client, answers = Client(), Answers()
    client.buffered = 2 * SHARE_BYTES
    client.reads.release()

    async with sending(client, answers, [b"x"]) as task:
        async with answers.room_for("rollouts"):  # all of it
            assert answers.unsent_bytes == 2 * SHARE_BYTES
        client.buffered = 0
        await task

    assert answers.unsent_bytes == 0


async def test_a_client_above_its_share_may_read_steadily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_answers, "GRACE_SECONDS", 0.001)
    left = iter(range(20 * MEGABYTE, -1, -MEGABYTE))

    await Answers().until_read(lambda: next(left))

    assert next(left, None) is None
