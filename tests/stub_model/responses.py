"""OpenAI's responses: items instead of messages, and a stream in which every item is opened, filled and closed."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from tests.stub_model.dialect import Dialect, content_of, json_schema_of, list_of, named_event, openai_error, positive
from tests.stub_model.script import BadRequest, CallOptions, Choice, Failure, Reply
from tests.stub_model.words import ROLES, Message, ToolCall


def read(body: dict[str, Any]) -> CallOptions:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(body, "input")
    messages = _merged([_message(item, n) for n, item in enumerate(items) if item.get("type") != "reasoning"])
    if body.get("instructions"):
        messages.insert(0, Message("system", body["instructions"]))
    return CallOptions(
        messages=tuple(messages),
        tools=tuple(body.get("tools") or ()),
        max_tokens=positive(body, "max_output_tokens"),
        json_schema=json_schema_of((body.get("text") or {}).get("format")),
    )


def continued(body: dict[str, Any], options: CallOptions, history: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages of a request behind those it goes on from; instructions are not carried over."""
    own = 1 if body.get("instructions") else 0
    return (*options.messages[:own], *history, *options.messages[own:])


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


# ---------------------------------------------------------------------- writing


def write(reply: Reply) -> dict[str, Any]:
    choice = reply.choices[0]
    is_cut = choice.finish_reason == "length"
    written = _frame(reply, "incomplete" if is_cut else "completed")
    written["output"] = _items(reply)
    written["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    written["usage"] = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    if reply.returns_token_ids:
        written |= {"prompt_token_ids": list(reply.request.prompt_token_ids), "token_ids": choice.token_ids}
    return written


def _frame(reply: Reply, status: str) -> dict[str, Any]:
    body = reply.body
    written = {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "model": reply.model,
    }
    written |= {"error": None, "incomplete_details": None, "output": [], "usage": None, "metadata": {}}
    written |= {"instructions": body.get("instructions"), "previous_response_id": body.get("previous_response_id")}
    written |= {"tools": body.get("tools") or [], "tool_choice": body.get("tool_choice", "auto")}
    written |= {"parallel_tool_calls": True, "store": True, "truncation": "disabled", "temperature": 1.0, "top_p": 1.0}
    written["text"] = body.get("text") or {"format": {"type": "text"}}
    return written


def _items(reply: Reply) -> list[dict[str, Any]]:
    choice = reply.choices[0]
    items: list[dict[str, Any]] = []
    if choice.thought:
        part = {"type": "reasoning_text", "text": choice.thought}
        items.append({"id": f"{reply.id}-thought", "type": "reasoning", "summary": [], "content": [part]})
    if choice.text or not choice.tool_calls:
        item = {"id": f"{reply.id}-message", "type": "message", "role": "assistant", "status": "completed"}
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        items.append({**item, "content": [part]})
    for number, call in enumerate(choice.tool_calls):
        item = {"id": f"{reply.id}-call-{number}", "type": "function_call", "status": "completed"}
        items.append({**item, "call_id": call.id, "name": call.name, "arguments": call.arguments})
    return items


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
        if item["type"] != "function_call":
            yield from _text_events(reply.choices[0], item, index)
        else:
            yield from _call_events(reply.choices[0], item, index, calls)
            calls += 1
    whole = write(reply)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _text_events(choice: Choice, item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    kind, place = f"response.{part['type']}", {"item_id": item["id"], "output_index": index, "content_index": 0}
    extra = {"logprobs": []} if item["type"] == "message" else {}
    opened = {**item, "content": [], **({"status": "in_progress"} if "status" in item else {})}
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    for piece in choice.texts("text" if item["type"] == "message" else "thought"):
        yield {"type": f"{kind}.delta", **place, "delta": piece, **extra}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **extra}
    yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(choice: Choice, item: dict[str, Any], index: int, tool: int) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    opened = {**item, "status": "in_progress", "arguments": ""}
    yield {"type": "response.output_item.added", "output_index": index, "item": opened}
    for piece in choice.texts("arguments", tool):
        yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
    done = {"name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **place, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _error_event(failure: Failure) -> bytes:
    written = openai_error(failure)["error"]
    return named_event(
        {"type": "error", "code": written["code"], "message": written["message"], "param": written["param"]}
    )


RESPONSES = Dialect("responses", "/responses", "resp", "call", read, write, stream, openai_error, _error_event)
