"""What LangChain says of how an answer ended, in the names of its integrations; LangChain itself is not needed."""

from typing import Any

import pytest

from agentlightning.dialects import langchain


def result(**said: Any) -> dict[str, Any]:
    """An `LLMResult` for one prompt, as plain JSON."""
    return {"generations": [[{"text": "Rain", **said}]]}


@pytest.mark.parametrize("name", ["finish_reason", "stop_reason", "done_reason", "stopReason"])
def test_the_end_of_an_answer_is_told_whatever_a_provider_calls_it(name: str) -> None:
    of_text = langchain.response_attributes(result(generation_info={name: "length"}))
    of_message = langchain.response_attributes(
        result(message={"content": "Rain", "response_metadata": {name: "length"}})
    )

    assert of_text["gen_ai.completion.0.finish_reason"] == "length"
    assert of_message["gen_ai.completion.0.finish_reason"] == "length"


@pytest.mark.parametrize("said", [{}, {"finish_reason": None}, {"finish_reason": ""}], ids=["absent", "none", "empty"])
def test_an_end_that_is_not_told_is_not_written(said: dict[str, Any]) -> None:
    assert "gen_ai.completion.0.finish_reason" not in langchain.response_attributes(result(generation_info=said))
