"""Agents of any framework are recorded, sent to the model that is trained, and learned from, as they stand."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.litagent import FunctionalLitAgent
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running


class Role(str, Enum):
    """As smolagents has them."""

    SYSTEM = "system"
    USER = "user"


@pytest.fixture
def trained() -> Iterator[StubModel]:
    """The model that is trained, served as vLLM serves one."""
    with running(Script(lambda request: f"I heard: {request.text}"), models=("trained",)) as served:
        yield served


@pytest.fixture
def original() -> Iterator[StubModel]:
    """The provider that the agent calls when it is not trained."""
    with running(models=("gpt-4.1-nano", "claude-sonnet-4-5", "judge")) as served:
        yield served


def spans_of(agent: Callable[[Any], Any], trained: StubModel, **llm: Any) -> Sequence[agl.Span]:
    """Run an agent once, with its calls redirected to the trained model; the spans that the store has afterwards."""
    entry = {"model": "hosted_vllm/trained", "api_base": trained.openai_url}
    store = agl.InMemoryLightningStore()
    proxy = agl.LLMProxy(port=0, model_list=[{"model_name": "trained", "litellm_params": entry}], store=store)
    proxy.start()
    runner = agl.LitAgentRunner[Any](agl.OtelTracer())
    try:
        with runner.run_context(agent=FunctionalLitAgent(agent), store=store):
            resource = proxy.as_resource().model_copy(update=llm)
            rollout = asyncio.run(runner.step("Hello there", resources={"main_llm": resource}))
        assert proxy.flush(10.0)
    finally:
        proxy.stop()
    return asyncio.run(store.query_spans(rollout.rollout_id))


def client_of(server: StubModel) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.openai_url, api_key="sk-mine", max_retries=0)


def test_roles_that_are_members_of_an_enum_are_read_as_messages(trained: StubModel, original: StubModel) -> None:
    def agent(task: str) -> float:
        parts = [{"type": "text", "text": task}]
        messages: Any = [{"role": Role.SYSTEM, "content": "Be brief."}, {"role": Role.USER, "content": parts}]
        with client_of(original) as client:
            client.chat.completions.create(model="gpt-4.1-nano", messages=messages)
        return 1.0

    (conversation,) = agl.TraceToMessages().adapt(spans_of(agent, trained))

    assert [message["role"] for message in conversation["messages"]] == ["system", "user", "assistant"]
