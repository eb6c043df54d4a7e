"""Runners with a runner's token and a proxy that is locked: agents of every kind call it, and none sees its secret."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.litagent.command import CommandAgent
from agentlightning.litagent.invocation import AgentRouter, Route
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.tracer import OtelTracer
from tests.e2e.server_process import left_behind
from tests.llm_proxy.accounts import MODEL, calls, serving
from tests.stub_model.server import StubModel, running

MASTER = "the-master-token-of-this-server"
KEY = "the-key-of-the-proxy"
PATIENCE_SECONDS = 60.0
PROGRAM = """
import json, os, sys, urllib.request
asked = {"model": os.environ["AGL_MODEL"], "messages": [{"role": "user", "content": json.load(sys.stdin)}]}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/v1/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), headers)) as answer:
    json.load(answer)
assert "the-key-" + "of-the-proxy" not in json.dumps(dict(os.environ)), "the secret is here"
print(1)
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


@pytest.fixture
def model() -> Iterator[StubModel]:
    with running() as served:
        yield served


@pytest.fixture
async def server() -> AsyncIterator[agl.LightningStoreServer]:
    started = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", 0, token=MASTER)
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
def proxy(model: StubModel, server: agl.LightningStoreServer) -> Iterator[agl.LLMProxy]:
    with serving(model, server, api_key=KEY) as served:
        yield served


@pytest.fixture
async def store(server: agl.LightningStoreServer) -> AsyncIterator[agl.LightningStoreClient]:
    """The server as a runner sees it."""
    client = agl.LightningStoreClient(server.endpoint, token=sign_token(MASTER, Scope("runner"), expires_at=None))
    yield client
    await client.close()


async def ask(llm: agl.LLM, task: str) -> float:
    async with openai.AsyncOpenAI(api_key=llm.api_key, base_url=llm.endpoint, max_retries=0) as client:
        await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return 1.0


@agl.rollout
async def function(task: str, llm: agl.LLM) -> float:
    return await ask(llm, task)


@agl.rollout
async def redirected(task: str, llm: agl.LLM) -> float:
    own = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="gpt", api_key="sk-own")
    return await ask(own, task)


class Bound(agl.LitAgent[str]):
    """Binds its model to its attempt itself."""

    async def rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        assert KEY not in str({name: vars(resource) for name, resource in resources.items()})
        return await ask(resources["main_llm"].with_attempted_rollout(rollout), task)


def runner_of(count: int) -> agl.LitAgentRunner[Any]:
    return agl.LitAgentRunner(OtelTracer(instrument=False), max_rollouts=count, heartbeat_interval=0)


@pytest.mark.parametrize(
    "agent",
    [
        function,
        redirected,
        Bound(),
        CommandAgent([sys.executable, "-c", PROGRAM], inherit_env=False),
        AgentRouter([Route("pinned", function, lambda task: True, resources_id="mine")]),
    ],
    ids=["function", "redirected", "bound", "program", "pinned"],
)
async def test_agents_call_a_locked_proxy_with_the_keys_of_their_attempts(
    server: agl.LightningStoreServer, store: Any, proxy: agl.LLMProxy, agent: Any
) -> None:
    await server.update_resources("mine", {"main_llm": proxy.as_resource(model=MODEL)})
    rollouts = [await server.enqueue_rollout(f"task {number}") for number in range(3)]
    runner = runner_of(3)

    with runner.run_context(agent=agent, store=store):
        await asyncio.wait_for(runner.iter(), PATIENCE_SECONDS)

    for rollout in rollouts:
        done = await server.get_rollout_by_id(rollout.rollout_id)
        assert isinstance(done, agl.AttemptedRollout)
        assert done.status == "succeeded", done.attempt.metadata
        assert "lost_calls" not in (done.attempt.metadata or {})
        assert len(await calls(server, done)) == 1
    written = json.dumps([s.model_dump(mode="json") for r in rollouts for s in await server.query_spans(r.rollout_id)])
    assert KEY not in written
    assert "agl1." not in written


async def test_an_attempt_without_its_keys_fails_and_says_what_to_do(
    server: agl.LightningStoreServer, store: Any, proxy: agl.LLMProxy, model: StubModel
) -> None:
    await server.add_resources({"main_llm": proxy.as_resource(model=MODEL)})
    runner = runner_of(1)

    with (
        runner.run_context(agent=function, store=store),
        pytest.raises(agl.errors.ConfigurationError, match="give the runner the store's master token"),
    ):
        await runner.step("task")

    assert model.requests == []
