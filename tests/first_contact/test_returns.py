"""What an agent returns and what it is given, as a newcomer writes it."""

import asyncio
import dataclasses
from typing import Any

import pytest

import agentlightning as agl

LLM = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="tiny")
RESOURCES: dict[str, Any] = {"llm": LLM, "prompt": agl.PromptTemplate(template="Say {x}.", engine="f-string")}


def results_of(agent: Any, tasks: list[Any]) -> list[Any]:
    """The rollouts of a first try with an agent."""
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(store=store, strategy="shm", initial_resources=RESOURCES, n_runners=1)

    trainer.dev(agent, train_dataset=tasks)

    return list(asyncio.run(store.query_rollouts()))


def rewards_of(agent: Any) -> dict[str, float]:
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(store=store, strategy="shm", initial_resources=RESOURCES, n_runners=1)

    trainer.dev(agent, train_dataset=["a"])

    async def read() -> dict[str, float]:
        (rollout,) = await store.query_rollouts()
        spans = await store.query_spans(rollout.rollout_id)
        return {reward.name: reward.value for span in spans for reward in agl.get_rewards_from_span(span)}

    return asyncio.run(read())


def test_an_agent_that_returns_the_endpoint_of_its_model_succeeds() -> None:
    @agl.llm_rollout
    def my_agent(task: str, llm: agl.LLM) -> str:
        return llm.endpoint

    (rollout,) = results_of(my_agent, ["a"])

    assert (rollout.status, rollout.output) == ("succeeded", LLM.endpoint)


def test_an_agent_that_returns_its_prompt_succeeds() -> None:
    @agl.prompt_rollout
    def my_agent(task: str, prompt_template: agl.PromptTemplate) -> str:
        return prompt_template.format(x=task)

    (rollout,) = results_of(my_agent, ["hello"])

    assert (rollout.status, rollout.output) == ("succeeded", "Say hello.")


def test_an_agent_that_returns_the_model_s_response_succeeds() -> None:
    completion = pytest.importorskip("openai.types.chat").ChatCompletion.model_validate(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "tiny",
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}},
            ],
        }
    )

    @agl.rollout
    def my_agent(task: str, llm: agl.LLM) -> Any:
        return completion

    (rollout,) = results_of(my_agent, ["2 + 2"])

    assert rollout.status == "succeeded"
    assert rollout.output["choices"][0]["message"]["content"] == "4"


def test_an_agent_that_returns_a_data_class_succeeds() -> None:
    @dataclasses.dataclass
    class Answer:
        text: str
        steps: int

    @agl.rollout
    def my_agent(task: str, llm: agl.LLM) -> Any:
        return Answer(text="4", steps=2)

    (rollout,) = results_of(my_agent, ["2 + 2"])

    assert (rollout.status, rollout.output) == ("succeeded", {"text": "4", "steps": 2})


def test_an_agent_that_returns_numbers_by_name_gives_rewards() -> None:
    @agl.rollout
    def my_agent(task: str, llm: agl.LLM) -> Any:
        return {"speed": 0.25, "reward": 1}

    assert rewards_of(my_agent) == {"reward": 1.0, "speed": 0.25}


def test_an_agent_that_returns_text_is_told_how_to_give_a_reward(caplog: pytest.LogCaptureFixture) -> None:
    class Letter(str):
        pass

    @agl.rollout
    def my_agent(task: str, llm: agl.LLM) -> Any:
        return Letter("Dear Sir")

    results_of(my_agent, ["a", "b", "c"])

    (hint,) = [record.message for record in caplog.records if "Letter" in record.message]
    assert "kept as the rollout's output" in hint
    assert "return a number or call emit_reward" in hint


def test_an_attempted_rollout_is_made_of_a_rollout_and_an_attempt() -> None:
    rollout = agl.Rollout(rollout_id="ro-1", input="a", start_time=1.0)
    attempt = agl.Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=1.0)

    attempted = agl.AttemptedRollout(rollout=rollout, attempt=attempt)

    assert (attempted.rollout, attempted.attempt, attempted.input) == (rollout, attempt, "a")


# ---------------------------------------------------------------------- rows that are tasks


ROWS = [
    agl.Task(rollout_id="first", input="2 + 2", metadata={"answer": "4"}),
    agl.Task(rollout_id="second", input="3 + 3", mode="train", metadata={"answer": "6"}),
]


@agl.prompt_rollout
def prompted(task: Any, prompt_template: agl.PromptTemplate) -> str:
    """The sample of the design: it reads its task's input."""
    return prompt_template.format(x=task.input)


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


def test_an_agent_whose_row_is_a_task_reads_the_task_s_input() -> None:
    rollouts = results_of(prompted, ROWS)

    assert [rollout.output for rollout in rollouts] == ["Say 2 + 2.", "Say 3 + 3."]
    assert [rollout.input for rollout in rollouts] == ["2 + 2", "3 + 3"]


def test_an_agent_whose_row_is_a_task_gets_the_task_of_its_rollout() -> None:
    rollouts = results_of(described, ROWS)

    assert [rollout.output for rollout in rollouts] == [expected(0), expected(1)]


def test_an_agent_in_another_process_gets_a_task_too() -> None:
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(
        algorithm=agl.Baseline(), store=store, n_runners=1, port=0, strategy="cs", initial_resources=RESOURCES
    )

    trainer.fit(described, train_dataset=ROWS)

    rollouts = asyncio.run(store.query_rollouts())
    assert [rollout.output for rollout in rollouts] == [expected(0), expected(1)]


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
