"""Bare results: which of the polled tasks they belong to."""

import asyncio
import gc
import logging
import pickle
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from agentlightning.client import AgentLightningClient, rollout_from_result
from agentlightning.errors import InvalidTransition
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.types import RolloutLegacy

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*v0.1 protocol:DeprecationWarning", "ignore:DevTaskLoader:DeprecationWarning"
)


def queue(served: Any, *samples: Any) -> list[str]:
    return [served.run(served.server.queue_task(sample)) for sample in samples]


def result_of(served: Any, rollout_id: str) -> RolloutLegacy:
    result: RolloutLegacy = served.run(served.server.get_completed_rollout(rollout_id))
    return result


def test_a_bare_result_is_that_of_the_polled_task_and_the_output_of_its_rollout(served: Any, connect: Any) -> None:
    (rollout_id,) = queue(served, "hello")
    client = connect(served.endpoint)
    client.poll_next_task()

    assert client.post_rollout("text")["status"] == "ok"

    stored = result_of(served, rollout_id)
    assert (stored.task.input, stored.final_reward, stored.metadata) == ("hello", None, {"result": "text"})
    assert served.run(served.server.store.get_rollout_by_id(rollout_id)).output == "text"


def test_a_task_that_was_given_up_does_not_get_the_result_of_the_next(served: Any, connect: Any) -> None:
    given_up, done = queue(served, "first", "second")
    client = connect(served.endpoint)

    task = client.poll_next_task()
    task = client.poll_next_task()
    gc.collect()  # for interpreters that do not let go at once
    client.post_rollout(task.input)

    assert result_of(served, done).metadata == {"result": "second"}
    assert result_of(served, given_up) is None


def test_a_bare_result_is_refused_where_several_tasks_are_held(served: Any, connect: Any) -> None:
    queue(served, "first", "second")
    client = connect(served.endpoint)
    tasks = [client.poll_next_task() for _ in range(2)]

    with pytest.raises(InvalidTransition, match=r"any of 2 polled tasks; .* rollout_from_result\(task, result\)"):
        client.post_rollout("text")

    client.post_rollout(rollout_from_result(tasks[0], "first"))
    assert client.post_rollout("second")["message"].split()[1] == tasks[1].rollout_id


def test_a_result_cannot_be_posted_twice_without_a_name(served: Any, connect: Any) -> None:
    queue(served, "hello")
    client = connect(served.endpoint)
    client.poll_next_task()
    client.post_rollout("text")

    with pytest.raises(InvalidTransition, match="belongs to no task that was polled"):
        client.post_rollout("text")


def test_threads_that_share_a_client_post_each_for_its_own_task(served: Any, connect: Any) -> None:
    ids = queue(served, *range(8))
    client = connect(served.endpoint)

    def work(_: int) -> None:
        task = client.poll_next_task()
        client.post_rollout(f"{task.input}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(8)))

    assert [result_of(served, rollout_id).metadata["result"] for rollout_id in ids] == [str(n) for n in range(8)]


async def test_coroutines_that_share_a_client_post_each_for_its_own_task(served: Any) -> None:
    ids = [await asyncio.to_thread(lambda n=n: queue(served, n)[0]) for n in range(8)]
    async with AgentLightningClient(served.endpoint, poll_interval=0.01) as client:

        async def work() -> None:
            task = await client.poll_next_task_async()
            assert task is not None
            await asyncio.sleep(0)
            await client.post_rollout_async(f"{task.input}")

        await asyncio.gather(*(work() for _ in range(8)))

    results = [await asyncio.to_thread(result_of, served, rollout_id) for rollout_id in ids]
    assert [result.metadata["result"] for result in results] == [str(n) for n in range(8)]


async def test_a_result_is_posted_from_a_thread_for_the_task_a_coroutine_polled(served: Any) -> None:
    (rollout_id,) = await asyncio.to_thread(queue, served, "hello")
    async with AgentLightningClient(served.endpoint) as client:
        await client.poll_next_task_async()

        await asyncio.to_thread(client.post_rollout, 1.0)

    assert (await asyncio.to_thread(result_of, served, rollout_id)).final_reward == 1.0


async def test_a_task_that_was_polled_with_a_time_limit_gets_its_result(served: Any) -> None:
    (rollout_id,) = await asyncio.to_thread(queue, served, "hello")
    async with AgentLightningClient(served.endpoint) as client:
        await asyncio.wait_for(client.poll_next_task_async(), 30)

        await client.post_rollout_async(1.0)

    assert (await asyncio.to_thread(result_of, served, rollout_id)).final_reward == 1.0


def test_a_result_that_was_not_delivered_can_be_posted_again_but_by_no_copy_of_the_client(
    served: Any, connect: Any
) -> None:
    queue(served, "hello")
    client = connect(served.endpoint)
    client.poll_next_task()
    reachable, client.endpoint = client.endpoint, "http://127.0.0.1:9"

    assert client.post_rollout("text") is None
    client.endpoint = reachable

    with pytest.raises(InvalidTransition):
        pickle.loads(pickle.dumps(client)).post_rollout("text")
    assert client.post_rollout("text") is not None


# ---------------------------------------------------------------------- the server


def test_a_task_that_no_answer_can_carry_is_failed_and_the_next_is_served(
    serve: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = InMemoryLightningStore()
    served = serve(store=store)
    bad = served.run(store.enqueue_rollout(object()))
    served.run(store.enqueue_rollout("good"))

    task = connect(served.endpoint).poll_next_task()

    failed = served.run(store.get_rollout_by_id(bad.rollout_id))
    assert (task.input, failed.status) == ("good", "failed")
    assert "cannot be sent to clients as JSON" in failed.attempt.metadata["error"]["message"]
    assert bad.rollout_id in caplog.text


@pytest.mark.claim(265)
def test_a_normal_round_leaves_one_line_for_each_step(
    serve: Any, connect: Any, resources: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    client = connect(served.endpoint)

    with caplog.at_level(logging.DEBUG, "agentlightning.legacy"):
        resources_id = served.run(served.server.update_resources(resources))
        (rollout_id,) = queue(served, "hello")
        client.poll_next_task()
        client.get_latest_resources()
        client.post_rollout(1.0)

    lines = [record.message.replace(served.endpoint, "SERVER") for record in caplog.records]
    assert lines == [
        f"Resources {resources_id} published.",
        f"Task {rollout_id} queued.",
        f"Task {rollout_id} handed out to legacy-127.0.0.1.",
        f"Task {rollout_id} polled from SERVER.",
        f"Resources {resources_id} received from SERVER.",
        f"Result of rollout {rollout_id} stored: reward 1.0.",
        f"Result of rollout {rollout_id} posted to SERVER.",
    ]


@pytest.mark.claim(266)
def test_health_looks_at_the_store(serve: Any, tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "runs.db")
    served = serve(store=store)
    well = requests.get(f"{served.endpoint}/health", timeout=10)
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute("DROP TABLE settings")

    broken = requests.get(f"{served.endpoint}/health", timeout=10)

    assert (well.status_code, broken.status_code) == (200, 503)
    assert "cannot be written to" in broken.json()["detail"]
    served.run(store.close())
