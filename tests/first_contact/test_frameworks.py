"""Agents of any framework are recorded, sent to the model that is trained, and learned from, as they stand."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any

import anthropic
import openai
import pytest

import agentlightning as agl
from agentlightning.errors import TrainingError
from agentlightning.litagent import FunctionalLitAgent, exclude_from_redirect, not_redirected
from tests.stub_model.script import Failure, Script
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
    with running(models=("gpt-4.1-nano", "claude", "judge")) as served:
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


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
def test_an_agent_that_uses_the_responses_api_can_be_trained(
    trained: StubModel, original: StubModel, is_streaming: bool
) -> None:
    def agent(task: str) -> float:
        ask: Any = {"model": "gpt-4.1-nano", "input": task, "instructions": "Be brief."}
        with client_of(original) as client:
            if is_streaming:
                with client.responses.stream(**ask) as stream:
                    reply = stream.get_final_response()
            else:
                reply = client.responses.create(**ask)
        return float(reply.output_text == f"I heard: {task}")

    (triplet,) = agl.TracerTraceToTriplet().adapt(spans_of(agent, trained))

    assert triplet.prompt["token_ids"] == list(trained.requests[0].prompt_token_ids)
    assert (len(triplet.response["token_ids"]), triplet.reward) == (len(triplet.response["logprobs"]), 1.0)
    assert original.requests == []


def test_tokens_are_counted_by_the_proxy_and_not_at_the_original_address(
    trained: StubModel, original: StubModel
) -> None:
    def agent(task: str) -> float:
        messages: Any = [{"role": "user", "content": task}]
        with anthropic.Anthropic(base_url=original.url, api_key="sk-mine", max_retries=0) as client:
            return float(client.messages.count_tokens(model="claude", messages=messages).input_tokens)

    spans = spans_of(agent, trained, sampling_parameters={"temperature": 0.5})

    assert (agl.find_final_reward(spans) or 0) > 0
    assert [span.name for span in spans if "gen_ai" in str(span.attributes)] == []
    assert original.requests == trained.requests == []


def answered(client: openai.OpenAI, model: str, text: str) -> str:
    reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
    return str(reply.choices[0].message.content)


@pytest.mark.parametrize("way", ["model", "client", "block"])
def test_a_judge_that_is_excluded_takes_no_reward_from_the_trained_model(
    trained: StubModel, original: StubModel, way: str
) -> None:
    def agent(task: str) -> float:
        with client_of(original) as client, client_of(original) as judge:
            said = answered(client, "gpt-4.1-nano", task)
            if way == "client":
                exclude_from_redirect(judge)
            with not_redirected() if way == "block" else nullcontext():
                answered(judge, "judge", said)
        return 1.0

    exclude = ["judge"] if way == "model" else []
    spans = spans_of(agent, trained, redirect_exclude=exclude)

    (triplet,) = agl.TracerTraceToTriplet().adapt(spans)
    assert (bool(triplet.response["token_ids"]), triplet.reward) == (True, 1.0)
    assert "excluded" in [call.reason.value for call in agl.TraceToTrajectory().adapt(spans).dropped]
    assert [request.body["model"] for request in original.requests] == ["judge"]


def test_a_call_that_failed_is_no_triplet_and_no_conversation(trained: StubModel, original: StubModel) -> None:
    def agent(task: str) -> float:
        with client_of(original) as client:
            said = answered(client, "gpt-4.1-nano", task)
            trained.script = Script([Failure(400, "too long")])
            with pytest.raises(openai.BadRequestError):
                answered(client, "gpt-4.1-nano", said)
        return 1.0

    spans = spans_of(agent, trained)

    (triplet,) = agl.TracerTraceToTriplet().adapt(spans)
    assert (bool(triplet.response["token_ids"]), triplet.reward) == (True, 1.0)
    (conversation,) = agl.TraceToMessages().adapt(spans)
    assert conversation["messages"][-1]["role"] == "assistant"


def test_responses_and_messages_are_triplets_without_a_proxy(original: StubModel) -> None:
    def agent(task: str) -> float:
        with client_of(original) as client:
            client.responses.create(model="gpt-4.1-nano", input=task)
        with anthropic.Anthropic(base_url=original.url, api_key="sk-mine", max_retries=0) as claude:
            messages: Any = [{"role": "user", "content": task}]
            claude.messages.create(model="claude", max_tokens=9, messages=messages)
        return 1.0

    runner, store = agl.LitAgentRunner[Any](agl.OtelTracer()), agl.InMemoryLightningStore()
    with runner.run_context(agent=FunctionalLitAgent(agent), store=store):
        rollout = asyncio.run(runner.step("Hello there", resources={}))
    triplets = agl.TracerTraceToTriplet().adapt(asyncio.run(store.query_spans(rollout.rollout_id)))

    assert [triplet.reward for triplet in triplets] == [None, 1.0]
    assert [triplet.response["raw_content"][0]["content"] for triplet in triplets] == ["Hello there", "Hello there"]


def test_a_training_whose_calls_bring_no_token_ids_stops_at_its_first_step(original: StubModel) -> None:
    asked: list[str] = []

    def agent(task: str) -> float:
        asked.append(task)
        with not_redirected(), client_of(original) as client:
            client.responses.create(model="gpt-4.1-nano", input=task)
        return float(len(asked) % 2)

    pytest.importorskip("torch")
    algorithm = agl.GRPO(model="tiny", group_size=2, tasks_per_step=1, steps=9)
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", progress="off")

    with pytest.raises(TrainingError, match=r"None of the 2 model calls brought the token ids .* 'openai.responses'"):
        trainer.fit(FunctionalLitAgent(agent), ["Hello"])

    assert asked == ["Hello", "Hello"]
