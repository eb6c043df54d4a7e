"""Requests of chat for backends that speak Anthropic's messages, and the other way round."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from agentlightning.dialects.base import (
    CHAT_HINTS,
    NEUTRAL_CHAT,
    RequestFields,
    UntranslatableRequest,
    chosen,
    image_part,
    numbered,
    parts_of,
    plain_content,
    text_part,
    untranslatable,
)
from agentlightning.dialects.chat import function_call
from agentlightning.dialects.output import REASONING_FIELDS, arguments_object, arguments_text
from agentlightning.utils.json_values import JsonObject

DEFAULT_MAX_TOKENS: Final = 4096
"""Messages must set the length of the output; a chat need not."""
_SAME: Final = ("model", "temperature", "top_p", "top_k")
_HINTS: Final = frozenset(
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
"""For Anthropic's own servers; without them the output is as good."""
_TOOL_CHOICES: Final = {"auto": "auto", "required": "any", "none": "none"}
_CHAT_TOOL_CHOICES: Final = {name: choice for choice, name in _TOOL_CHOICES.items()}
_LOW_BUDGET_TOKENS: Final = 4096
_MEDIUM_BUDGET_TOKENS: Final = 16384

_no_message = partial(untranslatable, client="chat", backend="messages")
_no_chat = partial(untranslatable, client="messages", backend="chat")


# ---------------------------------------------------------------------- chat to messages


def messages_from_chat(body: Mapping[str, object]) -> JsonObject:
    fields = RequestFields(body)
    request = fields.copy(*_SAME)
    request["max_tokens"] = fields.take_chat_limit() or DEFAULT_MAX_TOKENS
    request |= _conversation(fields.take("messages"))
    if stop := fields.take("stop"):
        request["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    tools = fields.take("tools")
    if tools:
        request["tools"] = numbered(_tool, tools, "tools")
    choice, is_parallel = fields.take("tool_choice"), fields.take("parallel_tool_calls")
    if choice is not None:
        request["tool_choice"] = _tool_choice(choice)
    if is_parallel is not None and tools and choice != "none":
        request.setdefault("tool_choice", {"type": "auto"})["disable_parallel_tool_use"] = not is_parallel
    effort = fields.take("reasoning_effort")
    if effort:
        request["thinking"] = {"type": "disabled" if effort == "none" else "adaptive"}
    config = {"effort": "low" if effort == "minimal" else effort} if effort not in (None, "", "none") else {}
    config |= _output_format(fields.take("response_format"))
    if config:
        request["output_config"] = config
    if fields.take("stream"):
        request["stream"] = True
    fields.refuse_rest(CHAT_HINTS | {"verbosity"}, NEUTRAL_CHAT, _no_message)
    return request


def _conversation(messages: list[JsonObject]) -> JsonObject:
    """System messages stand apart; the results of tools, and what the user adds to them, are one message."""
    system: list[JsonObject] = []
    turns: list[JsonObject] = []
    has_results = False
    for number, message in enumerate(messages):
        role, place = message["role"], f"messages[{number}]"
        if role in ("system", "developer"):
            system += _as_blocks(_content(message["content"], f"{place}.content"))
            continue
        if role == "assistant":
            content = _assistant_content(message, place)
        elif role in ("tool", "user"):
            content = _content(message["content"], f"{place}.content")
        else:
            raise _no_message(f"{place}.role {role!r}")
        if role == "tool":
            content = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
        if has_results and role != "assistant":
            turns[-1]["content"] += _as_blocks(content)
        else:
            turns.append({"role": "assistant" if role == "assistant" else "user", "content": content})
        has_results = role == "tool"
    if not system:
        return {"messages": turns}
    return {"system": system[0]["text"] if len(system) == 1 else system, "messages": turns}


def _assistant_content(message: Mapping[str, Any], place: str) -> str | list[JsonObject]:
    if message.get("function_call") is not None:
        raise _no_message(f"{place}.function_call")
    content = _content(message.get("content") or "", f"{place}.content")
    if not message.get("tool_calls") and not message.get("refusal"):
        return content
    blocks = [block for block in _as_blocks(content) if block.get("text") != ""]
    if message.get("refusal"):
        blocks.append(text_part(message["refusal"]))
    for number, call in enumerate(message.get("tool_calls") or ()):
        if call.get("type", "function") != "function":
            raise _no_message(f"{place}.tool_calls[{number}] of type {call['type']!r}")
        arguments = arguments_object(call["function"].get("arguments"))
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _content(content: Any, place: str) -> str | list[JsonObject]:
    return content if isinstance(content, str) else numbered(_block, content, place)


def _as_blocks(content: str | list[JsonObject]) -> list[JsonObject]:
    return [text_part(content)] if isinstance(content, str) else content


def _block(part: Mapping[str, Any], place: str) -> JsonObject:
    kind = part["type"]
    if kind in ("text", "refusal"):
        return text_part(part[kind])
    if kind == "image_url":
        url = part["image_url"]["url"]
        return {"type": "image", "source": _bytes_in(url, place) or {"type": "url", "url": url}}
    file = part.get("file") or {}
    source = _bytes_in(file["file_data"], place) if kind == "file" and file.get("file_data") else None
    if source is None or source["media_type"] != "application/pdf":
        raise _no_message(f"{place} of type {kind!r}")
    title = {"title": file["filename"]} if file.get("filename") else {}
    return {"type": "document", "source": source, **title}


def _bytes_in(url: str, place: str) -> JsonObject | None:
    """The source of a block for what a `data:` address holds; None for one that leads elsewhere."""
    if not url.startswith("data:"):
        return None
    head, comma, data = url.removeprefix("data:").partition(",")
    media_type, _, encoding = head.partition(";")
    if not comma or not encoding.endswith("base64"):
        raise UntranslatableRequest(place, f"'{place}' is a data address that is not in base64; encode it so.")
    return {"type": "base64", "media_type": media_type, "data": data}


def _tool(tool: Mapping[str, Any], place: str) -> JsonObject:
    if tool["type"] != "function":
        raise _no_message(f"{place} of type {tool['type']!r}")
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], **chosen(function, ("description", "strict")), "input_schema": schema}


