"""Spans become triplets, from a tracer and from the proxy."""

import json
import logging
from typing import Any

import pytest

from agentlightning.adapter import (
    LlmProxyTraceToTriplet,
    TracerTraceToTriplet,
    TraceToTriplet,
    Transition,
)
from agentlightning.adapter.tree import TraceTree
from agentlightning.types import Span, TraceStatus, Triplet
from tests.adapter.spans import CHAT, Conversation, reward, span


def one_call(**attributes: Any) -> Triplet:
    (triplet,) = TracerTraceToTriplet().adapt([span("c", name=CHAT, attributes=attributes)])
    return triplet


# ---------------------------------------------------------------------- from a tracer


def test_a_call_is_its_tokens_its_reward_and_where_it_came_from() -> None:
    talk = Conversation()
    talk.call([1, 2], [3], under=talk.agent("solver"))
    talk.reward(0.5)

    (triplet,) = TracerTraceToTriplet().adapt(talk.spans)

    assert triplet.prompt == {"token_ids": [1, 2]}
    assert triplet.response == {"token_ids": [3]}
    assert triplet.reward == 0.5
    assert triplet.metadata == {"response_id": "r2", "agent_name": "solver", "response": {"id": "r2"}}
    (transition,) = TracerTraceToTriplet().to_transitions(talk.spans)
    assert transition == Transition(state=[1, 2], action=[3], response_id="r2", agent_name="solver", reward=0.5)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), "[1,2]", "[1, 2]"], ids=["list", "tuple", "compact", "spaced"])
def test_token_ids_are_read_in_every_form(ids: Any) -> None:
    triplet = one_call(prompt_token_ids=ids, response_token_ids=ids)

    assert triplet.prompt["token_ids"] == triplet.response["token_ids"] == [1, 2]


def test_unreadable_tokens_are_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert one_call(prompt_token_ids="many").prompt == {"token_ids": []}
    assert "token ids of span c" in caplog.text


def test_texts_images_and_settings_are_added_where_they_were_recorded() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://x/1.png"}}, {"type": "text", "text": "what?"}]
    prompt = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": json.dumps(parts)}
    answer = {"gen_ai.completion.0.content": "4", "gen_ai.response.id": "r1", "gen_ai.response.model": "m"}

    triplet = one_call(**prompt, **answer, **{"gen_ai.request.temperature": 0.5})

    assert triplet.prompt["raw_content"] == [{"role": "user", "content": json.dumps(parts)}]
    assert triplet.prompt["image_urls"] == ["http://x/1.png"]
    assert triplet.response["raw_content"] == [{"content": "4"}]
    assert triplet.metadata["request"] == {"temperature": 0.5}
    assert triplet.metadata["response"] == {"id": "r1", "model": "m"}


def test_strays_are_found_under_their_agent_by_time() -> None:
    spans = [
        span("root", end=10.0),
        span("agent", "root", start=1.0, end=5.0, attributes={"agent.name": "solver"}),
        span("c1", "root", name=CHAT, start=2.0, end=3.0),
        span("c2", "root", name=CHAT, start=6.0, end=7.0),
    ]

    repaired = TracerTraceToTriplet(agent_match="solver").adapt(spans)
    as_recorded = TracerTraceToTriplet(agent_match="solver", repair_hierarchy=False).adapt(spans)

    assert [triplet.metadata["agent_name"] for triplet in repaired] == ["solver"]
    assert as_recorded == []


def test_calls_without_tokens_can_be_skipped(caplog: pytest.LogCaptureFixture) -> None:
    talk = Conversation()
    talk.call([1], None)
    talk.call([1], [2])
    talk.reward(1.0)

    with caplog.at_level(logging.WARNING):
        triplets = TracerTraceToTriplet(_skip_empty_token_spans=True).adapt(talk.spans)

    assert [(triplet.metadata["response_id"], triplet.reward) for triplet in triplets] == [("r2", 1.0)]
    assert "call-1 is skipped" in caplog.text


def test_a_call_that_was_excluded_or_failed_is_no_triplet_and_takes_no_reward() -> None:
    talk = Conversation()
    talk.call([1], [2])
    talk.call(None, None, **{"agentlightning.redirect.is_excluded": True})
    failed = talk.call(None, None)
    talk.spans[-1] = failed.model_copy(update={"status": TraceStatus(status_code="ERROR")})
    talk.reward(1.0)

    triplets = TracerTraceToTriplet().adapt(talk.spans)

    assert [(triplet.metadata["response_id"], triplet.reward) for triplet in triplets] == [("r1", 1.0)]


