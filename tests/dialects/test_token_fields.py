"""Token fields: asked of backends, and kept from clients that did not ask."""

from typing import Any

import pytest

from agentlightning.dialects import DialectName
from agentlightning.dialects.token_fields import (
    asks_for_logprobs,
    is_unasked_usage_chunk,
    with_tokens_asked,
    with_usage_asked,
    without_unasked,
)


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
        ("responses", {"include": ["message.output_text.logprobs"]}, True),
        ("responses", {"include": None}, False),
        ("messages", {"logprobs": True}, False),
    ],
)
def test_whether_a_request_asks_for_log_probabilities(dialect: DialectName, body: dict[str, Any], asks: bool) -> None:
    assert asks_for_logprobs(dialect, body) is asks


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
def test_request_that_asks_is_a_copy(dialect: DialectName, body: dict[str, Any], asking: dict[str, Any]) -> None:
    before = dict(body)

    assert with_tokens_asked(dialect, body, ids=True, logprobs=True) == asking
    assert body == before
    assert with_tokens_asked(dialect, body, ids=False, logprobs=False) == before


def test_unasked_fields_of_a_chat_are_removed() -> None:
    answer = chat_answer()

    assert without_unasked("chat", answer, {})
    assert answer == {"id": "1", "choices": [{"index": 0, "message": {"content": "a"}, "logprobs": None}]}
    assert not without_unasked("chat", answer, {})


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

    assert without_unasked("chat", answer, asked) is is_removed
    assert ("prompt_token_ids" in answer) is bool(asked.get("return_token_ids"))
    assert (answer["choices"][0]["logprobs"] is not None) is bool(asked.get("logprobs"))


def test_unasked_fields_of_completions_are_removed() -> None:
    answer = {"choices": [{"text": "a", "prompt_token_ids": [1], "token_ids": [2], "logprobs": {"tokens": ["a"]}}]}

    assert without_unasked("completions", answer, {"logprobs": 0})
    assert answer == {"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]}


def test_messages_are_left_alone() -> None:
    assert not without_unasked("messages", {"token_ids": [1]}, {})


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
    assert is_unasked_usage_chunk(chunk, asked) is is_unasked


def test_usage_is_asked_for_in_streams_alone() -> None:
    streamed = {"stream": True, "stream_options": {"x": 1}}

    assert with_usage_asked("chat", streamed)["stream_options"] == {"x": 1, "include_usage": True}
    assert with_usage_asked("chat", {}) == {}
    assert with_usage_asked("messages", {"stream": True}) == {"stream": True}
