"""The legacy client, each operation plainly and by its asynchronous twin, against a real server."""

import asyncio
import logging
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.legacy.client import AgentLightningClient
from agentlightning.types import PromptTemplate, RolloutLegacy, Task
from tests import warm_python

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

TASK = {"is_available": True, "task": {"rollout_id": "rollout-1", "input": "hello"}}
PATIENCE_SECONDS = 30.0


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_polling_goes_on_until_there_is_a_task(canned: Any, connect: Any, is_async: bool) -> None:
    empty = {"is_available": False, "task": None}
    server = canned((200, empty), (500, {}), (200, b"no JSON"), (200, [1]), (200, TASK))
    client = connect(f"{server.endpoint}/a/path/that/is/dropped")

    task = asyncio.run(client.poll_next_task_async()) if is_async else client.poll_next_task()

    assert task.rollout_id == "rollout-1"
    assert [path for _, path, _, _ in server.requests] == ["/task"] * 5


def test_closing_ends_a_poll(canned: Any) -> None:
    server = canned((200, {"is_available": False}))
    client = AgentLightningClient(server.endpoint, poll_interval=3600)
    answers: list[Task | None] = []
    polling = threading.Thread(target=lambda: answers.append(client.poll_next_task()))

    polling.start()
    client.close()
    polling.join()

    assert answers == [None]


async def test_closing_ends_a_poll_of_a_coroutine(canned: Any) -> None:
    server = canned((200, {"is_available": False}))
    client = AgentLightningClient(server.endpoint, poll_interval=3600)
    polling = asyncio.create_task(client.poll_next_task_async())
    while not server.requests:
        await asyncio.sleep(0.01)

    await client.aclose()

    assert await asyncio.wait_for(polling, PATIENCE_SECONDS) is None


def test_latest_resources_are_never_from_the_cache(served: Any, connect: Any, resources: Any) -> None:
    client = connect(served.endpoint)
    first = served.run(served.server.update_resources(resources))
    assert client.get_latest_resources().resources_id == first
    newer = {"prompt": PromptTemplate(template="Welcome {name}.", engine="f-string")}

    second = served.run(served.server.update_resources(newer))

    latest = client.get_latest_resources()
    assert (latest.resources_id, latest.resources) == (second, newer)
    assert set(client._resource_cache) == {first, second}


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("get_latest_resources", ()),
        ("get_resources_by_id", ("res-1",)),
        ("post_rollout", (RolloutLegacy(rollout_id="rollout-1"),)),
        ("_request_json", ("not a url",)),
        ("_post_json", ("http://127.0.0.1:1/nothing", {})),
    ],
)
def test_a_server_that_is_not_there_gives_none(
    nobody: str, connect: Any, method: str, args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "agentlightning.legacy"):
        assert asyncio.run(getattr(connect(nobody), f"{method}_async")(*args)) is None

    assert "got no answer" in caplog.text


def test_a_slow_server_gives_none(connect: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)

        assert client.get_latest_resources() is None


def test_a_bare_number_is_refused_among_several_results(connect: Any, nobody: str) -> None:
    with pytest.raises(TypeError, match=r"not float; turn .* rollout_from_result\(task, result\)"):
        connect(nobody).post_rollouts([0.5])


async def test_workers_that_poll_in_vain_do_not_keep_others_from_posting(served: Any) -> None:
    async with AgentLightningClient(served.endpoint, poll_interval=0.2) as client:
        polls = [asyncio.create_task(client.poll_next_task_async()) for _ in range(100)]
        await asyncio.sleep(0)

        answer = await asyncio.wait_for(client.post_rollout_async({"rollout_id": "r"}), PATIENCE_SECONDS)

        for poll in polls:
            poll.cancel()
    assert answer is not None


def test_a_closed_client_makes_no_more_requests(served: Any) -> None:
    with AgentLightningClient(served.endpoint) as client:
        assert client.submit_task("hello") is not None

    assert client.submit_task("hello") is None
    assert client.poll_next_task() is None
    assert asyncio.run(client.poll_next_task_async()) is None


def test_a_client_travels_to_another_process(served: Any) -> None:
    with AgentLightningClient(served.endpoint, poll_interval=1.0, timeout=2.0) as client:
        client.get_latest_resources()
        copy = pickle.loads(pickle.dumps(client))

    assert (copy.endpoint, copy.poll_interval, copy.timeout) == (served.endpoint, 1.0, 2.0)
    with copy:
        assert copy.submit_task("hello") is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_opens_connections_of_its_own(served: Any) -> None:
    script = """
import os, sys
from agentlightning.client import AgentLightningClient

client = AgentLightningClient(sys.argv[1])
assert client.submit_task("parent")
session = client._session
child = os.fork()
assert client.submit_task("both")
assert (client._session is session) == bool(child)
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""

    warm_python.run([sys.executable, "-c", script, served.endpoint], check=True, timeout=60)

    statistics = served.run(served.server.store.statistics())
    assert statistics["queue_length"] == 3


def work_until_closed(client: AgentLightningClient, done: Callable[[Task], None]) -> None:
    while (task := client.poll_next_task()) is not None:
        client.post_rollout({"rollout_id": task.rollout_id, "task": task, "final_reward": float(task.input)})
        done(task)


def test_several_clients_share_the_work_and_each_task_is_done_once(served: Any, connect: Any) -> None:
    rollout_ids = [served.run(served.server.queue_task(number)) for number in range(12)]
    clients = [connect(served.endpoint) for _ in range(3)]
    done: list[Task] = []
    threads = [threading.Thread(target=work_until_closed, args=(client, done.append)) for client in clients]
    for thread in threads:
        thread.start()

    rollouts = [served.run(served.server.poll_completed_rollout(rollout_id, timeout=30)) for rollout_id in rollout_ids]
    for client in clients:
        client.close()
    for thread in threads:
        thread.join()

    assert [rollout.final_reward for rollout in rollouts] == [float(number) for number in range(12)]
    assert sorted(task.rollout_id for task in done) == sorted(rollout_ids)
    assert sum(client.task_count for client in clients) == 12
