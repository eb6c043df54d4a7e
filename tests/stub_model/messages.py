"""Anthropic's messages: blocks of content, tool results among the user's words, and a stream of blocks."""

import json
from collections.abc import Iterator
from typing import Any

from tests.stub_model.dialect import Dialect, content_of, list_of, named_event, positive, stops_of
from tests.stub_model.script import BadRequest, CallOptions, Choice, Failure, Reply
from tests.stub_model.words import Message, ToolCall, as_json

ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
ERROR_TYPES |= {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: dict[str, Any]) -> CallOptions:
    limit = positive(body, "max_tokens")
    if limit is None:
        raise BadRequest("max_tokens: Field required", "max_tokens")
    return CallOptions(
        messages=conversation(body),
        tools=tuple(body.get("tools") or ()),
        max_tokens=limit,
        stop=stops_of(body.get("stop_sequences")),
    )


def conversation(body: dict[str, Any]) -> tuple[Message, ...]:
    """The messages of a request, those of tools apart from those of the user."""
    messages: list[Message] = []
    if body.get("system"):
        messages.append(Message("system", content_of(body["system"], "system")[0]))
    for number, message in enumerate(list_of(body, "messages")):
        if message.get("role") not in ("user", "assistant"):
            raise BadRequest(f"messages.{number}.role: Input should be 'user' or 'assistant'", "messages")
        messages += _messages(message, f"messages.{number}.content")
    return tuple(messages)


def _messages(message: dict[str, Any], place: str) -> Iterator[Message]:
    content = message.get("content")
    if not isinstance(content, list):
        yield Message(message["role"], content_of(content, place)[0])
        return
    kinds = [block.get("type") if isinstance(block, dict) else None for block in content]
    for block, kind in zip(content, kinds, strict=True):
        if kind == "tool_result":
            yield Message("tool", *content_of(block.get("content"), f"{place}.content"))
    rest = [block for block, kind in zip(content, kinds, strict=True) if kind not in ("tool_result", "tool_use")]
    calls = [
        ToolCall(block["name"], as_json(block["input"]), block["id"])
        for block, kind in zip(content, kinds, strict=True)
        if kind == "tool_use"
    ]
    if rest or calls:
        yield Message(message["role"], *content_of(rest, place), tuple(calls))


# ---------------------------------------------------------------------- writing


def write(reply: Reply) -> dict[str, Any]:
    choice = reply.choices[0]
    written = {**_frame(reply), "content": _blocks(choice), **_ending(choice), "usage": _usage(reply)}
    if reply.returns_token_ids:
        written |= {"prompt_token_ids": list(reply.request.prompt_token_ids), "token_ids": choice.token_ids}
    return written


def _frame(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model}


def _ending(choice: Choice) -> dict[str, Any]:
    if choice.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
    return {"stop_reason": STOP_REASONS[choice.finish_reason], "stop_sequence": None}


def _usage(reply: Reply, output_tokens: int | None = None) -> dict[str, Any]:
    used = {"input_tokens": reply.prompt_tokens - reply.cached_tokens, "cache_creation_input_tokens": 0}
    used["cache_read_input_tokens"] = reply.cached_tokens
    return {**used, "output_tokens": reply.completion_tokens if output_tokens is None else output_tokens}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.thought:
        blocks.append({"type": "thinking", "thinking": choice.thought, "signature": "s"})
    if choice.text:
        blocks.append({"type": "text", "text": choice.text})
    calls = choice.tool_calls
    return blocks + [{"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in calls]


def _input(call: ToolCall) -> Any:
    """The arguments as an object; those that a token limit cut short are left out."""
    try:
        return json.loads(call.arguments)
    except ValueError:
        return {}


# ---------------------------------------------------------------------- streaming


def stream(reply: Reply) -> Iterator[bytes]:
    return map(named_event, _events(reply))


def _events(reply: Reply) -> Iterator[dict[str, Any]]:
    choice = reply.choices[0]
    opening = {**_frame(reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(reply, 1)}
    yield {"type": "message_start", "message": opening}
    yield {"type": "ping"}
    tools = 0
    for index, block in enumerate(_blocks(choice)):
        yield {"type": "content_block_start", "index": index, "content_block": _opened(block)}
        for delta in _deltas(choice, block, tools):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
        tools += block["type"] == "tool_use"
    yield {"type": "message_delta", "delta": _ending(choice), "usage": {"output_tokens": reply.completion_tokens}}
    yield {"type": "message_stop"}


def _opened(block: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"thinking": "", "signature": "", "text": "", "input": {}}
    return {name: empty.get(name, value) for name, value in block.items()}


def _deltas(choice: Choice, block: dict[str, Any], tool: int) -> Iterator[dict[str, Any]]:
    if block["type"] == "thinking":
        yield from ({"type": "thinking_delta", "thinking": piece} for piece in choice.texts("thought"))
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "text":
        yield from ({"type": "text_delta", "text": piece} for piece in choice.texts("text"))
    else:
        pieces = ["", *choice.texts("arguments", tool)]
        yield from ({"type": "input_json_delta", "partial_json": piece} for piece in pieces)


def _error(failure: Failure) -> dict[str, Any]:
    kind = failure.code or ERROR_TYPES.get(failure.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}, "request_id": "req_stub"}


def _error_event(failure: Failure) -> bytes:
    return named_event(_error(failure))


MESSAGES = Dialect("messages", "/messages", "msg", "toolu", read, write, stream, _error, _error_event)
