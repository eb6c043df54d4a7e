"""Agents of the v0.1 protocol call a locked proxy with the key of their attempt, and never see its secret."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.server import AgentLightningServer
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.types import LLM
from tests.llm_proxy.accounts import ask, calls, serving
from tests.stub_model.server import StubModel

pytestmark = pytest.mark.filterwarnings("ignore:AgentLightning:DeprecationWarning")
SECRET, TOKEN = "agl-proxy-of-nobody-else", "master"


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@pytest.fixture
def proxy(model: StubModel, store: InMemoryLightningStore) -> Iterator[LLMProxy]:
    with serving(model, store, api_key=SECRET) as served:
        yield served


@pytest.mark.parametrize("names_resources", [True, False], ids=["of the task", "the latest"])
async def test_a_task_brings_the_key_of_its_attempt_and_no_secret(
    proxy: LLMProxy, store: InMemoryLightningStore, names_resources: bool
) -> None:
    server = AgentLightningServer(port=0, store=store, token=TOKEN)
    await server.start()
    resources_id = await server.update_resources({"main_llm": proxy.as_resource()})
    await server.queue_task("q", resources_id=resources_id if names_resources else None)
    token = sign_token(TOKEN, Scope("runner"), expires_at=None)

    def work() -> Any:
        client = AgentLightningClient(server.endpoint, token=token)
        task = client.poll_next_task(timeout=5)
        assert task is not None
        update = client.get_resources_by_id(task.resources_id)
        assert update is not None
        llm = update.resources["main_llm"]
        assert isinstance(llm, LLM)
        answer = ask(llm.endpoint, headers={"authorization": f"Bearer {llm.api_key}"})
        client.post_rollout({"rollout_id": task.rollout_id, "final_reward": 1.0})
        read = {"headers": {"Authorization": f"Bearer {token}"}, "timeout": 10}
        paths = ["latest", resources_id, task.resources_id, f"{resources_id}@attempt@nobody@at-1"]
        texts = [requests.get(f"{server.endpoint}/resources/{path}", **read).text for path in paths]  # type: ignore[arg-type]
        return task.rollout_id, answer.status_code, texts

    rollout_id, status, texts = await asyncio.to_thread(work)
    await asyncio.to_thread(proxy.flush)

    assert (status, [SECRET in text for text in texts]) == (200, [False] * 4)
    assert "not found" in texts[3]
    rollout: Any = await store.get_rollout_by_id(rollout_id)
    assert (rollout.status, rollout.reward, len(await calls(store, rollout))) == ("succeeded", 1.0, 1)
    await server.stop()


async def test_the_master_token_still_sees_everything(proxy: LLMProxy, store: InMemoryLightningStore) -> None:
    server = AgentLightningServer(port=0, store=store, token=TOKEN)
    await server.start()
    resources_id = await server.update_resources({"main_llm": proxy.as_resource()})
    await server.queue_task("q", resources_id=resources_id)

    def work() -> Any:
        client = AgentLightningClient(server.endpoint, token=TOKEN)
        task, update = client.poll_next_task(timeout=5), client.get_latest_resources()
        assert task is not None
        return task.resources_id, update

    named, update = await asyncio.to_thread(work)
    assert (named, update.resources["main_llm"].api_key) == (resources_id, SECRET)
    await server.stop()
