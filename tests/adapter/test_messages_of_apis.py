"""Conversations of real clients, with the stub model behind them: each API, each recorder, each kind of message."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from agentlightning.adapter import TraceToMessages
from agentlightning.types import Span
from tests.instrumentation.traces import observed
from tests.llm_proxy.fixtures import CLAUDE
from tests.llm_proxy.proxied import MODEL, entry, proxied
from tests.stub_model.script import Answer, Request, Script, Turn
from tests.stub_model.server import StubModel, running
from tests.stub_model.words import ToolCall

SYSTEM, QUESTION, ANSWER = "Be brief.", "How is the weather?", "It rains."
SAID = "Let me see."
PNG = "iVBORw0KGgo="
PNG_URL = f"data:image/png;base64,{PNG}"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CITIES = ("Oslo", "Bergen")
"""The model asks for the weather of all of these at once."""


USER = {"role": "user", "content": QUESTION}
ASSISTANT = {"role": "assistant", "content": ANSWER}
PICTURE = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": PNG_URL}}]
CALLS = [
    {"id": f"call {n}", "type": "function", "function": {"name": "weather", "arguments": f'{{"city":"{city}"}}'}}
    for n, city in enumerate(CITIES)
]
CALLING = {"role": "assistant", "content": SAID, "tool_calls": CALLS}
RESULTS = [{"role": "tool", "content": "rain", "tool_call_id": call["id"]} for call in CALLS]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It says.", "parameters": SCHEMA}}]
CONVERSATIONS: dict[str, list[list[dict[str, Any]]]] = {
    "text": [[USER, ASSISTANT]],
    "system": [[{"role": "system", "content": SYSTEM}, USER, ASSISTANT]],
    "image": [[{"role": "user", "content": PICTURE}, ASSISTANT]],
    "tools": [[USER, CALLING], [USER, CALLING, *RESULTS, ASSISTANT]],
}
"""What each case is in OpenAI's words: a conversation for each call of the model."""


def react(request: Request) -> Turn:
    """Calls the tool, if there is one, and answers when the results have come."""
    if request.body.get("tools") and not any(message.role == "tool" for message in request.messages):
        return Answer(SAID, tool_calls=tuple(ToolCall.of("weather", city=city) for city in CITIES))
    return ANSWER


def hold_chat(url: str, model: str, case: str, *, is_streaming: bool) -> None:
    """A conversation in the words of OpenAI's chat API."""
    history: list[Any] = [{"role": "user", "content": PICTURE if case == "image" else QUESTION}]
    if case == "system":
        history.insert(0, {"role": "system", "content": SYSTEM})
    options = {"tools": TOOLS} if case == "tools" else {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        for _ in CONVERSATIONS[case]:
            ask: Any = {"model": model, "messages": history, **options}
            if is_streaming:
                with client.chat.completions.stream(**ask) as stream:
                    told: Any = stream.get_final_completion()
            else:
                told = client.chat.completions.create(**ask)
            message = told.choices[0].message
            calls = message.tool_calls or ()
            results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
            history += [message.to_dict(), *results]


def hold_responses(url: str, model: str, case: str, *, is_streaming: bool) -> None:
    """The same in those of the responses API."""
    picture = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": PNG_URL}]
    history: list[Any] = [{"role": "user", "content": picture if case == "image" else QUESTION}]
    tool = {"type": "function", "name": "weather", "description": "It says.", "parameters": SCHEMA}
    options: Any = {"system": {"instructions": SYSTEM}, "tools": {"tools": [tool]}}.get(case, {})
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        for _ in CONVERSATIONS[case]:
            ask: Any = {"model": model, "input": history, **options}
            if is_streaming:
                with client.responses.stream(**ask) as stream:
                    told: Any = stream.get_final_response()
            else:
                told = client.responses.create(**ask)
            history += [item.to_dict() for item in told.output]
            calls = [item for item in told.output if item.type == "function_call"]
            history += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]


def hold_messages(url: str, model: str, case: str, *, is_streaming: bool) -> None:
    """The same in Anthropic's."""
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    picture = [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]
    history: list[Any] = [{"role": "user", "content": picture if case == "image" else QUESTION}]
    tool = {"name": "weather", "description": "It says.", "input_schema": SCHEMA}
    options: Any = {"system": {"system": SYSTEM}, "tools": {"tools": [tool]}}.get(case, {})
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        for _ in CONVERSATIONS[case]:
            ask: Any = {"model": model, "max_tokens": 99, "messages": history, **options}
            if is_streaming:
                with client.messages.stream(**ask) as stream:
                    told: Any = stream.get_final_message()
            else:
                told = client.messages.create(**ask)
            history.append({"role": "assistant", "content": [block.to_dict() for block in told.content]})
            calls = [block for block in told.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
            history += [{"role": "user", "content": results}] if results else []


AGENTS: dict[str, Any] = {"chat": hold_chat, "responses": hold_responses, "anthropic": hold_messages}


def by_the_tracer(model: StubModel, api: str, case: str, *, is_streaming: bool) -> list[Span]:
    """The spans of a client that asks the model itself, under a tracer."""
    trace = observed(AGENTS[api], model.url, MODEL, case, is_streaming=is_streaming)
    assert trace.error is None, trace.error
    return trace.spans


def by_the_proxy(model: StubModel, api: str, case: str, *, is_streaming: bool) -> list[Span]:
    """The spans of the proxy, through which a client without a tracer asks."""
    with proxied(entry(model.url), entry(model.url, "messages", model=CLAUDE)) as door:
        AGENTS[api](door.endpoint, CLAUDE if api == "anthropic" else MODEL, case, is_streaming=is_streaming)
        return door.spans()


RECORDERS = {"tracer": by_the_tracer, "proxy": by_the_proxy}


@pytest.fixture
def model() -> Iterator[StubModel]:
    with running(Script(react)) as served:
        yield served


def shown(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the ids of calls, which are the model's to choose, by their order."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = names.setdefault(call["id"], f"call {len(names)}")
            call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
        if "tool_call_id" in message:
            message["tool_call_id"] = names[message["tool_call_id"]]
    return messages


@pytest.mark.parametrize(
    ("case", "is_streaming"),
    [("text", False), ("system", False), ("image", False), ("tools", False), ("tools", True)],
    ids=["text", "system", "image", "tools", "streamed"],
)
@pytest.mark.parametrize("api", list(AGENTS))
@pytest.mark.parametrize("recorder", list(RECORDERS))
def test_conversation_is_the_same_whichever_api_and_recorder(
    model: StubModel, recorder: str, api: str, case: str, is_streaming: bool
) -> None:
    spans = RECORDERS[recorder](model, api, case, is_streaming=is_streaming)

    adapted = TraceToMessages().adapt(sorted(spans, key=lambda span: span.start_time or 0))

    assert [shown(one["messages"]) for one in adapted] == CONVERSATIONS[case]
    assert [one["tools"] for one in adapted] == [TOOLS if case == "tools" else None] * len(adapted)
