"""Runs that promise to report, and fall silent, over every back end."""

from typing import Any

import pytest

from agentlightning.store import LightningStore
from agentlightning.types import Run

LOST_SECONDS = 300.0
PROMISE = {"reports": {"interval_seconds": 30}}


async def seen(store: LightningStore, run: Run) -> tuple[str, float | None]:
    found = await store.get_run_by_id(run.run_id)
    assert found is not None
    return found.status, found.end_time


async def test_run_that_promised_to_report_and_does_not_is_lost(store: LightningStore, clock: Any) -> None:
    run = await store.start_run("fit", metadata=PROMISE)
    clock.advance(100)
    last_report = clock()
    await store.start_run("fit", run_id=run.run_id)

    clock.advance(LOST_SECONDS)
    before = await seen(store, run)
    clock.advance(1)

    assert before == ("running", None)
    assert await seen(store, run) == ("lost", last_report)


async def test_run_that_reports_again_is_running_again(store: LightningStore, clock: Any) -> None:
    run = await store.start_run("fit", metadata=PROMISE)
    clock.advance(LOST_SECONDS + 1)

    await store.start_run("fit", run_id=run.run_id)

    assert await seen(store, run) == ("running", None)


@pytest.mark.parametrize("metadata", [None, {"reports": "often"}, {"reports": None}], ids=str)
async def test_run_that_promised_nothing_is_never_lost(store: LightningStore, clock: Any, metadata: Any) -> None:
    run = await store.start_run("mine", metadata=metadata)

    clock.advance(100 * LOST_SECONDS)

    assert await seen(store, run) == ("running", None)
    assert await store.start_run("mine", run_id=run.run_id) == run


async def test_run_that_has_ended_is_never_lost_and_takes_no_reports(store: LightningStore, clock: Any) -> None:
    run = await store.start_run("fit", metadata=PROMISE)
    ended = await store.finish_run(run.run_id, "succeeded")
    clock.advance(LOST_SECONDS + 1)

    again = await store.start_run("fit", run_id=run.run_id)

    assert again == ended
    assert await seen(store, run) == ("succeeded", ended.end_time)


async def test_lost_runs_are_found_by_their_status(store: LightningStore, clock: Any) -> None:
    await store.start_run("lost", metadata=PROMISE)
    stopped = await store.start_run("stopped", metadata=PROMISE)
    await store.finish_run(stopped.run_id, "stopped")
    clock.advance(LOST_SECONDS + 1)
    await store.start_run("running", metadata=PROMISE)

    async def names(*status_in: Any, **options: Any) -> list[str]:
        return [run.name for run in await store.query_runs(status_in=status_in or None, **options)]

    assert await names() == ["lost", "stopped", "running"]
    assert await names("lost") == ["lost"]
    assert await names("running") == ["running"]
    assert await names("running", "stopped") == ["stopped", "running"]
    assert await names("lost", "running", sort_by="start_time", sort_order="desc", limit=1) == ["running"]
    assert await names(sort_by="status") == ["lost", "running", "stopped"]
    assert (await store.query_runs(status_in=["lost", "stopped"], limit=1)).total == 2


async def test_run_may_be_closed_as_lost(store: LightningStore) -> None:
    run = await store.start_run("fit", metadata=PROMISE)

    closed = await store.finish_run(run.run_id, "lost", summary={"error": "it was killed"})

    assert (closed.status, await seen(store, run)) == ("lost", ("lost", closed.end_time))
    assert [found.name for found in await store.query_runs(status_in=["lost"])] == ["fit"]
