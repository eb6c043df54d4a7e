"""Which method of an agent is called, and with what."""

import asyncio
from typing import Any

import pytest

from agentlightning.errors import RolloutFailed
from agentlightning.legacy.runner import call_on_loop, call_plainly, rollout_method
from agentlightning.litagent import LitAgent, llm_rollout, rollout
from agentlightning.types import LLM, PromptTemplate, RolloutMode, Task

RESOURCES = {"prompt": PromptTemplate(template="{name}", engine="f-string"), "llm": LLM(endpoint="e", model="m")}
TASK = Task(rollout_id="rollout-1", input="hello", mode="train")


def defining(*names: str) -> LitAgent[Any]:
    """An agent with these methods, plain or coroutines as their names say."""

    async def a_coroutine(self: Any, task: Any, resources: Any, rollout: Any) -> None: ...

    def a_function(self: Any, task: Any, resources: Any, rollout: Any) -> None: ...

    methods = {name: a_coroutine if name.endswith("_async") else a_function for name in names}
    agent: LitAgent[Any] = type("Agent", (LitAgent,), methods)()
    return agent


def call(manner: str, agent: LitAgent[Any], task: Task = TASK) -> Any:
    return (
        call_plainly(agent, task, RESOURCES)
        if manner == "plainly"
        else asyncio.run(call_on_loop(agent, task, RESOURCES))
    )


both_manners = pytest.mark.parametrize("manner", ["plainly", "on a loop"])


@pytest.mark.parametrize(
    ("names", "mode", "prefers_async", "chosen"),
    [
        (["training_rollout", "validation_rollout"], "train", False, "training_rollout"),
        (["training_rollout", "validation_rollout"], "val", False, "validation_rollout"),
        (["training_rollout", "validation_rollout"], None, False, "validation_rollout"),
        (["rollout", "training_rollout"], "test", False, "rollout"),
        (["training_rollout"], "val", False, "training_rollout"),
        (["rollout", "rollout_async"], "train", False, "rollout"),
        (["rollout", "rollout_async"], "train", True, "rollout_async"),
        (["training_rollout_async"], "val", False, "training_rollout_async"),
    ],
)
def test_the_most_fitting_method_is_chosen(
    names: list[str], mode: RolloutMode | None, prefers_async: bool, chosen: str
) -> None:
    agent = defining(*names)

    assert rollout_method(agent, mode, prefers_async=prefers_async) == getattr(agent, chosen)


@both_manners
def test_decorated_functions_are_agents_too(manner: str) -> None:
    @rollout
    def plain(task: str, prompt_template: PromptTemplate) -> float:
        return len(task + prompt_template.template)

    @llm_rollout
    async def coroutine(task: str, llm: LLM) -> float:
        return len(task + llm.model)

    assert (call(manner, plain), call(manner, coroutine)) == (11, 6)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
@both_manners
def test_a_coroutine_ends_its_own_rollout_and_nothing_else(manner: str, error: BaseException) -> None:
    class Agent(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            raise error

    with pytest.raises(RolloutFailed, match="The agent"):
        call(manner, Agent())


async def test_cancelling_ends_the_agent() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    class Agent(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    work = asyncio.create_task(call_on_loop(Agent(), TASK, RESOURCES))
    await began.wait()
    work.cancel()

    with pytest.raises(asyncio.CancelledError):
        await work
    assert ended.is_set()


@both_manners
def test_an_agent_without_any_method_says_what_is_missing(manner: str) -> None:
    with pytest.raises(NotImplementedError, match="must define rollout"):
        call(manner, LitAgent[Any]())
