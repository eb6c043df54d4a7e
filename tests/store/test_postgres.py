"""The PostgreSQL store: what several writers, several processes and a lost database make of it."""

import asyncio
import importlib
import os
import pickle
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from agentlightning.errors import ConfigurationError, IncompatibleStore, StoreUnavailable
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore, export_store, import_store
from agentlightning.trainer.components import build_store, store_address
from agentlightning.types import ResourcesUpdate, Span
from agentlightning.utils.installation import install_command
from tests.postgres import PASSWORD, Cluster, new_database, shared_cluster

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: the extra postgres")

from agentlightning.store.postgres import PostgresLightningStore, database  # noqa: E402
from agentlightning.store.postgres.database import connect, described  # noqa: E402
from agentlightning.store.postgres.session import PostgresSession  # noqa: E402


async def test_two_stores_on_one_database_hand_out_each_rollout_once() -> None:
    dsn = new_database()
    async with PostgresLightningStore(dsn) as one, PostgresLightningStore(dsn) as other:
        await asyncio.gather(*[store.enqueue_rollout(n) for n in range(20) for store in (one, other)])

        async def drain(store: PostgresLightningStore) -> list[str]:
            found = []
            while (claim := await store.dequeue_rollout()) is not None:
                found.append(claim.rollout_id)
            return found

        claims = await asyncio.gather(*[drain(store) for store in (one, other) for _ in range(4)])

    counts = Counter(rollout_id for found in claims for rollout_id in found)
    assert (len(counts), set(counts.values())) == (40, {1})


async def test_copies_of_a_claim_at_two_stores_claim_once() -> None:
    dsn = new_database()
    async with PostgresLightningStore(dsn) as one, PostgresLightningStore(dsn) as other:
        await one.enqueue_many_rollouts([])
        await asyncio.gather(*[one.enqueue_rollout(n) for n in range(3)])

        claims = await asyncio.gather(*[store.dequeue_rollout("w", claim_id="0:1") for store in (one, other) * 4])

        assert len({claim.attempt.attempt_id for claim in claims if claim is not None}) == 1
        assert (await one.statistics())["queue_length"] == 2


async def test_changes_of_one_rollout_by_two_stores_follow_each_other() -> None:
    dsn = new_database()
    async with PostgresLightningStore(dsn) as one, PostgresLightningStore(dsn) as other:
        rollout = await one.start_rollout("a")
        key = (rollout.rollout_id, rollout.attempt.attempt_id)
        pairs = [(store, number) for number in range(20) for store in (one, other)]

        given = await asyncio.gather(*[store.get_next_span_sequence_id(*key) for store, _ in pairs])
        started = await asyncio.gather(*[store.start_attempt(rollout.rollout_id) for store, _ in pairs])

        assert sorted(given) == list(range(1, len(pairs) + 1))
        assert sorted(one.attempt.sequence_id for one in started) == list(range(2, len(pairs) + 2))


async def test_waiter_is_woken_by_another_store() -> None:
    dsn = new_database()
    async with PostgresLightningStore(dsn) as one, PostgresLightningStore(dsn) as other:
        waiting = asyncio.create_task(one.dequeue_rollout(wait=30.0))
        while not one._board.has_waiters:
            await asyncio.sleep(0)

        rollout = await other.enqueue_rollout("a")

        claim = await asyncio.wait_for(waiting, 10)
        assert claim is not None
        assert claim.rollout_id == rollout.rollout_id


async def test_subscriber_sees_what_all_stores_do_in_one_order_without_holes() -> None:
    dsn = new_database()
    async with PostgresLightningStore(dsn) as one, PostgresLightningStore(dsn) as other:
        notices = one.subscribe(["rollout"])
        await asyncio.gather(*[store.enqueue_rollout(n) for n in range(10) for store in (one, other)])

        seen = [await asyncio.wait_for(anext(notices), 10) for _ in range(20)]

        assert [notice.cursor for notice in seen] == list(range(seen[0].cursor, seen[0].cursor + 20))
        again = other.subscribe(after=seen[9].cursor)
        assert [await asyncio.wait_for(anext(again), 10) for _ in range(10)] == seen[10:]


