"""Several agents in one trainer, each with resources, callbacks and rewards of its own."""

import asyncio
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.events import by_agent, events_of_spans


def a_trainer(**options: Any) -> agl.Trainer:
    """Small and quick: threads, one store in memory, nothing printed."""
    defaults: dict[str, Any] = {"strategy": "shm", "progress": "off", "tracer": agl.DummyTracer()}
    return agl.Trainer(**{"initial_resources": {"prompt": prompt("p")}, **defaults, **options})


def prompt(text: str) -> agl.PromptTemplate:
    return agl.PromptTemplate(template=text, engine="f-string")


def tried(trainer: agl.Trainer, *tasks: Any) -> list[str]:
    """Try the registered agents on tasks; the status of each rollout, in the order of the tasks."""
    trainer.dev(train_dataset=list(tasks))
    rollouts = asyncio.run(trainer.store.query_rollouts(sort_by="start_time"))
    return [rollout.status for rollout in rollouts]


async def spans_of(store: agl.LightningStore) -> list[agl.Span]:
    return [span for r in await store.query_rollouts() for span in await store.query_spans(r.rollout_id)]


class Noting(agl.LitAgent[Any]):
    """Notes the tasks that it gets and the resources that it sees."""

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward
        self.tasks: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        self.tasks.append(task)
        self.resources.append(dict(resources))
        return self.reward


# ---------------------------------------------------------------------- several agents


async def test_an_agl_task_names_its_agent_in_its_metadata() -> None:
    trainer = a_trainer()
    writer, critic = Noting(), Noting()
    trainer.add_agent(writer, name="writer")
    trainer.add_agent(critic, name="critic")

    router: Any = trainer._agent_for(None)
    route = await router.choose(agl.Task(rollout_id="ro-1", input="text", metadata={"agent": "critic"}))

    assert route.agent is critic


def test_the_first_rule_that_fits_takes_a_task_that_names_no_agent_or_the_first_agent_without_a_rule() -> None:
    async def is_even(task: int) -> bool:
        return task % 2 == 0

    even, large, rest, last = Noting(), Noting(), Noting(), Noting()
    trainer = a_trainer()
    trainer.add_agent(rest, name="rest")
    trainer.add_agent(last, name="last")
    trainer.add_agent(even, name="even", when=is_even)
    trainer.add_agent(large, name="large", when=lambda task: task > 9)

    tried(trainer, 1, 2, 11, 12)

    assert (rest.tasks, sorted(even.tasks), large.tasks, last.tasks) == ([1], [2, 12], [11], [])


def errors_of(trainer: agl.Trainer) -> list[str]:
    async def read() -> list[str]:
        rollouts = await trainer.store.query_rollouts()
        attempts = [await trainer.store.get_latest_attempt(rollout.rollout_id) for rollout in rollouts]
        return [(attempt.metadata or {})["error"]["message"] for attempt in attempts if attempt is not None]

    return asyncio.run(read())


def fitted(trainer: agl.Trainer, *tasks: Any) -> None:
    """As `tried`, where every rollout may fail."""
    try:
        trainer.dev(train_dataset=list(tasks))
    except agl.errors.AgentLightningError:  # says once more that they failed
        return


def test_a_misspelt_name_fails_and_names_the_agents() -> None:
    trainer = a_trainer()
    trainer.add_agent(Noting(), name="writer")
    trainer.add_agent(Noting(), name="critic")

    fitted(trainer, {"agent": "critc"})

    (message,) = errors_of(trainer)
    assert "No agent is called 'critc'" in message
    assert "'writer', 'critic'" in message


def test_a_column_called_agent_that_is_about_something_else_leaves_the_choice_to_the_rules() -> None:
    agent = Noting()
    trainer = a_trainer()
    trainer.add_agent(Noting(), name="writer", when=lambda row: False)
    trainer.add_agent(agent, name="any", when=lambda row: True)

    assert tried(trainer, {"agent": "007"}) == ["succeeded"]
    assert agent.tasks == [{"agent": "007"}]


def test_a_single_agent_may_have_rows_with_any_agent_column() -> None:
    agent = Noting()
    trainer = a_trainer()
    trainer.add_agent(agent, name="writer")

    assert tried(trainer, {"agent": "007"}) == ["succeeded"]


def test_an_agent_that_is_passed_is_taken_instead_of_the_registered_ones() -> None:
    registered, passed = Noting(), Noting()
    trainer = a_trainer()
    trainer.add_agent(registered)

    trainer.dev(passed, train_dataset=[1])

    assert (registered.tasks, passed.tasks) == ([], [1])


def test_agents_without_names_are_called_after_their_function_or_class() -> None:
    def writer(task: Any) -> float:
        return 1.0

    trainer = a_trainer()
    for agent in (writer, Noting(), Noting()):
        trainer.add_agent(agent)  # type: ignore[arg-type] # a plain function, as users give it

    router: Any = trainer._agent_for(None)

    assert [route.name for route in router.routes] == ["writer", "Noting", "Noting-2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "a/b"}, "cannot be called 'a/b'"),
        ({"name": ""}, "cannot be called ''"),
        ({"name": 7}, "cannot be called 7"),
        ({"name": "taken"}, "Two agents are called 'taken'"),
        ({"when": "always"}, "must be a function of the task"),
    ],
    ids=["scope", "empty", "number", "taken", "no rule"],
)
def test_a_name_or_rule_that_cannot_be_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    trainer = a_trainer()
    trainer.add_agent(Noting(), name="taken")

    with pytest.raises(ValueError, match=words):
        trainer.add_agent(Noting(), **options)


# ---------------------------------------------------------------------- resources


def test_a_class_by_itself_sees_the_resources_of_its_name_under_plain_names() -> None:
    agent, own = Noting(), prompt("its own")
    trainer = a_trainer(initial_resources={"p": prompt("for all"), "Noting/p": own})

    trainer.dev(agent, train_dataset=[1])

    assert agent.resources == [{"p": own}]


def test_the_models_of_a_team_are_ready_to_be_called() -> None:
    seen: dict[str, tuple[str, str, Any]] = {}

    @agl.rollout
    def team(task: str, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        for member in ("writer", "critic"):
            llm: Any = agl.resources_for(member, resources)["llm"]
            seen[member] = (llm.endpoint, llm.model, llm.sampling_parameters)
        assert all(f"/rollout/{rollout.rollout_id}/" in endpoint for endpoint, *_ in seen.values())
        return 1.0

    proxied = agl.ProxyLLM(endpoint="http://127.0.0.1:9/v1", model="large")
    cool = agl.LLM(endpoint="", model="", sampling_parameters={"temperature": 0})
    trainer = a_trainer(initial_resources={"llm": proxied, "critic/llm": cool})

    trainer.dev(team, train_dataset=["it"])

    assert [(model, sampling) for _, model, sampling in seen.values()] == [("large", {}), ("large", {"temperature": 0})]


# ---------------------------------------------------------------------- callbacks and rewards


@pytest.mark.parametrize("tracer", [agl.DummyTracer, agl.OtelTracer], ids=lambda kind: kind.__name__)
def test_the_reward_that_an_agent_returns_is_its_own(tracer: Any) -> None:
    trainer = a_trainer(tracer=tracer())
    trainer.add_agent(Noting(0.1), name="writer")
    trainer.add_agent(Noting(0.9), name="critic")

    tried(trainer, {"agent": "critic"})

    rewards = by_agent(events_of_spans(asyncio.run(spans_of(trainer.store))))
    assert {name: activity.rewards.values for name, activity in rewards.items()} == {"critic": (0.9,)}
