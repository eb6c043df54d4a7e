"""Requests of OpenAI's chat and completions dialects, read and checked before the engine hears of them.

What this server cannot do is refused in words, unless leaving it away changes nothing: an answer that silently ignores
a wish would be learned from as if the wish had been met. `tool_choice: "required"` is the one exception: it is taken as
a wish, because a small model that does not follow it is what training is there to change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from agentlightning.engine.codec import ChatCodec, Message, ToolDefinition
from agentlightning.engine.sampling import Sampling
from agentlightning.errors import InvalidRequest

__all__ = ["Asked", "Dialect", "read_chat", "read_text"]

Dialect = Literal["chat", "text"]

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_PROMPTS: Final = 256
MAX_SEQUENCES: Final = 1024
"""Prompts times choices of one request."""
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
"""Wishes this server does not grant, with the values that ask for nothing."""
_ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool", "function"))


@dataclass(frozen=True)
class Asked:
    """One request."""

    dialect: Dialect
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
        """Of one of the choices; each draws for itself."""
        if self.sampling.seed is None or number == 0:
            return self.sampling
        return Sampling(**{**vars(self.sampling), "seed": self.sampling.seed + number})


class _Body:
    """The fields of a request; one that is null counts as left away."""

    def __init__(self, raw: bytes) -> None:
        try:
            fields = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"The request is not JSON: {error}.") from error
        if not isinstance(fields, dict):
            raise InvalidRequest("The request is not a JSON object.")
        self.fields: dict[str, Any] = fields
        for name in fields.keys() & _UNSUPPORTED.keys():
            value = fields[name]
            if value is not None and value not in _UNSUPPORTED[name]:
                raise InvalidRequest(f"'{name}' is not supported by this server; leave it away.")

    def number(self, name: str, default: float) -> float:
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequest(f"'{name}' is {value!r}; a number is needed.")
        return float(value)

    def whole(self, name: str, default: int, *, low: int, high: int) -> int:
        value = self.fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequest(f"'{name}' is {value!r}; a whole number from {low} to {high} is needed.")
        return value

    def flag(self, name: str) -> bool:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"'{name}' is {value!r}; true or false is needed.")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"'{name}' is {value!r}; a text is needed.")
        return value

    def stops(self) -> tuple[str, ...]:
        value = self.fields.get("stop")
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
            raise InvalidRequest(
                f"'stop' is {value!r}; a text or up to {MAX_STOPS} texts, none of them empty, are needed."
            )
        return tuple(stops)

    def stop_ids(self) -> frozenset[int]:
        value = self.fields.get("stop_token_ids")
        if value is None:
            return frozenset()
        if not _are_ids(value):
            raise InvalidRequest(f"'stop_token_ids' is {value!r}; a list of ids is needed.")
        return frozenset(value)

    def wants_usage(self) -> bool:
        options = self.fields.get("stream_options")
        if options is not None and not isinstance(options, dict):
            raise InvalidRequest(f"'stream_options' is {options!r}; an object is needed.")
        return bool(options and options.get("include_usage"))

    def sampling(self, *, limit: int, longest: int, top_logprobs: int) -> Sampling:
        top_k = self.whole("top_k", 0, low=-1, high=2**31)
        return Sampling(
            max_new_tokens=limit,
            temperature=self.number("temperature", 1.0),
            top_p=self.number("top_p", 1.0),
            top_k=max(top_k, 0),  # -1 is vLLM's word for all of them
            seed=None if self.fields.get("seed") is None else self.whole("seed", 0, low=-(2**63), high=2**63 - 1),
            stop_ids=self.stop_ids(),
            min_new_tokens=self.whole("min_tokens", 0, low=0, high=longest),
            top_logprobs=top_logprobs,
        ).checked()


def read_chat(raw: bytes, codec: ChatCodec, longest: int) -> Asked:
    """A request of the chat dialect; InvalidRequest in words where it cannot be served.

    Args:
        longest: Tokens the engine has room for.
    """
    body = _Body(raw)
    tools = _tools(body.fields)
    asked_limit = "max_tokens" if body.fields.get("max_completion_tokens") is None else "max_completion_tokens"
    wants_logprobs = body.flag("logprobs")
    top_logprobs = body.whole("top_logprobs", 0, low=0, high=MAX_TOP_LOGPROBS)
    if top_logprobs and not wants_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.")
    limit = body.whole(asked_limit, longest, low=1, high=2**31)
    return Asked(
        dialect="chat",
        model=body.text("model"),
        prompts=[_rendered(codec, _messages(body.fields), tools)],
        tools=tools,
        sampling=body.sampling(limit=limit, longest=longest, top_logprobs=top_logprobs),
        choices=body.whole("n", 1, low=1, high=MAX_CHOICES),
        stops=body.stops(),
        is_stream=body.flag("stream"),
        wants_usage=body.wants_usage(),
        wants_logprobs=wants_logprobs,
        wants_ids=body.flag("return_token_ids"),
    )


DEFAULT_TEXT_TOKENS: Final = 16
"""What OpenAI's completions give when nothing is said."""


