"""OpenAI's chat completions, with what vLLM adds to them on request."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from tests.stub_model.dialect import (
    Dialect,
    content_of,
    data_event,
    json_schema_of,
    list_of,
    openai_error,
    openai_error_event,
)
from tests.stub_model.reply import BadRequest, Choice, Reply, Wish, logprob_of, positive, stops_of, token_texts
from tests.stub_model.words import ROLES, Message, Piece, ToolCall, id_of


def read(body: dict[str, Any]) -> Wish:
    return Wish(
        messages=tuple(_message(message, n) for n, message in enumerate(list_of(body, "messages"))),
        tools=tuple(body.get("tools") or ()),
        choices=positive(body, "n") or 1,
        max_tokens=positive(body, "max_completion_tokens", "max_tokens"),
        stop=stops_of(body.get("stop")),
        json_schema=json_schema_of(body.get("response_format")),
    )


def _message(message: dict[str, Any], number: int) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"Invalid value for 'messages[{number}].role': {role!r}.", f"messages[{number}].role")
    if role == "tool" and not message.get("tool_call_id"):
        raise BadRequest(f"Missing 'messages[{number}].tool_call_id'.", f"messages[{number}].tool_call_id")
    text, images = content_of(message.get("content"), f"messages[{number}].content")
    calls = [
        ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"])
        for call in message.get("tool_calls") or ()
    ]
    return Message(role, text, images, tuple(calls))


def usage_of(reply: Reply) -> dict[str, int]:
    used = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    return {**used, "total_tokens": reply.prompt_tokens + reply.completion_tokens}


def tell(reply: Reply) -> dict[str, Any]:
    told = {"id": reply.id, "object": "chat.completion", "created": reply.created, "model": reply.model}
    told |= {"choices": [_choice(reply, choice) for choice in reply.choices], "usage": usage_of(reply)}
    told["service_tier"], told["system_fingerprint"] = "default", "fp_stub"
    return {**told, **prompt_ids_of(reply), **instrumented_ids_of(reply)}


def prompt_ids_of(reply: Reply) -> dict[str, Any]:
    return {"prompt_token_ids": list(reply.request.prompt_token_ids)} if reply.returns_token_ids else {}


def instrumented_ids_of(reply: Reply) -> dict[str, Any]:
    """The ids as servers of the 0.2 release return them, asked or not: a list for each choice, at the top."""
    if reply.token_id_shape != "instrumented":
        return {}
    ids = [choice.token_ids for choice in reply.choices]
    return {"prompt_token_ids": list(reply.request.prompt_token_ids), "response_token_ids": ids}


def _choice(reply: Reply, choice: Choice) -> dict[str, Any]:
    calls = choice.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if calls else "")}
    message["refusal"] = None
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    told = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason}
    told["logprobs"] = logprobs_of(reply, token_texts(choice))
    if reply.returns_token_ids:
        told |= {"token_ids": choice.token_ids, "stop_reason": choice.stop_text}
    return told


def logprobs_of(reply: Reply, tokens: list[tuple[str, int]]) -> dict[str, Any] | None:
    if not reply.body.get("logprobs"):
        return None
    count = reply.body.get("top_logprobs") or 0
    as_ids = bool(reply.body.get("return_tokens_as_token_ids"))
    content = []
    for text, token_id in tokens:
        best = _logprob(f"token_id:{token_id}" if as_ids else text, logprob_of(token_id))
        others = [_logprob(f"{text}~{rank}", logprob_of(id_of(text)) - rank) for rank in range(1, count)]
        content.append({**best, "top_logprobs": [best, *others][:count]})
    return {"content": content, "refusal": None}


def _logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


# ---------------------------------------------------------------------- streaming


def stream(reply: Reply) -> Iterator[bytes]:
    """The chunks of all choices in turns, then the usage if asked for, then the end."""
    wants_usage = bool((reply.body.get("stream_options") or {}).get("include_usage"))
    head = {"id": reply.id, "object": "chat.completion.chunk", "created": reply.created, "model": reply.model}
    head["system_fingerprint"] = "fp_stub"
    if wants_usage:
        head["usage"] = None
    extra = {**prompt_ids_of(reply), **instrumented_ids_of(reply)}
    for round_of_choices in zip_longest(*(_deltas(reply, choice) for choice in reply.choices)):
        for told in filter(None, round_of_choices):
            yield data_event({**head, "choices": [told], **extra})
            extra = {}
    if wants_usage:
        yield data_event({**head, "choices": [], "usage": usage_of(reply)})
    yield data_event("[DONE]")


def _deltas(reply: Reply, choice: Choice) -> Iterator[dict[str, Any]]:
    opening: dict[str, Any] = {"role": "assistant", "content": None if choice.tool_call_ids else "", "refusal": None}
    yield _chunk_choice(reply, choice, opening, ())
    ending: tuple[Piece, ...] = ()
    for piece in choice.pieces:
        if piece.kind == "end":
            ending = (piece,)
        else:
            yield _chunk_choice(reply, choice, _delta(choice, piece), (piece,))
    yield {**_chunk_choice(reply, choice, {}, ending), "finish_reason": choice.finish_reason}


def _delta(choice: Choice, piece: Piece) -> dict[str, Any]:
    if piece.kind == "text":
        return {"content": piece.text}
    if piece.kind == "arguments":
        return {"tool_calls": [{"index": piece.tool, "function": {"arguments": piece.text}}]}
    function = {"name": piece.text, "arguments": ""}
    opened = {"index": piece.tool, "id": choice.tool_call_ids[piece.tool], "type": "function", "function": function}
    return {"tool_calls": [opened]}


def _chunk_choice(reply: Reply, choice: Choice, delta: dict[str, Any], pieces: tuple[Piece, ...]) -> dict[str, Any]:
    told: dict[str, Any] = {"index": choice.index, "delta": delta, "finish_reason": None}
    part = Choice(choice.index, pieces, choice.tool_call_ids, choice.finish_reason)
    told["logprobs"] = logprobs_of(reply, token_texts(part)) if pieces else None
    if reply.returns_token_ids:
        told["token_ids"] = part.token_ids
    return told


CHAT = Dialect("chat", "/chat/completions", "chatcmpl", "call", read, tell, stream, openai_error, openai_error_event)
