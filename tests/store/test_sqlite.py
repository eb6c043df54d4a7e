"""The SQLite store's own ways: durability, files, other processes, full disks."""

import asyncio
import gc
import multiprocessing
import pickle
import sqlite3
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import (
    AgentLightningError,
    ConfigurationError,
    IncompatibleStore,
    InvalidValue,
    StoreUnavailable,
)
from agentlightning.store import SqliteLightningStore
from agentlightning.store.durable import Job
from agentlightning.store.local import Call
from agentlightning.store.sqlite import database
from agentlightning.store.transaction import Setting
from agentlightning.types import EnqueueRolloutRequest, PromptTemplate, RolloutConfig
from tests.contract.conftest import known


async def test_everything_survives_reopening(tmp_path: Path, make_span: Any, clock: Any) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path, clock=clock) as store:
        done = await store.start_rollout({"a": [1]}, "train", config=RolloutConfig(max_attempts=3), metadata={"k": 1})
        await store.add_span(make_span(done, sequence_id=3))
        clock.advance(5)
        await store.add_span(make_span(done, sequence_id=4))
        queued = [await store.enqueue_rollout(n) for n in range(3)]
        update = await store.add_resources({"p": PromptTemplate(template="t", engine="jinja")})
        run = await store.start_run("r", config={"lr": 1})
        await store.add_metrics(run.run_id, 1, {"x": 0.5})
        worker = await store.update_worker("w", {"cpu": 1})
        before = await store.query_rollouts()
        statistics = await store.statistics()

    async with SqliteLightningStore(path, clock=clock) as store:
        assert await store.query_rollouts() == before
        assert (await store.get_latest_attempt(done.rollout_id)).last_heartbeat_time == clock.now  # type: ignore[union-attr]
        assert [s.sequence_id for s in await store.query_spans(done.rollout_id)] == [3, 4]
        assert await store.get_next_span_sequence_id(done.rollout_id, "x") == 5
        assert await store.get_latest_resources() == update
        assert await store.get_run_by_id(run.run_id) == run
        assert [p.values for p in await store.query_metrics(run.run_id)] == [{"x": 0.5}]
        assert dict(known(await store.get_worker_by_id("w"))).items() <= dict(worker).items()
        again = await store.statistics()
        assert {k: v for k, v in again.items() if k != "uptime"} == {
            k: v for k, v in statistics.items() if k != "uptime"
        }
        assert [(await store.dequeue_rollout()).input for _ in queued] == [0, 1, 2]  # type: ignore[union-attr]


async def test_running_attempts_are_recovered_after_a_restart(tmp_path: Path, clock: Any) -> None:
    path = tmp_path / "s.db"
    config = RolloutConfig(unresponsive_seconds=10, max_attempts=2, retry_condition=["unresponsive"])
    async with SqliteLightningStore(path, clock=clock) as store:
        await store.enqueue_rollout("a", config=config)
        first = await store.dequeue_rollout()

    clock.advance(11)
    async with SqliteLightningStore(path, clock=clock) as store:
        second = await store.dequeue_rollout()

    assert (known(second).rollout_id, known(second).attempt.sequence_id) == (known(first).rollout_id, 2)


async def test_tasks_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "s.db") as store:
        good = await store.enqueue_rollout("good")
        for task in (object(), {"a": [1, {"b": b"x"}]}, {1: "a"}, float("nan"), "\ud800", 2**70):
            with pytest.raises(InvalidValue, match="input"):
                await store.enqueue_rollout(task)
            with pytest.raises(InvalidValue, match="input"):
                await store.update_rollout(good.rollout_id, input=task, metadata={"k": 1})
            with pytest.raises(InvalidValue):
                await store.start_rollout("a", metadata={"k": task})
            with pytest.raises(InvalidValue):
                await store.update_worker("w", {"k": task})

        assert await store.query_rollouts() == [good]
        assert await store.query_workers() == []


async def test_full_disk_is_said_clearly_and_keeps_what_was_acknowledged(tmp_path: Path, make_span: Any) -> None:
    async with SqliteLightningStore(tmp_path / "s.db") as store:
        rollout = await store.start_rollout("a")
        connection = store._work().writer._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 20}")
        kept = 0

        async def fill() -> None:
            nonlocal kept
            for n in range(1000):
                await store.add_span(make_span(rollout, sequence_id=n, attributes={"text": "x" * 2000}))
                kept += 1

        with pytest.raises(StoreUnavailable, match=r"disk of store .* is full; what was acknowledged is kept"):
            await fill()

        assert 10 < kept < 1000
        assert [s.sequence_id for s in await store.query_spans(rollout.rollout_id)] == list(range(kept))
        connection.execute("PRAGMA max_page_count = 1000000")
        await store.add_span(make_span(rollout, sequence_id=kept))
        assert len(await store.query_spans(rollout.rollout_id)) == kept + 1


