"""Agents that speak Anthropic's messages, served by backends that speak chat."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning.dialects import JsonObject
from agentlightning.llm_proxy.translation.chat_parts import (
    REASONING_FIELDS,
    UsageCounts,
    arguments_object,
    arguments_text,
    first_choice,
    function_call,
    image_part,
    plain_content,
    reasoning_in,
    text_part,
    usage_counts,
)
from agentlightning.llm_proxy.translation.messages_on_chat_stream import MessagesFromChat
from agentlightning.llm_proxy.translation.messages_terms import ending, usage_of
from agentlightning.llm_proxy.translation.terms import Translation, UntranslatableRequest, refuse_others, unsayable

__all__ = ["MESSAGES_ON_CHAT"]

_DROPPED: Final = frozenset(
    {
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
"""Hints to Anthropic's own servers, without which an answer is as good."""
_SAID: Final = frozenset(
    {
        "max_tokens",
        "messages",
        "model",
        "output_config",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    }
)
_SAME: Final = ("model", "temperature", "top_p", "top_k")
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_FORGOTTEN_BLOCKS: Final = ("redacted_thinking", "fallback")
_LOW_BUDGET_TOKENS: Final = 4096
_MEDIUM_BUDGET_TOKENS: Final = 16384


def _unsayable(field: str) -> UntranslatableRequest:
    return unsayable(field, client="messages", backend="chat")


