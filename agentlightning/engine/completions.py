"""OpenAI's chat and completions as the engine takes and answers them, whole or as a stream.

A request is validated before it reaches the engine. A field that this server does not support is refused, unless its
value changes nothing: a response that silently ignores an option would be learned from as if it had been applied. A
field that is null counts as left out.

Responses have vLLM's fields for token ids. A chunk of a stream holds everything that was sampled since the last one: a
client that reads slowly gets fewer, larger ones.
"""

import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentlightning.dialects import CHAT
from agentlightning.dialects.chat import function_call
from agentlightning.dialects.completions import ChoicesDialect, SampledToken
from agentlightning.dialects.output import REASONING_FIELDS, TokenUsage, token_counts
from agentlightning.dialects.sse import DONE, ServerSentEvent
from agentlightning.engine.codec import (
    CallStarted,
    ChatCodec,
    ContentDelta,
    Delta,
    Message,
    ReasoningDelta,
    ToolDefinition,
    parsed_message,
)
from agentlightning.engine.sampling import FinishReason, Sampling
from agentlightning.errors import InvalidRequest
from agentlightning.utils.json_values import JsonObject

if TYPE_CHECKING:
    from agentlightning.engine.scheduler import Call, Choice

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_PROMPTS: Final = 256
MAX_SEQUENCES: Final = 1024
"""Prompts times choices of one request."""
_MAX_INT: Final = 2**31
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prediction": (),
    "web_search_options": (),
    "modalities": (["text"],),
    "audio": (),
}
"""Fields that are not supported, with the values that change nothing."""
_ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool", "function"))


@dataclass(frozen=True)
class CompletionRequest:
    """One request, with its prompts as token ids."""

    dialect: ChoicesDialect
    """Chat or completions."""
    model: str | None
    prompts: list[list[int]]
    """Of chat, one; of completions, any number."""
    tools: list[ToolDefinition] | None
    sampling: Sampling
    choices: int
    """For each prompt."""
    stops: tuple[str, ...]
    is_stream: bool
    wants_usage: bool
    """At the end of a stream."""
    wants_logprobs: bool
    wants_ids: bool

    def sampling_of(self, number: int) -> Sampling:
        """Of one of the choices; each has a seed of its own."""
        seed = self.sampling.seed
        return self.sampling if seed is None or number == 0 else replace(self.sampling, seed=seed + number)


