"""The files of a SQLite store: older ones still open, one file is the whole store after it was closed."""

import asyncio
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.store import SqliteLightningStore, export_store
from agentlightning.types import LLM
from tests.contract.conftest import known

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
        before = known(await store.get_rollout_by_id("running"))
        claims = [await store.dequeue_rollout("worker-4") for _ in range(4)]
        sequence_id = await store.get_next_span_sequence_id("succeeded", "latest")
        await store.finish_attempt("running", "latest", "succeeded", output=["text"])
    async with SqliteLightningStore(path) as store:
        after = known(await store.get_rollout_by_id("running"))

    assert [claim and claim.rollout_id for claim in claims] == ["requeuing", "queuing-0", "queuing-1", None]
    assert sequence_id == 4
    assert (before.output, after.output, after.input) == (None, ["text"], before.input)


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
    "ended by an error": "store = SqliteLightningStore(sys.argv[1]); asyncio.run(work(store)); raise SystemExit(3)",
    "forgotten at the end": "asyncio.run(work(SqliteLightningStore(sys.argv[1])))",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_the_file_alone_holds_everything_when_the_program_has_ended(tmp_path: Path, end: str) -> None:
    path = tmp_path / "runs.db"

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WORK + end, str(path))
    await process.wait()

    assert [file.name for file in tmp_path.iterdir()] == ["runs.db"]
    assert await counted(path) == (50, 0)


async def test_the_file_alone_holds_everything_while_another_program_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SqliteLightningStore(path) as other:
        async with SqliteLightningStore(path) as store:
            await store.enqueue_rollout("a")
            await other.query_rollouts()

        assert length_of(tmp_path / "runs.db-wal") == 0
        assert await counted(path) == (1, 0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy-of-one-file.db", "runs.db"]


async def test_a_store_that_only_its_children_wrote_to_is_one_file_after_close(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SqliteLightningStore(path)
    killed = f"{WORK}import os\nstore = SqliteLightningStore(sys.argv[1])\nasyncio.run(work(store))\nos._exit(0)"
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
        for number in range(40):
            spans = [make_span(rollout, number, attributes={"text": "x" * 50_000}) for rollout in rollouts]
            await asyncio.gather(*map(store.add_span, spans))
            longest = max(longest, length_of(tmp_path / "runs.db-wal"))
        polling.cancel()

    assert length_of(path) > 28 * MEBIBYTE
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


# ---------------------------------------------------------------------- for their owner alone


@pytest.fixture
def open_umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("AGL_FILE_MODE", raising=False)
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes_in(folder: Path) -> dict[str, str]:
    return {path.name: f"{stat.S_IMODE(path.stat().st_mode):04o}" for path in folder.iterdir()}


@pytest.mark.usefixtures("open_umask")
async def test_the_files_of_a_new_store_are_for_their_owner_alone(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "runs.db") as store:
        await store.enqueue_rollout("a secret")
        await store.backup(tmp_path / "backup.db")
        await export_store(store, tmp_path / "runs.jsonl")

        names = ["runs.db", "runs.db-wal", "runs.db-shm", "backup.db", "runs.jsonl"]
        assert modes_in(tmp_path) == dict.fromkeys(names, "0600")


@pytest.mark.usefixtures("open_umask")
async def test_the_environment_gives_a_new_store_another_mode_and_one_that_exists_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_FILE_MODE", "0660")
    for mode in ("0660", "0640"):
        async with SqliteLightningStore(tmp_path / "runs.db") as store:
            await store.enqueue_rollout("a")

            assert modes_in(tmp_path) == dict.fromkeys(["runs.db", "runs.db-wal", "runs.db-shm"], mode)
        (tmp_path / "runs.db").chmod(0o640)


@pytest.mark.usefixtures("open_umask")
async def test_a_store_behind_a_link_to_nothing_is_created_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "runs.db")
    await SqliteLightningStore(tmp_path / "link.db").close()
    assert modes_in(tmp_path)["runs.db"] == "0600"


@pytest.mark.parametrize("write", [export_store, SqliteLightningStore.backup], ids=["export", "backup"])
async def test_a_planted_link_is_refused_and_its_target_left_alone(tmp_path: Path, write: Any) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "copy.part").symlink_to(victim)

    async with SqliteLightningStore(tmp_path / "runs.db") as store:
        with pytest.raises(ConfigurationError, match="is a link"):
            await write(store, tmp_path / "copy")

    assert victim.read_text() == "precious"


# ---------------------------------------------------------------------- what a backup replaces


def sqlite_file_of_another_program(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()


OTHERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("notes"),
    "a database of another program": sqlite_file_of_another_program,
    "a folder": lambda path: path.mkdir(),
}


def identity(path: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced; to be looked at changes the time of its last access alone."""
    found = path.stat()
    return (found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
async def test_backup_and_export_do_not_replace_what_is_neither(tmp_path: Path, make: Callable[[Path], object]) -> None:
    target = tmp_path / "precious"
    make(target)
    before = identity(target)

    async with SqliteLightningStore(tmp_path / "runs.db") as store:
        with pytest.raises(ConfigurationError, match=r"is not a (store|file)"):
            await store.backup(target)
        with pytest.raises(ConfigurationError, match=r"is not an archive|Is a directory"):
            await export_store(store, target)

    assert identity(target) == before
    assert not (tmp_path / "precious.part").exists()


async def test_an_earlier_backup_and_an_earlier_export_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    async with SqliteLightningStore(tmp_path / "runs.db") as store:
        for number in range(2):
            await store.enqueue_rollout(number)
            await store.backup(tmp_path / "backup.db")
            counts = await export_store(store, tmp_path / "runs.jsonl")
        await store.backup(tmp_path / "empty.db")

    assert await counted(tmp_path / "backup.db") == (2, 0)
    assert await counted(tmp_path / "empty.db") == (2, 0)
    assert counts["rollout"] == 2


async def test_a_backup_does_not_replace_a_store_in_use(tmp_path: Path) -> None:
    async with (
        SqliteLightningStore(tmp_path / "runs.db") as store,
        SqliteLightningStore(tmp_path / "other.db") as other,
    ):
        await other.enqueue_rollout("mine")
        with pytest.raises(ConfigurationError, match="is a store in use"):
            await store.backup(tmp_path / "other.db")
        other.checkpoint()
        with pytest.raises(ConfigurationError, match="is a store in use"):
            await store.backup(tmp_path / "other.db")

        assert len(await other.query_rollouts()) == 1


async def test_a_backup_does_not_replace_its_own_store(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "runs.db")
    async with SqliteLightningStore(tmp_path / "runs.db") as store:
        for name in ("runs.db", "link.db"):
            with pytest.raises(ConfigurationError, match="is the store itself"):
                await store.backup(tmp_path / name)
        with pytest.raises(ConfigurationError, match=r"Cannot use '.*nowhere/copy': No such file or directory"):
            await store.backup(tmp_path / "nowhere" / "copy")


def test_a_link_of_another_account_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "elsewhere.db")
    if os.geteuid() == 0:
        os.chown(link, 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(ConfigurationError, match="is a link that another account has made"):
        SqliteLightningStore(link)
    assert not (tmp_path / "elsewhere.db").exists()
