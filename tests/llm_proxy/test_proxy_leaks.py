"""Thousands of calls of every kind, and nothing is left of them but their spans.

`AGL_LEAK_CALLS=10000` makes as many calls in each round instead of the usual number.
"""

import asyncio
import gc
import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from agentlightning.llm_proxy.answers import StreamRelay
from agentlightning.llm_proxy.proxied_call import ProxiedCall
from agentlightning.llm_proxy.recorder import CallRecord
from agentlightning.store import SqliteLightningStore
from tests.llm_proxy.openai_suite import USER
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.raw import (
    FINE,
    STREAM_HEAD,
    Connection,
    chunk,
    completion,
    drop,
    event,
    sent,
    streamed,
    then_hang,
    until,
    whole,
)
from tests.stub_model.script import Handler, Request
from tests.stub_model.server import StubModel, serving

CALLERS = 64
CALLS = int(os.environ.get("AGL_LEAK_CALLS", "250"))
"""In each round, of which the first makes what is made once."""
ROUNDS = 3
MOST_GROWTH_BYTES = 60 * 1024**2
"""The caches of SQLite are filled meanwhile, which takes half of it."""
MOST_NEW_OBJECTS = ROUNDS * CALLS // 2
"""Of one type. One for each call would be a leak; an idle connection, of which some are open at any time, has four."""
LAST_BATCHES = 200
"""Records of the batches that were numbered and stored last."""
OF_ONE_CALL = (ProxiedCall, CallRecord, StreamRelay, aiohttp.ClientResponse)
BREAKABLE, BAD_BACKENDS = "breakable", 20


@dataclass(frozen=True)
class Kind:
    """One kind of call."""

    handler: Handler
    """What the backend does."""
    stream: bool = False
    leaves: bool = False
    """Whether the caller leaves after the first part."""
    model: str = MODEL
    """Failures that put a backend out of use have backends of their own."""


KINDS = [
    Kind(whole(completion())),
    Kind(FINE, stream=True),
    Kind(whole(b"{}", 400)),
    Kind(sent(STREAM_HEAD, chunk(event("fi"))), stream=True, model=BREAKABLE),
    Kind(whole(b"nonsense")),
    Kind(streamed(event("fi"), b"data: nonsense\n\n"), stream=True),
    Kind(whole(completion("x" * 10_000))),
    Kind(then_hang(STREAM_HEAD, chunk(event("fi"))), stream=True, leaves=True),
    Kind(drop, model=BREAKABLE),
    Kind(FINE, stream=True),
]


async def handle(request: Request, connection: Connection) -> None:
    """What the request asks for."""
    await KINDS[request.body["seed"]].handler(request, connection)


class Watched:
    """Sees the loop that the proxy runs in."""

    loop: asyncio.AbstractEventLoop

    def middleware(self, app: Any) -> Callable[..., Awaitable[None]]:
        async def watched(scope: Any, receive: Any, send: Any) -> None:
            self.loop = asyncio.get_running_loop()
            await app(scope, receive, send)

        return watched

    def tasks(self) -> int:
        return len(asyncio.all_tasks(self.loop))


async def drive(door: Proxied, count: int) -> None:
    numbers = iter(range(count))
    connector = aiohttp.TCPConnector(limit=CALLERS)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def caller() -> None:
            for number in numbers:
                await call(session, door.endpoint, number % len(KINDS))

        await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def call(session: aiohttp.ClientSession, endpoint: str, number: int) -> None:
    kind = KINDS[number]
    body = json.dumps({"model": kind.model, "messages": USER, "seed": number, "stream": kind.stream}).encode()
    async with session.post(f"{endpoint}/v1/chat/completions", data=body) as answer:
        if kind.leaves:
            await answer.content.readany()
            answer.close()
        else:
            await answer.read()


def alive() -> Counter[str]:
    """How many there are of each kind that belongs to one call, in the whole process."""
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in OF_ONE_CALL)


def count_objects() -> Counter[type]:
    return Counter(map(type, gc.get_objects()))


def settle(door: Proxied, server: StubModel) -> None:
    """Wait until nothing is under way, and forget what the backend remembers."""
    until(lambda: door.proxy.status()["calls"]["in_flight"] == 0)
    assert door.proxy.flush(30.0)
    until(lambda: all(backend["in_flight"] == 0 for backend in door.proxy.status()["backends"]))
    server.requests.clear()
    gc.collect()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thousands_of_calls_leave_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "agentlightning")  # what is logged is kept by the fixture, and would be counted
    store, watched, process = SqliteLightningStore(tmp_path / "calls.db"), Watched(), psutil.Process(os.getpid())
    options: Any = {"store": store, "middlewares": [watched.middleware]}
    of_others = alive()  # a test that failed before keeps what was in its frames
    with serving(handle) as server, ExitStack() as life:
        breakable = [entry(server.url, model=BREAKABLE) for _ in range(BAD_BACKENDS)]
        door = life.enter_context(proxied(entry(server.url), *breakable, **options))
        asyncio.run(drive(door, CALLS))
        settle(door, server)
        tasks, files, memory, objects = watched.tasks(), process.num_fds(), process.memory_info().rss, count_objects()

        for _ in range(ROUNDS):
            asyncio.run(drive(door, CALLS))
            settle(door, server)

        until(lambda: watched.tasks() <= tasks)
        until(lambda: process.num_fds() <= files + CALLERS)
        until(lambda: server.open_connections <= CALLERS)
        until(lambda: not alive() - of_others - Counter(CallRecord=LAST_BATCHES))
        new_objects = count_objects() - objects
        assert not {kind: new for kind, new in new_objects.items() if new > MOST_NEW_OBJECTS}
        assert process.memory_info().rss - memory < MOST_GROWTH_BYTES
        status = door.proxy.status()["calls"]
        assert (status["stored"], status["lost"]) == ((ROUNDS + 1) * CALLS, {})
    asyncio.run(store.close())
