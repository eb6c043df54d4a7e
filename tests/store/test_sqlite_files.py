"""The files of a SQLite store: older ones still open, one file is the whole store after it was closed."""

import asyncio
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import SqliteLightningStore
from agentlightning.types import LLM

FIXTURES = Path(__file__).parent / "fixtures"
MEBIBYTE = 1024**2


async def test_a_file_of_schema_1_still_opens_with_all_it_holds(tmp_path: Path) -> None:
    path = Path(shutil.copy(FIXTURES / "schema-1.db", tmp_path / "runs.db"))

    async with SqliteLightningStore(path) as store:
        statuses = {rollout.rollout_id: rollout.status for rollout in await store.query_rollouts()}
        attempts = {name: [attempt.status for attempt in await store.query_attempts(name)] for name in statuses}
        spans = {name: [span.name for span in await store.query_spans(name)] for name in statuses}

    assert statuses == {
        "succeeded": "succeeded",
        "failed": "failed",
        "cancelled": "cancelled",
        "preparing": "preparing",
        "running": "running",
        "silent": "failed",
        "requeuing": "requeuing",
        "queuing-0": "queuing",
        "queuing-1": "queuing",
    }
    assert {name: found for name, found in attempts.items() if found} == {
        "succeeded": ["succeeded"],
        "failed": ["failed", "failed"],
        "preparing": ["preparing"],
        "running": ["running"],
        "silent": ["unresponsive"],
        "requeuing": ["timeout"],
    }
    assert {name: found for name, found in spans.items() if found} == {
        "succeeded": ["first", "second", "third"],
        "failed": ["broken", "broken"],
        "running": ["begun"],
        "silent": ["late"],
        "requeuing": ["late"],
    }


async def test_records_of_a_file_of_schema_1_are_as_they_were_written(tmp_path: Path) -> None:
    path = Path(shutil.copy(FIXTURES / "schema-1.db", tmp_path / "runs.db"))

    async with SqliteLightningStore(path) as store:
        rollout = await store.get_rollout_by_id("succeeded")
        span = (await store.query_spans("succeeded"))[0]
        resources = await store.get_latest_resources()
        workers = {worker.worker_id: worker.status for worker in await store.query_workers()}
        runs = {run.name: run for run in await store.query_runs()}
        metrics = await store.query_metrics(runs["done"].run_id)

    assert rollout is not None
    assert (rollout.input, rollout.mode, rollout.metadata) == ({"n": 1, "deep": [None, {"ä": 1.5}]}, "train", {"k": 1})
    assert span.attributes == {"text": "größer", "tokens": [1, 2, 3], "score": 0.5, "is_final": True}
    assert (span.events[0].name, span.links[0].context.trace_state) == ("said", {"a": "b"})
    assert resources is not None
    assert (resources.resources_id, type(resources.resources["model"])) == ("mine", LLM)
    assert workers == {"worker-1": "busy", "worker-2": "busy", "worker-3": "idle", "idle-worker": "unknown"}
    assert {name: run.status for name, run in runs.items()} == {
        "done": "succeeded",
        "failed": "failed",
        "stopped": "stopped",
        "running": "running",
    }
    assert runs["done"].summary == {"reward_mean": 1.0}
    assert [(point.step, point.values["reward"]) for point in metrics] == [(0, 0.0), (1, 0.5), (2, 1.0)]


async def test_work_goes_on_in_a_file_of_schema_1(tmp_path: Path) -> None:
    path = Path(shutil.copy(FIXTURES / "schema-1.db", tmp_path / "runs.db"))

    async with SqliteLightningStore(path) as store:
        claims = [await store.dequeue_rollout("worker-4") for _ in range(4)]
        sequence_id = await store.get_next_span_sequence_id("succeeded", "latest")

    assert [claim and claim.rollout_id for claim in claims] == ["requeuing", "queuing-0", "queuing-1", None]
    assert sequence_id == 4