@pytest.mark.parametrize("name", ["openai.responses", "anthropic.messages", "openai.completion"])
def test_calls_in_other_dialects_are_triplets_where_there_is_no_chat(name: str) -> None:
    ids = {"prompt_token_ids": [1], "response_token_ids": [2]}
    other = span("c", "root", name=name, attributes=ids)
    chat = span("d", "root", name=CHAT, start=2.0, end=3.0, attributes={"response_token_ids": [4]})

    (alone,) = TracerTraceToTriplet().adapt([span("root", end=9.0), other])
    (beside,) = TracerTraceToTriplet().adapt([span("root", end=9.0), other, chat])

    assert (alone.response["token_ids"], beside.response["token_ids"]) == ([2], [4])
    assert TracerTraceToTriplet(llm_call_match="my.call").adapt([span("root", end=9.0), other]) == []


def test_a_count_of_tokens_is_no_call() -> None:
    assert TracerTraceToTriplet().adapt([span("c", name="anthropic.messages.count_tokens")]) == []


def test_a_final_reward_replaces_that_of_the_last_call() -> None:
    talk = Conversation()
    talk.call([1], [2])
    talk.call([1], [2])
    talk.reward(0.5)

    triplets = TraceTree.from_spans(talk.spans).to_trajectory(final_reward=1.0)

    assert [triplet.reward for triplet in triplets] == [None, 1.0]


def test_a_tree_may_say_differently_what_a_triplet_holds() -> None:
    class Named(TraceTree):
        def span_to_triplet(self, span: Span, agent_name: str) -> Triplet:
            return Triplet(prompt=span.name, response=agent_name)

    (triplet,) = Named.from_spans([span("c", name=CHAT)]).to_trajectory()

    assert (triplet.prompt, triplet.response) == (CHAT, "*")


def test_no_spans_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one span"):
        TraceToTriplet().adapt([])


# ---------------------------------------------------------------------- transitions and files


def test_a_triplet_without_tokens_is_no_transition() -> None:
    with pytest.raises(ValueError, match="prompt of the triplet holds no token ids"):
        Transition.from_triplet(Triplet(prompt="2+2?", response={"token_ids": [4]}))


# ---------------------------------------------------------------------- from the proxy


def request(number: int, **attributes: Any) -> Span:
    ids = {"prompt_token_ids": [number], "response_token_ids": [number, 0]}
    return span(f"c{number}", name="litellm_request", sequence_id=number, attributes={**ids, **attributes})


def raw(number: int, **attributes: Any) -> Span:
    named = {f"llm.hosted_vllm.{name}": value for name, value in attributes.items()}
    return span(f"raw{number}", name="raw_gen_ai_request", sequence_id=number, attributes=named)


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param({"prompt_token_ids": "[1, 2]", "response_token_ids": "[[3, 4]]"}, id="response"),
        pytest.param({"prompt_token_ids": "[1, 2]", "choices": "[{'token_ids': [3, 4]}]"}, id="choices"),
        pytest.param({"prompt_token_ids": [1, 2], "choices": '[{"token_ids": [3, 4]}]'}, id="json"),
    ],
)
def test_raw_requests_are_read(attributes: dict[str, Any]) -> None:
    (triplet,) = LlmProxyTraceToTriplet().adapt([raw(1, **attributes, id="r1")])

    assert (triplet.prompt, triplet.response) == ({"token_ids": [1, 2]}, {"token_ids": [3, 4]})
    assert triplet.metadata == {"response_id": "r1"}


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param({"prompt_token_ids": "[1]"}, id="no-response"),
        pytest.param({"prompt_token_ids": "[1]", "response_token_ids": "[[]]"}, id="empty"),
        pytest.param({"prompt_token_ids": "oops", "response_token_ids": "[[1]]"}, id="no-literal"),
        pytest.param({"prompt_token_ids": "['a']", "response_token_ids": "[[1]]"}, id="texts"),
    ],
)
def test_requests_without_both_lists_are_left_out(attributes: dict[str, Any]) -> None:
    assert LlmProxyTraceToTriplet().adapt([raw(1, **attributes)]) == []


def test_proxy_spans_are_ordered_by_sequence_whatever_their_clocks_say() -> None:
    spans = [
        request(3).model_copy(update={"start_time": 0.0}),
        request(1).model_copy(update={"start_time": 99.0}),
        request(2).model_copy(update={"start_time": None}),
        span("x", name="other", sequence_id=1, attributes={"prompt_token_ids": [9], "response_token_ids": [9]}),
    ]

    assert [t.prompt["token_ids"] for t in LlmProxyTraceToTriplet().adapt(spans)] == [[1], [2], [3]]


def test_a_reward_goes_to_the_last_request_before_it_that_has_none() -> None:
    rewards = [reward(f"w{n}", None, value, at=0.0, sequence_id=n) for n, value in [(3, 0.3), (4, 0.4), (5, 0.5)]]

    triplets = LlmProxyTraceToTriplet().adapt([*rewards, request(1), request(2), request(3)])

    assert [triplet.reward for triplet in triplets] == [0.5, 0.3, 0.4]
