"""Which method of an agent is called, and with what."""

import asyncio
import threading
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.legacy.dev_task_loader import DevTaskLoader
from agentlightning.legacy.runner import LegacyAgentRunner, rollout_method
from agentlightning.litagent import LitAgent, llm_rollout, rollout
from agentlightning.tracer import DummyTracer
from agentlightning.types import LLM, PromptTemplate, RolloutLegacy, RolloutMode, Task

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

RESOURCES = {"prompt": PromptTemplate(template="{name}", engine="f-string"), "llm": LLM(endpoint="e", model="m")}
TASK = Task(rollout_id="rollout-1", input="hello", mode="train")


def defining(*names: str) -> LitAgent[Any]:
    """An agent with these methods, plain or coroutines as their names say."""

    async def a_coroutine(self: Any, task: Any, resources: Any, rollout: Any) -> None: ...

    def a_function(self: Any, task: Any, resources: Any, rollout: Any) -> None: ...

    methods = {name: a_coroutine if name.endswith("_async") else a_function for name in names}
    agent: LitAgent[Any] = type("Agent", (LitAgent,), methods)()
    return agent


def call(manner: str, agent: LitAgent[Any]) -> RolloutLegacy:
    """What is posted for one task."""
    loader = DevTaskLoader([TASK], RESOURCES)
    runner = LegacyAgentRunner(agent, loader, DummyTracer(), TracerTraceToTriplet(), max_tasks=1)
    assert (runner.iter() if manner == "plainly" else asyncio.run(runner.iter_async())) == 1
    return loader.rollouts[0]


both_manners = pytest.mark.parametrize("manner", ["plainly", "on a loop"])


@pytest.mark.parametrize(
    ("names", "mode", "chosen"),
    [
        (["training_rollout", "validation_rollout"], "train", "training_rollout"),
        (["training_rollout", "validation_rollout"], "val", "validation_rollout"),
        (["training_rollout", "validation_rollout"], None, "validation_rollout"),
        (["rollout", "training_rollout"], "test", "validation_rollout"),
        (["training_rollout"], "val", "training_rollout"),
        (["rollout", "rollout_async"], "train", "training_rollout_async"),
        (["training_rollout_async"], "val", "training_rollout_async"),
    ],
)
def test_the_most_fitting_method_is_chosen(names: list[str], mode: RolloutMode | None, chosen: str) -> None:
    agent = defining(*names)

    assert rollout_method(agent, mode).call == getattr(agent, chosen)


@both_manners
def test_decorated_functions_are_agents_too(manner: str) -> None:
    @rollout
    def plain(task: str, prompt_template: PromptTemplate) -> float:
        return len(task + prompt_template.template)

    @llm_rollout
    async def coroutine(task: str, llm: LLM) -> float:
        return len(task + llm.model)

    assert [call(manner, agent).final_reward for agent in (plain, coroutine)] == [11.0, 6.0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
@both_manners
def test_a_coroutine_ends_its_own_rollout_and_nothing_else(manner: str, error: BaseException) -> None:
    class Agent(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            raise error

    assert "The agent" in call(manner, Agent()).metadata["error"]["message"]


async def test_cancelling_ends_the_agent() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    class Agent(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    loader = DevTaskLoader([TASK], RESOURCES)
    runner = LegacyAgentRunner(Agent(), loader, DummyTracer(), TracerTraceToTriplet())
    work = asyncio.create_task(runner.run_async())
    await began.wait()
    work.cancel()

    with pytest.raises(asyncio.CancelledError):
        await work
    assert ended.is_set()
    assert loader.rollouts == []


@both_manners
def test_a_plain_agent_runs_in_the_thread_that_called_run(manner: str) -> None:
    class Agent(LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            return float(threading.current_thread() is threading.main_thread())

    assert call(manner, Agent()).final_reward == float(manner == "plainly")


@both_manners
def test_an_agent_without_any_method_says_what_is_missing(manner: str) -> None:
    assert "must define rollout" in call(manner, LitAgent[Any]()).metadata["error"]["message"]