class _Body(BaseModel):
    """What both APIs have. A description is what the error says is needed."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1, le=_MAX_INT)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int = Field(1, ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    min_tokens: int = Field(0, ge=0, le=_MAX_INT)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], max_length=MAX_STOPS, description=f"a text or up to {MAX_STOPS} texts, none of them empty,"
    )
    stop_token_ids: list[int] = Field([], description="a list of ids")
    stream: bool = False
    stream_options: JsonObject = {}
    return_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class _ChatBody(_Body):
    messages: list[Message] = Field(min_length=1, description="a list with at least one message")
    tools: list[ToolDefinition] = []
    tool_choice: str | JsonObject = "auto"
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT)

    @field_validator("messages")
    @classmethod
    def _with_plain_text(cls, messages: list[Message]) -> list[Message]:
        """Join the parts of a content; other parts than text mean nothing to these models."""
        for number, message in enumerate(messages):
            if message.get("role") not in _ROLES:
                raise ValueError(f"messages[{number}] has none of the roles {', '.join(sorted(_ROLES))}.")
            content = message.get("content")
            if content is None or isinstance(content, str):
                continue
            if not isinstance(content, list):
                raise ValueError(f"The content of messages[{number}] is neither a text nor a list of parts.")
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"messages[{number}] holds a part that is not text; this model reads text alone.")
            message["content"] = "".join(map(str, texts))
        return messages

    @field_validator("tools")
    @classmethod
    def _with_names(cls, tools: list[ToolDefinition]) -> list[ToolDefinition]:
        for tool in tools:
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if not (isinstance(name, str) and name):
                raise ValueError("'tools' must be a list of {'type': 'function', 'function': {'name': ..., ...}}.")
        return tools

    def chosen_tools(self) -> list[ToolDefinition] | None:
        """The tools the model may call: all or none; InvalidRequest where `tool_choice` would force a call."""
        if self.tool_choice not in ("auto", "none"):
            raise InvalidRequest(
                f"'tool_choice' is {self.tool_choice!r}; this server takes 'auto' and 'none', because it cannot make a "
                "model call a tool. Leave it away, and let the reward teach the model when to call."
            )
        return None if self.tool_choice == "none" else self.tools or None


class _CompletionBody(_Body):
    prompt: str | list[int] | list[str | Annotated[list[int], Field(min_length=1)]] = Field(
        description=f"a text, a list of ids, or a list of up to {MAX_PROMPTS} of these"
    )
    logprobs: bool | Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = False

    def prompt_ids(self, codec: ChatCodec) -> list[list[int]]:
        if isinstance(self.prompt, str):
            return [codec.encode(self.prompt)]
        prompts = [one for one in self.prompt if not isinstance(one, int)]
        if not prompts and self.prompt:
            return [[one for one in self.prompt if isinstance(one, int)]]
        if not 0 < len(prompts) <= MAX_PROMPTS:
            raise InvalidRequest(f"'prompt' must be a text, a list of ids, or a list of up to {MAX_PROMPTS} of these.")
        if len(prompts) * self.n > MAX_SEQUENCES:
            raise InvalidRequest(f"{len(prompts)} prompts with 'n' {self.n} are more than {MAX_SEQUENCES} choices.")
        return [codec.encode(one) if isinstance(one, str) else one for one in prompts]


def parse_request(
    raw: bytes, codec: ChatCodec, *, dialect: ChoicesDialect = CHAT, max_length: int
) -> CompletionRequest:
    """A request of chat or completions; InvalidRequest where it cannot be served.

    Args:
        max_length: Tokens of prompt and response that the engine has room for.
    """
    fields = {name: value for name, value in json_object(raw).items() if value is not None}
    for name in fields.keys() & _UNSUPPORTED.keys():
        if fields[name] not in _UNSUPPORTED[name]:
            raise InvalidRequest(f"'{name}' is not supported by this server; leave it away.")
    kind: type[_ChatBody] | type[_CompletionBody] = _ChatBody if dialect is CHAT else _CompletionBody
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(_message(error, kind)) from error
    tools: list[ToolDefinition] | None = None
    if isinstance(body, _ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.")
        tools = body.chosen_tools()
        try:
            prompts, top_logprobs = [codec.render(body.messages, tools)], body.top_logprobs
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(f"The messages cannot be rendered for this model: {error!r}") from error
        limit = body.max_completion_tokens or body.max_tokens or max_length
    else:
        prompts, top_logprobs = body.prompt_ids(codec), int(body.logprobs) if body.logprobs is not True else 0
        limit = body.max_tokens or 16  # OpenAI's default
    sampling = Sampling(
        max_new_tokens=limit,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),  # vLLM takes -1 for all tokens
        seed=body.seed,
        stop_ids=frozenset(body.stop_token_ids),
        min_new_tokens=body.min_tokens,
        top_logprobs=top_logprobs,
    )
    return CompletionRequest(
        dialect=dialect,
        model=body.model,
        prompts=prompts,
        tools=tools,
        sampling=sampling,
        choices=body.n,
        stops=tuple(body.stop),
        is_stream=body.stream,
        wants_usage=bool(body.stream_options.get("include_usage")),
        wants_logprobs=body.logprobs is not False,
        wants_ids=body.return_token_ids,
    )


def json_object(raw: bytes) -> JsonObject:
    """The fields of a body; InvalidRequest for anything but a JSON object."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The request is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("The request is not a JSON object.")
    return fields


def _message(error: ValidationError, kind: type[_Body]) -> str:
    """The first thing that is wrong with a body."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    shown = "missing" if first["type"] == "missing" else repr(first["input"])[:80]
    needed = kind.model_fields[name].description
    reason = f"{first['msg'][0].lower()}{first['msg'][1:]}" if needed is None else f"{needed} is needed"
    return f"'{name}' is {shown}; {reason}."


# ---------------------------------------------------------------------- responses


def event(content: object) -> bytes:
    """One server-sent event."""
    return ServerSentEvent(orjson.dumps(content)).encoded()


class Responses:
    """Writes the responses of one model."""

    def __init__(self, model_name: str, codec: ChatCodec) -> None:
        self.model_name = model_name
        self.codec = codec
        self._text = functools.cache(codec.token_text)

    def whole(self, call: "Call") -> JsonObject:
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

    async def stream(self, call: "Call") -> AsyncGenerator[bytes, None]:
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

    def _choice(self, call: "Call", choice: "Choice") -> JsonObject:
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
        call: "Call",
        choice: "Choice",
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

    def _chunks(self, call: "Call", choice: "Choice") -> list[JsonObject]:
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


def _usage(call: "Call") -> JsonObject:
    """A prompt counts once, however many choices it has."""
    prompt = sum(len(one) for one in call.request.prompts)
    return token_counts(TokenUsage(prompt, sum(len(choice.generation.token_ids) for choice in call.choices)))


def _chunk(call: "Call", choice: "Choice", delta: JsonObject, finish_reason: str | None = None) -> JsonObject:
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