# ---------------------------------------------------------------------- one file is the store


async def counted(path: Path) -> tuple[int, int]:
    """Rollouts and spans of a copy of the file alone."""
    copy = Path(shutil.copy(path, path.with_name("copy-of-one-file.db")))
    async with SqliteLightningStore(copy) as store:
        statistics = await store.statistics()
    return statistics["total_rollouts"], statistics["total_spans"]


def length_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


WORK = """
import asyncio, sys
from agentlightning.store import SqliteLightningStore

async def work(store):
    for number in range(50):
        await store.enqueue_rollout({"n": number, "text": "x" * 2000})
    await store.query_rollouts()
    await store.wait_for_rollouts(["nobody"], timeout=0.1)

"""
ENDS = {
    "closed": "store = SqliteLightningStore(sys.argv[1]); asyncio.run(work(store)); asyncio.run(store.close())",
    "kept until the end": "store = SqliteLightningStore(sys.argv[1]); asyncio.run(work(store))",
    "forgotten at the end": "asyncio.run(work(SqliteLightningStore(sys.argv[1])))",
    "ended by an error": "store = SqliteLightningStore(sys.argv[1]); asyncio.run(work(store)); raise SystemExit(3)",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_the_file_alone_holds_everything_when_the_program_has_ended(tmp_path: Path, end: str) -> None:
    path = tmp_path / "runs.db"

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORK + end, str(path))
    await process.wait()

    assert await counted(path) == (50, 0)
    assert length_of(tmp_path / "runs.db-wal") == 0


async def test_the_file_alone_holds_everything_while_another_program_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SqliteLightningStore(path) as other:
        async with SqliteLightningStore(path) as store:
            await store.enqueue_rollout("a")
            await other.query_rollouts()

        assert length_of(tmp_path / "runs.db-wal") == 0
        assert await counted(path) == (1, 0)


async def test_a_store_that_only_its_children_wrote_to_is_one_file_after_close(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SqliteLightningStore(path)
    killed = f"{WORK}import os\nasyncio.run(work(SqliteLightningStore(sys.argv[1])))\nos._exit(0)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", killed, str(path))
    await process.wait()
    assert length_of(tmp_path / "runs.db-wal") > 0

    await store.close()

    assert await counted(path) == (50, 0)


async def test_the_log_stays_short_while_much_is_written_and_a_reader_polls(tmp_path: Path, make_span: Any) -> None:
    path = tmp_path / "runs.db"
    longest = 0
    async with SqliteLightningStore(path) as store, SqliteLightningStore(path) as reader:
        rollouts = [await store.start_rollout(number) for number in range(16)]
        polling = asyncio.create_task(poll(reader))
        for number in range(1500):
            spans = [make_span(rollout, number, attributes={"text": "x" * 2000}) for rollout in rollouts]
            await asyncio.gather(*map(store.add_span, spans))
            longest = max(longest, length_of(tmp_path / "runs.db-wal"))
        polling.cancel()

    assert length_of(path) > 48 * MEBIBYTE
    assert longest < 16 * MEBIBYTE


async def poll(store: SqliteLightningStore) -> None:
    while True:
        await store.query_rollouts()
        await store.statistics()


async def test_a_reader_that_stays_does_not_stop_the_work(tmp_path: Path, make_span: Any) -> None:
    path = tmp_path / "runs.db"
    async with SqliteLightningStore(path) as store:
        rollout = await store.start_rollout("a")
        reader = sqlite3.connect(path)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM spans").fetchone()
        for number in range(40):
            await store.add_span(make_span(rollout, number, attributes={"text": "x" * 1_000_000}))
        seen = reader.execute("SELECT count(*) FROM spans").fetchone()
        reader.close()

        assert seen == (0,)
        assert len(await store.query_spans(rollout.rollout_id)) == 40

    assert length_of(tmp_path / "runs.db-wal") == 0
