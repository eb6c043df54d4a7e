"""Resources of one agent among several."""

from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.types import LLM, NamedResources, PromptTemplate, ProxyLLM, Rollout
from agentlightning.types.resources import check_agent_name, pinned_id, resources_for


def prompt(text: str) -> PromptTemplate:
    return PromptTemplate(template=text, engine="f-string")


def model(endpoint: str = "http://large/v1", name: str = "large", **fields: Any) -> LLM:
    return LLM(endpoint=endpoint, model=name, **fields)


def rollout(metadata: dict[str, Any] | None) -> Rollout:
    return Rollout(rollout_id="ro-1", input="task", start_time=0, metadata=metadata)


def test_an_agent_sees_its_own_before_the_defaults_and_nothing_of_others() -> None:
    resources: NamedResources = {
        "prompt": prompt("for all"),
        "system": prompt("default"),
        "writer/prompt": prompt("for the writer"),
        "critic/prompt": prompt("for the critic"),
        "writer/extra": prompt("more"),
    }

    seen = {name: resource.template for name, resource in resources_for("writer", resources).items()}  # type: ignore[union-attr]

    assert list(seen.items()) == [("prompt", "for the writer"), ("extra", "more"), ("system", "default")]


def test_an_agent_without_a_name_sees_the_defaults_alone() -> None:
    resources: NamedResources = {"writer/llm": model(), "prompt": prompt("for all")}
    assert list(resources_for(None, resources)) == list(resources_for("critic", resources)) == ["prompt"]


def test_scopes_nest() -> None:
    resources: NamedResources = {"team/writer/llm": model(), "team/llm": model("http://team")}
    of_team = resources_for("team", resources)
    assert list(of_team) == ["writer/llm", "llm"]
    assert resources_for("writer", of_team)["llm"] == model()


def test_sampling_parameters_are_laid_over_those_of_the_default() -> None:
    resources: NamedResources = {
        "llm": model(sampling_parameters={"temperature": 1.0, "top_p": 0.9}),
        "writer/llm": model("http://small", "small", sampling_parameters={"temperature": 0.2}),
    }

    own = resources_for("writer", resources)["llm"]

    expected = model("http://small", "small", sampling_parameters={"temperature": 0.2, "top_p": 0.9})
    assert own == expected
    assert resources["llm"] == model(sampling_parameters={"temperature": 1.0, "top_p": 0.9})  # as it was


def test_what_an_own_model_leaves_open_is_the_defaults() -> None:
    default = ProxyLLM(endpoint="http://proxy/v1", model="large", api_key="sk-1", sampling_parameters={"n": 1})
    resources: NamedResources = {"llm": default, "critic/llm": model("", "", sampling_parameters={"temperature": 0})}

    own = resources_for("critic", resources)["llm"]

    assert own == ProxyLLM(
        endpoint="http://proxy/v1", model="large", api_key="sk-1", sampling_parameters={"n": 1, "temperature": 0}
    )
    assert isinstance(own, ProxyLLM)
    assert own.get_base_url("R", "A") == "http://proxy/rollout/R/attempt/A/v1"


def test_the_key_of_the_default_is_not_sent_to_another_endpoint() -> None:
    resources: NamedResources = {"llm": model(api_key="sk-1"), "critic/llm": model("http://elsewhere", "")}
    own = resources_for("critic", resources)["llm"]
    assert own == LLM(endpoint="http://elsewhere", model="large", api_key=None)


def test_an_open_model_without_a_default_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="The LLM 'critic/llm' leaves its endpoint or its model to the default"
    ):
        resources_for("critic", {"critic/llm": model("")})


@pytest.mark.parametrize("pins", ["rs-1", ["critic"], {"critic": 3}])
def test_pins_of_another_shape_are_refused(pins: Any) -> None:
    with pytest.raises(ConfigurationError, match="must give ids of resources by names of agents"):
        pinned_id("critic", rollout({"pinned_resources": pins}))


@pytest.mark.parametrize("name", ["", "a/b"])
def test_names_that_are_no_scopes_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="An agent cannot be called"):
        check_agent_name(name)
