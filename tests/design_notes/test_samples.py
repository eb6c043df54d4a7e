"""The notes' own samples, as nearly unchanged as Python allows; names that they leave open are defined here."""

import asyncio
import json
import logging
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning import (
    LLM,
    AgentLightningClient,
    AgentLightningServer,
    Baseline,
    InMemoryLightningStore,
    LitAgentRunner,
    OtelTracer,
    PromptTemplate,
    ResourcesUpdate,
    Rollout,
    RolloutLegacy,
    SqliteLightningStore,
    Task,
    Triplet,
)
from agentlightning.cli.agentops_server import DEFAULT_PORT as AGENTOPS_PORT
from agentlightning.cli.store import DEFAULT_PORT as STORE_PORT
from agentlightning.litagent.decorator import llm_rollout
from agentlightning.store import LightningStoreServer, export_store, import_store
from tests.legacy.conftest import ServerInThread, connect, serve, served, stopping
from tests.stub_model.server import StubModel

__all__ = ["connect", "serve", "served", "stopping"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Connect = Callable[..., AgentLightningClient]


@pytest.mark.claim(21)
def test_a_task() -> None:
    task = Task(
        rollout_id="rollout-123",
        input={"question": "What is 2 + 2?", "context": "math"},
        mode="train",
        resources_id="resources-456",
        create_time=time.time(),
        metadata={"source": "training_dataset"},
    )

    assert Task.model_validate_json(task.model_dump_json()) == task


@pytest.mark.claim(44)
def test_resources() -> None:
    llm_resource = LLM(
        endpoint="http://localhost:8000/v1",
        model="gpt-4o",
        api_key="your-api-key",
        sampling_parameters={"temperature": 0.7, "max_tokens": 1000},
    )
    prompt_resource = PromptTemplate(template="Answer the question: {{question}}", engine="jinja")
    resources_update = ResourcesUpdate(
        resources_id="resources-456", resources={"main_llm": llm_resource, "system_prompt": prompt_resource}
    )

    assert prompt_resource.format(question="why?") == "Answer the question: why?"
    assert set(resources_update.resources) == {"main_llm", "system_prompt"}


@pytest.mark.claim(56)
def test_a_result() -> None:
    triplet = Triplet(
        prompt="What is 2 + 2?", response="4", reward=1.0, metadata={"confidence": 0.95, "tokens_used": 10}
    )
    rollout = RolloutLegacy(
        rollout_id="rollout-123",
        final_reward=1.0,
        triplets=[triplet],
        trace=[{"name": "llm_call", "attributes": {"model": "gpt-4o"}}],
        logs=["Processing started", "LLM response received"],
        metadata={"duration": 1.5},
    )

    assert RolloutLegacy.model_validate_json(rollout.model_dump_json()) == rollout


@pytest.mark.claim(91)
@pytest.mark.parametrize("has_resources", [True, False], ids=["resources", "no resources"])
def test_the_client(served: ServerInThread, connect: Connect, has_resources: bool) -> None:
    resources_id = None
    if has_resources:
        prompt = PromptTemplate(template="{q}", engine="f-string")
        resources_id = served.run(served.server.update_resources({"prompt": prompt}))
    rollout_id = served.run(served.server.queue_task({"q": 1}, resources_id=resources_id))
    client = connect(served.endpoint)

    task = client.poll_next_task()
    if task:
        resources = client.get_resources_by_id(task.resources_id)
        result = RolloutLegacy(
            rollout_id=task.rollout_id, final_reward=1.0 if bool(resources) == has_resources else 0.0
        )
        client.post_rollout(result)

    posted = served.run(served.server.get_completed_rollout(rollout_id))
    assert posted.final_reward == 1.0


@pytest.mark.claim(59, 482)
@pytest.mark.parametrize("result_kind", ["number", "text"])
def test_a_polled_task_is_run_by_a_decorated_agent_and_posted(
    served: ServerInThread, connect: Connect, result_kind: str
) -> None:
    @llm_rollout
    def simple_agent(task: Any, llm: LLM) -> Any:
        return 0.5 if result_kind == "number" else f"{llm.model}: {task.input}"

    llm = LLM(endpoint="http://localhost:9/v1", model="m")
    resources_id = served.run(served.server.update_resources({"main_llm": llm}))
    rollout_id = served.run(served.server.queue_task("hello", resources_id=resources_id))
    client: Any = connect(served.endpoint)

    task = client.poll_next_task()
    resources = client.get_resources_by_id(task.resources_id)
    rollout = Rollout(rollout_id=task.rollout_id, input=task.input, start_time=time.time())
    result = simple_agent.rollout(task, resources, rollout)
    client.post_rollout(result)

    posted = served.run(served.server.get_completed_rollout(rollout_id))
    assert posted is not None
    assert posted.final_reward == (0.5 if result_kind == "number" else None)
    stored = served.run(served.server.store.get_rollout_by_id(rollout_id))
    assert (stored.status, stored.output) == ("succeeded", None if result_kind == "number" else "m: hello")


@pytest.mark.claim(98, 301)
async def test_data_move_from_the_old_to_the_new(tmp_path: Path) -> None:
    old = InMemoryLightningStore()
    server = AgentLightningServer(port=0, store=old)
    await server.start()
    queued = await server.queue_task("task")
    await server.stop()
    export_store_to = tmp_path / "data.jsonl"

    await export_store(old, export_store_to)
    new = SqliteLightningStore(tmp_path / "new.db")
    await import_store(new, export_store_to)

    moved = await new.get_rollout_by_id(queued)
    counts = await new.statistics()
    assert moved is not None
    assert moved.input == "task"
    assert counts["total_rollouts"] == 1
    await new.close()


@pytest.mark.claim(481)
async def test_a_served_store_is_used_from_python() -> None:
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
    await server.start()

    def agent(task: int) -> float:
        return float(task)

    trainer = agl.Trainer(store=server.endpoint, algorithm=Baseline(), n_runners=2, progress="off")
    await asyncio.to_thread(trainer.fit, agent, [1, 2])

    done = await server.query_rollouts()
    assert [one.status for one in done] == ["succeeded", "succeeded"]
    await server.stop()


@pytest.mark.claim(458, 462)
def test_the_default_ports_are_those_of_the_notes() -> None:
    assert (STORE_PORT, AGENTOPS_PORT) == (4747, 8002)


@pytest.mark.claim(265)
def test_debug_shows_a_round(served: ServerInThread, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "agentlightning"):
        rollout_id = served.run(served.server.queue_task("task"))
        client = connect(served.endpoint)
        task = client.poll_next_task()
        assert task is not None
        client.post_rollout(RolloutLegacy(rollout_id=rollout_id))

    assert sum(rollout_id in record.getMessage() for record in caplog.records) >= 3


@pytest.mark.claim(501)
def test_a_task_that_cannot_be_serialised_is_refused(served: ServerInThread) -> None:
    with pytest.raises((TypeError, ValueError)):
        served.run(served.server.queue_task(threading.Lock()))


@pytest.mark.claim(507)
async def test_resources_that_are_written_again_reach_the_next_rollout() -> None:
    store, seen = InMemoryLightningStore(), []

    @agl.rollout
    def agent(task: int, prompt_template: PromptTemplate) -> float:
        seen.append(prompt_template.template)
        return 1.0

    for word in ("one", "two"):
        await store.update_resources("default", {"p": PromptTemplate(template=word, engine="f-string")})
        await store.enqueue_rollout(1)
        runner = LitAgentRunner[int](OtelTracer(), max_rollouts=1)
        with runner.run_context(agent=agent, store=store):
            await runner.iter()

    assert seen == ["one", "two"]


@pytest.mark.claim(510)
async def test_a_checkpoint_is_published_as_the_name_of_a_model() -> None:
    store = InMemoryLightningStore()

    await store.add_resources({"llm": LLM(endpoint="http://localhost:1/v1", model="checkpoints/step-3")})

    latest = await store.get_latest_resources()
    assert latest is not None
    assert json.loads(latest.model_dump_json())["resources"]["llm"]["model"] == "checkpoints/step-3"


@pytest.mark.claim(299)
async def test_tracing_adds_little_to_a_model_call(stub_model: StubModel) -> None:
    """Seconds of the processor, with and without a tracer in turns; the median of the ratios counts, about 1.2."""
    client = openai.OpenAI(base_url=f"{stub_model.url}/v1", api_key="none")
    store, tracer = InMemoryLightningStore(), OtelTracer()
    started = await store.start_rollout("task")
    place = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
    ratios = []

    def call() -> None:
        for _ in range(5):
            client.chat.completions.create(model="stub-model", messages=[{"role": "user", "content": "hello"}])

    for _ in range(20):
        began = time.process_time()
        call()
        plain = time.process_time() - began
        with tracer.lifespan(store):
            began = time.process_time()
            async with tracer.trace_context("trace", store=store, **place):
                call()
            ratios.append((time.process_time() - began) / plain)
    client.close()

    assert len(await store.query_spans(started.rollout_id)) == 100
    assert statistics.median(ratios) < 1.75
