"""Agents that speak chat, served by backends that speak OpenAI's responses."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from agentlightning.dialects import JsonObject
from agentlightning.dialects.failures import BackendStreamError, failure_in_stream
from agentlightning.llm_proxy.translation.chat_on_responses_stream import ChatFromResponses
from agentlightning.llm_proxy.translation.chat_parts import function_call
from agentlightning.llm_proxy.translation.chat_terms import HINTS, answer, answer_message, meant
from agentlightning.llm_proxy.translation.responses_terms import counts_of, finish_reason_of
from agentlightning.llm_proxy.translation.terms import Translation, UntranslatableRequest, refuse_others, unsayable

__all__ = ["CHAT_ON_RESPONSES"]

_SAID: Final = frozenset(
    {
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "parallel_tool_calls",
        "reasoning_effort",
        "response_format",
        "stream",
        "temperature",
        "tool_choice",
        "tools",
        "top_p",
        "verbosity",
    }
)
_SAME: Final = ("model", "temperature", "top_p")


def _unsayable(field: str) -> UntranslatableRequest:
    return unsayable(field, client="chat", backend="responses")


def _request(body: Mapping[str, Any]) -> JsonObject:
    refuse_others(meant(body), _SAID | HINTS, client="chat", backend="responses")
    said: JsonObject = {name: body[name] for name in _SAME if body.get(name) is not None}
    messages = enumerate(body["messages"])
    said["input"] = [item for number, message in messages for item in _items(message, f"messages[{number}]")]
    said["store"] = False
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None:
        said["max_output_tokens"] = limit
    if body.get("tools"):
        said["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body["tools"])]
        if body.get("parallel_tool_calls") is not None:
            said["parallel_tool_calls"] = body["parallel_tool_calls"]
    if body.get("tool_choice") is not None:
        said["tool_choice"] = _tool_choice(body["tool_choice"])
    if body.get("reasoning_effort"):
        said["reasoning"] = {"effort": body["reasoning_effort"]}
    text = _text(body)
    if text:
        said["text"] = text
    if body.get("stream"):
        said["stream"] = True
    return said


# ---------------------------------------------------------------------- messages


def _items(message: Mapping[str, Any], place: str) -> Iterator[JsonObject]:
    """A message, and the calls that it makes. What the model thought before is left out: OpenAI takes its own alone."""
    role, content = message["role"], message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) else _parts(content, f"{place}.content")
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
    elif role == "assistant":
        yield from _assistant_items(message, place)
    elif role in ("system", "developer", "user"):
        said = content if isinstance(content, str) else _parts(content, f"{place}.content")
        yield {"type": "message", "role": role, "content": said}
    else:
        raise _unsayable(f"{place}.role {role!r}")


def _assistant_items(message: Mapping[str, Any], place: str) -> Iterator[JsonObject]:
    if message.get("function_call") is not None:
        raise _unsayable(f"{place}.function_call")
    content, calls = message.get("content"), message.get("tool_calls") or ()
    text = content if isinstance(content, str) else "".join(_spoken(part, place) for part in content or ())
    text += message.get("refusal") or ""
    if text or not calls:
        yield {"type": "message", "role": "assistant", "content": text}
    for number, call in enumerate(calls):
        if call.get("type", "function") != "function":
            raise _unsayable(f"{place}.tool_calls[{number}] of type {call['type']!r}")
        function = call["function"]
        item = {"type": "function_call", "call_id": call["id"], "name": function["name"]}
        yield {**item, "arguments": function.get("arguments") or "{}"}


def _spoken(part: Mapping[str, Any], place: str) -> str:
    if part["type"] not in ("text", "refusal"):
        raise _unsayable(f"{place}.content of type {part['type']!r}")
    return str(part[part["type"]])


def _parts(content: Any, place: str) -> list[JsonObject]:
    return [_part(part, f"{place}[{number}]") for number, part in enumerate(content)]


def _part(part: Mapping[str, Any], place: str) -> JsonObject:
    kind = part["type"]
    if kind == "text":
        return {"type": "input_text", "text": part["text"]}
    if kind == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail") or "auto"}
    if kind == "file":
        return {"type": "input_file", **part["file"]}
    raise _unsayable(f"{place} of type {kind!r}")


# ---------------------------------------------------------------------- options


def _tool(tool: Mapping[str, Any], place: str) -> JsonObject:
    if tool["type"] != "function":
        raise _unsayable(f"{place} of type {tool['type']!r}")
    function = tool["function"]
    said: JsonObject = {"type": "function", "name": function["name"]}
    said["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
    said["strict"] = bool(function.get("strict"))  # responses are strict unless told, a chat is not
    return {**said, **({"description": function["description"]} if function.get("description") else {})}


def _tool_choice(choice: str | Mapping[str, Any]) -> str | JsonObject:
    if isinstance(choice, str):
        return choice
    if choice["type"] != "function":
        raise _unsayable(f"tool_choice of type {choice['type']!r}")
    return {"type": "function", "name": choice["function"]["name"]}


def _text(body: Mapping[str, Any]) -> JsonObject:
    text: JsonObject = {"verbosity": body["verbosity"]} if body.get("verbosity") else {}
    form = body.get("response_format")
    if form is None:
        return text
    if form["type"] in ("text", "json_object"):
        return {**text, "format": {"type": form["type"]}}
    if form["type"] == "json_schema":
        return {**text, "format": {"type": "json_schema", **form["json_schema"]}}
    raise _unsayable(f"response_format of type {form['type']!r}")


# ---------------------------------------------------------------------- answers


def _response(body: Mapping[str, Any], request: Mapping[str, Any]) -> JsonObject:
    del request  # nothing of it is repeated
    if body.get("status") == "failed" or body.get("error"):
        raise BackendStreamError(failure_in_stream("responses", orjson.dumps(body)))
    message = _message(body)
    return answer(
        message,
        finish_reason_of(body, has_calls="tool_calls" in message),
        answer_id=body["id"],
        model=body["model"],
        created=int(body.get("created_at") or time.time()),
        counts=counts_of(body.get("usage")),
    )


def _message(body: Mapping[str, Any]) -> JsonObject:
    texts: dict[str, str] = {"output_text": "", "refusal": "", "reasoning": ""}
    calls: list[JsonObject] = []
    for item in body["output"]:
        if item["type"] == "message":
            for part in item["content"]:
                texts[part["type"]] += part["refusal" if part["type"] == "refusal" else "text"]
        elif item["type"] == "function_call":
            calls.append(function_call(item["call_id"], item["name"], item["arguments"] or "{}"))
        elif item["type"] == "reasoning":
            thoughts = [part["text"] for part in item.get("content") or item.get("summary") or ()]
            texts["reasoning"] += "\n\n".join(thoughts)
    refusal = texts["refusal"] or None
    return answer_message(texts["output_text"], refusal=refusal, reasoning=texts["reasoning"], calls=calls)


CHAT_ON_RESPONSES = Translation("chat", "responses", _request, _response, ChatFromResponses)