def read_text(raw: bytes, codec: ChatCodec, longest: int) -> Asked:
    """A request of the completions dialect, as `read_chat`."""
    body = _Body(raw)
    asked_logprobs = body.fields.get("logprobs")
    wants_logprobs = asked_logprobs is not None and asked_logprobs is not False
    if asked_logprobs is True or not wants_logprobs:
        top_logprobs = 0
    else:
        top_logprobs = body.whole("logprobs", 0, low=0, high=MAX_TOP_LOGPROBS)
    limit = body.whole("max_tokens", DEFAULT_TEXT_TOKENS, low=1, high=2**31)
    prompts = _prompts(body.fields.get("prompt"), codec)
    choices = body.whole("n", 1, low=1, high=MAX_CHOICES)
    if len(prompts) * choices > MAX_SEQUENCES:
        raise InvalidRequest(f"{len(prompts)} prompts with 'n' {choices} are more than {MAX_SEQUENCES} answers.")
    return Asked(
        dialect="text",
        model=body.text("model"),
        prompts=prompts,
        tools=None,
        sampling=body.sampling(limit=limit, longest=longest, top_logprobs=top_logprobs),
        choices=choices,
        stops=body.stops(),
        is_stream=body.flag("stream"),
        wants_usage=body.wants_usage(),
        wants_logprobs=wants_logprobs,
        wants_ids=body.flag("return_token_ids"),
    )


def _rendered(codec: ChatCodec, messages: list[Message], tools: list[ToolDefinition] | None) -> list[int]:
    try:
        return codec.render(messages, tools)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"The messages cannot be rendered for this model: {error!r}") from error


def _messages(fields: Mapping[str, Any]) -> list[Message]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("'messages' must be a list with at least one message.")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise InvalidRequest(
                f"messages[{number}] is not an object with one of the roles {', '.join(sorted(_ROLES))}."
            )
        content = message.get("content")
        if not (content is None or isinstance(content, str)):
            message["content"] = _text_of(content, number)
    return messages


def _text_of(content: Any, number: int) -> str:
    """Of a content in parts, the text; other parts than text mean nothing to these models."""
    if not isinstance(content, list):
        raise InvalidRequest(f"The content of messages[{number}] is neither a text nor a list of parts.")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"messages[{number}] holds a part that is not text; this model reads text alone.")
        texts.append(part["text"])
    return "".join(texts)


def _tools(fields: Mapping[str, Any]) -> list[ToolDefinition] | None:
    """The tools the model may call: none, all, or the one that `tool_choice` names."""
    tools = fields.get("tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise InvalidRequest("'tools' must be a list of {'type': 'function', 'function': {'name': ..., ...}}.")
    choice = fields.get("tool_choice")
    if choice is None or choice in ("auto", "required"):
        return tools
    if choice == "none":
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise InvalidRequest(f"'tool_choice' is {choice!r}; 'auto', 'none', 'required' or one of the tools is needed.")
    return named


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _prompts(prompt: Any, codec: ChatCodec) -> list[list[int]]:
    if isinstance(prompt, str):
        return [codec.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if _are_ids(prompt):
            return [prompt]
        if len(prompt) <= MAX_PROMPTS and all(isinstance(one, str) or (one and _are_ids(one)) for one in prompt):
            return [codec.encode(one) if isinstance(one, str) else one for one in prompt]
    raise InvalidRequest(f"'prompt' must be a text, a list of ids, or a list of up to {MAX_PROMPTS} of these.")


def _are_ids(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) and not isinstance(value, bool) for value in values)
