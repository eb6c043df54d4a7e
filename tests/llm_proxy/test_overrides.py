"""An entry of the model list may override what callers ask for, for rollouts of certain resources."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import LLM
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running

OVERRIDES = {"train": {"temperature": 1.0, "seed": None}}


@pytest.fixture
def model() -> Iterator[StubModel]:
    with running(Script(lambda request: request.text), models=(MODEL,)) as served:
        yield served


@pytest.fixture
def made(model: StubModel) -> Iterator[Proxied]:
    listed = entry(model.url.removesuffix("/v1"))
    listed["model_info"] = {"overrides": OVERRIDES}
    with proxied(listed) as running_proxy:
        yield running_proxy


def call(made: Proxied, resources_id: str | None, agent: str | None = None) -> None:
    """A call of an attempt with these resources, which asks for a seed and a temperature."""
    rollout = made._loop.run(made.store.start_rollout("task", resources_id=resources_id))
    made_for = made.proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id, MODEL, agent=agent)
    with openai.OpenAI(base_url=f"{made_for.endpoint}/v1", api_key="any", max_retries=0) as client:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], seed=7, temperature=0.2
        )


def publish(made: Proxied, name: str, **resources: Any) -> None:
    made._loop.run(made.store.update_resources(name, {"main_llm": LLM(endpoint="e", model=MODEL), **resources}))


def sampling(model: StubModel) -> list[tuple[Any, Any]]:
    return [(request.body.get("temperature"), request.body.get("seed")) for request in model.requests]


def test_entry_overrides_what_is_asked_for_with_the_resources_it_names(made: Proxied, model: StubModel) -> None:
    for name in ("train", "val"):
        publish(made, name)

    for name in ("train", "val", None):
        call(made, name)

    assert sampling(model) == [(1.0, None), (0.2, 7), (0.2, 7)]


def test_what_resources_give_to_an_agent_comes_before_what_the_entry_overrides(made: Proxied, model: StubModel) -> None:
    critic = LLM(endpoint="e", model=MODEL, sampling_parameters={"temperature": 0.0})
    publish(made, "train", **{"critic/main_llm": critic})

    call(made, "train", agent="critic")

    assert sampling(model) == [(0.0, None)]


def test_each_field_that_is_overridden_is_warned_of_once(made: Proxied, caplog: pytest.LogCaptureFixture) -> None:
    publish(made, "train")

    for _ in range(3):
        call(made, "train")

    assert caplog.text.count(f"Calls of model '{MODEL}' ask for seed=7, which its entry of the model list") == 1
    assert caplog.text.count("ask for temperature=0.2") == 1


@pytest.mark.parametrize("wrong", ["seed", {"train": "seed"}, {"train": {1: 2}}], ids=["text", "inner text", "number"])
def test_overrides_that_are_no_fields_are_refused(wrong: Any) -> None:
    listed = {**entry("http://127.0.0.1:9"), "model_info": {"overrides": wrong}}

    with pytest.raises(ConfigurationError, match="overrides"):
        LLMProxy(0, [listed], InMemoryLightningStore()).start()
