"""Resources, workers, runs and metrics, over every back end."""

import math
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound
from agentlightning.store import LightningStore
from agentlightning.types import LLM, NamedResources, PromptTemplate, ProxyLLM


def prompt(text: str) -> NamedResources:
    return {"prompt": PromptTemplate(template=text, engine="f-string")}


async def test_nothing_is_published_at_first(store: LightningStore) -> None:
    assert await store.get_latest_resources() is None
    assert await store.get_resources_by_id("rs-1") is None


async def test_added_resources_become_the_latest(store: LightningStore, clock: Any) -> None:
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


async def test_merging_keeps_the_names_that_are_not_given(store: LightningStore) -> None:
    await store.update_resources("mine", prompt("a"))

    merged = await store.update_resources("mine", {"llm": LLM(endpoint="http://h", model="m")}, merge=True)

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


async def test_worker_is_busy_with_a_claim_and_idle_after_it(store: LightningStore, clock: Any) -> None:
    await store.enqueue_rollout("a")
    claimed = await store.dequeue_rollout("w-1")
    assert claimed is not None

    busy = await store.get_worker_by_id("w-1")
    clock.advance(3)
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    idle = await store.get_worker_by_id("w-1")

    assert busy is not None
    assert idle is not None
    assert (busy.status, busy.current_attempt_id) == ("busy", claimed.attempt.attempt_id)
    assert (idle.status, idle.current_rollout_id, idle.last_idle_time) == ("idle", None, clock.now)
    assert idle.last_busy_time == clock.now - 3


async def test_asking_for_work_in_vain_shows_the_worker_idle(store: LightningStore, clock: Any) -> None:
    await store.dequeue_rollout("w-1")

    worker = await store.get_worker_by_id("w-1")

    assert worker is not None
    assert (worker.status, worker.last_dequeue_time) == ("idle", clock.now)
    assert await store.get_worker_by_id("w-2") is None


async def test_assigning_a_worker_shows_it_busy(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")

    await store.update_attempt(rollout.rollout_id, "latest", worker_id="w-1")

    worker = await store.get_worker_by_id("w-1")
    assert worker is not None
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
        worker = await store.get_worker_by_id("w")
        assert worker is not None
        return worker.status, worker.last_dequeue_time, worker.last_busy_time, worker.current_attempt_id

    one = await store.start_rollout("one", None, None, None, None, "w")
    started = clock.now
    assert await shown() == ("busy", None, started, one.attempt.attempt_id)
    await store.update_attempt(one.rollout_id, "latest", status="running")
    running = clock.now
    assert await shown() == ("busy", None, running, one.attempt.attempt_id)
    await store.update_attempt(one.rollout_id, "latest", status="succeeded")
    assert await shown() == ("idle", None, running, None)

    await store.enqueue_rollout("two")
    two = await store.dequeue_rollout("w")
    assert two is not None
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

    run = await store.start_run("grpo", config=config)
    closed = await store.finish_run(run.run_id, summary={"judge_token": "sk-secret", "reward": 0.5})

    assert run.config == {"model": {"api_key": "***", "max_tokens": 9}, "engines": [{"accessToken": "***"}]}
    assert closed.summary == {"judge_token": "***", "reward": 0.5}
    assert "sk-secret" not in str(await store.get_run_by_id(run.run_id)) + str(list(await store.query_runs()))
    assert config["model"] == {"api_key": "sk-secret", "max_tokens": 9}  # the caller's own


async def test_opening_a_run_twice_is_opening_it_once(store: LightningStore) -> None:
    first = await store.start_run("a", run_id="mine")
    again = await store.start_run("b", run_id="mine")

    assert first == again
    assert [r.name for r in await store.query_runs()] == ["a"]


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


@pytest.mark.parametrize("value", [math.nan, math.inf, "high", True, None], ids=repr)
async def test_metrics_that_are_no_finite_numbers_are_refused(store: LightningStore, value: Any) -> None:
    run = await store.start_run()

    with pytest.raises(InvalidValue, match="'loss'"):
        await store.add_metrics(run.run_id, 1, {"ok": 1.0, "loss": value})

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