async def test_refused_operation_does_not_take_its_batch_with_it(make_span: Any) -> None:
    async with PostgresLightningStore(new_database()) as store:
        rollout = await store.start_rollout("a")
        spans = [make_span(rollout, sequence_id=n) for n in range(10)]
        unknown = spans[0].model_copy(update={"rollout_id": "ro-unknown"})
        mixed = [span for known in spans for span in (known, unknown)]

        outcomes = await asyncio.gather(*map(store.add_span, mixed), return_exceptions=True)

        assert [type(outcome).__name__ for outcome in outcomes] == ["Span", "NotFound"] * 10
        assert len(await store.query_spans(rollout.rollout_id)) == 10


async def test_a_deadlock_is_a_transaction_that_is_run_again(make_span: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dsn, failures, run_once = new_database(), list[type](), PostgresLightningStore._try

    def watched(*args: Any) -> Any:
        try:
            return run_once(*args)
        except Exception as error:
            failures.append(type(error))
            raise

    monkeypatch.setattr(PostgresLightningStore, "_try", watched)
    async with PostgresLightningStore(dsn) as store:
        claims = [await store.start_rollout(n) for n in range(2)]
        spans = [make_span(claim, span_id=claim.rollout_id) for claim in claims]
        lock = "SELECT 1 FROM rollouts WHERE rollout_id = %s FOR UPDATE"
        with psycopg.connect(dsn) as other, psycopg.connect(dsn, autocommit=True) as watcher:
            other.execute("SET deadlock_timeout = '60s'")  # so that the store's transaction is the one that is ended
            other.execute(lock, [claims[1].rollout_id])
            adding = asyncio.create_task(store.add_many_spans(spans))
            while not watcher.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall():
                await asyncio.sleep(0)
            await asyncio.to_thread(other.execute, lock, [claims[0].rollout_id])
            other.commit()

            added = await adding

        assert set(failures) == {psycopg.errors.DeadlockDetected}
        assert [span is not None for span in added] == [True, True]
        assert (await store.statistics())["total_spans"] == 2


async def test_concurrent_updates_of_resources_count_every_version() -> None:
    dsn = new_database()
    async with PostgresLightningStore(dsn) as one, PostgresLightningStore(dsn) as other:
        await one.update_resources("r", {})

        updates = await asyncio.gather(*[store.update_resources("r", {}) for store in (one, other) * 5])

    assert sorted(update.version for update in updates if isinstance(update, ResourcesUpdate)) == list(range(2, 12))


async def test_cancelled_claim_goes_back_to_the_queue() -> None:
    async with PostgresLightningStore(new_database()) as store:
        await store.enqueue_rollout("a")
        claiming = asyncio.create_task(store.dequeue_rollout())
        await asyncio.sleep(0)
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)

        claim = await store.dequeue_rollout(wait=10.0)

        assert claim is not None
        assert (claim.input, claim.attempt.sequence_id) == ("a", 1)


async def test_store_moves_between_all_back_ends(tmp_path: Path, make_span: Any) -> None:
    async with PostgresLightningStore(new_database()) as store:
        rollout = await store.start_rollout({"q": 1}, worker_id="w")
        await store.add_span(make_span(rollout, name="step"))
        await store.enqueue_rollout("waiting")
        first = await export_store(store, tmp_path / "1.jsonl")
        expected = await store.query_spans(rollout.rollout_id)
    for number, target in enumerate(
        [SqliteLightningStore(tmp_path / "s.db"), InMemoryLightningStore(), PostgresLightningStore(new_database())], 1
    ):
        assert await import_store(target, tmp_path / f"{number}.jsonl") == first
        await export_store(target, tmp_path / f"{number + 1}.jsonl")
        assert await target.query_spans(rollout.rollout_id) == expected
        assert (await target.statistics())["queue_length"] == 1
        await target.close()