def _tool_choice(choice: str | Mapping[str, Any]) -> JsonObject:
    if isinstance(choice, Mapping):
        if choice["type"] != "function":
            raise _no_message(f"tool_choice of type {choice['type']!r}")
        return {"type": "tool", "name": choice["function"]["name"]}
    if choice not in _TOOL_CHOICES:
        raise _no_message(f"tool_choice {choice!r}")
    return {"type": _TOOL_CHOICES[choice]}


def _output_format(form: Mapping[str, Any] | None) -> JsonObject:
    if form is None or form["type"] == "text":
        return {}
    if form["type"] != "json_schema":
        problem = (
            f"'response_format' of type {form['type']!r} in a chat request cannot be said to a backend that speaks"
        )
        raise UntranslatableRequest("response_format", f"{problem} messages; give a 'json_schema' instead.")
    return {"format": {"type": "json_schema", "schema": form["json_schema"]["schema"]}}


# ---------------------------------------------------------------------- messages to chat


def chat_from_messages(body: Mapping[str, object]) -> JsonObject:
    fields = RequestFields(body)
    request = fields.copy(*_SAME)
    system = fields.take("system")
    messages = [{"role": "system", "content": plain_content(parts_of(system, "system", _part))}] if system else []
    for number, message in enumerate(fields.take("messages")):
        messages += _chat_messages(message, f"messages[{number}].content")
    request["messages"] = messages
    if (limit := fields.take("max_tokens")) is not None:
        request["max_completion_tokens"] = limit
    if stop := fields.take("stop_sequences"):
        request["stop"] = list(stop)
    if tools := fields.take("tools"):
        request["tools"] = numbered(_chat_tool, tools, "tools")
    request |= _chat_tool_choice(fields.take("tool_choice"))
    request |= _chat_reasoning(fields.take("thinking"), fields.take("output_config") or {})
    if fields.take("stream"):
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    fields.refuse_rest(_HINTS, {}, _no_chat)
    return request


