"""What a legacy client does when the server is down, slow, wrong, or has nothing for it."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.legacy.client import RESULT_TRIES, AgentLightningClient
from agentlightning.legacy.dev_task_loader import DevTaskLoader
from agentlightning.legacy.trainer import TrainerLegacy
from agentlightning.types import RolloutLegacy

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

NO_TASK = {"is_available": False, "task": None}
RESULT = RolloutLegacy(rollout_id="rollout-1", final_reward=1.0)
PATIENCE_SECONDS = 60.0


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else can: the port is bound."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---------------------------------------------------------------------- nothing to do, nothing to work with


def test_resources_without_an_id_are_none(nobody: str, connect: Any, ask: Any) -> None:
    assert ask(connect(nobody), "get_resources_by_id", None) is None


def test_a_dev_loader_has_no_resources_without_an_id(ask: Any) -> None:
    assert ask(DevTaskLoader(["hello"], {}), "get_resources_by_id", None) is None


def test_a_timeout_shorter_than_the_pause_is_kept(canned: Any, connect: Any, ask: Any) -> None:
    server = canned((200, NO_TASK))
    began = time.monotonic()

    assert ask(connect(server.endpoint, poll_interval=3600.0), "poll_next_task", 0.05) is None

    assert time.monotonic() - began < PATIENCE_SECONDS


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("method", ["post_rollout", "post_rollouts"])
def test_a_result_that_cannot_be_delivered_is_warned_about(
    nobody: str, connect: Any, ask: Any, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    result = RESULT if method == "post_rollout" else [RESULT]

    assert ask(connect(nobody), method, result) is None

    (warning,) = warnings_of(caplog)
    assert f"after {RESULT_TRIES} tries" in warning
    assert RESULT.rollout_id in warning
    assert "is lost" in warning


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_result_is_sent_again_to_a_server_that_is_starting(
    canned: Any, connect: Any, ask: Any, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server = canned((status, {}), (status, {}), (200, {"status": "ok"}))

    assert ask(connect(server.endpoint), "post_rollout", RESULT) == {"status": "ok"}

    assert len(server.requests) == 3
    assert warnings_of(caplog) == []


def test_a_result_is_sent_again_to_a_server_that_hung_up(canned: Any, connect: Any, ask: Any) -> None:
    server = canned((None, None), (200, {"status": "ok"}))

    assert ask(connect(server.endpoint), "post_rollout", RESULT) == {"status": "ok"}

    assert [body for *_, body in server.requests] == [server.requests[0][-1]] * 2


def test_a_result_that_is_refused_is_sent_once(canned: Any, connect: Any, ask: Any) -> None:
    server = canned((400, {"detail": "no"}))

    assert ask(connect(server.endpoint), "post_rollout", RESULT) is None

    assert len(server.requests) == 1


def test_a_task_is_not_submitted_twice(canned: Any, connect: Any, ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = canned((503, {}))

    assert ask(connect(server.endpoint), "submit_task", "hello") is None

    assert len(server.requests) == 1
    assert len(warnings_of(caplog)) == 1


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


def poll_some_times(client: AgentLightningClient, is_async: bool) -> None:
    for _ in range(3):
        if is_async:
            asyncio.run(client.poll_next_task_async(timeout=0.0))
        else:
            client.poll_next_task(timeout=0.0)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_server_that_is_not_running_is_reported_once(
    nobody: str, connect: Any, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    poll_some_times(connect(nobody), is_async)

    (warning,) = warnings_of(caplog)
    assert f"{nobody}/task" in warning


@pytest.mark.parametrize("answer", [(500, {}), (404, {}), (200, b"<html>"), (200, [1])])
def test_a_server_that_is_another_is_reported_once(
    canned: Any, connect: Any, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    poll_some_times(connect(canned(answer).endpoint), is_async=False)

    assert len(warnings_of(caplog)) == 1


def test_a_second_outage_is_reported_again(canned: Any, connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = canned((500, {}), (200, NO_TASK), (500, {}))

    poll_some_times(connect(server.endpoint), is_async=False)

    assert len(warnings_of(caplog)) == 2


# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("address", "way_out"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("//host:80", "http://host:80"),
        ("ftp://host", "http://"),
        ("http://", "http://"),
        ("http://:8000", "http://"),
        ("http://host:99999", "http://"),
        ("", "http://"),
    ],
)
def test_an_address_that_is_none_is_refused_with_the_way_out(address: str, way_out: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        AgentLightningClient(address)
    assert way_out in str(refused.value)

    with pytest.raises(ConfigurationError) as refused:
        TrainerLegacy().init(address)
    assert way_out in str(refused.value)
