"""What a legacy client does when the server is down, slow, wrong, or has nothing for it."""

import asyncio
import logging
import threading
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError, StoreError
from agentlightning.legacy.client import RESULT_TRIES, AgentLightningClient
from agentlightning.legacy.dev_task_loader import DevTaskLoader
from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.types import RolloutLegacy

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

NO_TASK = {"is_available": False, "task": None}
RESULT = RolloutLegacy(rollout_id="rollout-1", final_reward=1.0)
PATIENCE_SECONDS = 60.0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---------------------------------------------------------------------- nothing to do, nothing to work with


def test_resources_without_an_id_are_none(nobody: str, connect: Any) -> None:
    for client in (connect(nobody), DevTaskLoader(["hello"], {})):
        assert client.get_resources_by_id(None) is None


def test_a_timeout_shorter_than_the_pause_is_kept(canned: Any, connect: Any) -> None:
    client = connect(canned((200, NO_TASK)).endpoint, poll_interval=3600.0)

    assert client.poll_next_task(0.05) is None
    assert asyncio.run(asyncio.wait_for(client.poll_next_task_async(0.05), PATIENCE_SECONDS)) is None


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("method", ["post_rollout", "post_rollouts"])
def test_a_result_that_cannot_be_delivered_is_warned_about(
    nobody: str, connect: Any, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    result = RESULT if method == "post_rollout" else [RESULT]

    assert getattr(connect(nobody), method)(result) is None

    (warning,) = warnings_of(caplog)
    assert f"after {RESULT_TRIES} tries" in warning
    assert RESULT.rollout_id in warning
    assert "is lost" in warning


@pytest.mark.parametrize("status", [502, 503, 504, None])
def test_a_result_is_sent_again_to_a_server_that_is_starting_or_hung_up(
    canned: Any, connect: Any, caplog: pytest.LogCaptureFixture, status: int | None
) -> None:
    server = canned((status, {}), (status, {}), (200, {"status": "ok"}))

    assert connect(server.endpoint).post_rollout(RESULT) == {"status": "ok"}

    assert [body for *_, body in server.requests] == [server.requests[0][-1]] * 3
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(("status", "method"), [(400, "post_rollout"), (503, "submit_task")])
def test_a_refused_result_and_a_task_are_sent_once_and_warned_about(
    canned: Any, connect: Any, caplog: pytest.LogCaptureFixture, status: int, method: str
) -> None:
    server = canned((status, {"detail": "no"}))

    assert getattr(connect(server.endpoint), method)(RESULT) is None

    assert len(server.requests) == 1
    assert f"was refused with {status}" in warnings_of(caplog)[0]


def test_closing_ends_the_tries(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    client = AgentLightningClient(nobody, poll_interval=3600.0)
    answers: list[Any] = []
    posting = threading.Thread(target=lambda: answers.append(client.post_rollout(RESULT)))

    posting.start()
    client.close()
    posting.join(PATIENCE_SECONDS)

    assert answers == [None]
    assert "is lost" in warnings_of(caplog)[-1]


# ---------------------------------------------------------------------- a server that is not there, or is another


def test_a_server_that_is_not_running_is_reported_once(
    nobody: str, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(nobody)

    client.poll_next_task(timeout=0.0)
    asyncio.run(client.poll_next_task_async(timeout=0.0))

    (warning,) = warnings_of(caplog)
    assert f"{nobody}/task" in warning


@pytest.mark.parametrize("answer", [(500, {}), (404, {}), (200, b"<html>"), (200, [1])])
def test_a_server_that_is_another_is_reported_once_for_each_outage(
    canned: Any, connect: Any, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    client = connect(canned(answer, answer, (200, NO_TASK), answer).endpoint)

    for _ in range(5):
        client.poll_next_task(timeout=0.0)

    assert len(warnings_of(caplog)) == 2


# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("address", "way_out"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("//host:80", "http://host:80"),
        ("ftp://host", "http://"),
        ("http://:8000", "http://"),
        ("http://host:99999", "http://"),
        ("", "http://"),
    ],
)
def test_an_address_that_is_none_is_refused_with_the_way_out(address: str, way_out: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        AgentLightningClient(address)
    assert way_out in str(refused.value)


# ---------------------------------------------------------------------- a server of another kind


def test_client_of_a_store_is_told_how_its_agent_runs_there(connect: Any) -> None:
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
    asyncio.run(server.start())
    try:
        with pytest.raises(StoreError, match=r"protocol of tasks; run the agent with `agl runner MODULE:AGENT"):
            connect(server.endpoint).poll_next_task()
    finally:
        asyncio.run(server.stop())