def _chat_messages(message: Mapping[str, Any], place: str) -> Iterator[JsonObject]:
    """One message, or several: the results of tools are messages of their own in a chat."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if role == "assistant":
        yield _chat_assistant(content, place)
        return
    parts: list[JsonObject] = []
    for number, block in enumerate(content):
        here = f"{place}[{number}]"
        if block["type"] != "tool_result":
            parts.append(_part(block, here))
            continue
        result = parts_of(block.get("content") or "", f"{here}.content", _part)
        # The results of tools are text in a chat; their pictures go into the user's message behind them.
        parts += [part for part in result if part["type"] != "text"]
        texts = [part for part in result if part["type"] == "text"]
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": plain_content(texts)}
    if parts or not any(block["type"] == "tool_result" for block in content):
        yield {"role": role, "content": plain_content(parts)}


def _chat_assistant(blocks: list[JsonObject], place: str) -> JsonObject:
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
            signature = block.get("signature")  # in what we wrote, the field that the reasoning came from
            name = signature if signature in REASONING_FIELDS else REASONING_FIELDS[0]
            message[name] = message.get(name, "") + block["thinking"]
        elif kind not in ("redacted_thinking", "fallback"):
            raise _no_chat(f"{place}[{number}] of type {kind!r}")
    if texts or not calls:
        message["content"] = plain_content(texts)
    if calls:
        message["tool_calls"] = calls
    return message


def _part(block: JsonObject, place: str) -> JsonObject:
    kind = block["type"]
    if kind == "text":
        return text_part(block["text"])
    source = block.get("source") or {}
    form = source.get("type")
    if kind == "image" and form == "url":
        return image_part(source["url"])
    if kind == "document" and form == "text":
        return text_part(source["data"])
    if kind not in ("image", "document") or form != "base64":
        raise _no_chat(f"{place} of type {kind!r}" + (f" from {form!r}" if form else ""))
    data = f"data:{source['media_type']};base64,{source['data']}"
    if kind == "image":
        return image_part(data)
    return {"type": "file", "file": {"filename": block.get("title") or "document.pdf", "file_data": data}}


def _chat_tool(tool: Mapping[str, object], place: str) -> JsonObject:
    if tool.get("type") not in (None, "custom"):
        raise _no_chat(f"{place} of type {tool['type']!r}")
    function = {"name": tool["name"], "parameters": tool["input_schema"], **chosen(tool, ("description", "strict"))}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Mapping[str, object] | None) -> JsonObject:
    if choice is None:
        return {}
    kind = choice["type"]
    if kind == "tool":
        request: JsonObject = {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    elif kind in _CHAT_TOOL_CHOICES:
        request = {"tool_choice": _CHAT_TOOL_CHOICES[kind]}
    else:
        raise _no_chat(f"tool_choice of type {kind!r}")
    if choice.get("disable_parallel_tool_use") is not None:
        request["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return request


def _chat_reasoning(thinking: Mapping[str, Any] | None, config: Mapping[str, Any]) -> JsonObject:
    """The effort of the reasoning, which without any word is the model's own, and the format of the output."""
    request: JsonObject = {}
    if thinking and thinking["type"] == "enabled":
        is_low = thinking["budget_tokens"] <= _LOW_BUDGET_TOKENS
        is_medium = thinking["budget_tokens"] <= _MEDIUM_BUDGET_TOKENS
        request["reasoning_effort"] = "low" if is_low else "medium" if is_medium else "high"
    if config.get("effort"):
        request["reasoning_effort"] = config["effort"]
    form = config.get("format")
    if form:
        if form["type"] != "json_schema":
            raise _no_chat(f"output_config.format of type {form['type']!r}")
        schema = {"name": "answer", "schema": form["schema"], "strict": True}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    return request
