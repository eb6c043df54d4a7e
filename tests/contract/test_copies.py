"""What goes in and what comes out is the caller's own, over every back end."""

from typing import Any

from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, PromptTemplate, RolloutConfig
from tests.contract.conftest import known


async def test_given_values_are_copied(store: LightningStore) -> None:
    task: dict[str, Any] = {"list": [1], "nested": {"a": 1}}
    metadata: dict[str, Any] = {"k": "v"}
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout = await store.enqueue_rollout(task, config=config, metadata=metadata)

    task["list"].append(2)
    task["nested"]["a"] = 2
    metadata["k"] = "changed"
    config.retry_condition.clear()

    stored = known(await store.get_rollout_by_id(rollout.rollout_id))
    assert stored.input == {"list": [1], "nested": {"a": 1}}
    assert (stored.metadata, stored.config.retry_condition) == ({"k": "v"}, ["failed"])


async def test_returned_rollouts_and_attempts_are_copies(store: LightningStore) -> None:
    started = await store.start_rollout({"a": [1]}, metadata={"k": 1}, config=RolloutConfig(retry_condition=["failed"]))
    await store.update_attempt(started.rollout_id, "latest", metadata={"m": [1]})
    original = await store.get_rollout_by_id(started.rollout_id)
    assert isinstance(original, AttemptedRollout)

    for returned in (started, await store.get_rollout_by_id(started.rollout_id), (await store.query_rollouts())[0]):
        assert isinstance(returned, AttemptedRollout)
        returned.status = "cancelled"
        returned.input["a"].append(2)
        returned.config.retry_condition.append("timeout")
        assert returned.metadata is not None
        returned.metadata["k"] = 2
        returned.attempt.status = "failed"
        if returned.attempt.metadata:
            returned.attempt.metadata["m"].append(2)
    known(await store.get_latest_attempt(started.rollout_id)).status = "timeout"

    assert await store.get_rollout_by_id(started.rollout_id) == original


async def test_resources_are_copied_both_ways(store: LightningStore) -> None:
    template = PromptTemplate(template="a", engine="f-string")
    added = await store.add_resources({"p": template})

    template.template = "changed"
    added.resources["p"].template = "changed"  # type: ignore[union-attr]
    added.resources["q"] = template
    known(await store.get_latest_resources()).resources.clear()

    stored = known(await store.get_resources_by_id(added.resources_id))
    assert {name: r.template for name, r in stored.resources.items()} == {"p": "a"}  # type: ignore[union-attr]


async def test_an_output_that_was_handed_out_is_the_callers_own(store: LightningStore) -> None:
    given = {"list": [1]}
    rollout = await store.enqueue_rollout("a")
    await store.update_rollout(rollout.rollout_id, output=given)

    given["list"].append(2)
    known(await store.get_rollout_by_id(rollout.rollout_id)).output["list"].append(3)

    assert known(await store.get_rollout_by_id(rollout.rollout_id)).output == {"list": [1]}


async def test_a_span_is_copied_on_the_way_in(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    span = make_span(rollout, attributes={"k": 1})
    await store.add_span(span)

    span.name = "changed"
    span.attributes["k"] = 2

    (stored,) = await store.query_spans(rollout.rollout_id)
    assert (stored.name, stored.attributes) == ("step", {"k": 1})


async def test_workers_runs_and_metrics_are_copies(store: LightningStore) -> None:
    stats = {"cpu": [1]}
    worker = await store.update_worker("w", stats)
    run = await store.start_run(config={"a": [1]})
    point = await store.add_metrics(run.run_id, 1, {"x": 1.0})

    stats["cpu"].append(2)
    assert worker.heartbeat_stats is not None
    worker.heartbeat_stats["cpu"].append(3)
    run.config["a"].append(2)
    point.values["x"] = 9.0

    assert known(await store.get_worker_by_id("w")).heartbeat_stats == {"cpu": [1]}
    assert known(await store.get_run_by_id(run.run_id)).config == {"a": [1]}
    assert (await store.query_metrics(run.run_id))[0].values == {"x": 1.0}
