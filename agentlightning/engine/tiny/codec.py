"""The tiny model's chat format.

    <system> text <end>  <user> text <end>  <assistant> text <call> arguments <end>  <tool> text <end>

A message of the assistant is its text, then its tool calls. The arguments of a tool with a single string parameter are
the bare characters of that string; those of any other tool are the JSON text itself. With one tool a call needs no
name; with several, a list of their names precedes the conversation, and a call is `<call> name <named> arguments`.

Any tokens at all parse, and what was parsed renders to the same tokens again. A `<call>` that does not name one of the
tools begins no call: it belongs to the text or to the arguments in which it stands, as a character of its own.
"""

import json
from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from agentlightning.engine.codec import (
    CallArguments,
    CallStarted,
    ContentDelta,
    Delta,
    Message,
    ParsedMessage,
    ToolDefinition,
    parsed_message,
)
from agentlightning.engine.tiny import tokenizer
from agentlightning.engine.tiny.tokenizer import ASSISTANT, CALL, END, NAMED, SYSTEM, TOOL, TOOLS, USER
from agentlightning.errors import InvalidRequest
from agentlightning.utils.json_values import JsonObject

__all__ = ["TinyChatCodec", "TinyParser"]

_ROLES: Final = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "tool": TOOL, "function": TOOL}


class TinyChatCodec:
    """Renders and parses the tiny model's chat; it has no state."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition] | None = None) -> list[int]:
        parameters = _parameters_by_tool(tools)
        if not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest("A message is not an object.")
        tokens: list[int] = []
        if len(parameters) > 1:
            tokens += [TOOLS, *tokenizer.encode(",".join(parameters)), END]
        for message in messages:
            tokens += _render_message(message, parameters)
        return [*tokens, ASSISTANT]

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolDefinition] | None = None) -> ParsedMessage:
        parser = self.stream(tools)
        deltas = [delta for token in token_ids for delta in parser.add(token)] + parser.finish()
        return parsed_message(deltas)

    def stream(self, tools: Sequence[ToolDefinition] | None = None) -> "TinyParser":
        return TinyParser(_parameters_by_tool(tools))

    def remember(self, prompt_ids: Sequence[int], token_ids: Sequence[int], message: Message) -> None:
        """Its text says every token."""

    def encode(self, text: str) -> list[int]:
        return tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        return tokenizer.token_text(token_id)


class TinyParser:
    """Parses one message token by token; what could still become the name of a tool is held back."""

    def __init__(self, parameters: dict[str, str | None]) -> None:
        self._parameters = parameters
        """By tool, its only string parameter; None for tools whose arguments are JSON text."""
        self._only_tool = next(iter(parameters)) if len(parameters) == 1 else None
        self._held: list[int] = []
        """An end token that may not be the last, or a call whose name is not yet complete."""
        self._calls = 0
        self._parameter: str | None = None

    def add(self, token_id: int) -> list[Delta]:
        if not self._held and token_id != END and (token_id != CALL or not self._parameters):
            return self._say([token_id])
        return self._add_structure(token_id)

    def finish(self) -> list[Delta]:
        """What was held back; the end token is left out, and the last call's arguments are closed."""
        held, self._held = self._held, []
        if held and held[-1] == END:
            held.pop()
        return self._say(held) + self._close_call()

    def _add_structure(self, token_id: int) -> list[Delta]:
        if token_id in (CALL, END):
            deltas, self._held = self._say(self._held), [token_id]
            if token_id == CALL and self._only_tool is not None:
                self._held = []
                deltas += self._start_call(self._only_tool)
            return deltas
        if self._held[0] == CALL and self._may_be_named(token_id):
            if token_id != NAMED:
                self._held.append(token_id)
                return []
            name, self._held = tokenizer.text_of(self._held[1:]), []
            return self._start_call(name)
        held, self._held = self._held, []
        return self._say([*held, token_id])

    def _may_be_named(self, token_id: int) -> bool:
        """Whether the held call and this token are still the beginning of a call to one of the tools."""
        name = tokenizer.text_of(self._held[1:])
        if token_id == NAMED:
            return name in self._parameters
        name += tokenizer.text_of([token_id])
        return any(known.startswith(name) for known in self._parameters)

    def _start_call(self, name: str) -> list[Delta]:
        deltas = self._close_call()
        self._parameter = self._parameters[name]
        deltas.append(CallStarted(self._calls, f"call_{uuid4().hex[:24]}", name))
        if self._parameter is not None:
            deltas.append(CallArguments(self._calls, f'{{{json.dumps(self._parameter)}: "'))
        self._calls += 1
        return deltas

    def _close_call(self) -> list[Delta]:
        return [CallArguments(self._calls - 1, '"}')] if self._calls and self._parameter is not None else []

    def _say(self, tokens: list[int]) -> list[Delta]:
        """Tokens without structure, as text of the answer or of the arguments that are being written."""
        if not tokens:
            return []
        text = tokenizer.text_of(tokens)
        if not self._calls:
            return [ContentDelta(text)]
        return [CallArguments(self._calls - 1, text if self._parameter is None else json.dumps(text)[1:-1])]


def _parameters_by_tool(tools: Sequence[ToolDefinition] | None) -> dict[str, str | None]:
    """For every tool its only string parameter, or None where its arguments are written as JSON."""
    parameters: dict[str, str | None] = {}
    for tool in tools or ():
        function = _named_function(tool)
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        parameters[function["name"]] = None
        if isinstance(properties, dict) and len(properties) == 1:
            [(name, kind)] = properties.items()
            if isinstance(kind, dict) and kind.get("type") == "string":
                parameters[function["name"]] = name
    return parameters


def _named_function(entry: object) -> JsonObject:
    """The function of a tool's definition or of a call to one."""
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"The tool or tool call {entry!r} has no function with a name.")
    return function


def _render_message(message: Message, parameters: dict[str, str | None]) -> list[int]:
    role = message.get("role")
    if role == "assistant":
        tokens = [ASSISTANT, *tokenizer.tokens_of(_text(message))]
        for call in message.get("tool_calls") or ():
            tokens += _render_call(call, parameters)
        return [*tokens, END]
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"A message has the role {role!r}; known are assistant, {', '.join(_ROLES)}.")
    return [_ROLES[role], *tokenizer.encode(_text(message)), END]


def _render_call(call: object, parameters: dict[str, str | None]) -> list[int]:
    function = _named_function(call)
    name = function["name"]
    arguments = _bare_arguments(function.get("arguments") or "", parameters.get(name))
    if len(parameters) == 1 and name in parameters:
        return [CALL, *tokenizer.tokens_of(arguments)]
    return [CALL, *tokenizer.tokens_of(name), NAMED, *tokenizer.tokens_of(arguments)]


def _bare_arguments(arguments: object, parameter: str | None) -> str:
    """What the model would have written for these arguments."""
    if not isinstance(arguments, str):
        raise InvalidRequest(f"The arguments of a tool call are {arguments!r}; they must be JSON text.")
    if parameter is None:
        return arguments
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(values, dict) and set(values) == {parameter} and isinstance(values[parameter], str):
        return str(values[parameter])
    return arguments


def _text(message: Message) -> str:
    """A message's content as one text; the parts of it that are not text are question marks."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"The content of a message is {content!r}; it must be text or a list of parts.")
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return "".join(text if isinstance(text, str) else "?" for text in texts)
