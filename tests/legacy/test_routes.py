"""The routes of the v0.1 protocol, as any HTTP client sees them."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from agentlightning.legacy.server import AgentLightningServer
from agentlightning.utils.loop_thread import LoopThread

JSON = {"Content-Type": "application/json"}
PROMPT = {"resource_type": "prompt_template", "template": "Hi {name}", "engine": "f-string"}


@pytest.fixture(scope="module")
def server() -> Iterator[AgentLightningServer]:
    """One server for all tests; each uses ids of its own."""
    thread = LoopThread("legacy-server")
    with pytest.warns(DeprecationWarning, match="AgentLightningServer"):
        server = AgentLightningServer(port=0)
    thread.run(server.start())
    yield server
    thread.run(server.stop())
    thread.stop()


@pytest.fixture
def not_started(server: AgentLightningServer) -> Iterator[None]:
    """Requests are answered, but the server has no state yet."""
    data_store, server._app.data_store = server._app.data_store, None
    yield
    server._app.data_store = data_store


def send(server: AgentLightningServer, method: str, path: str, **options: Any) -> requests.Response:
    return requests.request(method, f"{server.endpoint}{path}", timeout=10, **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rollout", b'{"final_reward": 1.0}'),
        ("/rollout", b"[]"),
        ("/rollout", b"{"),
        ("/rollout", b'{"rollout_id": "r", "final_reward": NaN}'),
        ("/rollout", b"\xff\xfe"),
        ("/rollout", b"[" * 100_000),
        ("/rollouts", b'[{"rollout_id": "r"}, {}]'),
        ("/task", b'{"sample": 1, "mode": "sometimes"}'),
        ("/task", b'{"sample": 1, "metadata": NaN}'),
        ("/resources", b'{"resources": {"p": {"resource_type": "nonsense"}}}'),
    ],
)
def test_a_malformed_body_is_refused_with_400_and_the_reason(
    server: AgentLightningServer, path: str, body: bytes
) -> None:
    response = send(server, "POST", path, data=body, headers=JSON)

    assert response.status_code == 400
    assert response.json()["detail"]


def test_of_a_malformed_batch_nothing_is_kept(server: AgentLightningServer) -> None:
    send(server, "POST", "/rollouts", json=[{"rollout_id": "rollout-b"}, {}])

    assert asyncio.run(server.store.get_rollout_by_id("rollout-b")) is None


@pytest.mark.usefixtures("not_started")
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/resources/latest", None),
        ("GET", "/health", None),
        ("POST", "/rollout", {"rollout_id": "r"}),
        ("POST", "/task", {"sample": 1}),
        ("POST", "/resources", {"resources": {}}),
    ],
)
@pytest.mark.claim(453)
def test_a_server_without_state_answers_503(server: AgentLightningServer, method: str, path: str, body: Any) -> None:
    response = send(server, method, path, json=body)

    assert (response.status_code, "not initialised" in response.json()["detail"]) == (503, True)


@pytest.mark.usefixtures("not_started")
@pytest.mark.claim(453)
def test_a_server_without_state_has_no_task(server: AgentLightningServer) -> None:
    assert send(server, "GET", "/task").json() == {"is_available": False, "task": None}


def test_a_compressed_body_is_understood(server: AgentLightningServer) -> None:
    body = gzip.compress(json.dumps({"rollout_id": "rollout-d", "logs": ["x" * 5000]}).encode())

    response = send(server, "POST", "/rollout", data=body, headers={**JSON, "Content-Encoding": "gzip"})

    assert response.json()["status"] == "ok"


@pytest.mark.parametrize(
    "body",
    [b"plain", gzip.compress(b"{}")[:-4], gzip.compress(b"") * 2000 + gzip.compress(b'{"rollout_id": "r"}')],
    ids=["not gzip", "cut off", "empty members"],
)
def test_a_body_that_cannot_be_unpacked_is_refused(server: AgentLightningServer, body: bytes) -> None:
    response = send(server, "POST", "/rollout", data=body, headers={**JSON, "Content-Encoding": "gzip"})

    assert (response.status_code, "gzip" in response.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/task", {"sample": "\ud800"}),
        ("/task", {"sample": 1, "metadata": {"\ud800": 1}}),
        ("/task", {"sample": 1, "resources_id": "\ud800"}),
        ("/resources", {"resources": {"prompt": {**PROMPT, "template": "\ud800"}}}),
        ("/rollout", {"rollout_id": "\ud800"}),
        ("/rollout", {"rollout_id": "r", "trace": [{"name": "\ud800"}]}),
        ("/rollouts", [{"rollout_id": "r"}, {"rollout_id": "\ud800"}]),
    ],
)
def test_half_a_character_is_refused_and_leaves_nothing(server: AgentLightningServer, path: str, body: Any) -> None:
    before = send(server, "GET", "/resources/latest").json()

    response = send(server, "POST", path, data=json.dumps(body), headers=JSON)

    assert response.status_code == 400
    assert send(server, "GET", "/task").json()["is_available"] is False
    assert send(server, "GET", "/resources/latest").json() == before
