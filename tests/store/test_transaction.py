"""Transactions: what an operation writes is applied when it is done, and dropped when it raises, on every back end."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import NotFound
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.store.copies import replaced
from agentlightning.store.local import Call, LocalStore
from agentlightning.store.selection import Selection
from agentlightning.store.transaction import Setting, Transaction
from agentlightning.types import Rollout, Span
from tests.postgres import new_database


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def local(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalStore]:
    if request.param == "postgres":
        pytest.importorskip("psycopg", reason="psycopg is not installed: the extra postgres")
        from agentlightning.store.postgres import PostgresLightningStore

        made: LocalStore = PostgresLightningStore(new_database())
    else:
        made = InMemoryLightningStore() if request.param == "memory" else SqliteLightningStore(tmp_path / "s.db")
    async with made as store:
        yield store


def write_everything(tx: Transaction, now: float, rollout_id: str, span: Span) -> None:
    """Change whatever hangs on a running rollout, take what is queued, and queue the rollout again."""
    (attempt,) = tx.get_attempts(rollout_id)
    tx.append_spans(attempt, [span], now)
    tx.pop(1)
    rollout = tx.get(Rollout, rollout_id)
    assert rollout is not None
    tx.put(replaced(rollout, status="requeuing", metadata={"changed": True}))
    tx.put(replaced(attempt, status="failed", end_time=now))
    tx.push(rollout_id)
    tx.put(Setting("written", "yes"))
    tx.put_last_sequence(rollout_id, 77)
    tx.schedule(rollout_id, now + 1000)
    tx.note("rollout", rollout_id, status="requeuing")


async def snapshot(store: LocalStore, rollout_id: str) -> tuple[object, ...]:
    setting = await store._read(Call("setting", lambda tx, now: tx.get(Setting, "written")))
    counts = await store._read(Call("counts", lambda tx, now: (tx.counts(), tx.get_last_sequence(rollout_id))))
    queued = await store._read(Call("queue", lambda tx, now: list(tx.queue_ids())))
    return list(await store.query_rollouts()), list(await store.query_spans(rollout_id)), setting, counts, queued


async def test_what_an_operation_wrote_is_dropped_when_it_raises(local: LocalStore, make_span: Any) -> None:
    running, _ = await local.start_rollout("running"), await local.enqueue_rollout("queued")
    before = await snapshot(local, running.rollout_id)

    def write_and_fail(tx: Transaction, now: float) -> None:
        write_everything(tx, now, running.rollout_id, make_span(running))
        raise NotFound("nothing of it stays")

    with pytest.raises(NotFound):
        await local._write(Call("test", write_and_fail))

    assert await snapshot(local, running.rollout_id) == before


async def test_an_operation_sees_its_records_and_not_in_selections(local: LocalStore, make_span: Any) -> None:
    running, queued = await local.start_rollout("running"), await local.enqueue_rollout("queued")
    span = make_span(running)

    def write_and_look(tx: Transaction, now: float) -> tuple[object, ...]:
        write_everything(tx, now, running.rollout_id, span)
        rollout, (attempt,) = tx.get(Rollout, running.rollout_id), tx.get_attempts(running.rollout_id)
        assert rollout is not None
        selected = tx.select(Rollout, Selection()).items
        own = rollout.status, attempt.status, tx.get_last_sequence(running.rollout_id), list(tx.pop(2))
        return own, [one.status for one in selected], tx.has_span(attempt, span.span_id)

    own, selected, has_span = await local._write(Call("test", write_and_look))

    assert own == ("requeuing", "failed", 77, [running.rollout_id])
    assert (selected, has_span) == (["preparing", "queuing"], False)
    assert [one.status for one in await local.query_rollouts()] == ["requeuing", queued.status]
    assert [one.span_id for one in await local.query_spans(running.rollout_id)] == [span.span_id]
