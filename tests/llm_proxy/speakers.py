"""Agents that hold one conversation with a tool, each in the words of one vendor's client."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tests.llm_proxy.openai_suite import CHAT_TOOLS, RESPONSE_TOOLS, SCHEMA
from tests.llm_proxy.proxied import MODEL, Proxied

SYSTEM = "Be brief."


@dataclass(frozen=True)
class Said:
    """What the model said in one turn."""

    text: str
    calls: tuple[tuple[str, str, Any], ...]
    """Id, name and arguments of each."""
    ended: str
    tokens: tuple[int, int]


class Speaker(ABC):
    """An agent; `history` grows by what is said."""

    def __init__(self, door: Proxied, *, is_streaming: bool) -> None:
        self.door = door
        self.is_streaming = is_streaming
        self.history: list[Any] = []

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    @abstractmethod
    def result(self, call_id: str, text: str) -> None:
        """Add what a tool returned."""

    @abstractmethod
    def turn(self) -> Said:
        """Have the model answer."""


class ChatSpeaker(Speaker):
    ENDED = ("tool_calls", "stop")

    def result(self, call_id: str, text: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def turn(self) -> Said:
        client = self.door.openai().chat.completions
        messages = [{"role": "system", "content": SYSTEM}, *self.history]
        ask: Any = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS, "max_tokens": 99}
        if self.is_streaming:
            with client.stream(**ask, stream_options={"include_usage": True}) as stream:
                told: Any = stream.get_final_completion()
        else:
            told = client.create(**ask)
        message = told.choices[0].message
        self.history.append(message.to_dict())
        calls = [
            (call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()
        ]
        tokens = (told.usage.prompt_tokens, told.usage.completion_tokens)
        return Said(message.content or "", tuple(calls), told.choices[0].finish_reason, tokens)


class ResponsesSpeaker(Speaker):
    ENDED = ("completed", "completed")

    def result(self, call_id: str, text: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def turn(self) -> Said:
        client = self.door.openai().responses
        ask: Any = {"model": MODEL, "input": self.history, "instructions": SYSTEM, "tools": RESPONSE_TOOLS}
        if self.is_streaming:
            with client.stream(**ask) as stream:
                told: Any = stream.get_final_response()
        else:
            told = client.create(**ask)
        self.history += [item.to_dict() for item in told.output]
        calls = [
            (item.call_id, item.name, json.loads(item.arguments))
            for item in told.output
            if item.type == "function_call"
        ]
        return Said(told.output_text, tuple(calls), told.status, (told.usage.input_tokens, told.usage.output_tokens))


class MessagesSpeaker(Speaker):
    ENDED = ("tool_use", "end_turn")

    def result(self, call_id: str, text: str) -> None:
        result = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        self.history.append({"role": "user", "content": [result]})

    def turn(self) -> Said:
        client = self.door.anthropic().messages
        tools = [{"name": "weather", "input_schema": SCHEMA}]
        ask: Any = {"model": MODEL, "max_tokens": 99, "system": SYSTEM, "messages": self.history, "tools": tools}
        if self.is_streaming:
            with client.stream(**ask) as stream:
                told: Any = stream.get_final_message()
        else:
            told = client.create(**ask)
        self.history.append({"role": "assistant", "content": [block.to_dict() for block in told.content]})
        text = "".join(block.text for block in told.content if block.type == "text")
        calls = [(block.id, block.name, block.input) for block in told.content if block.type == "tool_use"]
        return Said(text, tuple(calls), told.stop_reason, (told.usage.input_tokens, told.usage.output_tokens))


SPEAKERS: dict[str, Any] = {"chat": ChatSpeaker, "responses": ResponsesSpeaker, "messages": MessagesSpeaker}
