"""Resources, workers, runs and metrics, over every back end."""

import math
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound
from agentlightning.store import LightningStore
from agentlightning.types import LLM, NamedResources, PromptTemplate, ProxyLLM, Run
from tests.contract.conftest import known


def prompt(text: str) -> NamedResources:
    return {"prompt": PromptTemplate(template=text, engine="f-string")}


async def test_added_resources_become_the_latest(store: LightningStore, clock: Any) -> None:
    assert (await store.get_latest_resources(), await store.get_resources_by_id("rs-1")) == (None, None)
    first = await store.add_resources(prompt("a"))
    clock.advance(1)
    second = await store.add_resources({"llm": ProxyLLM(endpoint="http://h", model="m"), **prompt("b")})

    assert await store.get_latest_resources() == second
    assert await store.get_resources_by_id(first.resources_id) == first
    assert (second.version, second.create_time, second.update_time) == (1, clock.now, clock.now)
    assert type(second.resources["llm"]) is ProxyLLM


async def test_updated_resources_are_replaced_counted_and_latest(store: LightningStore, clock: Any) -> None:
    first = await store.update_resources("mine", prompt("a"))
    await store.add_resources(prompt("other"))
    clock.advance(1)

    second = await store.update_resources("mine", {"llm": LLM(endpoint="http://h", model="m")})

    assert (first.version, second.version) == (1, 2)
    assert (second.create_time, second.update_time) == (first.create_time, clock.now)
    assert list(second.resources) == ["llm"]
    assert await store.get_latest_resources() == second
    merged = await store.update_resources("mine", prompt("c"), merge=True)
    assert sorted(merged.resources) == ["llm", "prompt"]


async def test_what_is_no_resource_is_refused(store: LightningStore) -> None:
    with pytest.raises(InvalidValue, match="These are not resources"):
        await store.add_resources({"llm": {"resource_type": "nonsense"}})  # type: ignore[dict-item]
    assert await store.get_latest_resources() is None


async def test_resources_are_queried_by_id_and_paged(store: LightningStore) -> None:
    for name in ("a-1", "b-1", "a-2"):
        await store.update_resources(name, prompt(name))

    async def ids(**query: Any) -> list[str]:
        return [r.resources_id for r in await store.query_resources(**query)]

    assert await ids() == ["a-1", "b-1", "a-2"]
    assert await ids(resources_id_contains="a-") == ["a-1", "a-2"]
    assert await ids(resources_id="b-1") == ["b-1"]
    assert await ids(sort_by="resources_id", sort_order="desc", limit=1) == ["b-1"]
    with pytest.raises(InvalidQuery):
        await store.query_resources(sort_by="resources")


async def test_asking_for_work_in_vain_shows_the_worker_idle(store: LightningStore, clock: Any) -> None:
    await store.dequeue_rollout("w-1")
    worker = known(await store.get_worker_by_id("w-1"))
    assert (worker.status, worker.last_dequeue_time) == ("idle", clock.now)
    assert await store.get_worker_by_id("w-2") is None


