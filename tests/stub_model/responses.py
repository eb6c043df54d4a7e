"""OpenAI's responses: items instead of messages, and a stream in which every item is opened, filled and closed."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from tests.stub_model.dialect import (
    Dialect,
    content_of,
    json_schema_of,
    list_of,
    named_event,
    openai_error,
)
from tests.stub_model.reply import BadRequest, Choice, Reply, Wish, positive
from tests.stub_model.script import Failure
from tests.stub_model.words import ROLES, Message, ToolCall


def read(body: dict[str, Any]) -> Wish:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(body, "input")
    messages = _merged([_message(item, n) for n, item in enumerate(items) if item.get("type") != "reasoning"])
    if body.get("instructions"):
        messages.insert(0, Message("system", body["instructions"]))
    return Wish(
        messages=tuple(messages),
        tools=tuple(body.get("tools") or ()),
        max_tokens=positive(body, "max_output_tokens"),
        json_schema=json_schema_of((body.get("text") or {}).get("format")),
    )


def continued(body: dict[str, Any], wish: Wish, history: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages of a request behind those it goes on from; instructions are not carried over."""
    own = 1 if body.get("instructions") else 0
    return (*wish.messages[:own], *history, *wish.messages[own:])


def spoken(body: dict[str, Any], messages: tuple[Message, ...], choice: Choice) -> tuple[Message, ...]:
    """A conversation after an answer, for the request that goes on from it."""
    own = 1 if body.get("instructions") else 0
    return (*messages[own:], Message("assistant", choice.text, (), tuple(choice.tool_calls)))


def _message(item: dict[str, Any], number: int) -> Message:
    kind = item.get("type", "message")
    place = f"input[{number}]"
    if kind == "function_call":
        return Message("assistant", tool_calls=(ToolCall(item["name"], item["arguments"], item["call_id"]),))
    if kind == "function_call_output":
        text, images = content_of(item.get("output"), f"{place}.output")
        return Message("tool", text, images)
    if kind != "message" or item.get("role") not in ROLES:
        raise BadRequest(f"Invalid value for '{place}': a {kind!r} of role {item.get('role')!r}.", place)
    text, images = content_of(item.get("content"), f"{place}.content")
    return Message(item["role"], text, images)


def _merged(messages: list[Message]) -> list[Message]:
    """The items of one answer, its text and its calls, as one message again."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role == "assistant":
            before = merged.pop()
            calls = (*before.tool_calls, *message.tool_calls)
            message = Message("assistant", before.text + message.text, before.images + message.images, calls)
        merged.append(message)
    return merged


# ---------------------------------------------------------------------- telling


def tell(reply: Reply) -> dict[str, Any]:
    choice = reply.choices[0]
    is_cut = choice.finish_reason == "length"
    told = _frame(reply, "incomplete" if is_cut else "completed")
    told["output"] = _items(reply)
    told["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    told["usage"] = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    if reply.returns_token_ids:
        told |= {"prompt_token_ids": list(reply.request.prompt_token_ids), "token_ids": choice.token_ids}
    return told


def _frame(reply: Reply, status: str) -> dict[str, Any]:
    body = reply.body
    told = {"id": reply.id, "object": "response", "created_at": reply.created, "status": status, "model": reply.model}
    told |= {"error": None, "incomplete_details": None, "output": [], "usage": None, "metadata": {}}
    told |= {"instructions": body.get("instructions"), "previous_response_id": body.get("previous_response_id")}
    told |= {"tools": body.get("tools") or [], "tool_choice": body.get("tool_choice", "auto")}
    told |= {"parallel_tool_calls": True, "store": True, "truncation": "disabled", "temperature": 1.0, "top_p": 1.0}
    told["text"] = body.get("text") or {"format": {"type": "text"}}
    return told


def _items(reply: Reply) -> list[dict[str, Any]]:
    choice = reply.choices[0]
    items: list[dict[str, Any]] = []
    if choice.text or not choice.tool_calls:
        item = {"id": f"{reply.id}-message", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**item, "content": [_text_part(choice.text)]})
    for number, call in enumerate(choice.tool_calls):
        item = {"id": f"{reply.id}-call-{number}", "type": "function_call", "status": "completed"}
        items.append({**item, "call_id": call.id, "name": call.name, "arguments": call.arguments})
    return items


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# ---------------------------------------------------------------------- streaming


def stream(reply: Reply) -> Iterator[bytes]:
    numbers = count()
    for event in _events(reply):
        yield named_event({**event, "sequence_number": next(numbers)})


def _events(reply: Reply) -> Iterator[dict[str, Any]]:
    frame = _frame(reply, "in_progress")
    yield {"type": "response.created", "response": frame}
    yield {"type": "response.in_progress", "response": frame}
    calls = 0
    for index, item in enumerate(_items(reply)):
        if item["type"] == "message":
            yield from _text_events(reply.choices[0], item, index)
        else:
            yield from _call_events(reply.choices[0], item, index, calls)
            calls += 1
    whole = tell(reply)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _text_events(choice: Choice, item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index, "content_index": 0}
    opened = {**item, "status": "in_progress", "content": []}
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    yield {"type": "response.content_part.added", **place, "part": _text_part("")}
    for piece in choice.pieces:
        if piece.kind == "text":
            yield {"type": "response.output_text.delta", **place, "delta": piece.text, "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": choice.text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": item["content"][0]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(choice: Choice, item: dict[str, Any], index: int, tool: int) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    opened = {**item, "status": "in_progress", "arguments": ""}
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    for piece in choice.pieces:
        if piece.kind == "arguments" and piece.tool == tool:
            yield {"type": "response.function_call_arguments.delta", **place, "delta": piece.text}
    done = {"name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **place, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _error_event(failure: Failure) -> bytes:
    told = openai_error(failure)["error"]
    return named_event({"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]})


RESPONSES = Dialect("responses", "/responses", "resp", "call", read, tell, stream, openai_error, _error_event)
