"""Requests of OpenAI's chat and completions APIs, validated before they reach the engine.

A field that this server does not support is refused, unless its value changes nothing: a response that silently ignores
an option would be learned from as if it had been applied. A field that is null counts as left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentlightning.dialects import CHAT
from agentlightning.dialects.choices import ChoicesDialect
from agentlightning.engine.codec import ChatCodec, Message, ToolDefinition
from agentlightning.engine.sampling import Sampling
from agentlightning.errors import InvalidRequest
from agentlightning.utils.json_values import JsonObject

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