def database_of_another_program(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE cats (name TEXT)")
    connection.close()


FOREIGN: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_bytes(b"hello"),
    "torn": lambda path: path.write_bytes(b"SQLite format 3\x00" + b"y" * 8000),
    "of another program": database_of_another_program,
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_foreign_or_damaged_file_is_refused_and_not_touched(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "s.db"
    make(path)
    content = path.read_bytes()

    with pytest.raises(IncompatibleStore, match=r"s\.db"):
        SqliteLightningStore(path)

    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


async def test_damage_inside_the_file_is_found_when_it_is_opened(tmp_path: Path, make_span: Any) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as store:
        rollout = await store.start_rollout("a")
        await store.add_many_spans([make_span(rollout, attributes={"t": "x" * 3000}) for _ in range(50)])
    content = bytearray(path.read_bytes())
    content[16384:40960] = b"\xff" * (40960 - 16384)
    path.write_bytes(content)

    with pytest.raises(IncompatibleStore, match=r"damaged .* restore it from a backup"):
        SqliteLightningStore(path)

    assert path.read_bytes() == content


def test_a_file_that_another_process_makes_at_the_same_moment_is_ours(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    ours = sqlite3.connect(path)
    statements: list[str] = []

    def trace(statement: str) -> None:
        statements.append(statement)
        if len(statements) == 2:  # between the two looks
            database.prepare(path, "process")

    ours.set_trace_callback(trace)
    database._check_ours(ours, path)
    ours.close()

    assert len(statements) == 2


async def test_file_of_a_newer_release_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as store:
        await store.enqueue_rollout("a")
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = path.read_bytes()

    with pytest.raises(IncompatibleStore, match=r"schema version 99, this release knows \d+: open it with the release"):
        SqliteLightningStore(path)

    assert path.read_bytes() == content


async def test_a_missing_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "today" / "s.db"

    async with SqliteLightningStore(path) as store:
        await store.enqueue_rollout(1)

    assert path.is_file()
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("place", "expected"),
    [("folder", "'.*folder' is a folder, not a store"), ("file/s.db", "Folder '.*file' .* cannot be made")],
)
def test_a_place_where_no_store_can_be_is_refused(tmp_path: Path, place: str, expected: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(AgentLightningError, match=expected):
        SqliteLightningStore(tmp_path / place)


@pytest.mark.parametrize(("durability", "synchronous"), [("process", 1), ("power", 2)])
async def test_durability_sets_when_the_disk_is_waited_for(tmp_path: Path, durability: Any, synchronous: int) -> None:
    async with SqliteLightningStore(tmp_path / "s.db", durability=durability) as store:
        await store.enqueue_rollout("a")
        connection = store._work().writer._connection
        assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    with pytest.raises(ConfigurationError, match="use 'process' or 'power'"):
        SqliteLightningStore(tmp_path / "s.db", durability="hope")  # type: ignore[arg-type]


async def test_backup_of_a_store_in_use_is_consistent(tmp_path: Path, make_span: Any) -> None:
    async with SqliteLightningStore(tmp_path / "s.db") as store:
        rollout = await store.start_rollout("a")
        writing = asyncio.create_task(_write_pairs(store, rollout, make_span))
        await store.backup(tmp_path / "copy.db")
        writing.cancel()

    async with SqliteLightningStore(tmp_path / "copy.db") as copy:
        spans = await copy.query_spans(rollout.rollout_id)
        assert len(spans) % 2 == 0
        assert (await copy.statistics())["total_rollouts"] == 1
    assert not (tmp_path / "copy.db.part").exists()
    async with SqliteLightningStore() as store:
        with pytest.raises(ConfigurationError, match="export_store"):
            await store.backup("copy.db")


async def _write_pairs(store: SqliteLightningStore, rollout: Any, make_span: Any) -> None:
    while True:
        await store.add_many_spans([make_span(rollout), make_span(rollout)])


async def test_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "s.db")
    await store.enqueue_rollout("a")
    await store.close()
    await store.close()

    with pytest.raises(StoreUnavailable, match="is closed; open it again"):
        await store.enqueue_rollout("b")
    with pytest.raises(StoreUnavailable, match="is closed"):
        await store.query_rollouts()


async def test_forgotten_store_lets_go_of_its_threads(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "s.db")
    await store.enqueue_rollout("a")
    thread = store._work().writer._thread
    reference = weakref.ref(store)

    del store
    gc.collect()

    assert reference() is None
    await asyncio.get_running_loop().run_in_executor(None, thread.join, 10)
    assert not thread.is_alive()


async def test_claim_of_a_caller_cancelled_at_the_last_moment_is_given_again(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "s.db") as store:
        await store.enqueue_rollout("a")
        claim = asyncio.create_task(store.dequeue_rollout("w", claim_id="0:1"))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(claim.cancel)  # behind the batch, before the task sees its result
        await asyncio.gather(claim, return_exceptions=True)

        again = known(await store.dequeue_rollout("w", claim_id="0:1"))
        assert claim.cancelled()
        assert (again.input, again.attempt.sequence_id) == ("a", 1)


async def test_claim_of_a_caller_cancelled_while_it_is_made_comes_back_with_its_lease(
    tmp_path: Path, clock: Any
) -> None:
    async with SqliteLightningStore(tmp_path / "s.db", durability="power", clock=clock) as store:
        first = await store.enqueue_rollout("a")
        writer = store._work().writer

        with writer._turn:
            claim = asyncio.create_task(store.dequeue_rollout("w", heartbeat_interval=10))
            while not writer._jobs:
                await asyncio.sleep(0)
            job = writer._jobs[0]
            original = job.call.behaviour

            def claim_then_cancel(*args: Any, **kwargs: Any) -> Any:
                job.future.get_loop().call_soon_threadsafe(job.future.cancel)  # type: ignore[union-attr]
                return original(*args, **kwargs)

            job.call.behaviour = claim_then_cancel
        with pytest.raises(asyncio.CancelledError):
            await claim

        await store.update_worker("v")  # behind the claim
        assert known(await store.get_rollout_by_id(first.rollout_id)).status == "preparing"
        clock.advance(301)
        again = known(await store.dequeue_rollout("v"))
        assert (again.input, again.attempt.sequence_id) == ("a", 2)


async def test_batch_cut_off_by_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "s.db", durability="power") as store:
        await store.enqueue_rollout("before")
        writer = store._work().writer

        def interrupt(tx: Any, now: float) -> None:
            tx.put(Setting("half", "written"))
            raise KeyboardInterrupt

        with writer._turn:
            job = Job(Call("test", interrupt))
            writer._jobs.append(job)
            with pytest.raises(KeyboardInterrupt):
                writer._run_batch(10, None)
            assert list(writer._jobs) == [job]
            writer._jobs.clear()

        await store.enqueue_rollout("after")
        assert [r.input for r in await store.query_rollouts()] == ["before", "after"]
        assert await store._read(Call("test", lambda tx, now: tx.get(Setting, "half"))) is None


async def test_values_look_the_same_to_the_writer_and_to_readers(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "s.db") as store:
        queued = await store.enqueue_rollout({"t": (1, 2)}, metadata={"t": (1, 2)})
        claimed = known(await store.dequeue_rollout())
        read = known(await store.get_rollout_by_id(queued.rollout_id))
        await store.update_attempt(queued.rollout_id, "latest", metadata={"t": (3,)})
        attempt = await store.update_attempt(queued.rollout_id, "latest", worker_id="w")
        await store.update_worker("w", {"t": (4,)})
        worker_again = await store.update_worker("w")

        assert claimed.input == read.input == {"t": [1, 2]}
        assert claimed.metadata == read.metadata == {"t": [1, 2]}
        assert attempt.metadata == {"t": [3]}
        assert worker_again.heartbeat_stats == {"t": [4]}


async def test_operation_that_fails_after_its_rows_were_written_spoils_nothing(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "s.db") as store:

        def write_then_fail(tx: Any, now: float) -> None:
            tx.put(Setting("half", "written"))
            tx.counts()
            raise ValueError("changed my mind")

        call = Call("test", write_then_fail)
        results = await asyncio.gather(
            store.enqueue_rollout("a"), store._write(call), store.enqueue_rollout("b"), return_exceptions=True
        )

        assert isinstance(results[1], ValueError)
        assert [r.input for r in await store.query_rollouts()] == ["a", "b"]
        settings = await store._read(Call("test", lambda tx, now: tx.get(Setting, "half")))
        assert settings is None


def _enqueue_in_child(store: SqliteLightningStore, count: int) -> None:
    async def enqueue() -> None:
        for n in range(count):
            await store.enqueue_rollout(n)
        await store.close()

    asyncio.run(enqueue())


async def test_store_is_handed_to_a_forked_process(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "s.db") as store:
        await store.enqueue_rollout("mine")  # in use, so a fork must leave threads and connections behind
        child = multiprocessing.get_context("fork").Process(target=_enqueue_in_child, args=(store, 5))
        child.start()
        await asyncio.get_running_loop().run_in_executor(None, child.join)

        assert child.exitcode == 0
        assert len(await store.query_rollouts()) == 6
        assert (await store.dequeue_rollout()).input == "mine"  # type: ignore[union-attr]
        assert (await store.dequeue_rollout()).input == 0  # type: ignore[union-attr]


def test_pickle_carries_the_address(tmp_path: Path) -> None:
    options: Any = {"durability": "power", "max_span_bytes": 1000, "lost_worker_seconds": 77}
    copy = pickle.loads(pickle.dumps(SqliteLightningStore(tmp_path / "s.db", **options)))
    assert (copy.path, copy.durability, copy.max_span_bytes) == (str(tmp_path / "s.db"), "power", 1000)
    assert copy._limits.lease_seconds == 77


async def test_waiters_see_what_another_connection_writes(tmp_path: Path, make_span: Any) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as here, SqliteLightningStore(path) as there:
        rollout = await there.start_rollout("a")
        notices = here.subscribe(["span"])
        finished = asyncio.create_task(here.wait_for_rollouts([rollout.rollout_id]))
        work = asyncio.create_task(here.dequeue_rollout(wait=30))
        span = asyncio.create_task(anext(notices))
        while not here._board.has_waiters:
            await asyncio.sleep(0)

        await there.add_span(make_span(rollout, name="seen"))
        await there.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        queued = await there.enqueue_rollout("b")

        assert [r.status for r in await asyncio.wait_for(finished, 10)] == ["succeeded"]
        assert known(await asyncio.wait_for(work, 10)).rollout_id == queued.rollout_id
        assert (await asyncio.wait_for(span, 10)).name == "seen"
        await notices.aclose()  # type: ignore[attr-defined]


async def test_two_stores_on_one_file_see_each_other_at_once(tmp_path: Path, make_span: Any) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as one, SqliteLightningStore(path) as two:
        rollout = await one.start_rollout("a")
        for n in range(6):
            store = (one, two)[n % 2]
            number = await store.get_next_span_sequence_id(rollout.rollout_id, "x")
            await store.add_span(make_span(rollout, sequence_id=number))
            await store.enqueue_rollout(n)
        await two.update_rollout(rollout.rollout_id, metadata={"by": "two"})

        assert [s.sequence_id for s in await one.query_spans(rollout.rollout_id)] == [1, 2, 3, 4, 5, 6]
        assert [(await (one, two)[n % 2].dequeue_rollout()).input for n in range(6)] == list(range(6))  # type: ignore[union-attr]
        changed = await one.update_rollout(rollout.rollout_id, mode="val")
        assert (changed.metadata, changed.mode) == ({"by": "two"}, "val")


async def test_subscriber_resumes_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as store:
        notices = store.subscribe()
        for n in range(4):
            await store.enqueue_rollout(n, rollout_id=f"r-{n}")
        first = await anext(notices)
        await notices.aclose()  # type: ignore[attr-defined]

    async with SqliteLightningStore(path) as store:
        resumed = store.subscribe(after=first.cursor)
        told = [(await anext(resumed)).rollout_id for _ in range(3)]
        await resumed.aclose()  # type: ignore[attr-defined]

    assert told == ["r-1", "r-2", "r-3"]


async def test_rollouts_beyond_the_cache_are_found_again(
    tmp_path: Path, make_span: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.sql.MOST_ENTRIES", 5)
    async with SqliteLightningStore(tmp_path / "s.db") as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(300)])
        claimed = await store.dequeue_many_rollouts(limit=300, worker_id="w")
        await store.add_many_spans([make_span(rollout) for rollout in claimed])
        repeated = await store.add_many_spans([make_span(claimed[0], span_id="x"), make_span(claimed[0], span_id="x")])

        assert [c.input for c in claimed if c] == list(range(300))
        assert [answer is None for answer in repeated] == [False, True]
        assert {r.status for r in await store.query_rollouts()} == {"running"}