async def test_pickled_store_opens_the_same_database() -> None:
    async with PostgresLightningStore(new_database()) as store:
        rollout = await store.enqueue_rollout("a")
        async with pickle.loads(pickle.dumps(store)) as again:
            assert (await again.get_rollout_by_id(rollout.rollout_id)).input == "a"


async def test_text_that_a_database_cannot_hold_names_no_rollout() -> None:
    async with PostgresLightningStore(new_database()) as store:
        assert await store.get_rollout_by_id("a\0b") is None
        with pytest.raises(ValueError, match="0x00"):
            await store.enqueue_rollout("a", rollout_id="a\0b")


async def test_lost_connections_are_replaced_and_the_operation_is_run_again() -> None:
    dsn = new_database()
    async with PostgresLightningStore(dsn) as store:
        await asyncio.gather(*[store.enqueue_rollout(n) for n in range(8)])
        name = dsn.rpartition("/")[2]

        shared_cluster().run_sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")

        assert (await store.dequeue_rollout()) is not None


async def test_database_that_is_not_there_is_an_outage_that_shows_no_password() -> None:
    dsn = new_database().rpartition("/")[0] + "/nowhere"
    with pytest.raises(StoreUnavailable, match='database "nowhere" does not exist') as caught:
        PostgresLightningStore(dsn)
    assert PASSWORD not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://agl:{PASSWORD}@x@host/db",
        f"postgresql://agl:{PASSWORD}/x@host/db",
        f"postgresql://agl:a:{PASSWORD}@host:{PASSWORD}/db",
    ],
    ids=["at", "slash", "port"],
)
def test_address_that_cannot_be_read_is_not_quoted(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="%40") as caught:
        PostgresLightningStore(dsn)
    assert PASSWORD not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"


def test_address_is_described_without_its_password() -> None:
    assert described(f"postgresql://agl:{PASSWORD}@host:5433/db") == "postgresql://agl@host:5433/db"
    assert described(f"host=/run/pg user=agl password={PASSWORD} dbname=db") == "postgresql://agl@/db?host=/run/pg"


def test_database_of_another_program_is_refused() -> None:
    dsn = shared_cluster().create_database("of_another_program")
    shared_cluster().run_sql("CREATE TABLE runs (id int)", "of_another_program")
    with pytest.raises(IncompatibleStore, match="tables of another program"):
        PostgresLightningStore(dsn)


async def test_trainer_takes_the_address_of_a_database() -> None:
    dsn = new_database()
    store = build_store(dsn)

    assert isinstance(store, PostgresLightningStore)
    assert store_address(store) == described(dsn)
    await store.close()


def test_commands_refuse_a_password_that_others_could_see(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--backend", "postgres", "--dsn", f"postgresql://agl:{PASSWORD}@h/db"]) != 0
    shown = capsys.readouterr()
    assert "PGPASSWORD" in shown.err
    assert PASSWORD not in shown.err + shown.out


def test_status_export_and_import_work_on_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = described(new_database())
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    archive = str(tmp_path / "a.jsonl")
    asyncio.run(_enqueue_in_file(tmp_path / "s.db"))

    assert main(["store", "export", str(tmp_path / "s.db"), archive]) == 0
    assert main(["store", "import", address, archive]) == 0
    assert main(["store", "status", address]) == 0
    assert main(["store", "export", address, str(tmp_path / "b.jsonl")]) == 0

    assert "PostgresLightningStore" in capsys.readouterr().out


async def _enqueue_in_file(path: Path) -> None:
    async with SqliteLightningStore(path) as store:
        await store.enqueue_rollout("a")


async def test_what_was_acknowledged_survives_a_crash_of_the_database(tmp_path_factory: Any, make_span: Any) -> None:
    shared_cluster()  # skips where there is none
    cluster = Cluster(Path(os.environ["AGL_TEST_POSTGRES"]) / f"crash-{os.getpid()}")
    cluster.create()
    cluster.start()
    try:
        async with PostgresLightningStore(cluster.create_database("crashing")) as store:
            kept: list[Span] = []
            rollout = await store.start_rollout("a")
            notices = store.subscribe()
            for _ in range(3):
                kept += [await store.add_span(make_span(rollout)) for _ in range(5)]
                cluster.kill()
                cluster.start()

            found = await store.query_spans(rollout.rollout_id)
            assert [span.span_id for span in found] == [span.span_id for span in kept]
            await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
            assert (await asyncio.wait_for(anext(notices), 30)).kind in ("gap", "span")
            await store.start_rollout("b")  # whatever was missed is one gap; the subscription goes on after it
            await asyncio.wait_for(anext(notices), 30)
    finally:
        cluster.kill()


def test_module_without_psycopg_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "agentlightning.store.postgres")
    monkeypatch.setitem(sys.modules, "psycopg_pool", None)
    with pytest.raises(ImportError, match=re.escape(install_command("postgres"))):
        importlib.import_module("agentlightning.store.postgres")


