"""One answer of a model, told by a backend of any dialect, whole and in pieces."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentlightning.llm_proxy.dialects.names import DialectName
from agentlightning.llm_proxy.dialects.sse import ServerSentEvent


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        return json.dumps(self.arguments, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class Answer:
    text: tuple[str, ...] = ()
    """In the pieces it is streamed in."""
    thought: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    is_cut: bool = False
    """Whether the token limit ended it."""
    prompt_tokens: int = 20
    cached_tokens: int = 5
    completion_tokens: int = 7

    @property
    def finish_reason(self) -> str:
        return "length" if self.is_cut else "tool_calls" if self.calls else "stop"


def pieces(text: str) -> list[str]:
    """A text in three, one of which may be empty."""
    third = len(text) // 3
    return [text[:third], text[third : 2 * third], text[2 * third :]]


def whole(dialect: DialectName, answer: Answer) -> dict[str, Any]:
    return {"chat": _chat, "messages": _message, "responses": _response}[dialect](answer)


def events(dialect: DialectName, answer: Answer) -> list[ServerSentEvent]:
    if dialect == "chat":
        chunks = [ServerSentEvent(json.dumps(chunk).encode()) for chunk in _chunks(answer)]
        return [*chunks, ServerSentEvent(b"[DONE]")]
    told = _message_events(answer) if dialect == "messages" else _response_events(answer)
    return [ServerSentEvent(json.dumps(event).encode(), event["type"]) for event in told]


# ---------------------------------------------------------------------- chat


def _chat_usage(answer: Answer) -> dict[str, Any]:
    used = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    used["total_tokens"] = answer.prompt_tokens + answer.completion_tokens
    return {**used, "prompt_tokens_details": {"cached_tokens": answer.cached_tokens}}


def _chat(answer: Answer) -> dict[str, Any]:
    calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.text}} for c in answer.calls]
    text = "".join(answer.text)
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
    message |= {"reasoning_content": "".join(answer.thought) or None}
    message |= {"tool_calls": calls} if calls else {}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "token_ids": [1, 2]}
    choice["logprobs"] = {"content": [{"token": "a", "logprob": -1.0}]}
    told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1700000000, "model": "m", "choices": [choice]}
    return {**told, "usage": _chat_usage(answer), "prompt_token_ids": [1], "weights_version": "7"}


def _chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in answer.thought]
    deltas += [{"content": piece} for piece in answer.text]
    for index, call in enumerate(answer.calls):
        opened = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        deltas.append({"tool_calls": [opened]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces(call.text)]
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [3], "logprobs": None}
        yield {**frame, "choices": [choice], "usage": None}
    yield {**frame, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}], "usage": None}
    yield {**frame, "choices": [], "usage": _chat_usage(answer)}


# ---------------------------------------------------------------------- messages


def _message_usage(answer: Answer) -> dict[str, Any]:
    used = {"input_tokens": answer.prompt_tokens - answer.cached_tokens, "output_tokens": answer.completion_tokens}
    return {**used, "cache_read_input_tokens": answer.cached_tokens, "cache_creation_input_tokens": 0}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.thought:
        blocks.append({"type": "thinking", "thinking": "".join(answer.thought), "signature": "s"})
    if answer.text:
        blocks.append({"type": "text", "text": "".join(answer.text)})
    calls = answer.calls
    return blocks + [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in calls]


def _message(answer: Answer) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}[answer.finish_reason]
    told = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": _blocks(answer)}
    return {**told, "stop_reason": reason, "stop_sequence": None, "usage": _message_usage(answer)}


def _message_events(answer: Answer) -> Iterator[dict[str, Any]]:
    message = _message(answer)
    opening = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 1}}
    yield {"type": "message_start", "message": opening}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        empty: dict[str, Any] = {"thinking": "", "signature": "", "text": "", "input": {}}
        opened = {name: empty.get(name, value) for name, value in block.items()}
        yield {"type": "content_block_start", "index": index, "content_block": opened}
        for delta in _block_deltas(answer, block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": {"output_tokens": answer.completion_tokens}}
    yield {"type": "message_stop"}


def _block_deltas(answer: Answer, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "thinking":
        yield from ({"type": "thinking_delta", "thinking": piece} for piece in answer.thought)
        yield {"type": "signature_delta", "signature": "s"}
    elif block["type"] == "text":
        yield from ({"type": "text_delta", "text": piece} for piece in answer.text)
    elif block["input"]:
        text = next(call.text for call in answer.calls if call.id == block["id"])
        yield from ({"type": "input_json_delta", "partial_json": piece} for piece in ["", *pieces(text)])
    else:
        yield {"type": "input_json_delta", "partial_json": ""}


# ---------------------------------------------------------------------- responses


def _items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.thought:
        part = {"type": "reasoning_text", "text": "".join(answer.thought)}
        items.append({"id": "rs_1", "type": "reasoning", "summary": [], "content": [part]})
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": "".join(answer.text), "annotations": [], "logprobs": []}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**item, "content": [part]})
    for call in answer.calls:
        item = {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", "call_id": call.id}
        items.append({**item, "name": call.name, "arguments": call.text})
    return items


def _response(answer: Answer) -> dict[str, Any]:
    told = {"id": "resp_1", "object": "response", "created_at": 1700000000, "model": "m", "output": _items(answer)}
    told |= {
        "status": "incomplete" if answer.is_cut else "completed",
        "error": None,
        "tools": [],
        "tool_choice": "auto",
    }
    told |= {"incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None}
    told |= {"parallel_tool_calls": True}
    total = answer.prompt_tokens + answer.completion_tokens
    used = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens, "total_tokens": total}
    used |= {"input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0}}
    return {**told, "usage": {**used, "output_tokens_details": {"reasoning_tokens": 0}}}


def _response_events(answer: Answer) -> Iterator[dict[str, Any]]:
    response = _response(answer)
    yield {"type": "response.created", "response": {**response, "output": [], "status": "in_progress", "usage": None}}
    for index, item in enumerate(response["output"]):
        opened = {**item, **({"content": []} if "content" in item else {"arguments": ""})}
        place = {"item_id": item["id"], "output_index": index}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
        else:
            kind = item["content"][0]["type"]
            for piece in answer.text if kind == "output_text" else answer.thought:
                yield {"type": f"response.{kind}.delta", **place, "content_index": 0, "delta": piece}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
