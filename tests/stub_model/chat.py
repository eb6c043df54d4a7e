"""OpenAI's chat completions, completions and embeddings, with what vLLM adds to them on request."""

import base64
import math
import struct
from collections.abc import Iterator
from itertools import accumulate, zip_longest
from typing import Any

from tests.stub_model.dialect import (
    Dialect,
    content_of,
    data_event,
    json_schema_of,
    list_of,
    openai_error,
    openai_error_event,
    positive,
    stops_of,
)
from tests.stub_model.script import BadRequest, CallOptions, Choice, Reply
from tests.stub_model.words import ROLES, Message, Piece, ToolCall, encode, id_of

DEFAULT_MAX_TOKENS = 16
DEFAULT_DIMENSIONS = 16


def read(body: dict[str, Any]) -> CallOptions:
    return CallOptions(
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


def logprob_of(token_id: int) -> float:
    """A log probability that only depends on the token, between -1 and 0."""
    return -(token_id % 1000) / 1000


def usage_of(reply: Reply) -> dict[str, Any]:
    used: dict[str, Any] = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    used["total_tokens"] = reply.prompt_tokens + reply.completion_tokens
    return {**used, "prompt_tokens_details": {"cached_tokens": reply.cached_tokens}} if reply.cached_tokens else used


def write(reply: Reply) -> dict[str, Any]:
    written = {"id": reply.id, "object": "chat.completion", "created": reply.created, "model": reply.model}
    written |= {"choices": [_choice(reply, choice) for choice in reply.choices], "usage": usage_of(reply)}
    written["service_tier"], written["system_fingerprint"] = "default", "fp_stub"
    return {**written, **prompt_ids_of(reply), **instrumented_ids_of(reply)}


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
    if choice.thought:
        message["reasoning_content"] = choice.thought
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    written = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason}
    written["logprobs"] = logprobs_of(reply, choice.tokens)
    if reply.returns_token_ids:
        written |= {"token_ids": choice.token_ids, "stop_reason": choice.stop_text}
    return written


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
        for written in filter(None, round_of_choices):
            yield data_event({**head, "choices": [written], **extra})
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
    if piece.kind in ("text", "thought"):
        return {"content" if piece.kind == "text" else "reasoning_content": piece.text}
    if piece.kind == "arguments":
        return {"tool_calls": [{"index": piece.tool, "function": {"arguments": piece.text}}]}
    function = {"name": piece.text, "arguments": ""}
    opened = {"index": piece.tool, "id": choice.tool_call_ids[piece.tool], "type": "function", "function": function}
    return {"tool_calls": [opened]}


def _chunk_choice(reply: Reply, choice: Choice, delta: dict[str, Any], pieces: tuple[Piece, ...]) -> dict[str, Any]:
    written: dict[str, Any] = {"index": choice.index, "delta": delta, "finish_reason": None}
    part = Choice(choice.index, pieces, choice.tool_call_ids, choice.finish_reason)
    written["logprobs"] = logprobs_of(reply, part.tokens) if pieces else None
    if reply.returns_token_ids:
        written["token_ids"] = part.token_ids
    return written


CHAT = Dialect("chat", "/chat/completions", "chatcmpl", "call", read, write, stream, openai_error, openai_error_event)


# ---------------------------------------------------------------------- completions


def _read_completion(body: dict[str, Any]) -> CallOptions:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        text, ids = prompt, encode(prompt)
    elif isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        text, ids = "", prompt
    else:
        raise BadRequest("Invalid 'prompt': expected one text or one list of token ids.", "prompt")
    return CallOptions(
        messages=(Message("user", text),),
        prompt_token_ids=tuple(ids),
        choices=positive(body, "n") or 1,
        max_tokens=positive(body, "max_tokens") or DEFAULT_MAX_TOKENS,
        stop=stops_of(body.get("stop")),
    )


def _write_completion(reply: Reply) -> dict[str, Any]:
    choices = [
        {**_text_choice(reply, choice, choice.pieces), "finish_reason": choice.finish_reason}
        for choice in reply.choices
    ]
    return {**_completion_head(reply), "choices": choices, "usage": usage_of(reply), **instrumented_ids_of(reply)}


def _completion_head(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "object": "text_completion", "created": reply.created, "model": reply.model}


def _text_choice(reply: Reply, choice: Choice, pieces: tuple[Piece, ...]) -> dict[str, Any]:
    part = Choice(choice.index, pieces, (), choice.finish_reason)
    written: dict[str, Any] = {"index": choice.index, "text": part.text, "finish_reason": None}
    written["logprobs"] = _text_logprobs(part) if reply.body.get("logprobs") is not None else None
    if reply.returns_token_ids:
        written |= {"prompt_token_ids": list(reply.request.prompt_token_ids), "token_ids": part.token_ids}
    return written


def _text_logprobs(part: Choice) -> dict[str, Any]:
    tokens = part.tokens
    texts = [text for text, _ in tokens]
    values = [logprob_of(token_id) for _, token_id in tokens]
    top = [{text: value} for text, value in zip(texts, values, strict=True)]
    offsets = list(accumulate((len(text) for text in texts[:-1]), initial=0)) if texts else []
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _stream_completion(reply: Reply) -> Iterator[bytes]:
    for choice in reply.choices:
        ends = tuple(piece for piece in choice.pieces if piece.kind == "end")
        for piece in choice.pieces:
            if piece.kind != "end":
                yield data_event({**_completion_head(reply), "choices": [_text_choice(reply, choice, (piece,))]})
        last = {**_text_choice(reply, choice, ends), "finish_reason": choice.finish_reason}
        yield data_event({**_completion_head(reply), "choices": [last]})
    if (reply.body.get("stream_options") or {}).get("include_usage"):
        yield data_event({**_completion_head(reply), "choices": [], "usage": usage_of(reply)})
    yield data_event("[DONE]")


COMPLETIONS = Dialect(
    "completions",
    "/completions",
    "cmpl",
    "call",
    _read_completion,
    _write_completion,
    _stream_completion,
    openai_error,
    openai_error_event,
)


# ---------------------------------------------------------------------- embeddings


def embed(body: dict[str, Any]) -> dict[str, Any]:
    """Bags of words as directions, so that texts with common words lie close together."""
    inputs = _inputs(body.get("input"))
    size = positive(body, "dimensions") or DEFAULT_DIMENSIONS
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadRequest(f"Invalid 'encoding_format': {form!r}.", "encoding_format")
    vectors = [_vector(ids, size) for ids in inputs]
    embedded = [_packed(vector) if form == "base64" else vector for vector in vectors]
    items = [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(embedded)]
    used = sum(map(len, inputs))
    return {
        "object": "list",
        "data": items,
        "model": body["model"],
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }


def _inputs(given: Any) -> list[list[int]]:
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise BadRequest("Invalid 'input': expected a text, token ids, or a list of them.", "input")
    return [encode(item) if isinstance(item, str) else item for item in given]


def _vector(ids: list[int], size: int) -> list[float]:
    sums = [0.0] * size
    for token_id in ids:
        sums[token_id % size] += 1.0 if token_id // size % 2 else -1.0
    length = math.hypot(*sums) or 1.0
    return [value / length for value in sums]


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
