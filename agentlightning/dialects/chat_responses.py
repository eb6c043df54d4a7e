"""Requests of chat for backends that speak OpenAI's responses, and the other way round."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from agentlightning.dialects.base import (
    CHAT_HINTS,
    NEUTRAL_CHAT,
    OPENAI_HINTS,
    RequestFields,
    chosen,
    image_part,
    numbered,
    parts_of,
    plain_content,
    text_part,
    untranslatable,
)
from agentlightning.dialects.chat import function_call
from agentlightning.dialects.output import REASONING_FIELDS
from agentlightning.utils.json_values import JsonObject

_HINTS: Final = OPENAI_HINTS | {"context_management", "max_tool_calls", "truncation"}
"""Without these an output is as good; `max_tool_calls` limits tools that run at OpenAI alone."""
_SAME: Final = ("model", "temperature", "top_p")

_no_response = partial(untranslatable, client="chat", backend="responses")
_no_chat = partial(untranslatable, client="responses", backend="chat")


# ---------------------------------------------------------------------- chat to responses


def responses_from_chat(body: Mapping[str, object]) -> JsonObject:
    fields = RequestFields(body)
    request = fields.copy(*_SAME)
    messages = enumerate(fields.take("messages"))
    request["input"] = [item for number, message in messages for item in _items(message, f"messages[{number}]")]
    request["store"] = False
    if (limit := fields.take_chat_limit()) is not None:
        request["max_output_tokens"] = limit
    is_parallel = fields.copy("parallel_tool_calls")
    if tools := fields.take("tools"):
        request["tools"] = numbered(_tool, tools, "tools")
        request |= is_parallel
    choice = fields.take("tool_choice")
    if isinstance(choice, Mapping):
        if choice["type"] != "function":
            raise _no_response(f"tool_choice of type {choice['type']!r}")
        choice = {"type": "function", "name": choice["function"]["name"]}
    if choice is not None:
        request["tool_choice"] = choice
    if effort := fields.take("reasoning_effort"):
        request["reasoning"] = {"effort": effort}
    if text := _text(fields.take("verbosity"), fields.take("response_format")):
        request["text"] = text
    if fields.take("stream"):
        request["stream"] = True
    fields.refuse_rest(CHAT_HINTS, NEUTRAL_CHAT, _no_response)
    return request


def _items(message: Mapping[str, Any], place: str) -> Iterator[JsonObject]:
    """A message, and the calls that it makes. Earlier reasoning is left out: OpenAI takes its own alone."""
    role = message["role"]
    if role == "assistant":
        yield from _assistant_items(message, place)
        return
    content = message.get("content")
    if not isinstance(content, str):
        content = numbered(_part, content or (), f"{place}.content")
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}
    elif role in ("system", "developer", "user"):
        yield {"type": "message", "role": role, "content": content}
    else:
        raise _no_response(f"{place}.role {role!r}")


def _assistant_items(message: Mapping[str, Any], place: str) -> Iterator[JsonObject]:
    if message.get("function_call") is not None:
        raise _no_response(f"{place}.function_call")
    content, calls = message.get("content") or "", message.get("tool_calls") or ()
    text = ""
    for part in [text_part(content)] if isinstance(content, str) else content:
        if part["type"] not in ("text", "refusal"):
            raise _no_response(f"{place}.content of type {part['type']!r}")
        text += part[part["type"]]
    text += message.get("refusal") or ""
    if text or not calls:
        yield {"type": "message", "role": "assistant", "content": text}
    for number, call in enumerate(calls):
        if call.get("type", "function") != "function":
            raise _no_response(f"{place}.tool_calls[{number}] of type {call['type']!r}")
        item = {"type": "function_call", "call_id": call["id"], "name": call["function"]["name"]}
        yield {**item, "arguments": call["function"].get("arguments") or "{}"}


def _part(part: Mapping[str, Any], place: str) -> JsonObject:
    kind = part["type"]
    if kind == "text":
        return {"type": "input_text", "text": part["text"]}
    if kind == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail") or "auto"}
    if kind == "file":
        return {"type": "input_file", **part["file"]}
    raise _no_response(f"{place} of type {kind!r}")


def _tool(tool: Mapping[str, Any], place: str) -> JsonObject:
    if tool["type"] != "function":
        raise _no_response(f"{place} of type {tool['type']!r}")
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    is_strict = bool(function.get("strict"))  # responses are strict by default, a chat is not
    item = {"type": "function", "name": function["name"], "parameters": schema, "strict": is_strict}
    return {**item, **({"description": function["description"]} if function.get("description") else {})}


def _text(verbosity: str | None, form: Mapping[str, Any] | None) -> JsonObject:
    text: JsonObject = {"verbosity": verbosity} if verbosity else {}
    if form is None:
        return text
    if form["type"] in ("text", "json_object"):
        return {**text, "format": {"type": form["type"]}}
    if form["type"] == "json_schema":
        return {**text, "format": {"type": "json_schema", **form["json_schema"]}}
    raise _no_response(f"response_format of type {form['type']!r}")


# ---------------------------------------------------------------------- responses to chat


def chat_from_responses(body: Mapping[str, object]) -> JsonObject:
    fields = RequestFields(body)
    # Names of earlier items that a server has kept; a chat server keeps none.
    for name in ("previous_response_id", "conversation"):
        if fields.take(name) is not None:
            raise _no_chat(name, instead="leave it out and send the earlier items in 'input'")
    for inclusion in fields.take("include") or ():
        if inclusion != "reasoning.encrypted_content":
            raise _no_chat(f"include {inclusion!r}")
    request = fields.copy(*_SAME)
    instructions = fields.take("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    request["messages"] = messages + _messages(fields.take("input"))
    if (limit := fields.take("max_output_tokens")) is not None:
        request["max_completion_tokens"] = limit
    is_parallel = fields.copy("parallel_tool_calls")
    if tools := fields.take("tools"):
        request["tools"] = numbered(_chat_tool, tools, "tools")
        request |= is_parallel
    choice = fields.take("tool_choice")
    if isinstance(choice, Mapping):
        if choice["type"] != "function":
            raise _no_chat(f"tool_choice of type {choice['type']!r}")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    if choice is not None:
        request["tool_choice"] = choice
    if effort := (fields.take("reasoning") or {}).get("effort"):
        request["reasoning_effort"] = effort
    request |= _chat_format(fields.take("text") or {})
    if fields.take("stream"):
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    fields.refuse_rest(_HINTS, {"background": False, "top_logprobs": 0}, _no_chat)
    return request


def _messages(items: str | list[JsonObject]) -> list[JsonObject]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[JsonObject] = []
    reasoning = ""
    for number, item in enumerate(items):
        if item.get("type") == "reasoning":
            reasoning += reasoning_text(item)
            continue
        message = _message(item, f"input[{number}]")
        if message["role"] == "assistant" and reasoning:
            message[REASONING_FIELDS[0]] = reasoning
        reasoning = ""
        if not _is_joined(messages, message):
            messages.append(message)
    return messages


def _is_joined(messages: list[JsonObject], message: JsonObject) -> bool:
    """Add calls to the text of the same output, or text to its calls: a chat wants a call and its result together."""
    last = messages[-1] if messages else {}
    if message["role"] != "assistant" or last.get("role") != "assistant":
        return False
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
        last["content"] = last["content"] or None
    elif "tool_calls" in last:
        last["content"] = message["content"] if not last["content"] else f"{last['content']}\n{message['content']}"
    else:
        return False
    if REASONING_FIELDS[0] in message:
        last[REASONING_FIELDS[0]] = last.get(REASONING_FIELDS[0], "") + message[REASONING_FIELDS[0]]
    return True


def _message(item: Mapping[str, Any], place: str) -> JsonObject:
    kind = item.get("type") or "message"
    if kind == "function_call":
        call = function_call(item["call_id"], item["name"], item["arguments"])
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = plain_content(parts_of(item["output"], f"{place}.output", _chat_part))
        return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    if kind != "message":
        raise _no_chat(f"{place} of type {kind!r}")
    role, parts = item["role"], parts_of(item["content"], f"{place}.content", _chat_part)
    if role == "assistant":
        return {"role": role, "content": "".join(part["text"] for part in parts)}
    # Most templates of open models know no developer; OpenAI's take the system for one.
    return {"role": "system" if role == "developer" else role, "content": plain_content(parts)}


def _chat_part(part: Mapping[str, Any], place: str) -> JsonObject:
    kind = part["type"]
    if kind in ("input_text", "output_text", "text", "refusal"):
        return text_part(part["refusal" if kind == "refusal" else "text"])
    if kind == "input_image" and part.get("image_url"):
        image = image_part(part["image_url"])
        if part.get("detail") not in (None, "auto"):
            image["image_url"]["detail"] = part["detail"]
        return image
    if kind == "input_file" and part.get("file_data"):
        return {"type": "file", "file": chosen(part, ("filename", "file_data"))}
    raise _no_chat(f"{place} of type {kind!r}")


def _chat_tool(tool: Mapping[str, object], place: str) -> JsonObject:
    if tool["type"] != "function":
        raise _no_chat(f"{place} of type {tool['type']!r}")
    return {"type": "function", "function": chosen(tool, ("name", "description", "parameters", "strict"))}


def _chat_format(text: Mapping[str, Any]) -> JsonObject:
    request: JsonObject = {"verbosity": text["verbosity"]} if text.get("verbosity") else {}
    form = text.get("format")
    if not form or form["type"] == "text":
        return request
    if form["type"] == "json_object":
        return {**request, "response_format": {"type": "json_object"}}
    if form["type"] == "json_schema":
        schema = chosen(form, ("name", "description", "schema", "strict"))
        return {**request, "response_format": {"type": "json_schema", "json_schema": schema}}
    raise _no_chat(f"text.format of type {form['type']!r}")


def reasoning_text(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item, or its summary where it has no text."""
    return "\n\n".join(part["text"] for part in item.get("content") or item.get("summary") or ())
