"""Answers that are sent while they are sampled, as server-sent events.

A chunk holds everything that was sampled since the last one: a client that reads slowly gets fewer, larger ones.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from typing_extensions import assert_never

from agentlightning.engine.answering import Answers, finish_of, usage_of
from agentlightning.engine.calls import Call, Choice
from agentlightning.engine.codec import (
    CallArguments,
    CallStarted,
    ContentDelta,
    Delta,
    Message,
    ParsedMessage,
    ReasoningDelta,
    ToolCall,
)

__all__ = ["DONE", "event", "events_of"]

DONE: Final = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


@dataclass
class _Progress:
    """How far one choice was sent."""

    has_begun: bool = False
    has_ended: bool = False
    sent: int = 0
    """Tokens."""
    called: set[int] = field(default_factory=set)
    """Tool calls that were begun."""
    deltas: list[Delta] = field(default_factory=list)
    """Everything that was said."""

    def message(self) -> Message:
        """As the client puts it together."""
        started = [delta for delta in self.deltas if isinstance(delta, CallStarted)]
        arguments = dict.fromkeys((call.index for call in started), "")
        for delta in self.deltas:
            if isinstance(delta, CallArguments):
                arguments[delta.index] += delta.text
        calls = [ToolCall(call.id, call.name, arguments[call.index]) for call in started]
        text = "".join(delta.text for delta in self.deltas if isinstance(delta, ContentDelta))
        return ParsedMessage(text, calls).as_message()


async def events_of(call: Call, answers: Answers) -> AsyncGenerator[bytes, None]:
    """The events of a call that has begun; raises what its generations raise."""
    is_chat = call.asked.dialect == "chat"
    head = answers.head(call, "chat.completion.chunk" if is_chat else "text_completion")
    if call.asked.wants_usage:
        head["usage"] = None
    progress = [_Progress() for _ in call.choices]
    assert call.news is not None
    while not all(one.has_ended for one in progress):
        await call.news.wait()
        call.news.clear()
        parts: list[bytes] = []
        for choice, one in zip(call.choices, progress, strict=True):
            if not one.has_ended:
                parts += [event({**head, **chunk}) for chunk in _chunks(call, choice, one, answers)]
        if parts:
            yield b"".join(parts)
    if call.asked.wants_usage:
        yield event({**head, "choices": [], "usage": usage_of(call), "weights_version": call.version})
    yield DONE


def _chunks(call: Call, choice: Choice, progress: _Progress, answers: Answers) -> list[dict[str, Any]]:
    """What is new about a choice, as chunks."""
    is_done = choice.is_done  # asked first: what comes after it is in the pieces then
    if is_done:
        choice.generation  # noqa: B018 # raises, if that is how it ended
    token_ids, logprobs, deltas = _taken(choice)
    if is_done and choice.speech is not None:
        deltas += choice.speech.finish()
    if not (token_ids or is_done):
        return []
    chunks: list[dict[str, Any]] = []
    if not progress.has_begun:
        progress.has_begun = True
        chunks += _beginning(call, choice)
    has_something = bool(deltas) or call.asked.wants_ids or call.asked.wants_logprobs
    if token_ids and has_something:
        body = _delta(call, deltas, progress)
        reported = None
        if call.asked.wants_logprobs:
            tops = None if choice.tops is None else choice.tops[progress.sent : progress.sent + len(token_ids)]
            reported = answers.logprobs_of(call, token_ids, logprobs, tops)
        chunks.append(_chunk(call, choice, body, logprobs=reported, token_ids=token_ids))
    elif deltas:
        chunks.append(_chunk(call, choice, _delta(call, deltas, progress)))
    progress.sent += len(token_ids)
    progress.deltas += deltas
    if is_done:
        progress.has_ended = True
        if call.asked.dialect == "chat":
            answers.remember(choice, progress.message())
        finish = finish_of(choice.generation.finish_reason, calls_tools=bool(progress.called))
        chunks.append(_chunk(call, choice, _delta(call, [], progress), finish=finish))
    return chunks


def _taken(choice: Choice) -> tuple[list[int], list[float], list[Delta]]:
    token_ids: list[int] = []
    logprobs: list[float] = []
    deltas: list[Delta] = []
    while choice.pieces:
        token_id, logprob, said = choice.pieces.popleft()
        token_ids.append(token_id)
        logprobs.append(logprob)
        deltas += said
    return token_ids, logprobs, deltas


def _beginning(call: Call, choice: Choice) -> list[dict[str, Any]]:
    """OpenAI's chat begins with the role; the ids of the prompt stand in the first chunk."""
    if call.asked.dialect == "text":
        return []
    chunk = _chunk(call, choice, {"delta": {"role": "assistant", "content": ""}})
    if call.asked.wants_ids:
        chunk["prompt_token_ids"] = choice.prompt
    return [chunk]


def _chunk(
    call: Call,
    choice: Choice,
    body: dict[str, Any],
    *,
    finish: str | None = None,
    logprobs: Any = None,
    token_ids: list[int] | None = None,
) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": choice.number, **body, "logprobs": logprobs, "finish_reason": finish}
    if call.asked.wants_ids and token_ids is not None:
        entry["token_ids"] = token_ids
        if call.asked.dialect == "text" and not choice.is_prompt_sent:
            choice.is_prompt_sent = True
            entry["prompt_token_ids"] = choice.prompt
    return {"choices": [entry], "weights_version": call.version}


def _delta(call: Call, deltas: list[Delta], progress: _Progress) -> dict[str, Any]:
    """Several deltas as one, in the words of the dialect."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    if call.asked.dialect == "text":
        return {"text": text}
    body: dict[str, Any] = {"content": text} if text else {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            continue
        if isinstance(delta, ReasoningDelta):
            body["reasoning_content"] = body.get("reasoning_content", "") + delta.text
        elif isinstance(delta, CallStarted):
            progress.called.add(delta.index)
            function = {"name": delta.name, "arguments": ""}
            calls.append({"index": delta.index, "id": delta.id, "type": "function", "function": function})
        elif isinstance(delta, CallArguments):
            if calls and calls[-1]["index"] == delta.index and "id" not in calls[-1]:
                calls[-1]["function"]["arguments"] += delta.text
            else:
                calls.append({"index": delta.index, "function": {"arguments": delta.text}})
        else:
            assert_never(delta)
    if calls:
        body["tool_calls"] = calls
    return {"delta": body}