def _run(connection: Any, *statements: tuple[str, tuple[Any, ...]]) -> None:
    with PostgresSession(connection) as session:
        for statement in statements:
            session.send(*statement)


def test_statement_that_was_cut_off_by_an_error_is_prepared_again() -> None:
    with connect(new_database()) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            _run(connection, ("SELECT 1 / ?", (0,)), ("SELECT ?::text", ("a",)))
        connection.rollback()

        with PostgresSession(connection) as session:
            assert session.select("SELECT ?::text", ("b",)) == [("b",)]


def test_session_carries_values_and_arrays_in_both_directions() -> None:
    columns = [(1, None, -(2**53)), (0.5, 2, None), ("ä", None, ""), (b"\0", b"", None)]

    with connect(new_database()) as connection, PostgresSession(connection) as session:
        sql = "SELECT * FROM unnest(?::bigint[], ?::float8[], ?::text[], ?::bytea[])"
        found = session.select(sql, columns)
        single = session.select("SELECT ?, ?::text, ?, ?, cardinality(?::text[])", (7, "x", 1.5, b"\1", []))

    assert found == [(1, 0.5, "ä", b"\0"), (None, 2.0, None, b""), (-(2**53), None, "", None)]
    assert single == [(7, "x", 1.5, b"\1", 0)]


def test_connection_that_is_lost_in_a_session_is_an_outage_and_closed() -> None:
    with connect(new_database()) as connection:
        with pytest.raises(psycopg.OperationalError):
            _run(connection, ("SELECT pg_terminate_backend(pg_backend_pid())", ()), ("SELECT 1", ()))
        assert connection.closed


def test_statement_is_prepared_anew_when_a_parameter_has_another_type() -> None:
    with connect(new_database()) as connection, PostgresSession(connection) as session:
        found = [session.select("SELECT ?::float8", (value,)) for value in (None, 1.5, 2, None, 2.5)]
        assert found == [[(None,)], [(1.5,)], [(2.0,)], [(None,)], [(2.5,)]]
        assert connection.prepared < 6


async def test_a_lock_that_another_session_holds_is_an_outage_and_not_a_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "lock_timeout=30s" in database._OPTIONS
    monkeypatch.setattr(database, "_OPTIONS", database._OPTIONS.replace("lock_timeout=30s", "lock_timeout=100ms"))
    dsn = new_database()
    async with PostgresLightningStore(dsn) as store:
        with connect(dsn) as other, other.transaction():
            other.execute("LOCK TABLE rollouts IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(StoreUnavailable, match=r"lock timeout; .*retry"):
                await asyncio.wait_for(store.enqueue_rollout("a"), 20)

        assert (await store.enqueue_rollout("a")).status == "queuing"


async def test_the_time_is_the_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    dsn, real = new_database(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
    async with PostgresLightningStore(dsn, lost_worker_seconds=0.3) as store:
        await store.update_worker("w", {"interval_seconds": 0.1})
        await store.enqueue_rollout("a")
        claim = await store.dequeue_rollout("w", heartbeat_interval=0.1)
        assert claim is not None
        again = await asyncio.wait_for(store.dequeue_rollout("v", wait=30), 40)

    assert abs(claim.attempt.start_time - real()) < 60
    assert again is not None
    assert 0.3 <= again.attempt.start_time - claim.attempt.start_time < 30
