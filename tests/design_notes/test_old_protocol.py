"""Client and server of the first protocol, as the notes describe them; they are deprecated and work."""

import asyncio
import inspect
import logging
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from typing import Any

import pytest
import requests

import agentlightning as agl
from agentlightning.legacy.data_store import ServerDataStore
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.types import GenericResponse, PromptTemplate, ResourcesUpdate, RolloutLegacy, Task, TaskIfAny
from tests.legacy.conftest import CannedServer, ServerInThread, connect, serve, served, stopping

__all__ = ["connect", "serve", "served", "stopping"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Connect = Callable[..., agl.AgentLightningClient]
RESOURCES: Any = {"prompt": PromptTemplate(template="Greet {name}.", engine="f-string")}


def _get(served: ServerInThread, path: str) -> requests.Response:
    return requests.get(f"{served.endpoint}{path}", timeout=60)


def _post(served: ServerInThread, path: str, body: Any) -> requests.Response:
    return requests.post(f"{served.endpoint}{path}", json=body, timeout=60)


# ------------------------------------------------------------------ names and attributes


@pytest.mark.claim(179, 180)
def test_the_classes_come_from_where_the_notes_import_them() -> None:
    from agentlightning import AgentLightningClient, AgentLightningServer

    assert {AgentLightningClient.__name__, AgentLightningServer.__name__} == {
        "AgentLightningClient",
        "AgentLightningServer",
    }
    assert issubclass(LightningStoreServer, LightningStore)
    assert issubclass(LightningStoreClient, LightningStore)


@pytest.mark.parametrize(
    ("make", "successor"),
    [
        pytest.param(
            lambda: agl.AgentLightningClient("http://localhost:1"), "LightningStoreClient", marks=pytest.mark.claim(483)
        ),
        pytest.param(lambda: agl.AgentLightningServer(port=0), "LightningStoreServer", marks=pytest.mark.claim(484)),
        pytest.param(lambda: agl.DevTaskLoader(["task"], RESOURCES), "Trainer.dev", marks=pytest.mark.claim(485)),
    ],
)
@pytest.mark.claim(181)
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_an_old_class_names_its_successor(make: Callable[[], Any], successor: str) -> None:
    with pytest.warns(DeprecationWarning, match=successor):
        make()


@pytest.mark.claim(187, 188, 189, 190, 191, 192, 193, 264, 380)
def test_the_client_has_the_attributes_of_the_notes() -> None:
    client = agl.AgentLightningClient("http://localhost:1", 2.0, 30.0)

    assert (client.endpoint, client.poll_interval, client.timeout, client.task_count) == (
        "http://localhost:1",
        2.0,
        30.0,
        0,
    )
    assert client._resource_cache == {}
    assert client._default_headers


_CLIENT_METHODS = {
    "poll_next_task": (194, 195, ""),
    "get_resources_by_id": (196, 197, "resource_id"),
    "get_latest_resources": (198, 199, ""),
    "post_rollout": (200, 201, "rollout"),
    "_request_json": (202, 203, "url"),
    "_post_json": (204, 205, "url payload"),
}


@pytest.mark.parametrize(
    ("method", "names"),
    [
        pytest.param(name, names, marks=pytest.mark.claim(plain, asynchronous))
        for name, (plain, asynchronous, names) in _CLIENT_METHODS.items()
    ],
)
@pytest.mark.claim(182, 381)
def test_the_client_has_each_method_plain_and_asynchronous(method: str, names: str) -> None:
    plain = getattr(agl.AgentLightningClient, method)
    twin = getattr(agl.AgentLightningClient, f"{method}_async")

    assert set(names.split()) <= set(inspect.signature(plain).parameters)
    assert not inspect.iscoroutinefunction(plain)
    assert inspect.iscoroutinefunction(twin)


@pytest.mark.claim(216, 217, 218, 219, 220, 221, 230, 231, 232, 382, 383)
async def test_the_server_has_the_attributes_of_the_notes() -> None:
    server = agl.AgentLightningServer("127.0.0.1", 0, 7.0)
    await server.start()
    try:
        assert server.host == "127.0.0.1"
        assert server.endpoint == f"http://127.0.0.1:{server.port}"
        assert server.task_timeout_seconds == server._task_timeout_seconds == 7.0
        assert isinstance(server._store, ServerDataStore)
        assert server.loop is asyncio.get_running_loop()
        assert server.startup_event.is_set()
        assert server._app is not None
        assert server._uvicorn_server is not None
        assert server._uvicorn_config is not None
        assert {"_lifespan", "_check_and_requeue_stale_tasks", "_setup_routes"} <= set(dir(server))
    finally:
        await server.stop()


# ------------------------------------------------------------------ the round


@pytest.mark.claim(59, 68, 69, 70, 71, 82, 185, 190, 200, 222, 223, 225, 226, 227, 384, 385, 386, 487)
def test_a_task_goes_round(served: ServerInThread, connect: Connect) -> None:
    resources_id = served.run(served.server.update_resources(RESOURCES))
    queued = served.run(served.server.queue_task({"name": "Ada"}, "train", resources_id, {"a": 1}))
    client = connect(served.endpoint)

    task = client.poll_next_task()
    assert task is not None
    update = client.get_resources_by_id(task.resources_id)
    answer = client.post_rollout(RolloutLegacy(rollout_id=task.rollout_id, final_reward=0.5))
    result = served.run(served.server.get_completed_rollout(queued))

    assert (task.rollout_id, task.input, task.mode, task.metadata) == (queued, {"name": "Ada"}, "train", {"a": 1})
    assert update is not None
    assert update.resources == RESOURCES
    assert answer is not None
    assert result.final_reward == 0.5
    assert client.task_count == 1


@pytest.mark.claim(75, 182, 195, 197, 199, 201)
def test_a_task_goes_round_without_blocking(served: ServerInThread, connect: Connect) -> None:
    resources_id = served.run(served.server.update_resources(RESOURCES))
    served.run(served.server.queue_task("task", resources_id=resources_id))
    client = connect(served.endpoint)

    async def one_round() -> GenericResponse:
        task = await client.poll_next_task_async()
        assert task is not None
        assert await client.get_resources_by_id_async(resources_id) == await client.get_latest_resources_async()
        answer = await client.post_rollout_async(RolloutLegacy(rollout_id=task.rollout_id, final_reward=1.0))
        await client.aclose()
        return GenericResponse.model_validate(answer)

    assert asyncio.run(one_round()).status == "ok"


@pytest.mark.claim(68)
def test_a_client_submits_a_task_and_gets_its_id(served: ServerInThread, connect: Connect) -> None:
    client = connect(served.endpoint)

    rollout_id = client.submit_task("task")

    task = client.poll_next_task()
    assert task is not None
    assert task.rollout_id == rollout_id


@pytest.mark.claim(92)
def test_resources_are_asked_for_once(connect: Connect) -> None:
    server = CannedServer((200, {"resources_id": "rs-1", "resources": {}}))
    try:
        client = connect(server.endpoint)
        assert client.get_resources_by_id("rs-1") == client.get_resources_by_id("rs-1")
        assert len(server.requests) == 1
    finally:
        server.stop()


@pytest.mark.claim(206)
def test_polling_skips_an_invalid_task_and_waits_where_there_is_none(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"is_available": True, "task": {"rollout_id": "ro-1", "input": "q"}}
    bad = {"is_available": True, "task": {"rollout_id": 3}}
    server = CannedServer((200, bad), (200, {"is_available": False}), (200, good))
    try:
        client = connect(server.endpoint)
        with caplog.at_level(logging.DEBUG, "agentlightning"):
            task = client.poll_next_task()
    finally:
        server.stop()

    assert task is not None
    assert (task.rollout_id, client.task_count) == ("ro-1", 1)
    assert any(record.levelno == logging.DEBUG and "rollout_id" in record.getMessage() for record in caplog.records)


@pytest.mark.claim(97, 196, 263)
def test_what_is_not_there_is_none(served: ServerInThread, connect: Connect) -> None:
    client = connect(served.endpoint)

    assert client.get_resources_by_id("nothing") is None
    assert client.get_latest_resources() is None
    assert client.poll_next_task(timeout=0) is None


@pytest.mark.claim(183, 389)
def test_a_task_that_nobody_answers_is_handed_out_again(serve: Callable[..., ServerInThread], connect: Connect) -> None:
    served = serve(task_timeout_seconds=0.05)
    served.run(served.server.queue_task("task"))
    client = connect(served.endpoint)

    first, second = client.poll_next_task(), client.poll_next_task()

    assert first is not None
    assert second is not None
    assert second.rollout_id == first.rollout_id
    assert second.num_claims == 2


@pytest.mark.claim(228, 387)
def test_a_result_is_waited_for(served: ServerInThread) -> None:
    rollout_id = served.run(served.server.queue_task("task"))

    assert served.run(served.server.poll_completed_rollout(rollout_id, timeout=0.05)) is None
    _get(served, "/task")
    _post(served, "/rollout", {"rollout_id": rollout_id, "final_reward": 1.0})
    assert served.run(served.server.poll_completed_rollout(rollout_id, timeout=60)).final_reward == 1.0


@pytest.mark.claim(229, 246, 388)
def test_all_results_are_handed_out_once(served: ServerInThread) -> None:
    ids = {served.run(served.server.queue_task(number)) for number in range(2)}
    for rollout_id in ids:
        _post(served, "/rollout", {"rollout_id": rollout_id})

    first = served.run(served.server.retrieve_completed_rollouts())

    assert {one.rollout_id for one in first} == ids
    assert served.run(served.server.retrieve_completed_rollouts()) == []


@pytest.mark.claim(224, 521)
async def test_a_server_runs_until_it_is_stopped() -> None:
    server = agl.AgentLightningServer(port=0)
    running = asyncio.create_task(server.run_forever())
    await asyncio.to_thread(server.startup_event.wait, 60)

    await server.stop()
    await asyncio.wait_for(running, 60)

    assert running.done()


@pytest.mark.claim(94, 257)
def test_results_are_posted_in_batches(served: ServerInThread, connect: Connect) -> None:
    ids = [served.run(served.server.queue_task(number)) for number in range(3)]

    connect(served.endpoint).post_rollouts([{"rollout_id": one, "final_reward": 1.0} for one in ids])

    assert len(served.run(served.server.retrieve_completed_rollouts())) == 3


@pytest.mark.claim(94)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_tasks_are_submitted_in_batches(served: ServerInThread, connect: Connect, is_async: bool) -> None:
    client: Any = connect(served.endpoint)
    batch = ([1, 2, 3], "val", "rs-1")

    ids = asyncio.run(client.submit_tasks_async(*batch)) if is_async else client.submit_tasks(*batch)
    tasks = [client.poll_next_task(timeout=0) for _ in range(4)]

    found = [None if task is None else (task.rollout_id, task.input, task.mode, task.resources_id) for task in tasks]
    assert found == [*((one, n, "val", "rs-1") for n, one in enumerate(ids, 1)), None]


@pytest.mark.claim(94)
def test_no_task_of_a_batch_is_queued_if_one_is_malformed(served: ServerInThread) -> None:
    assert _post(served, "/tasks", [{"sample": 1}, {"mode": "train"}]).status_code == 400
    assert _get(served, "/task").json()["is_available"] is False


@pytest.mark.claim(67, 267)
def test_old_and_new_share_one_store(serve: Callable[..., ServerInThread], connect: Connect) -> None:
    store = InMemoryLightningStore()
    served = serve(store=store)
    queued = asyncio.run(store.enqueue_rollout("from the new side"))

    task = connect(served.endpoint).poll_next_task()

    assert task is not None
    assert (task.rollout_id, task.input) == (queued.rollout_id, "from the new side")


def test_an_address_without_http_is_refused_when_the_client_is_made() -> None:
    with pytest.raises(agl.errors.ConfigurationError, match="for example http://localhost:8000"):
        agl.AgentLightningClient("localhost:8000")


def test_a_result_that_is_lost_is_named(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    connect("http://127.0.0.1:9", poll_interval=0.01).post_rollout({"rollout_id": "rollout-7", "final_reward": 1.0})

    assert "The result of rollout-7 could not be delivered" in caplog.text


# ------------------------------------------------------------------ routes


@pytest.mark.claim(73, 249, 446)
def test_get_task_answers_a_task(served: ServerInThread) -> None:
    served.run(served.server.queue_task("task"))

    answer = _get(served, "/task").json()

    assert TaskIfAny.model_validate(answer).is_available
    assert set(answer["task"]) >= {
        *("rollout_id", "input", "mode", "resources_id"),
        *("create_time", "last_claim_time", "num_claims", "metadata"),
    }


@pytest.mark.claim(74)
def test_get_task_answers_that_there_is_none(served: ServerInThread) -> None:
    answer = TaskIfAny.model_validate(_get(served, "/task").json())

    assert (answer.is_available, answer.task) == (False, None)


@pytest.mark.claim(250, 251, 447, 448, 452)
def test_resources_are_answered_or_a_404(served: ServerInThread) -> None:
    assert _get(served, "/resources/latest").status_code == 404
    resources_id = served.run(served.server.update_resources(RESOURCES))

    for path in ("latest", resources_id):
        answer = _get(served, f"/resources/{path}").json()
        assert {"resources_id", "resources"} <= set(answer)
        assert ResourcesUpdate.model_validate(answer).resources == RESOURCES
    assert _get(served, "/resources/nothing").status_code == 404


@pytest.mark.claim(252, 449, 450, 451)
def test_a_whole_result_is_taken_without_credentials(served: ServerInThread) -> None:
    rollout_id = served.run(served.server.queue_task("task"))
    result = RolloutLegacy(
        rollout_id=rollout_id,
        task=Task(rollout_id=rollout_id, input="task"),
        final_reward=0.5,
        triplets=[agl.Triplet(prompt="p", response="r", reward=0.5)],
        logs=["line"],
        metadata={"a": 1},
    )

    answer = _post(served, "/rollout", result.model_dump(mode="json"))

    assert answer.status_code == 200
    assert GenericResponse.model_validate(answer.json()).status == "ok"
    assert answer.json()["message"]
    assert served.run(served.server.get_completed_rollout(rollout_id)) == result


@pytest.mark.claim(454)
def test_a_malformed_request_is_a_400(served: ServerInThread) -> None:
    assert _post(served, "/rollout", {"rollout_id": 3}).status_code == 400
    assert requests.post(f"{served.endpoint}/rollout", data=b"{", timeout=60).status_code == 400


@pytest.mark.claim(453)
async def test_a_server_that_is_not_ready_answers_503() -> None:
    import httpx

    server = agl.AgentLightningServer(port=0)
    transport = httpx.ASGITransport(app=server._app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answers = [await client.get("/resources/latest"), await client.post("/rollout", json={"rollout_id": "ro-1"})]

    assert {answer.status_code for answer in answers} == {503}


@pytest.mark.claim(266)
def test_a_server_tells_its_health(served: ServerInThread) -> None:
    assert _get(served, "/health").status_code == 200


# ------------------------------------------------------------------ connections


@pytest.mark.claim(96, 258)
def test_a_connection_is_used_again(connect: Connect) -> None:
    connections: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            connections.append(self.client_address)
            super().setup()

        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with connect(f"http://127.0.0.1:{server.server_port}") as client:
            for _ in range(3):
                client.get_latest_resources()
        server.shutdown()

    assert len(connections) == 1


@pytest.mark.claim(259)
def test_answers_are_compressed_for_those_who_ask(served: ServerInThread) -> None:
    big = {"prompt": PromptTemplate(template="word " * 5_000, engine="f-string")}
    served.run(served.server.update_resources(big))

    answer = requests.get(f"{served.endpoint}/resources/latest", headers={"Accept-Encoding": "gzip"}, timeout=60)

    assert answer.headers["Content-Encoding"] == "gzip"
    assert ResourcesUpdate.model_validate(answer.json()).resources == big


@pytest.mark.claim(253, 254, 255, 256)
def test_the_notes_libraries_are_installed_with_the_package() -> None:
    written = [line for line in metadata.requires("agentlightning") or [] if "extra ==" not in line]
    named = {re.split(r"[\[<>=!~ ;]", line)[0].lower(): line for line in written}

    assert {"requests", "aiohttp", "fastapi", "uvicorn", "pydantic"} <= set(named)
    for name in ("requests", "aiohttp", "fastapi", "uvicorn"):
        assert re.fullmatch(rf"{name}(\[\w+\])?>=[\d.]+", named[name]), "a floor and no ceiling"


# ------------------------------------------------------------------ DevTaskLoader


@pytest.mark.claim(72, 186, 207, 208, 209, 210, 211, 212, 213, 214)
def test_tasks_are_tried_without_a_server() -> None:
    loader = agl.DevTaskLoader(["one", "two"], RESOURCES)

    tasks = [loader.poll_next_task() for _ in range(2)]
    update = loader.get_resources_by_id(tasks[0].resources_id)
    loader.post_rollout(RolloutLegacy(rollout_id=tasks[0].rollout_id, final_reward=1.0))

    assert isinstance(loader, agl.AgentLightningClient)
    assert [task.input for task in tasks] == ["one", "two"]
    assert update == loader.get_latest_resources()
    assert [one.final_reward for one in loader.rollouts] == [1.0]
    assert {"_tasks", "_task_index", "_resources_update", "_rollouts"} <= set(vars(loader))


@pytest.mark.claim(215)
def test_the_loaders_errors_help() -> None:
    with pytest.raises(ValueError, match="requires at least one task"):
        agl.DevTaskLoader([], RESOURCES)
    with pytest.raises(ValueError, match="either Task or TaskInput"):
        agl.DevTaskLoader(["one", Task(rollout_id="ro-1", input="two")], RESOURCES)


# ------------------------------------------------------------------ ServerDataStore


@pytest.mark.claim(233, 234, 235, 239, 240, 244, 245, 247, 248)
async def test_the_data_store_hands_out_tasks_and_keeps_results() -> None:
    store = ServerDataStore()
    ids = [await store.add_task(number, "train", None, {"n": number}) for number in range(2)]

    first = await store.get_next_task()
    assert first is not None
    assert first.rollout_id == ids[0]
    assert set(store.get_processing_tasks()) == {ids[0]}
    await store.requeue_task(first)
    await store.store_rollout(RolloutLegacy(rollout_id=ids[1], final_reward=1.0))

    assert (await store.retrieve_rollout(ids[1])) == RolloutLegacy(rollout_id=ids[1], final_reward=1.0)
    assert await store.retrieve_rollout(ids[1]) is None
    again = await store.get_next_task()
    assert again is not None
    assert (again.rollout_id, await store.get_next_task()) == (ids[0], None)


@pytest.mark.claim(236, 237, 238, 241, 242, 243)
async def test_the_data_store_keeps_versions_of_resources() -> None:
    store = ServerDataStore()
    updates = [ResourcesUpdate(resources_id=f"rs-{number}", resources=RESOURCES) for number in range(8)]

    await asyncio.gather(*(store.update_resources(update) for update in updates))

    for update in updates:
        found = await store.get_resources_by_id(update.resources_id)
        assert found is not None
        assert found.resources_id == update.resources_id
    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources_id in {update.resources_id for update in updates}


# ------------------------------------------------------------------ speed


ROUNDS = 24


async def _seconds_of_the_old_server(workers: int) -> float:
    """Of the processor, for client and server: the load of other programs does not count."""
    server = agl.AgentLightningServer(port=0)
    await server.start()
    clients = [agl.AgentLightningClient(server.endpoint, poll_interval=0.001) for _ in range(workers)]

    async def work(client: agl.AgentLightningClient) -> None:
        for _ in range(ROUNDS // workers):
            await client.submit_task_async("task")
            task = await client.poll_next_task_async()
            assert task is not None
            await client.post_rollout_async(RolloutLegacy(rollout_id=task.rollout_id, final_reward=1.0))

    began = time.process_time()
    await asyncio.gather(*map(work, clients))
    seconds = time.process_time() - began
    for client in clients:
        await client.aclose()
    await server.stop()
    return seconds


async def _seconds_of_a_store_server(workers: int) -> float:
    """The same rounds over HTTP, through a store server and its client."""
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
    await server.start()
    client = LightningStoreClient(server.endpoint)

    async def work() -> None:
        for _ in range(ROUNDS // workers):
            await client.enqueue_rollout("task")
            claimed = await client.dequeue_rollout()
            assert claimed is not None
            await client.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")

    began = time.process_time()
    await asyncio.gather(*(work() for _ in range(workers)))
    seconds = time.process_time() - began
    await client.close()
    await server.stop()
    return seconds


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.claim(81)), pytest.param(8, marks=pytest.mark.claim(79))]
)
async def test_a_store_server_carries_more_than_the_old_server(workers: int) -> None:
    """Both over HTTP on this machine, in turns; the best of each counts. It is about a quarter."""
    pairs = [(await _seconds_of_the_old_server(workers), await _seconds_of_a_store_server(workers)) for _ in range(3)]

    old, new = map(min, zip(*pairs, strict=True))
    assert new < old / 1.5
