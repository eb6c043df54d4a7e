"""Whole trainings of agents that know nothing of us: they ask a model of their own, and the rollout's answers."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.errors import TrainingError
from agentlightning.litagent import FunctionalLitAgent
from agentlightning.types.resources import AttemptKey, read_attempt_key
from tests.e2e.server_process import free_port, left_behind
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running

SECRET = "agl-proxy-0123456789"
TASKS = [f"question number {number:03d}" for number in range(8)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


@pytest.fixture
def original() -> Iterator[StubModel]:
    with running(models=("gpt-4.1-nano",)) as served:
        yield served


@pytest.fixture
def proxy() -> Iterator[StubModel]:
    with running(
        is_proxy=True, script=Script(lambda request: f"I heard: {request.text}"), models=("trained",)
    ) as served:
        yield served


def asking(url: str) -> Any:
    """A function that uses OpenAI's SDK as its documentation shows, with a client that all its calls share."""
    client = openai.OpenAI(api_key="x", base_url=url, max_retries=0)

    def agent(task: str) -> float:
        messages: Any = [{"role": "user", "content": task}]
        reply = client.chat.completions.create(model="gpt-4.1-nano", messages=messages)
        return float(f"I heard: {task}" == reply.choices[0].message.content)

    return agent, client


def resources(proxy: StubModel) -> dict[str, Any]:
    llm = agl.ProxyLLM(endpoint=proxy.url, model="trained", api_key=SECRET, sampling_parameters={"temperature": 0.5})
    return {"main_llm": llm}


def check(store: agl.LightningStore, proxy: StubModel, original: StubModel) -> None:
    """Each task was done once, by the proxy's model, under its own rollout and attempt."""
    asyncio.run(check_rollouts(store, proxy))
    assert original.requests == []
    assert sorted(request.text for request in proxy.requests) == TASKS
    for request in proxy.requests:
        key = request.headers["authorization"].removeprefix("Bearer ")
        assert read_attempt_key(SECRET, key) == AttemptKey(*request.attempt)
        assert request.body["temperature"] == 0.5


async def check_rollouts(store: agl.LightningStore, proxy: StubModel) -> None:
    requests = {request.text: request for request in proxy.requests}
    rollouts = await store.query_rollouts()
    assert sorted(str(rollout.input) for rollout in rollouts) == TASKS
    for rollout in rollouts:
        spans = list(await store.query_spans(rollout.rollout_id))
        (call,) = [span for span in spans if span.name == "openai.chat.completion"]
        request = requests[str(rollout.input)]
        assert (rollout.status, agl.find_final_reward(spans)) == ("succeeded", 1.0)
        assert request.attempt == (rollout.rollout_id, call.attempt_id)
        assert request.headers["traceparent"].startswith(f"00-{call.trace_id}-{call.span_id}-")
        assert call.attributes["agentlightning.requested_model"] == "gpt-4.1-nano"
        assert call.attributes["gen_ai.request.model"] == "trained"


def test_a_function_that_only_knows_openai_is_trained_as_it_stands(original: StubModel, proxy: StubModel) -> None:
    agent, client = asking(original.openai_url)
    trainer = agl.Trainer(
        algorithm=agl.Baseline(max_queue_length=16),
        strategy=agl.SharedMemoryExecutionStrategy(n_runners=2, main_thread="algorithm"),
        runner={"max_concurrency": 8},
        initial_resources=resources(proxy),
        progress="off",
    )

    with client:
        trainer.fit(FunctionalLitAgent(agent), TASKS)

    check(trainer.store, proxy, original)


def test_dev_redirects_too(original: StubModel, proxy: StubModel) -> None:
    agent, client = asking(original.openai_url)
    trainer = agl.Trainer(initial_resources=resources(proxy), strategy="shm", progress="off")

    with client:
        trainer.dev(FunctionalLitAgent(agent), TASKS)

    check(trainer.store, proxy, original)


class Asking(agl.LitAgent[str]):
    """Ignores its resources; makes its client where it runs."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    async def rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        async with openai.AsyncOpenAI(api_key="x", base_url=self.url, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": task}]
            reply = await client.chat.completions.create(model="gpt-4.1-nano", messages=messages)
        return float(f"I heard: {task}" == reply.choices[0].message.content)


def test_runners_in_processes_redirect_too(original: StubModel, proxy: StubModel) -> None:
    trainer = agl.Trainer(
        algorithm=agl.Baseline(max_queue_length=16),
        strategy=agl.ClientServerExecutionStrategy(n_runners=2, server_port=free_port()),
        runner={"max_concurrency": 4},
        initial_resources=resources(proxy),
        progress="off",
    )

    trainer.fit(Asking(original.openai_url), TASKS)

    check(trainer.store, proxy, original)


def test_a_proxy_that_does_not_answer_fails_the_rollouts_and_the_original_is_not_asked(original: StubModel) -> None:
    agent, client = asking(original.openai_url)
    trainer = agl.Trainer(
        algorithm=agl.Baseline(),
        strategy="shm",
        initial_resources={"llm": agl.ProxyLLM(endpoint="http://127.0.0.1:9", model="trained")},
        progress="off",
    )

    with client, pytest.raises(TrainingError, match="2 of 2 rollouts failed with APIConnectionError"):
        trainer.fit(FunctionalLitAgent(agent), TASKS[:2])

    assert {rollout.status for rollout in asyncio.run(trainer.store.query_rollouts())} == {"failed"}
    assert original.requests == []
