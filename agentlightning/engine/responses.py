"""Responses of OpenAI's chat and completions APIs, whole or as a stream, with vLLM's fields for token ids.

A chunk of a stream holds everything that was sampled since the last one: a client that reads slowly gets fewer, larger
ones.
"""

import functools
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import accumulate
from typing import Final

import orjson

from agentlightning.engine.codec import (
    CallArguments,
    CallStarted,
    ChatCodec,
    ContentDelta,
    Delta,
    ReasoningDelta,
    parsed_message,
)
from agentlightning.engine.sampling import FinishReason
from agentlightning.engine.scheduler import Call, Choice
from agentlightning.utils.json_values import JsonObject

DONE: Final = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


class Responses:
    """Writes the responses of one model."""

    def __init__(self, model_name: str, codec: ChatCodec) -> None:
        self.model_name = model_name
        self.codec = codec
        self._token = functools.cache(self._text_and_bytes)

    def whole(self, call: Call) -> JsonObject:
        """The response to a call that is complete; raises what its generations raise."""
        request = call.request
        generations = [choice.generation for choice in call.choices]
        first = min(generation.weights_version for generation in generations)
        last = max(generation.last_weights_version or generation.weights_version for generation in generations)
        response = self._head(call, "chat.completion" if request.is_chat else "text_completion")
        response["choices"] = [self._choice(call, choice) for choice in call.choices]
        response |= {"usage": _usage(call), "weights_version": first}
        if last != first:
            response["last_weights_version"] = last
        if request.wants_ids and request.is_chat:
            response["prompt_token_ids"] = request.prompts[0]
        return response

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The events of a call that has begun; raises what its generations raise."""
        request = call.request
        head = self._head(call, "chat.completion.chunk" if request.is_chat else "text_completion")
        if request.wants_usage:
            head["usage"] = None
        while not all(choice.has_ended for choice in call.choices):
            await call.updated.wait()
            call.updated.clear()
            unsent = [choice for choice in call.choices if not choice.has_ended]
            parts = [event({**head, **chunk}) for choice in unsent for chunk in self._chunks(call, choice)]
            if parts:
                yield b"".join(parts)
        if request.wants_usage:
            yield event({**head, "choices": [], "usage": _usage(call), "weights_version": call.version})
        yield DONE

    # ------------------------------------------------------------------ whole responses

    def _head(self, call: Call, kind: str) -> JsonObject:
        """The fields that responses and chunks have in common."""
        identifier = f"{'chatcmpl' if call.request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        return {"id": identifier, "object": kind, "created": int(time.time()), "model": self.model_name}

    def _choice(self, call: Call, choice: Choice) -> JsonObject:
        request, generation = call.request, choice.generation
        entry: JsonObject = {"index": choice.index}
        cut = choice.text_before_stop()
        calls_tools = False
        if request.is_chat:
            parsed = self.codec.parse(generation.token_ids, request.tools)
            entry["message"] = parsed.as_message()
            if cut is not None:
                entry["message"]["content"] = cut
            self.codec.remember(choice.prompt, generation.token_ids, entry["message"])
            calls_tools = bool(parsed.tool_calls)
        else:
            entry["text"] = self.codec.decode(generation.token_ids) if cut is None else cut
        entry["finish_reason"] = _finish_reason(generation.finish_reason, calls_tools=calls_tools)
        entry["logprobs"] = None
        if request.wants_logprobs:
            tops = generation.top_logprobs
            entry["logprobs"] = self._logprobs(call, generation.token_ids, generation.logprobs, tops)
        if request.wants_ids:
            entry["token_ids"] = generation.token_ids
            if not request.is_chat:
                entry["prompt_token_ids"] = choice.prompt
        return entry

    def _logprobs(
        self, call: Call, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Mapping[int, float]] | None
    ) -> JsonObject:
        if call.request.is_chat:
            entries = [self._entry(one, logprob) for one, logprob in zip(ids, logprobs, strict=True)]
            for number, entry in enumerate(entries):
                entry["top_logprobs"] = [] if tops is None else [self._entry(*one) for one in tops[number].items()]
            return {"content": entries, "refusal": None}
        texts = [self._token(token_id)[0] for token_id in ids]
        alternatives = None
        if tops is not None:
            alternatives = [{self._token(one)[0]: logprob for one, logprob in top.items()} for top in tops]
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": alternatives,
            "text_offset": [0, *accumulate(map(len, texts))][:-1],
        }

    def _entry(self, token_id: int, logprob: float) -> JsonObject:
        text, content = self._token(token_id)
        return {"token": text, "logprob": logprob, "bytes": content}

    def _text_and_bytes(self, token_id: int) -> tuple[str, list[int]]:
        text = self.codec.token_text(token_id)
        return text, list(text.encode("utf-8", "replace"))

    # ------------------------------------------------------------------ streams

    def _chunks(self, call: Call, choice: Choice) -> list[JsonObject]:
        """What is new about a choice."""
        request = call.request
        # Before the pieces are taken, so that none comes after them; raises, if that is how it ended.
        generation = choice.generation if choice.is_done else None
        pieces = [choice.pieces.popleft() for _ in range(len(choice.pieces))]
        token_ids, logprobs = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
        deltas = [delta for piece in pieces for delta in piece[2]]
        if generation is not None and choice.parser is not None:
            deltas += choice.parser.finish()
        if not (token_ids or generation):
            return []
        chunks: list[JsonObject] = []
        if not choice.has_begun:
            choice.has_begun = True
            if request.is_chat:
                chunks.append(_chunk(call, choice, {"delta": {"role": "assistant", "content": ""}}))
                if request.wants_ids:
                    chunks[0]["prompt_token_ids"] = choice.prompt
        if deltas or (token_ids and (request.wants_ids or request.wants_logprobs)):
            chunk = _chunk(call, choice, _body(call, deltas))
            if token_ids:
                self._add_tokens(call, choice, chunk["choices"][0], token_ids, logprobs)
            chunks.append(chunk)
        choice.sent_tokens += len(token_ids)
        choice.deltas += deltas
        if generation is not None:
            choice.has_ended = True
            message = parsed_message(choice.deltas)
            if request.is_chat:
                self.codec.remember(choice.prompt, generation.token_ids, message.as_message())
            reason = _finish_reason(generation.finish_reason, calls_tools=bool(message.tool_calls))
            chunks.append(_chunk(call, choice, _body(call, []), finish_reason=reason))
        return chunks

    def _add_tokens(
        self, call: Call, choice: Choice, entry: JsonObject, token_ids: list[int], logprobs: list[float]
    ) -> None:
        request = call.request
        if request.wants_logprobs:
            tops = None if choice.future is None else choice.future.top_logprobs
            start = choice.sent_tokens
            tops = None if tops is None else tops[start : start + len(token_ids)]
            entry["logprobs"] = self._logprobs(call, token_ids, logprobs, tops)
        if request.wants_ids:
            entry["token_ids"] = token_ids
            if not request.is_chat and not choice.sent_tokens:
                entry["prompt_token_ids"] = choice.prompt


def _finish_reason(reason: FinishReason, *, calls_tools: bool) -> str:
    if reason == "length":
        return "length"
    return "tool_calls" if calls_tools and reason == "stop" else "stop"


def _usage(call: Call) -> dict[str, int]:
    """A prompt counts once, however many choices it has."""
    prompt = sum(len(one) for one in call.request.prompts)
    sampled = sum(len(choice.generation.token_ids) for choice in call.choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _chunk(call: Call, choice: Choice, body: JsonObject, finish_reason: str | None = None) -> JsonObject:
    entry = {"index": choice.index, **body, "logprobs": None, "finish_reason": finish_reason}
    return {"choices": [entry], "weights_version": call.version}


def _body(call: Call, deltas: Sequence[Delta]) -> JsonObject:
    """Several deltas as one."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    if not call.request.is_chat:
        return {"text": text}
    body: JsonObject = {"content": text} if text else {}
    calls: list[JsonObject] = []
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            body["reasoning_content"] = body.get("reasoning_content", "") + delta.text
        elif isinstance(delta, CallStarted):
            function = {"name": delta.name, "arguments": ""}
            calls.append({"index": delta.index, "id": delta.id, "type": "function", "function": function})
        elif isinstance(delta, CallArguments):
            if calls and calls[-1]["index"] == delta.index and "id" not in calls[-1]:
                calls[-1]["function"]["arguments"] += delta.text
            else:
                calls.append({"index": delta.index, "function": {"arguments": delta.text}})
    if calls:
        body["tool_calls"] = calls
    return {"delta": body}
