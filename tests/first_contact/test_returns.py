"""What an agent returns and what it is given, as a newcomer writes it."""

import asyncio
from typing import Any

import agentlightning as agl

LLM = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="tiny")
RESOURCES: dict[str, Any] = {"llm": LLM, "prompt": agl.PromptTemplate(template="Say {x}.", engine="f-string")}


def results_of(agent: Any, tasks: list[Any]) -> list[Any]:
    """The rollouts of a first try with an agent."""
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(store=store, strategy="shm", initial_resources=RESOURCES, n_runners=1)

    trainer.dev(agent, train_dataset=tasks)

    return list(asyncio.run(store.query_rollouts()))


# ---------------------------------------------------------------------- rows that are tasks


ROWS = [
    agl.Task(rollout_id="first", input="2 + 2", metadata={"answer": "4"}),
    agl.Task(rollout_id="second", input="3 + 3", mode="train", metadata={"answer": "6"}),
]


@agl.rollout
def described(task: Any, llm: agl.LLM, rollout: Any) -> dict[str, Any]:
    """What an agent sees of its task."""
    return {
        "kind": type(task).__name__,
        "input": task.input,
        "answer": task.metadata.get("answer"),
        "mode": task.mode,
        "is_its_rollout": task.rollout_id == rollout.rollout_id,
    }


def expected(number: int) -> dict[str, Any]:
    row = ROWS[number]
    answer = row.metadata["answer"]
    return {"kind": "Task", "input": row.input, "answer": answer, "mode": "train", "is_its_rollout": True}


def test_an_agent_whose_row_is_a_task_gets_the_task_of_its_rollout() -> None:
    rollouts = results_of(described, ROWS)

    assert [rollout.output for rollout in rollouts] == [expected(0), expected(1)]
    assert [rollout.input for rollout in rollouts] == ["2 + 2", "3 + 3"]


def test_a_task_that_is_enqueued_by_hand_reaches_the_agent_as_a_task() -> None:
    async def run() -> Any:
        store = agl.InMemoryLightningStore()
        await store.add_resources(RESOURCES)
        enqueued = await store.enqueue_rollout(input=ROWS[1])
        runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=1)
        with runner.run_context(agent=described, store=store):
            await runner.iter()
        return await store.get_rollout_by_id(enqueued.rollout_id)

    assert asyncio.run(run()).output == expected(1)


def test_an_agent_whose_row_is_no_task_gets_the_row_itself() -> None:
    @agl.rollout
    def my_agent(task: Any, llm: agl.LLM) -> Any:
        return type(task).__name__

    assert [rollout.output for rollout in results_of(my_agent, ["a", {"input": "a"}])] == ["str", "dict"]