def _request(body: Mapping[str, Any]) -> JsonObject:
    refuse_others(body, _SAID | _DROPPED, client="messages", backend="chat")
    said: JsonObject = {name: body[name] for name in _SAME if body.get(name) is not None}
    messages: list[JsonObject] = []
    if body.get("system"):
        messages.append({"role": "system", "content": plain_content(_parts(body["system"], "system"))})
    for number, message in enumerate(body["messages"]):
        messages += _messages(message, f"messages[{number}]")
    said["messages"] = messages
    if body.get("max_tokens") is not None:
        said["max_completion_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        said["stop"] = list(body["stop_sequences"])
    if body.get("tools"):
        said["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body["tools"])]
    _say_tool_choice(said, body.get("tool_choice"))
    _say_thinking(said, body.get("thinking"), body.get("output_config") or {})
    if body.get("stream"):
        said |= {"stream": True, "stream_options": {"include_usage": True}}
    return said


# ---------------------------------------------------------------------- messages


def _messages(message: Mapping[str, Any], place: str) -> Iterator[JsonObject]:
    """One message, or several: the results of tools are messages of their own in a chat."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        yield {"role": role, "content": content}
    elif role == "assistant":
        yield _assistant(content, f"{place}.content")
    else:
        yield from _user(role, content, f"{place}.content")


def _assistant(blocks: list[JsonObject], place: str) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": None}
    texts: list[JsonObject] = []
    calls: list[JsonObject] = []
    for number, block in enumerate(blocks):
        kind = block["type"]
        if kind == "text":
            texts.append(text_part(block["text"]))
        elif kind == "tool_use":
            calls.append(function_call(block["id"], block["name"], arguments_text(block["input"])))
        elif kind == "thinking":
            name = block.get("signature")  # where our own answer has it from
            name = name if name in REASONING_FIELDS else REASONING_FIELDS[0]
            message[name] = message.get(name, "") + block["thinking"]
        elif kind not in _FORGOTTEN_BLOCKS:
            raise _unsayable(f"{place}[{number}] of type {kind!r}")
    if texts or not calls:
        message["content"] = plain_content(texts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[JsonObject], place: str) -> Iterator[JsonObject]:
    parts: list[JsonObject] = []
    for number, block in enumerate(blocks):
        here = f"{place}[{number}]"
        if block["type"] == "tool_result":
            told = _parts(block.get("content") or "", f"{here}.content")
            # The results of tools are text in a chat; their pictures go into the user's words behind them.
            parts += [part for part in told if part["type"] != "text"]
            texts = [part for part in told if part["type"] == "text"]
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": plain_content(texts)}
        else:
            parts.append(_part(block, here))
    if parts or not any(block["type"] == "tool_result" for block in blocks):
        yield {"role": role, "content": plain_content(parts)}


def _parts(content: str | list[JsonObject], place: str) -> list[JsonObject]:
    if isinstance(content, str):
        return [text_part(content)]
    return [_part(block, f"{place}[{number}]") for number, block in enumerate(content)]


def _part(block: JsonObject, place: str) -> JsonObject:
    kind = block["type"]
    if kind == "text":
        return text_part(block["text"])
    source = block.get("source") or {}
    form = source.get("type")
    if kind == "image" and form == "url":
        return image_part(source["url"])
    if kind == "image" and form == "base64":
        return image_part(f"data:{source['media_type']};base64,{source['data']}")
    if kind == "document" and form == "text":
        return text_part(source["data"])
    if kind == "document" and form == "base64":
        data = f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "file", "file": {"filename": block.get("title") or "document.pdf", "file_data": data}}
    raise _unsayable(f"{place} of type {kind!r}" + (f" from {form!r}" if form else ""))


# ---------------------------------------------------------------------- options


def _tool(tool: Mapping[str, Any], place: str) -> JsonObject:
    if tool.get("type") not in (None, "custom"):
        raise _unsayable(f"{place} of type {tool['type']!r}")
    function: JsonObject = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _say_tool_choice(said: JsonObject, choice: Mapping[str, Any] | None) -> None:
    if choice is None:
        return
    kind = choice["type"]
    if kind == "tool":
        said["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif kind in _CHOICES:
        said["tool_choice"] = _CHOICES[kind]
    else:
        raise _unsayable(f"tool_choice of type {kind!r}")
    if choice.get("disable_parallel_tool_use") is not None:
        said["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]


def _say_thinking(said: JsonObject, thinking: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
    """How hard to think; a model that is told nothing thinks as it does by itself."""
    if thinking and thinking["type"] == "enabled":
        budget = thinking["budget_tokens"]
        is_low, is_medium = budget <= _LOW_BUDGET_TOKENS, budget <= _MEDIUM_BUDGET_TOKENS
        said["reasoning_effort"] = "low" if is_low else "medium" if is_medium else "high"
    if config.get("effort"):
        said["reasoning_effort"] = config["effort"]
    form = config.get("format")
    if form:
        if form["type"] != "json_schema":
            raise _unsayable(f"output_config.format of type {form['type']!r}")
        schema = {"name": "answer", "schema": form["schema"], "strict": True}
        said["response_format"] = {"type": "json_schema", "json_schema": schema}


# ---------------------------------------------------------------------- answers


def _response(body: Mapping[str, Any], request: Mapping[str, Any]) -> JsonObject:
    del request  # nothing of it is repeated
    choice = first_choice(body)
    counts: UsageCounts = usage_counts(body.get("usage"))
    return {
        "id": body["id"],
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": list(_blocks(choice["message"], body["id"])),
        **ending(choice, choice["message"]),
        "usage": usage_of(counts),
    }


def _blocks(message: Mapping[str, Any], answer_id: str) -> Iterator[JsonObject]:
    thought = reasoning_in(message)
    if thought:
        yield {"type": "thinking", "thinking": thought[1], "signature": thought[0]}
    for name in ("content", "refusal"):
        if message.get(name):
            yield {"type": "text", "text": message[name]}
    for number, call in enumerate(message.get("tool_calls") or ()):
        function, call_id = call["function"], call.get("id") or f"{answer_id}-call-{number}"
        said = {"type": "tool_use", "id": call_id, "name": function["name"]}
        yield {**said, "input": arguments_object(function.get("arguments"))}


MESSAGES_ON_CHAT = Translation("messages", "chat", _request, _response, MessagesFromChat)
