"""The legacy client, each operation plainly and by its asynchronous twin, against a real server."""

import asyncio
import gzip
import json
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
from agentlightning.types import PromptTemplate, RolloutLegacy, Task, Triplet
from tests import warm_python

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

TASK = {"is_available": True, "task": {"rollout_id": "rollout-1", "input": "hello"}}
LONG = "x" * 2000
PATIENCE_SECONDS = 30.0


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_attributes_and_their_defaults() -> None:
    client = AgentLightningClient("http://localhost:8000")

    assert (client.endpoint, client.poll_interval, client.timeout) == ("http://localhost:8000", 5.0, 10.0)
    assert client.task_count == 0
    assert client._resource_cache == {}
    assert client._default_headers == {"X-AgentLightning-Client": "true"}
    assert (client._next_task_uri, client._resources_uri) == ("/task", "/resources")
    assert (client._latest_resources_uri, client._report_rollout_uri) == ("/resources/latest", "/rollout")


def test_polling_goes_on_until_there_is_a_task(canned: Any, connect: Any, ask: Any) -> None:
    empty = {"is_available": False, "task": None}
    server = canned((200, empty), (500, {}), (200, b"no JSON"), (200, [1]), (200, TASK))

    task = ask(connect(server.endpoint), "poll_next_task")

    assert task.rollout_id == "rollout-1"
    assert len(server.requests) == 5


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


def test_a_path_in_the_endpoint_is_dropped(canned: Any, connect: Any, ask: Any) -> None:
    server = canned((200, TASK))

    ask(connect(f"{server.endpoint}/some/path"), "poll_next_task")

    assert [(method, path) for method, path, _, _ in server.requests] == [("GET", "/task")]


def test_latest_resources_are_never_from_the_cache(served: Any, connect: Any, ask: Any, resources: Any) -> None:
    client = connect(served.endpoint)
    first = served.run(served.server.update_resources(resources))
    assert ask(client, "get_latest_resources").resources_id == first
    newer = {"prompt": PromptTemplate(template="Welcome {name}.", engine="f-string")}

    second = served.run(served.server.update_resources(newer))

    latest = ask(client, "get_latest_resources")
    assert (latest.resources_id, latest.resources) == (second, newer)
    assert set(client._resource_cache) == {first, second}


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("get_latest_resources", ()),
        ("get_resources_by_id", ("res-1",)),
        ("post_rollout", (RolloutLegacy(rollout_id="rollout-1"),)),
        ("submit_task", ("hello",)),
        ("_request_json", ("http://127.0.0.1:1/nothing",)),
        ("_request_json", ("not a url",)),
        ("_post_json", ("http://127.0.0.1:1/nothing", {})),
    ],
)
def test_a_server_that_is_not_there_gives_none(
    nobody: str, connect: Any, ask: Any, method: str, args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "agentlightning.legacy"):
        assert ask(connect(nobody), method, *args) is None

    assert "got no answer" in caplog.text


def test_a_slow_server_gives_none(connect: Any, ask: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)

        assert ask(client, "get_latest_resources") is None


def test_a_result_is_acknowledged_and_given_back_whole(served: Any, connect: Any, ask: Any) -> None:
    client = connect(served.endpoint)
    served.run(served.server.queue_task("hello"))
    task = ask(client, "poll_next_task")
    rollout = RolloutLegacy(
        rollout_id=task.rollout_id,
        task=task,
        final_reward=0.5,
        triplets=[Triplet(prompt="p", response="r", reward=0.5, metadata={"turn": 1})],
        trace=[{"name": "step", "attributes": {"a": 1}, "odd": [None, {"deep": True}]}],
        logs=["one", "two"],
        metadata={"note": "kept"},
    )

    answer = ask(client, "post_rollout", rollout)

    assert (answer["status"], answer["data"]) == ("ok", None)
    assert task.rollout_id in answer["message"]
    assert served.run(served.server.get_completed_rollout(task.rollout_id)) == rollout


def test_a_mapping_is_posted_as_a_result(served: Any, connect: Any, ask: Any) -> None:
    answer = ask(connect(served.endpoint), "post_rollout", {"rollout_id": "rollout-1", "final_reward": 1})

    assert answer["status"] == "ok"
    assert served.run(served.server.get_completed_rollout("rollout-1")).final_reward == 1.0


def test_a_bare_number_is_refused_among_several_results(connect: Any, ask: Any, nobody: str) -> None:
    with pytest.raises(TypeError, match=r"not float; turn .* rollout_from_result\(task, result\)"):
        ask(connect(nobody), "post_rollouts", [0.5])


def test_a_refused_result_is_none_and_someone_is_warned(
    served: Any, connect: Any, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(connect(served.endpoint), "_post_json", f"{served.endpoint}/rollout", {"final_reward": 1.0}) is None

    assert [record.levelname for record in caplog.records if "was refused with 400" in record.message] == ["WARNING"]


def test_a_large_result_is_compressed_once_the_server_has_offered_it(served: Any, connect: Any, ask: Any) -> None:
    client = connect(served.endpoint)
    rollout = RolloutLegacy(rollout_id="rollout-1", logs=[LONG])
    assert "Content-Encoding" not in client._body(rollout.model_dump())[0]

    ask(client, "get_latest_resources")

    headers, body = client._body(rollout.model_dump())
    assert headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(body))["logs"] == [LONG]
    assert ask(client, "post_rollout", rollout)["status"] == "ok"
    assert served.run(served.server.get_completed_rollout("rollout-1")) == rollout


def test_nothing_is_compressed_for_a_server_of_an_earlier_release(canned: Any, connect: Any, ask: Any) -> None:
    server = canned((200, TASK))
    client = connect(server.endpoint)

    ask(client, "poll_next_task")
    ask(client, "post_rollout", {"rollout_id": "rollout-1", "logs": [LONG]})

    _, path, headers, body = server.requests[-1]
    assert (path, "content-encoding" in headers) == ("/rollout", False)
    assert json.loads(body)["logs"] == [LONG]


async def test_workers_that_poll_in_vain_do_not_keep_others_from_posting(served: Any) -> None:
    async with AgentLightningClient(served.endpoint, poll_interval=0.2) as client:
        polls = [asyncio.create_task(client.poll_next_task_async()) for _ in range(100)]
        await asyncio.sleep(0)

        answer = await asyncio.wait_for(client.post_rollout_async({"rollout_id": "r"}), PATIENCE_SECONDS)

        for poll in polls:
            poll.cancel()
    assert answer is not None


def test_a_closed_client_makes_no_more_requests(served: Any, ask: Any) -> None:
    with AgentLightningClient(served.endpoint) as client:
        assert client.submit_task("hello") is not None

    assert ask(client, "submit_task", "hello") is None
    assert ask(client, "poll_next_task") is None


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
    rollout_ids = [served.run(served.server.queue_task(number)) for number in range(40)]
    clients = [connect(served.endpoint) for _ in range(5)]
    done: list[Task] = []
    threads = [threading.Thread(target=work_until_closed, args=(client, done.append)) for client in clients]
    for thread in threads:
        thread.start()

    rollouts = [served.run(served.server.poll_completed_rollout(rollout_id, timeout=30)) for rollout_id in rollout_ids]
    for client in clients:
        client.close()
    for thread in threads:
        thread.join()

    assert [rollout.final_reward for rollout in rollouts] == [float(number) for number in range(40)]
    assert sorted(task.rollout_id for task in done) == sorted(rollout_ids)
    assert sum(client.task_count for client in clients) == 40
