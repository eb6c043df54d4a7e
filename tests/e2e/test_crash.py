"""A process that writes to a SQLite store is killed again and again; what it was told is kept, is kept.

The child tells each acknowledged step to a pipe. It is killed with SIGKILL on one file, in each life after another
number of steps, so that the first and the last steps of a group commit are among them. The next child opens the file
again; at the end everything that any of them told is looked for.
"""

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import SqliteLightningStore
from tests import warm_python

STEPS_BEFORE_DEATH = (0, 1, 2, 3, 5, 8, 13, 21, 45, 90)
LONGEST_DELAY_SECONDS = 0.01
"""Death comes at a random moment after a step, so that it falls into commits too."""

CHILD = """
import asyncio, itertools, os, sys
from agentlightning.store import SqliteLightningStore
from agentlightning.types import EnqueueRolloutRequest, OtelResource, Span, TraceStatus

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

def span(claimed, number, span_id):
    return Span(rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id, sequence_id=number,
        trace_id="1" * 32, span_id=span_id, parent_id=None, name="s", status=TraceStatus(status_code="OK"),
        attributes={"text": "x" * 500}, events=[], links=[], start_time=1.0, end_time=2.0, context=None, parent=None,
        resource=OtelResource(attributes={}, schema_url=""))

async def produce(store, numbers):
    while True:
        rollout = await store.enqueue_rollout({"n": next(numbers)})
        tell("queued", rollout.rollout_id)
        many = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"n": next(numbers)}) for _ in range(2)])
        for rollout in many:
            tell("queued", rollout.rollout_id)
        await store.dequeue_rollout(wait=0.002)  # some attempts are left hanging

async def consume(store):
    while True:
        claimed = await store.dequeue_rollout("w", wait=1)
        if claimed is None:
            continue
        tell("claimed", claimed.rollout_id, claimed.attempt.attempt_id)
        await store.add_span(span(claimed, 1, claimed.attempt.attempt_id + "-1"))
        tell("span", claimed.rollout_id, claimed.attempt.attempt_id + "-1")
        await store.add_many_spans([span(claimed, n, f"{claimed.attempt.attempt_id}-{n}") for n in (2, 3)])
        tell("span", claimed.rollout_id, claimed.attempt.attempt_id + "-2")
        tell("span", claimed.rollout_id, claimed.attempt.attempt_id + "-3")
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        tell("done", claimed.rollout_id)

async def main(path):
    store = SqliteLightningStore(path)
    tell("open")
    await asyncio.gather(produce(store, itertools.count()), *(consume(store) for _ in range(4)))

asyncio.run(main(sys.argv[1]))
"""


@dataclass
class Told:
    """Everything children have acknowledged so far."""

    queued: list[str] = field(default_factory=list)
    claimed: dict[str, str] = field(default_factory=dict)
    spans: set[tuple[str, str]] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    def hear(self, line: str) -> None:
        kind, *words = line.split()
        if kind == "queued":
            self.queued.append(words[0])
        elif kind == "claimed":
            assert words[0] not in self.claimed, f"rollout {words[0]} was handed out twice"
            self.claimed[words[0]] = words[1]
        elif kind == "span":
            self.spans.add((words[0], words[1]))
        elif kind == "done":
            self.done.add(words[0])


def live_and_die(path: Path, told: Told, steps: int, delay_seconds: float) -> None:
    """Start a child, kill it a moment after it has told so many steps, and read what it told until its end."""
    is_killed, heard = False, 0
    with warm_python.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line != "open\n":
                told.hear(line)
                heard += 1
            if heard >= steps and not is_killed:
                threading.Timer(delay_seconds, child.kill).start()
                is_killed = True
    assert child.returncode == -signal.SIGKILL


async def check(path: Path, told: Told) -> None:
    async with SqliteLightningStore(path) as store:
        rollouts: Any = {r.rollout_id: r for r in await store.query_rollouts()}
        assert len(rollouts) == (await store.query_rollouts()).total
        assert set(told.queued) <= set(rollouts)
        assert all(rollouts[rollout_id].status == "succeeded" for rollout_id in told.done)
        for rollout_id, attempt_id in told.claimed.items():
            attempts = await store.query_attempts(rollout_id)
            assert [a.attempt_id for a in attempts] == [attempt_id]
        kept = {
            (rollout_id, span.span_id)
            for rollout_id in {rollout_id for rollout_id, _ in told.spans}
            for span in await store.query_spans(rollout_id)
        }
        assert told.spans <= kept


async def check_queue(path: Path, told: Told) -> None:
    """What is still queued comes out in the order it went in, once."""
    async with SqliteLightningStore(path) as store:
        waiting = [r.rollout_id for r in await store.query_rollouts(status=["queuing"])]
        claimed = []
        while (rollout := await store.dequeue_rollout()) is not None:
            claimed.append(rollout.rollout_id)
    assert claimed == waiting
    assert len(set(claimed)) == len(claimed)
    still_waiting = set(waiting)
    assert [r for r in waiting if r in set(told.queued)] == [r for r in told.queued if r in still_waiting]


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    chance = random.Random(20260101)
    path = tmp_path / "s.db"
    told = Told()
    for steps in STEPS_BEFORE_DEATH:
        live_and_die(path, told, steps, chance.uniform(0, LONGEST_DELAY_SECONDS))
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()

    asyncio.run(check(path, told))
    asyncio.run(check_queue(path, told))
    assert len(told.done) > len(STEPS_BEFORE_DEATH)
