"""Conversations of real clients, with the stub model behind them: each API, each recorder, each kind of message."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
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


def react(request: Request) -> Turn:
    """Calls the tool, if there is one, and answers when the results have come."""
    if request.body.get("tools") and not any(message.role == "tool" for message in request.messages):
        return Answer(SAID, tool_calls=tuple(ToolCall.of("weather", city=city) for city in CITIES))
    return ANSWER


class Agent(ABC):
    """An agent that holds a conversation in the words of one API."""

    def __init__(self, url: str, model: str, *, is_streaming: bool) -> None:
        self.url, self.model, self.is_streaming = url, model, is_streaming
        self.history: list[Any] = []
        self.options: dict[str, Any] = {}

    def hold(self, case: str) -> None:
        """The whole conversation."""
        self.history.append({"role": "user", "content": self.picture() if case == "image" else QUESTION})
        if case == "system":
            self.instruct()
        if case == "tools":
            self.options["tools"] = [self.tool()]
        with ExitStack() as life:
            self.turn(life)
            if case == "tools":
                self.turn(life)

    @abstractmethod
    def instruct(self) -> None: ...

    @abstractmethod
    def picture(self) -> list[Any]: ...

    @abstractmethod
    def tool(self) -> dict[str, Any]: ...

    @abstractmethod
    def turn(self, life: ExitStack) -> None:
        """Have the model answer, and add what it said and what its tools returned."""


class ChatAgent(Agent):
    def instruct(self) -> None:
        self.history.insert(0, {"role": "system", "content": SYSTEM})

    def picture(self) -> list[Any]:
        return [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": PNG_URL}}]

    def tool(self) -> dict[str, Any]:
        function = {"name": "weather", "description": "It says.", "parameters": SCHEMA}
        return {"type": "function", "function": function}

    def turn(self, life: ExitStack) -> None:
        client = life.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0))
        ask: Any = {"model": self.model, "messages": self.history, **self.options}
        if self.is_streaming:
            told: Any = life.enter_context(client.chat.completions.stream(**ask)).get_final_completion()
        else:
            told = client.chat.completions.create(**ask)
        message = told.choices[0].message
        self.history.append(message.to_dict())
        for call in message.tool_calls or ():
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})


class ResponsesAgent(Agent):
    def instruct(self) -> None:
        self.options["instructions"] = SYSTEM

    def picture(self) -> list[Any]:
        return [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": PNG_URL}]

    def tool(self) -> dict[str, Any]:
        return {"type": "function", "name": "weather", "description": "It says.", "parameters": SCHEMA}

    def turn(self, life: ExitStack) -> None:
        client = life.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0))
        ask: Any = {"model": self.model, "input": self.history, **self.options}
        if self.is_streaming:
            told: Any = life.enter_context(client.responses.stream(**ask)).get_final_response()
        else:
            told = client.responses.create(**ask)
        self.history += [item.to_dict() for item in told.output]
        for item in told.output:
            if item.type == "function_call":
                self.history.append({"type": "function_call_output", "call_id": item.call_id, "output": "rain"})


class AnthropicAgent(Agent):
    def instruct(self) -> None:
        self.options["system"] = SYSTEM

    def picture(self) -> list[Any]:
        source = {"type": "base64", "media_type": "image/png", "data": PNG}
        return [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]

    def tool(self) -> dict[str, Any]:
        return {"name": "weather", "description": "It says.", "input_schema": SCHEMA}

    def turn(self, life: ExitStack) -> None:
        client = life.enter_context(anthropic.Anthropic(base_url=self.url, api_key="any", max_retries=0))
        ask: Any = {"model": self.model, "max_tokens": 99, "messages": self.history, **self.options}
        if self.is_streaming:
            told: Any = life.enter_context(client.messages.stream(**ask)).get_final_message()
        else:
            told = client.messages.create(**ask)
        self.history.append({"role": "assistant", "content": [block.to_dict() for block in told.content]})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in told.content
            if block.type == "tool_use"
        ]
        if results:
            self.history.append({"role": "user", "content": results})


AGENTS: dict[str, type[Agent]] = {"chat": ChatAgent, "responses": ResponsesAgent, "anthropic": AnthropicAgent}


def by_the_tracer(model: StubModel, api: str, case: str, *, is_streaming: bool) -> list[Span]:
    """The spans of a client that asks the model itself, under a tracer."""
    agent = AGENTS[api](model.url, MODEL, is_streaming=is_streaming)
    trace = observed(agent.hold, case)
    assert trace.error is None, trace.error
    return trace.spans


def by_the_proxy(model: StubModel, api: str, case: str, *, is_streaming: bool) -> list[Span]:
    """The spans of the proxy, through which a client without a tracer asks."""
    with proxied(entry(model.url), entry(model.url, "messages", model=CLAUDE)) as door:
        name = CLAUDE if api == "anthropic" else MODEL
        AGENTS[api](door.endpoint, name, is_streaming=is_streaming).hold(case)
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


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", list(CONVERSATIONS))
@pytest.mark.parametrize("api", list(AGENTS))
@pytest.mark.parametrize("recorder", list(RECORDERS))
def test_conversation_is_the_same_whichever_api_and_recorder(
    model: StubModel, recorder: str, api: str, case: str, is_streaming: bool
) -> None:
    spans = RECORDERS[recorder](model, api, case, is_streaming=is_streaming)

    adapted = TraceToMessages().adapt(sorted(spans, key=lambda span: span.start_time or 0))

    assert [shown(one["messages"]) for one in adapted] == CONVERSATIONS[case]
    assert [one["tools"] for one in adapted] == [TOOLS if case == "tools" else None] * len(adapted)
