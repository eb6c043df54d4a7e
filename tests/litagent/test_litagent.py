"""LitAgent: agents as classes, and those they work for."""

import asyncio
import pickle
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.litagent import LitAgent
from agentlightning.litagent.litagent import is_v0_1_rollout_api
from agentlightning.types import NamedResources, Rollout, RolloutRawResult

ROLLOUT = Rollout(rollout_id="ro-1", input="task", start_time=0.0)


class Owner:
    """Stands for a trainer or a runner."""

    def __init__(self, tracer: Any = None) -> None:
        self.tracer = tracer


class Plain(LitAgent[str]):
    def rollout(self, task: str, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.5


class Async(LitAgent[str]):
    async def rollout_async(self, task: str, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.5


class AsyncToTrain(LitAgent[str]):
    async def training_rollout_async(self, task: str, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.5


class CoroutineUnderThePlainName(LitAgent[str]):
    async def rollout(  # type: ignore[override] # as SPEC 20.1 asks for
        self, task: str, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        return 0.5


class Heir(CoroutineUnderThePlainName):
    """Inherits its coroutine."""


@pytest.mark.parametrize(
    ("kind", "is_async"),
    [
        (LitAgent, False),
        (Plain, False),
        (Async, True),
        (AsyncToTrain, True),
        (CoroutineUnderThePlainName, True),
        (Heir, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_agent_knows_whether_it_is_written_as_coroutines(kind: type[LitAgent[str]], is_async: bool) -> None:
    assert kind().is_async() is is_async


def test_validation_does_not_go_through_training() -> None:
    with pytest.raises(NotImplementedError):
        asyncio.run(AsyncToTrain().validation_rollout_async("task", {}, ROLLOUT))


def test_what_is_not_defined_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"LitAgent must define rollout"):
        LitAgent[str]().rollout("task", {}, ROLLOUT)
    with pytest.raises(NotImplementedError, match=r"rollout_async"):
        asyncio.run(LitAgent[str]().rollout_async("task", {}, ROLLOUT))


@pytest.mark.parametrize("name", ["trainer", "runner"])
def test_owners_are_held_weakly(name: str) -> None:
    agent, owner = Plain(), Owner()
    getattr(agent, f"set_{name}")(owner)

    assert getattr(agent, name) is getattr(agent, f"get_{name}")() is owner
    del owner
    with pytest.raises(ValueError, match=f"Plain has no {name}"):
        getattr(agent, f"get_{name}")()


def test_owners_that_were_never_set_are_named() -> None:
    agent = Plain()
    for get in (agent.get_trainer, agent.get_runner, agent.get_tracer):
        with pytest.raises(ConfigurationError, match="has no"):
            get()


def test_the_tracer_is_the_runner_s_and_otherwise_the_trainer_s() -> None:
    agent, trainer, runner, bare = Plain(), Owner("of the trainer"), Owner("of the runner"), object.__new__(Owner)

    agent.set_trainer(trainer)
    assert agent.tracer == "of the trainer"
    agent.set_runner(bare)
    assert agent.get_tracer() == "of the trainer"
    agent.set_runner(runner)
    assert agent.tracer == "of the runner"


def test_subclasses_need_not_call_our_constructor() -> None:
    class Careless(LitAgent[str]):
        def __init__(self) -> None:
            self.own = 1

    agent, owner = Careless(), Owner("t")
    agent.set_runner(owner)

    assert (agent.trained_agents, agent.tracer, agent.is_async()) == (None, "t", False)


@pytest.mark.parametrize("is_named", [True, False])
def test_trained_agents_is_deprecated_in_either_form(is_named: bool) -> None:
    with pytest.warns(DeprecationWarning, match="trained_agents"):
        agent = LitAgent[str](trained_agents="a.*") if is_named else LitAgent[str]("a.*")
    assert agent.trained_agents == "a.*"


def test_an_agent_travels_without_its_owners() -> None:
    agent, owner = Plain(), Owner()
    agent.own = 7  # type: ignore[attr-defined] # agents carry what they like
    agent.set_runner(owner)
    agent.set_trainer(owner)

    other = pickle.loads(pickle.dumps(agent))

    assert other.own == 7
    with pytest.raises(ValueError, match="has no runner"):
        other.get_runner()


def test_the_first_release_s_signature_is_recognised() -> None:
    def old(task: Any, rollout_id: str, resources: Any) -> None: ...

    def new(task: Any, resources: Any, rollout: Any) -> None: ...

    assert is_v0_1_rollout_api(old)
    assert not is_v0_1_rollout_api(new)
