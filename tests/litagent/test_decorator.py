"""Functions as agents: what they are handed, and what is said of those that do not fit."""

import asyncio
import inspect
import logging
import pickle
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.litagent import LitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.decorator import (
    FunctionalLitAgent,
    _validate_llm_rollout_func,
    _validate_prompt_rollout_func,
)
from agentlightning.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    ResourcesUpdate,
    Rollout,
)

MODEL = LLM(endpoint="http://model/v1", model="m")
OTHER = LLM(endpoint="http://other/v1", model="o")
PROXY = ProxyLLM(endpoint="http://proxy", model="p")
PROMPT = PromptTemplate(template="Do it.", engine="f-string")
PLAIN = Rollout(rollout_id="ro-1", input="task", start_time=0.0)
ATTEMPTED = AttemptedRollout(
    rollout_id="ro-1",
    input="task",
    start_time=0.0,
    attempt=Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0),
)


@rollout
def at_the_top(task: str, llm: LLM) -> float:
    """Found by its address."""
    return 0.5


def calling(agent: FunctionalLitAgent[Any], resources: Any, of: Rollout = PLAIN) -> Any:
    return agent.rollout("task", resources, of)


# ---------------------------------------------------------------------- what a function is handed


def test_all_that_is_declared_is_handed_in() -> None:
    @rollout
    def agent(task: str, prompt_template: PromptTemplate, llm: LLM, rollout: Rollout) -> Any:
        return prompt_template, llm, rollout

    assert calling(agent, {"main": MODEL, "prompt": PROMPT}) == (PROMPT, MODEL, PLAIN)


def test_parameters_may_be_keyword_only_and_have_defaults() -> None:
    @rollout
    def agent(task: str, *, llm: LLM, depth: int = 3) -> Any:
        return llm, depth

    assert calling(agent, {"main": MODEL}) == (MODEL, 3)


def test_a_coroutine_function_is_awaited() -> None:
    @rollout
    async def agent(task: str, llm: LLM) -> float:
        return 0.5

    assert agent.is_async()
    assert asyncio.run(agent.rollout_async("task", {"main": MODEL}, PLAIN)) == 0.5


def test_the_wrong_way_of_calling_is_told() -> None:
    @rollout
    async def later(task: str, llm: LLM) -> float:
        return 0.5

    with pytest.raises(RuntimeError, match="later is a coroutine function; call rollout_async"):
        later.rollout("task", {"main": MODEL}, PLAIN)
    with pytest.raises(RuntimeError, match="at_the_top is not a coroutine function; call rollout"):
        asyncio.run(at_the_top.rollout_async("task", {"main": MODEL}, PLAIN))


def test_what_get_resources_returned_will_do() -> None:
    update = ResourcesUpdate(resources_id="rs-1", resources={"main": MODEL})
    assert calling(at_the_top, update) == 0.5


def test_resources_that_are_missing_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"at_the_top asks for llm, a resource of type LLM.*'prompt'.*initial_resources"
    ):
        calling(at_the_top, {"prompt": PROMPT})
    with pytest.raises(ValueError, match="no resources at all"):
        calling(at_the_top, {})


def test_of_several_the_first_is_used_and_named(caplog: pytest.LogCaptureFixture) -> None:
    @rollout
    def agent(task: str, llm: LLM) -> Any:
        return llm

    with caplog.at_level(logging.WARNING):
        assert calling(agent, {"first": MODEL, "second": OTHER}) == MODEL
    assert "gets the LLM 'first'" in caplog.text
    assert "second" in caplog.text


# ---------------------------------------------------------------------- proxies


def test_a_proxy_becomes_a_plain_llm_of_the_attempt() -> None:
    @llm_rollout
    def agent(task: str, llm: LLM) -> Any:
        return llm

    llm = calling(agent, {"main": PROXY}, ATTEMPTED)

    assert type(llm) is LLM
    assert llm.endpoint == "http://proxy/rollout/ro-1/attempt/at-1"


def test_a_proxy_needs_an_attempt() -> None:
    with pytest.raises(ValueError, match="names the attempt"):
        calling(at_the_top, {"main": PROXY}, PLAIN)


def test_a_proxy_is_left_as_it_is_on_request() -> None:
    @llm_rollout(strip_proxy=False)
    def agent(task: str, llm: LLM) -> Any:
        return llm

    assert calling(agent, {"main": PROXY}, PLAIN) == PROXY


# ---------------------------------------------------------------------- still a function


@pytest.mark.parametrize("decorate", [llm_rollout, llm_rollout(), llm_rollout(strip_proxy=False), rollout])
def test_decorators_are_used_bare_or_called(decorate: Any) -> None:
    def agent(task: str, llm: LLM) -> float:
        return 0.5

    assert calling(decorate(agent), {"main": MODEL}) == 0.5


def test_an_agent_of_a_module_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(at_the_top)) is at_the_top


def test_an_agent_made_inside_a_function_cannot_be_pickled_and_says_so() -> None:
    @rollout
    def inside(task: str, llm: LLM) -> None: ...

    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.dumps(inside)


# ---------------------------------------------------------------------- functions that do not fit


def no_parameters() -> None: ...


def only_a_task(task: str) -> None: ...


def task_comes_second(llm: LLM, task: str) -> None: ...


def neither(task: str, resources: NamedResources) -> None: ...


def takes_anything(task: str, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_parameters, "must have at least 2 parameters"),
        (only_a_task, "must have at least 2 parameters"),
        (task_comes_second, "must be a positional parameter called 'task'"),
        (neither, "must have a positional parameter called 'llm'"),
        (takes_anything, "must have a positional parameter called 'llm'"),
    ],
)
def test_a_function_that_is_no_llm_agent_is_told_why(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm_rollout(function)
    with pytest.raises(ValueError, match=words):
        _validate_llm_rollout_func(function)


def test_a_function_that_is_no_prompt_agent_is_told_why() -> None:
    with pytest.raises(ValueError, match="must have a positional parameter called 'prompt_template'"):
        prompt_rollout(neither)
    assert _validate_prompt_rollout_func(lambda task, prompt_template: None)


@pytest.mark.parametrize("function", [no_parameters, task_comes_second])
def test_a_function_that_is_no_agent_at_all_is_told(function: Any) -> None:
    with pytest.raises(NotImplementedError, match="does not match any known agent patterns"):
        rollout(function)


def test_all_resources_are_handed_in_by_name() -> None:
    agent = rollout(lambda task, resources: resources)
    given = calling(agent, {"llm": MODEL, "<lambda>/llm": PROXY, "critic/llm": OTHER}, ATTEMPTED)
    assert given == {"llm": PROXY.with_attempted_rollout(ATTEMPTED), "critic/llm": OTHER}


def by_position_alone(task: str, llm: LLM, /) -> None: ...


def by_name_alone(*, task: str, llm: LLM) -> None: ...


@pytest.mark.parametrize("function", [by_position_alone, by_name_alone, no_parameters])
def test_a_function_that_cannot_be_called_is_told_before_it_is(function: Any) -> None:
    name = function.__name__
    words = rf"{name}\(.*\).* cannot be called with its task first.*; write it as {name}\(task\)"
    with pytest.raises(ConfigurationError, match=words):
        FunctionalLitAgent(function).check_parameters()


def test_an_agent_is_still_the_function() -> None:
    assert at_the_top("task", MODEL) == 0.5
    assert (at_the_top.__name__, at_the_top.__doc__) == ("at_the_top", "Found by its address.")
    assert list(inspect.signature(at_the_top).parameters) == ["task", "llm"]
    assert isinstance(at_the_top, LitAgent)
