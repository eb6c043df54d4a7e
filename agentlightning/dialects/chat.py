"""Chat completions, as OpenAI, vLLM and most others speak them."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Dialect, field, items, opened, reader

__all__ = ["DIALECT", "ChatAssembler"]

_PLAIN_MESSAGE: Final = {"role", "content"}
_TEXTS: Final = ("content", "refusal", "reasoning_content", "reasoning")
"""Parts of an answer that come in pieces."""


def request_attributes(body: Mapping[str, Any]) -> Attributes:
    attributes: Attributes = {}
    fields.write_request(attributes, body, system="openai")
    for number, message in enumerate(items(body.get("messages"))):
        _write_message(attributes, f"{fields.PROMPT}.{number}", message)
    fields.write_tools(attributes, _tools(body))
    return attributes


def _write_message(attributes: Attributes, prefix: str, message: Any) -> None:
    content = field(message, "content")
    if type(message) is dict and type(content) is str and message.keys() == _PLAIN_MESSAGE:  # as most
        attributes[f"{prefix}.role"] = fields.plain_text(message["role"])
        attributes[f"{prefix}.content"] = content
        return
    fields.write_message(
        attributes,
        prefix,
        role=field(message, "role") or "assistant",
        content=content,
        tool_call_id=field(message, "tool_call_id"),
    )
    fields.write_tool_calls(attributes, prefix, _tool_calls(message))


def _tool_calls(message: Any) -> Iterator[tuple[Any, Any, Any]]:
    for call in items(field(message, "tool_calls")):
        function = field(call, "function") or field(call, "custom")
        arguments = field(function, "arguments")
        yield (
            field(call, "id"),
            field(function, "name"),
            arguments if arguments is not None else field(function, "input"),
        )
    called = field(message, "function_call")  # the form before tools
    if called is not None:
        yield None, field(called, "name"), field(called, "arguments")


def _tools(body: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for tool in items(body.get("tools")):
        function = field(tool, "function") or field(tool, "custom") or tool
        yield field(function, "name"), field(function, "description"), field(function, "parameters")
    for function in items(body.get("functions")):
        yield field(function, "name"), field(function, "description"), field(function, "parameters")


def response_attributes(response: Any) -> Attributes:
    attributes: Attributes = {}
    response = opened(response)
    fields.write_response(attributes, response)
    fields.write_usage(attributes, opened(field(response, "usage")))
    choices = [opened(choice) for choice in items(field(response, "choices"))]
    for number, choice in enumerate(choices):
        prefix = f"{fields.COMPLETION}.{number}"
        message = opened(field(choice, "message"))
        _write_message(attributes, prefix, message)
        told = reader(message)
        for name, value in (
            ("finish_reason", field(choice, "finish_reason")),
            ("refusal", told("refusal")),
            ("reasoning", told("reasoning_content") or told("reasoning")),
        ):
            if value:
                attributes[f"{prefix}.{name}"] = fields.plain_text(value)
        if number:  # those of the first choice have names of their own
            ids = fields.response_ids(response, choice, number)
            fields.write_token_ids(attributes, f"{prefix}.token_ids", ids)
            fields.write_logprobs(attributes, f"{prefix}.logprobs", field(field(choice, "logprobs"), "content"))
    _write_tokens(attributes, response, choices[0] if choices else None)
    return attributes


def _write_tokens(attributes: Attributes, response: Any, choice: Any) -> None:
    prompt_ids = field(response, "prompt_token_ids") or field(choice, "prompt_token_ids")
    fields.write_token_ids(attributes, fields.PROMPT_IDS, prompt_ids)
    fields.write_token_ids(attributes, fields.RESPONSE_IDS, fields.response_ids(response, choice, 0))
    logprobs = field(choice, "logprobs")
    fields.write_logprobs(attributes, fields.LOGPROBS, field(logprobs, "content"))
    fields.write_logprobs(attributes, fields.REFUSAL_LOGPROBS, field(logprobs, "refusal"))


class _Choice:
    """One choice of a stream."""

    def __init__(self) -> None:
        self.role = "assistant"
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.token_ids: list[int] = []
        self.prompt_ids: Any = None
        self.finish_reason: str | None = None

    def add(self, choice: Mapping[str, Any]) -> bool:
        delta = choice.get("delta") or {}
        self.role = delta.get("role") or self.role
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.prompt_ids = self.prompt_ids or choice.get("prompt_token_ids")
        self.token_ids += choice.get("token_ids") or ()
        for name, entries in (choice.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(items(entries))
        for name in _TEXTS:
            if isinstance(delta.get(name), str):
                self.texts.setdefault(name, []).append(delta[name])
        calls = list(items(delta.get("tool_calls")))
        if delta.get("function_call"):  # the form before tools
            calls.append({"index": 0, "function": delta["function_call"]})
        for call in calls:
            self._add_call(call)
        return bool(calls or any(delta.get(name) for name in _TEXTS))

    def _add_call(self, delta: Mapping[str, Any]) -> None:
        function = delta.get("function") or delta.get("custom") or {}
        number = delta.get("index")
        if number is None:  # some servers do not number them: then what has no name goes on with the last
            number = len(self.calls) if function.get("name") or not self.calls else max(self.calls)
        known = self.calls.setdefault(number, {"id": None, "name": "", "parts": []})
        known["id"] = delta.get("id") or known["id"]
        known["name"] = function.get("name") or known["name"]
        known["parts"].append(function.get("arguments") or function.get("input") or "")

    def response(self) -> dict[str, Any]:
        texts = {name: "".join(parts) for name, parts in self.texts.items()}
        message: dict[str, Any] = {"role": self.role, **texts}
        if self.calls and not texts.get("content"):  # a whole answer has none then
            message["content"] = None
        message["tool_calls"] = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": "".join(call["parts"])}}
            for _, call in sorted(self.calls.items())
        ]
        return {
            "message": message,
            "finish_reason": self.finish_reason,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_ids,
            "logprobs": self.logprobs,
        }


class ChatAssembler:
    """Puts chunks of a chat completion together."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def add(self, event: Mapping[str, Any]) -> bool:
        fields.keep_known(self._known, event)
        has_spoken = False
        for choice in items(event.get("choices")):
            has_spoken |= self._choices.setdefault(choice.get("index") or 0, _Choice()).add(choice)
        return has_spoken

    def response(self) -> Mapping[str, Any]:
        return {**self._known, "choices": [choice.response() for _, choice in sorted(self._choices.items())]}


DIALECT = Dialect("openai.chat.completion", request_attributes, response_attributes, ChatAssembler)
