"""Callbacks that are called with new resources."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.legacy.client import RESOURCES_THREAD
from agentlightning.types import PromptTemplate, ResourcesUpdate

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

PATIENCE_SECONDS = 30.0


def prompt(text: str) -> dict[str, PromptTemplate]:
    return {"prompt": PromptTemplate(template=text, engine="f-string")}


@pytest.fixture
def told() -> "queue.Queue[ResourcesUpdate]":
    return queue.Queue()


def next_of(told: "queue.Queue[ResourcesUpdate]") -> str:
    return told.get(timeout=PATIENCE_SECONDS).resources["prompt"].template  # type: ignore[union-attr] # a prompt


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


@pytest.fixture
def client(served: Any, connect: Any) -> Any:
    return connect(served.endpoint)


def test_present_resources_are_told_first_and_then_every_change(served: Any, client: Any, told: Any) -> None:
    served.run(served.server.update_resources(prompt("one")))

    client.on_resources_update(told.put)

    assert next_of(told) == "one"
    for text in ("two", "three"):
        served.run(served.server.update_resources(prompt(text)))
        assert next_of(told) == text


def test_resources_rewritten_under_their_id_are_a_change(served: Any, client: Any, told: Any) -> None:
    store = served.server.store
    served.run(store.update_resources("mine", prompt("one")))
    client.on_resources_update(told.put)
    assert next_of(told) == "one"

    served.run(store.update_resources("mine", prompt("two")))

    assert next_of(told) == "two"


def test_a_coroutine_function_is_awaited(served: Any, client: Any, told: Any) -> None:
    served.run(served.server.update_resources(prompt("one")))

    async def learn(update: ResourcesUpdate) -> None:
        told.put(update)

    client.on_resources_update(learn)

    assert next_of(told) == "one"


def test_a_failing_callback_is_logged_and_called_again(
    served: Any, client: Any, told: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(update: ResourcesUpdate) -> None:
        told.put(update)
        raise ValueError("not today")

    served.run(served.server.update_resources(prompt("one")))
    client.on_resources_update(fail)
    assert next_of(told) == "one"
    with caplog.at_level(logging.ERROR):
        served.run(served.server.update_resources(prompt("two")))
        assert next_of(told) == "two"

    asyncio.run(asyncio.wait_for(until(lambda: "not today" in caplog.text), PATIENCE_SECONDS))


def test_closing_ends_the_thread(served: Any, client: Any, told: Any) -> None:
    served.run(served.server.update_resources(prompt("one")))
    client.on_resources_update(told.put)
    assert next_of(told) == "one"

    client.close()

    for thread in [one for one in threading.enumerate() if one.name == RESOURCES_THREAD]:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_a_server_that_fails_is_asked_again(canned: Any, connect: Any, told: Any) -> None:
    first = {"resources_id": "a", "resources": {"prompt": prompt("one")["prompt"].model_dump()}}
    second = {"resources_id": "b", "resources": {"prompt": prompt("two")["prompt"].model_dump()}}
    server = canned((500, {}), (200, first), (200, first), (200, second))

    connect(server.endpoint).on_resources_update(told.put)

    assert [next_of(told), next_of(told)] == ["one", "two"]
