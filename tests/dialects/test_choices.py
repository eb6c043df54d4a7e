"""Token fields: asked of backends, and kept from clients that did not ask."""

from typing import Any

import pytest

from agentlightning.dialects import CHAT, DIALECTS
from agentlightning.dialects.completions import ChoicesDialect


def chat_answer() -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": "a"}, "token_ids": [3], "logprobs": {"content": [{"token": "a"}]}}
    return {"id": "1", "prompt_token_ids": [1, 2], "choices": [choice]}


@pytest.mark.parametrize(
    ("dialect", "body", "asks"),
    [
        ("chat", {}, False),
        ("chat", {"logprobs": True}, True),
        ("chat", {"logprobs": None}, False),
        ("completions", {"logprobs": 0}, True),
        ("completions", {"logprobs": None}, False),
    ],
)
def test_whether_a_request_asks_for_log_probabilities(dialect: str, body: dict[str, Any], asks: bool) -> None:
    spoken = DIALECTS[dialect]
    assert isinstance(spoken, ChoicesDialect)

    assert spoken.asks_for_logprobs(body) is asks


@pytest.mark.parametrize(
    ("dialect", "body", "asking"),
    [
        ("chat", {"model": "m"}, {"model": "m", "return_token_ids": True, "logprobs": True}),
        (
            "chat",
            {"logprobs": True, "top_logprobs": 3},
            {"return_token_ids": True, "logprobs": True, "top_logprobs": 3},
        ),
        ("completions", {"logprobs": 5}, {"return_token_ids": True, "logprobs": 5}),
        ("completions", {"logprobs": None}, {"return_token_ids": True, "logprobs": 1}),
        ("messages", {"model": "m"}, {"model": "m"}),
        ("embeddings", {"model": "m"}, {"model": "m"}),
    ],
)
def test_request_that_asks_is_a_copy(dialect: str, body: dict[str, Any], asking: dict[str, Any]) -> None:
    before = dict(body)

    assert DIALECTS[dialect].with_tokens(body, ids=True, logprobs=True) == asking
    assert body == before
    assert DIALECTS[dialect].with_tokens(body, ids=False, logprobs=False) == before


def test_unasked_fields_of_a_chat_are_removed() -> None:
    answer = chat_answer()

    assert DIALECTS["chat"].without_extras(answer, {})
    assert answer == {"id": "1", "choices": [{"index": 0, "message": {"content": "a"}, "logprobs": None}]}
    assert not DIALECTS["chat"].without_extras(answer, {})


@pytest.mark.parametrize(
    ("asked", "is_removed"),
    [
        ({"return_token_ids": True, "logprobs": True}, False),
        ({"return_token_ids": True}, True),
        ({"logprobs": True}, True),
    ],
)
def test_asked_fields_stay(asked: dict[str, Any], is_removed: bool) -> None:
    answer = chat_answer()

    assert DIALECTS["chat"].without_extras(answer, asked) is is_removed
    assert ("prompt_token_ids" in answer) is bool(asked.get("return_token_ids"))
    assert (answer["choices"][0]["logprobs"] is not None) is bool(asked.get("logprobs"))


def test_unasked_fields_of_completions_are_removed() -> None:
    answer = {"choices": [{"text": "a", "prompt_token_ids": [1], "token_ids": [2], "logprobs": {"tokens": ["a"]}}]}

    assert DIALECTS["completions"].without_extras(answer, {"logprobs": 0})
    assert answer == {"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]}


def test_messages_are_left_alone() -> None:
    assert not DIALECTS["messages"].without_extras({"token_ids": [1]}, {})


@pytest.mark.parametrize(
    ("chunk", "asked", "is_unasked"),
    [
        ({"choices": [], "usage": {"total_tokens": 1}}, {}, True),
        ({"choices": [], "usage": {"total_tokens": 1}}, {"stream_options": {"include_usage": False}}, True),
        ({"choices": [], "usage": {"total_tokens": 1}}, {"stream_options": {"include_usage": True}}, False),
        ({"choices": [{"index": 0}], "usage": {"total_tokens": 1}}, {}, False),
        ({"choices": [], "usage": None}, {}, False),
        ({"error": {}, "usage": {}}, {}, False),
    ],
)
def test_usage_chunk_is_unasked(chunk: dict[str, Any], asked: dict[str, Any], is_unasked: bool) -> None:
    assert CHAT.is_extra(chunk, asked) is is_unasked


def test_usage_is_asked_for_in_streams_alone() -> None:
    streamed = {"stream": True, "stream_options": {"x": 1}}

    assert DIALECTS["chat"].with_usage(streamed)["stream_options"] == {"x": 1, "include_usage": True}
    assert DIALECTS["chat"].with_usage({}) == {}
    assert DIALECTS["messages"].with_usage({"stream": True}) == {"stream": True}
