"""Streams made of whole answers: a middleware for servers of models that cannot stream.

Our LLM proxy streams by itself. The middleware is for servers that users wrote, and for tests that import it.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

__all__ = ["StreamConversionMiddleware"]


class StreamConversionMiddleware(BaseHTTPMiddleware):
    """Sends requests for a stream on without `stream`, and answers with the events of the whole answer."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        path = request.url.path
        if request.method != "POST" or not path.endswith(("/chat/completions", "/messages")):
            return await call_next(request)
        try:
            asked = json.loads(await request.body())
        except ValueError:
            return await call_next(request)
        if not isinstance(asked, dict) or not asked.get("stream"):
            return await call_next(request)
        whole = {key: value for key, value in asked.items() if key not in ("stream", "stream_options")}
        request._body = json.dumps({**whole, "stream": False}).encode()  # what Starlette hands on
        response = await call_next(request)
        if not 200 <= response.status_code < 300:
            return response
        body = b"".join([part async for part in response.body_iterator])  # type: ignore[attr-defined] # it streams
        answer = json.loads(body)
        events = self.anthropic_stream_generator(answer) if path.endswith("/messages") else None
        return StreamingResponse(events or self.openai_stream_generator(answer), media_type="text/event-stream")

    async def openai_stream_generator(self, response_json: Mapping[str, Any]) -> AsyncIterator[str]:
        """An answer of chat completions as the chunks of its stream."""
        created = int(time.time())
        head = {"id": f"chatcmpl-{created}", "object": "chat.completion.chunk", "created": created}
        head["model"] = response_json.get("model", "")
        for choice in response_json.get("choices", []):
            message = choice.get("message") or {}
            deltas: list[dict[str, Any]] = [{"role": message.get("role", "assistant")}]
            if message.get("content"):
                deltas.append({"content": message["content"]})
            for index, call in enumerate(message.get("tool_calls") or []):
                function = call.get("function") or {}
                named = {"id": call.get("id"), "type": "function", "function": {"name": function.get("name")}}
                deltas.append({"tool_calls": [{"index": index, **named}]})
                given = {"index": index, "function": {"arguments": function.get("arguments", "")}}
                deltas.append({"tool_calls": [given]})
            ends = [None] * len(deltas) + [choice.get("finish_reason") or "stop"]
            for delta, end in zip([*deltas, {}], ends, strict=True):
                chunk = {"index": choice.get("index", 0), "delta": delta, "finish_reason": end}
                yield f"data: {json.dumps({**head, 'choices': [chunk]})}\n\n"
        yield "data: [DONE]\n\n"

    async def anthropic_stream_generator(self, original_response: Mapping[str, Any]) -> AsyncIterator[str]:
        """A message as the events of its stream."""
        usage = original_response.get("usage") or {}
        opened = {**original_response, "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event({"type": "message_start", "message": opened})
        yield _event({"type": "ping"})
        for index, block in enumerate(original_response.get("content") or []):
            start, delta = _block_events(block)
            yield _event({"type": "content_block_start", "index": index, "content_block": start})
            if delta is not None:
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        ended = {name: original_response.get(name) for name in ("stop_reason", "stop_sequence")}
        tokens = {"output_tokens": usage.get("output_tokens", 0)}
        yield _event({"type": "message_delta", "delta": ended, "usage": tokens})
        yield _event({"type": "message_stop"})


def _block_events(block: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """How a block of content begins, and what is added to it; a block of another kind comes whole."""
    if block.get("type") == "text":
        return {"type": "text", "text": ""}, {"type": "text_delta", "text": block.get("text", "")}
    if block.get("type") == "tool_use":
        added = {"type": "input_json_delta", "partial_json": json.dumps(block.get("input") or {})}
        return {**block, "input": {}}, added
    return block, None


def _event(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
