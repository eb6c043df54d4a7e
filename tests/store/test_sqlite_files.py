"""The files of a SQLite store: older ones still open, one file is the whole store after it was closed."""

import shutil
from pathlib import Path

from agentlightning.store import SqliteLightningStore
from agentlightning.types import LLM

FIXTURES = Path(__file__).parent / "fixtures"


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
