"""The parts of GEPA: what the reflecting model is shown, and the way from the engine's thread to the loop."""

import asyncio
from typing import Any

import pytest

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.prompts.gepa_engine import EngineBridge, new_text_in, reflection_question
from agentlightning.algorithm.prompts.reflection import MOST_CHARACTERS, ReflectiveRecord, reflective_record
from agentlightning.types import Span

CALL = "openai.chat.completion"


def span(name: str, attributes: dict[str, Any]) -> Span:
    return Span.from_attributes(name=name, attributes=attributes, rollout_id="ro-1", attempt_id="at-1", sequence_id=1)


def call(*messages: tuple[str, str], answer: str) -> Span:
    attributes = {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": answer}
    for number, (role, content) in enumerate(messages):
        attributes |= {f"gen_ai.prompt.{number}.role": role, f"gen_ai.prompt.{number}.content": content}
    return span(CALL, attributes)


def record(*spans: Span, task: Any = "Which room?", error: str | None = None) -> ReflectiveRecord:
    return reflective_record(task, list(spans), reward="Reward: 0", error=error, adapter=TraceToMessages())


# ---------------------------------------------------------------------- feedback


def test_record_holds_the_task_the_conversation_and_the_reward() -> None:
    told = record(call(("system", "Book."), ("user", "Which room?"), answer="Ada"))

    assert told == {
        "Inputs": "Which room?",
        "Generated Outputs": "[system]\nBook.\n\n[user]\nWhich room?\n\n[assistant]\nAda",
        "Feedback": "Reward: 0",
    }


def test_conversation_that_a_later_call_goes_on_with_is_told_once() -> None:
    first = call(("user", "Which room?"), answer="Ada")
    second = call(("user", "Which room?"), ("assistant", "Ada"), ("user", "Sure?"), answer="Yes")
    said = record(first, second)["Generated Outputs"]
    assert (said.count("Which room?"), said.count("Ada"), said.endswith("[assistant]\nYes")) == (1, 1, True)


def test_remarks_and_further_rewards_are_feedback() -> None:
    judged = span(
        "agentlightning.annotation",
        {
            "agentlightning.reward.0.name": "right",
            "agentlightning.reward.0.value": 0.0,
            "agentlightning.reward.1.name": "brief",
            "agentlightning.reward.1.value": 1.0,
        },
    )
    remark = span("agentlightning.message", {"agentlightning.message.body": "The room is too small."})
    raised = span("agentlightning.exception", {"exception.type": "KeyError", "exception.message": "'seats'"})

    feedback = record(judged, remark, raised, error="rollout 'ro-1': no")["Feedback"]

    assert feedback.splitlines() == [
        "Reward: 0",
        "Reward for 'right': 0",
        "Reward for 'brief': 1",
        "The room is too small.",
        "KeyError: 'seats'",
        "The rollout failed; rollout 'ro-1': no",
    ]


def test_long_texts_lose_their_middle() -> None:
    told = record(task={"text": "a" * MOST_CHARACTERS + "end"})["Inputs"]

    assert len(told) < MOST_CHARACTERS + 100
    assert told.startswith('{\n "text": "aaa')
    assert told.endswith('end"\n}')
    assert "characters left out" in told


def test_question_and_answer_are_as_gepa_has_them() -> None:
    question = reflection_question("Book {room}.", [{"Inputs": "x", "Feedback": "y"}], "\n\nMind the gap.")

    assert "```\nBook {room}.\n```" in question
    assert "## Inputs\nx" in question
    assert question.endswith("Mind the gap.")
    assert new_text_in("Well:\n```text\nBook {room} now.\n```\nDone.") == "Book {room} now."


# ---------------------------------------------------------------------- the bridge


async def test_error_on_the_loop_ends_the_engine_though_it_catches_exceptions() -> None:
    bridge, went_on = EngineBridge(), []

    async def fail() -> None:
        raise LookupError("nothing there")

    def engine() -> None:
        try:
            bridge.call(fail())
        except Exception:  # as gepa does
            went_on.append(True)

    with pytest.raises(LookupError, match="nothing there"):
        await bridge.run(engine)

    assert went_on == []


async def test_cancelling_cancels_what_the_engine_waits_for_and_lets_it_ask_no_more() -> None:
    bridge, waiting, ended = EngineBridge(), asyncio.Event(), []

    async def wait() -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")

    def engine() -> None:
        try:
            bridge.call(wait())
        finally:
            try:
                bridge.call(wait())
            finally:
                ended.append("engine")

    task = asyncio.create_task(bridge.run(engine))
    await asyncio.wait_for(waiting.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sorted(ended) == ["engine", "wait"]
