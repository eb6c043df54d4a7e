"""Responses of OpenAI's chat and completions APIs, whole or as a stream, with vLLM's fields for token ids.

A chunk of a stream holds everything that was sampled since the last one: a client that reads slowly gets fewer, larger
ones.
"""

import functools
from collections.abc import AsyncGenerator, Mapping, Sequence

import orjson

from agentlightning.dialects import CHAT
from agentlightning.dialects.chat import function_call
from agentlightning.dialects.choices import SampledToken
from agentlightning.dialects.output import REASONING_FIELDS, TokenUsage, token_counts
from agentlightning.dialects.sse import DONE, ServerSentEvent
from agentlightning.engine.codec import (
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


def event(content: object) -> bytes:
    """One server-sent event."""
    return ServerSentEvent(orjson.dumps(content)).encoded()


class Responses:
    """Writes the responses of one model."""

    def __init__(self, model_name: str, codec: ChatCodec) -> None:
        self.model_name = model_name
        self.codec = codec
        self._text = functools.cache(codec.token_text)

    def whole(self, call: Call) -> JsonObject:
        """The response to a call that is complete; raises what its generations raise."""
        request, dialect = call.request, call.request.dialect
        generations = [choice.generation for choice in call.choices]
        first = min(generation.weights_version for generation in generations)
        last = max(generation.last_weights_version or generation.weights_version for generation in generations)
        response = dialect.head(self.model_name)
        response["choices"] = [self._choice(call, choice) for choice in call.choices]
        response |= {"usage": _usage(call), "weights_version": first}
        if last != first:
            response["last_weights_version"] = last
        if request.wants_ids and not dialect.has_prompt_in_choice:
            response["prompt_token_ids"] = request.prompts[0]
        return response

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The events of a call that has begun; raises what its generations raise."""
        request = call.request
        head = request.dialect.head(self.model_name, is_stream=True)
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
        yield DONE.encoded()

    # ------------------------------------------------------------------ whole responses

    def _choice(self, call: Call, choice: Choice) -> JsonObject:
        request, generation = call.request, choice.generation
        cut = choice.text_before_stop()
        calls_tools = False
        if request.dialect is CHAT:
            parsed = self.codec.parse(generation.token_ids, request.tools)
            message = parsed.as_message()
            if cut is not None:
                message["content"] = cut
            self.codec.remember(choice.prompt, generation.token_ids, message)
            calls_tools = bool(parsed.tool_calls)
        else:
            message = {"content": self.codec.decode(generation.token_ids) if cut is None else cut}
        reason = _finish_reason(generation.finish_reason, calls_tools=calls_tools)
        entry = request.dialect.choice(message, reason, index=choice.index)
        self._add_tokens(call, choice, entry, generation.token_ids, generation.logprobs, generation.top_logprobs)
        return entry

    def _add_tokens(
        self,
        call: Call,
        choice: Choice,
        entry: JsonObject,
        token_ids: list[int],
        logprobs: Sequence[float],
        tops: Sequence[Mapping[int, float]] | None,
    ) -> None:
        """Add what a request asks to know of the tokens of a choice, or of a chunk of one."""
        request, start = call.request, choice.sent_tokens
        if request.wants_logprobs:
            likeliest: Sequence[Mapping[int, float] | None] = [None] * len(token_ids)
            if tops is not None:
                likeliest = tops[start : start + len(token_ids)]
            entry["logprobs"] = request.dialect.logprobs(
                [self._sampled(*one) for one in zip(token_ids, logprobs, likeliest, strict=True)]
            )
        if request.wants_ids:
            entry["token_ids"] = token_ids
            if request.dialect.has_prompt_in_choice and not start:
                entry["prompt_token_ids"] = choice.prompt

    def _sampled(self, token_id: int, logprob: float, likeliest: Mapping[int, float] | None) -> SampledToken:
        others = None
        if likeliest is not None:
            others = [SampledToken(self._text(one), value) for one, value in likeliest.items()]
        return SampledToken(self._text(token_id), logprob, others)

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
            if request.dialect is CHAT:
                chunks.append(_chunk(call, choice, {"role": "assistant", "content": ""}))
                if request.wants_ids:
                    chunks[0]["prompt_token_ids"] = choice.prompt
        if deltas or (token_ids and (request.wants_ids or request.wants_logprobs)):
            chunk = _chunk(call, choice, _message_of(deltas))
            if token_ids:
                tops = None if choice.future is None else choice.future.top_logprobs
                self._add_tokens(call, choice, chunk["choices"][0], token_ids, logprobs, tops)
            chunks.append(chunk)
        choice.sent_tokens += len(token_ids)
        choice.deltas += deltas
        if generation is not None:
            choice.has_ended = True
            message = parsed_message(choice.deltas)
            if request.dialect is CHAT:
                self.codec.remember(choice.prompt, generation.token_ids, message.as_message())
            reason = _finish_reason(generation.finish_reason, calls_tools=bool(message.tool_calls))
            chunks.append(_chunk(call, choice, {}, finish_reason=reason))
        return chunks


def _finish_reason(reason: FinishReason, *, calls_tools: bool) -> str:
    if reason == "length":
        return "length"
    return "tool_calls" if calls_tools and reason == "stop" else "stop"


def _usage(call: Call) -> JsonObject:
    """A prompt counts once, however many choices it has."""
    prompt = sum(len(one) for one in call.request.prompts)
    return token_counts(TokenUsage(prompt, sum(len(choice.generation.token_ids) for choice in call.choices)))


def _chunk(call: Call, choice: Choice, delta: JsonObject, finish_reason: str | None = None) -> JsonObject:
    entry = call.request.dialect.chunk(delta, finish_reason, index=choice.index)
    return {"choices": [entry], "weights_version": call.version}


def _message_of(deltas: Sequence[Delta]) -> JsonObject:
    """Several deltas as one part of a message."""
    texts: dict[str, str] = {}
    calls: list[JsonObject] = []
    for delta in deltas:
        if isinstance(delta, (ContentDelta, ReasoningDelta)):
            name = "content" if isinstance(delta, ContentDelta) else REASONING_FIELDS[0]
            texts[name] = texts.get(name, "") + delta.text
        elif isinstance(delta, CallStarted):
            calls.append({"index": delta.index, **function_call(delta.id, delta.name, "")})
        elif calls and calls[-1]["index"] == delta.index and "id" not in calls[-1]:
            calls[-1]["function"]["arguments"] += delta.text
        else:
            calls.append({"index": delta.index, "function": {"arguments": delta.text}})
    return {**texts, "tool_calls": calls} if calls else dict(texts)