async def test_assigning_a_worker_shows_it_busy(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    await store.update_attempt(rollout.rollout_id, "latest", worker_id="w-1")
    worker = known(await store.get_worker_by_id("w-1"))
    assert (worker.status, worker.current_rollout_id) == ("busy", rollout.rollout_id)


async def test_heartbeat_of_a_worker_is_recorded(store: LightningStore, clock: Any) -> None:
    worker = await store.update_worker("w-1", {"cpu": 0.5})
    clock.advance(1)
    again = await store.update_worker("w-1")

    assert (worker.status, worker.heartbeat_stats) == ("unknown", {"cpu": 0.5})
    assert (again.heartbeat_stats, again.last_heartbeat_time) == ({"cpu": 0.5}, clock.now)
    assert (await store.update_worker("w-1", None)).heartbeat_stats is None


async def test_workers_are_filtered_and_sorted(store: LightningStore) -> None:
    for name in ("b", "a", "c"):
        await store.update_worker(name)
    await store.dequeue_rollout("c")

    assert [w.worker_id for w in await store.query_workers()] == ["b", "a", "c"]
    assert [w.worker_id for w in await store.query_workers(status_in=["idle"])] == ["c"]
    assert [w.worker_id for w in await store.query_workers(sort_by="worker_id", limit=2)] == ["a", "b"]


async def test_worker_is_shown_over_the_life_of_its_attempts(store: LightningStore, clock: Any) -> None:
    async def shown() -> tuple[Any, ...]:
        clock.advance(1)
        worker = known(await store.get_worker_by_id("w"))
        return worker.status, worker.last_dequeue_time, worker.last_busy_time, worker.current_attempt_id

    one = await store.start_rollout("one", None, None, None, None, "w")
    started = clock.now
    assert await shown() == ("busy", None, started, one.attempt.attempt_id)
    await store.update_attempt(one.rollout_id, "latest", status="running")
    running = clock.now
    assert await shown() == ("busy", None, running, one.attempt.attempt_id)
    await store.update_attempt(one.rollout_id, "latest", status="succeeded")
    ended = clock.now
    assert await shown() == ("idle", None, running, None)
    assert known(await store.get_worker_by_id("w")).last_idle_time == ended

    await store.enqueue_rollout("two")
    two = known(await store.dequeue_rollout("w"))
    dequeued = clock.now
    assert await shown() == ("busy", dequeued, dequeued, two.attempt.attempt_id)
    await store.update_attempt(two.rollout_id, "latest", status="timeout")
    assert await shown() == ("unknown", dequeued, dequeued, None)


async def test_run_is_opened_and_closed(store: LightningStore, clock: Any) -> None:
    run = await store.start_run("grpo", config={"lr": 0.1}, metadata={"by": "me"})
    clock.advance(60)

    closed = await store.finish_run(run.run_id, "failed", summary={"reason": "out of patience"})

    assert (run.status, run.end_time, run.config) == ("running", None, {"lr": 0.1})
    assert (closed.status, closed.end_time, closed.summary) == ("failed", clock.now, {"reason": "out of patience"})
    assert await store.get_run_by_id(run.run_id) == closed
    assert run.run_id.startswith("run-")


async def test_secrets_in_a_run_are_masked_before_they_are_stored(store: LightningStore) -> None:
    config = {"model": {"api_key": "sk-secret", "max_tokens": 9}, "engines": [{"accessToken": "sk-secret"}]}

    metadata: dict[str, object] = {
        "argv": ["--api-key", "sk-secret"],
        "dsn": "sk-secret",
        "host": "http://me:sk-secret@x",
    }

    run = await store.start_run("grpo", config=config, metadata=metadata)
    closed = await store.finish_run(run.run_id, summary={"judge_token": "sk-secret", "reward": 0.5})

    assert run.config == {"model": {"api_key": "***", "max_tokens": 9}, "engines": [{"accessToken": "***"}]}
    assert run.metadata == {"argv": ["--api-key", "***"], "dsn": "***", "host": "http://***@x"}
    assert closed.summary == {"judge_token": "***", "reward": 0.5}
    assert "sk-secret" not in str(await store.get_run_by_id(run.run_id)) + str(list(await store.query_runs()))
    assert config["model"] == {"api_key": "sk-secret", "max_tokens": 9}  # the caller's own


async def test_runs_are_filtered_by_status_and_name(store: LightningStore) -> None:
    one, _, _ = [await store.start_run(name) for name in ("a", "b", "a")]
    await store.finish_run(one.run_id)

    assert [r.status for r in await store.query_runs(name="a")] == ["succeeded", "running"]
    assert len(await store.query_runs(status_in=["running"])) == 2
    assert (await store.query_runs(limit=1, offset=1)).total == 3


async def test_metrics_come_back_by_step_and_by_name(store: LightningStore, clock: Any) -> None:
    run = await store.start_run()
    for step in (2, 1, 2):
        clock.advance(1)
        await store.add_metrics(run.run_id, step, {"reward": step / 10, **({"loss": 1} if step == 1 else {})})

    points = await store.query_metrics(run.run_id)
    losses = await store.query_metrics(run.run_id, names=["loss"])

    assert [p.step for p in points] == [1, 2, 2]
    assert points[1].time < points[2].time
    assert [(p.step, p.values) for p in losses] == [(1, {"loss": 1.0})]
    assert [p.step for p in await store.query_metrics(run.run_id, limit=1, offset=1)] == [2]
    assert await store.query_metrics("run-nope") == []


async def test_metrics_that_are_no_finite_numbers_are_refused(store: LightningStore) -> None:
    run = await store.start_run()

    for value in (math.nan, math.inf, "high", True, None):
        with pytest.raises(InvalidValue, match="'loss'"):
            await store.add_metrics(run.run_id, 1, {"ok": 1.0, "loss": value})  # type: ignore[dict-item]

    assert await store.query_metrics(run.run_id) == []


async def test_metrics_need_a_known_run(store: LightningStore) -> None:
    with pytest.raises(NotFound, match="Run nope not found"):
        await store.add_metrics("nope", 1, {"x": 1.0})
    with pytest.raises(NotFound, match="Run nope not found"):
        await store.finish_run("nope")


async def test_statistics_count_what_is_kept(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    await store.enqueue_rollout("b")
    await store.add_many_spans([make_span(rollout), make_span(rollout)])
    await store.add_resources(prompt("a"))
    await store.update_worker("w")
    await store.start_run()

    found = await store.statistics()

    counted = [found[f"total_{kind}"] for kind in ("rollouts", "attempts", "spans", "resources", "workers", "runs")]  # type: ignore[literal-required]
    assert counted == [2, 1, 2, 1, 1, 1]
    assert found["queue_length"] == 1
    assert found["total_span_bytes"] > 100
    assert found["name"].endswith("LightningStore")


# ---------------------------------------------------------------------- runs that promise to report

LOST_SECONDS = 300.0
PROMISE = {"reports": {"interval_seconds": 30}}


async def seen(store: LightningStore, run: Run) -> tuple[str, float | None]:
    found = known(await store.get_run_by_id(run.run_id))
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
    await store.start_run("fit", run_id=run.run_id)
    assert await seen(store, run) == ("running", None)


async def test_run_that_promised_nothing_is_never_lost(store: LightningStore, clock: Any) -> None:
    promises: list[Any] = [None, {"reports": "often"}, {"reports": None}]
    runs = [await store.start_run("mine", metadata=metadata) for metadata in promises]

    clock.advance(100 * LOST_SECONDS)

    for run in runs:
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
