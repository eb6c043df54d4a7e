"""Agents that speak OpenAI's responses, served by backends that speak chat."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning.dialects import JsonObject
from agentlightning.llm_proxy.translation.chat_parts import (
    REASONING_FIELDS,
    first_choice,
    function_call,
    image_part,
    plain_content,
    reasoning_in,
    text_part,
    usage_counts,
)
from agentlightning.llm_proxy.translation.responses_on_chat_stream import ResponsesFromChat
from agentlightning.llm_proxy.translation.responses_terms import (
    call_item,
    frame,
    incomplete_reason,
    message_item,
    reasoning_item,
    reasoning_part,
    refusal_part,
    usage_of,
)
from agentlightning.llm_proxy.translation.responses_terms import text_part as output_text_part
from agentlightning.llm_proxy.translation.terms import Translation, UntranslatableRequest, refuse_others, unsayable

__all__ = ["RESPONSES_ON_CHAT"]

_DROPPED: Final = frozenset(
    {
        "context_management",
        "max_tool_calls",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "truncation",
        "user",
    }
)
"""Hints, without which an answer is as good; limits on tools that run at OpenAI, of which there are none here."""
_SAID: Final = frozenset(
    {
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "model",
        "parallel_tool_calls",
        "reasoning",
        "stream",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_p",
    }
)
_MEANINGLESS: Final[Mapping[str, tuple[Any, ...]]] = {"background": (False,), "top_logprobs": (0,)}
"""Values that say what is so anyway."""
_STORED: Final = ("previous_response_id", "conversation")
"""What names earlier items that a server has kept; a chat server keeps none."""
_SAME: Final = ("model", "temperature", "top_p")
_HARMLESS_INCLUSIONS: Final = frozenset({"reasoning.encrypted_content"})


def _unsayable(field: str) -> UntranslatableRequest:
    return unsayable(field, client="responses", backend="chat")


def _request(body: Mapping[str, Any]) -> JsonObject:
    for name in _STORED:
        if body.get(name) is not None:
            instead = "leave it out and send the earlier items in 'input'"
            raise unsayable(name, client="responses", backend="chat", instead=instead)
    meant = {name: value for name, value in body.items() if value not in _MEANINGLESS.get(name, ())}
    refuse_others(meant, _SAID | _DROPPED, client="responses", backend="chat")
    for inclusion in body.get("include") or ():
        if inclusion not in _HARMLESS_INCLUSIONS:
            raise _unsayable(f"include {inclusion!r}")
    said: JsonObject = {name: body[name] for name in _SAME if body.get(name) is not None}
    said["messages"] = _messages(body)
    if body.get("max_output_tokens") is not None:
        said["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        said["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body["tools"])]
        if body.get("parallel_tool_calls") is not None:
            said["parallel_tool_calls"] = body["parallel_tool_calls"]
    if body.get("tool_choice") is not None:
        said["tool_choice"] = _tool_choice(body["tool_choice"])
    if (body.get("reasoning") or {}).get("effort"):
        said["reasoning_effort"] = body["reasoning"]["effort"]
    _say_text(said, body.get("text") or {})
    if body.get("stream"):
        said |= {"stream": True, "stream_options": {"include_usage": True}}
    return said


# ---------------------------------------------------------------------- messages


def _messages(body: Mapping[str, Any]) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    thought = ""
    for number, item in enumerate(given):
        place = f"input[{number}]"
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought += _thought(item)
            continue
        message = _message(item, kind, place)
        if message["role"] == "assistant" and thought:
            message[REASONING_FIELDS[0]] = thought
        thought = ""
        _append(messages, message)
    return messages


def _append(messages: list[JsonObject], message: JsonObject) -> None:
    """The items of one answer are one message of a chat, because a call and its result must stand together."""
    last = messages[-1] if messages else {}
    if message["role"] != "assistant" or last.get("role") != "assistant":
        messages.append(message)
        return
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
        last["content"] = last["content"] or None
    elif "tool_calls" in last:
        last["content"] = message["content"] if not last["content"] else f"{last['content']}\n{message['content']}"
    else:
        messages.append(message)
        return
    for name in REASONING_FIELDS:
        if name in message:
            last[name] = last.get(name, "") + message[name]


def _message(item: Mapping[str, Any], kind: str, place: str) -> JsonObject:
    if kind == "function_call":
        call = function_call(item["call_id"], item["name"], item["arguments"])
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = plain_content(_parts(item["output"], f"{place}.output"))
        return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    if kind != "message":
        raise _unsayable(f"{place} of type {kind!r}")
    role, parts = item["role"], _parts(item["content"], f"{place}.content")
    if role == "assistant":
        return {"role": role, "content": "".join(part["text"] for part in parts)}
    # Most templates of open models know no developer; OpenAI's take the system for one.
    return {"role": "system" if role == "developer" else role, "content": plain_content(parts)}


def _thought(item: Mapping[str, Any]) -> str:
    """What a reasoning item says: the text itself where it is there, else its summary."""
    parts = item.get("content") or item.get("summary") or ()
    return "\n\n".join(part["text"] for part in parts)


def _parts(content: str | list[JsonObject], place: str) -> list[JsonObject]:
    if isinstance(content, str):
        return [text_part(content)]
    return [_part(part, f"{place}[{number}]") for number, part in enumerate(content)]


def _part(part: Mapping[str, Any], place: str) -> JsonObject:
    kind = part["type"]
    if kind in ("input_text", "output_text", "text"):
        return text_part(part["text"])
    if kind == "refusal":
        return text_part(part["refusal"])
    if kind == "input_image" and part.get("image_url"):
        image = image_part(part["image_url"])
        if part.get("detail") not in (None, "auto"):
            image["image_url"]["detail"] = part["detail"]
        return image
    if kind == "input_file" and part.get("file_data"):
        return {"type": "file", "file": {name: part[name] for name in ("filename", "file_data") if part.get(name)}}
    raise _unsayable(f"{place} of type {kind!r}")


# ---------------------------------------------------------------------- options


def _tool(tool: Mapping[str, Any], place: str) -> JsonObject:
    if tool["type"] != "function":
        raise _unsayable(f"{place} of type {tool['type']!r}")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: str | Mapping[str, Any]) -> str | JsonObject:
    if isinstance(choice, str):
        return choice
    if choice["type"] != "function":
        raise _unsayable(f"tool_choice of type {choice['type']!r}")
    return {"type": "function", "function": {"name": choice["name"]}}


def _say_text(said: JsonObject, text: Mapping[str, Any]) -> None:
    form = text.get("format")
    if text.get("verbosity"):
        said["verbosity"] = text["verbosity"]
    if not form or form["type"] == "text":
        return
    if form["type"] == "json_object":
        said["response_format"] = {"type": "json_object"}
    elif form["type"] == "json_schema":
        names = ("name", "description", "schema", "strict")
        schema = {name: form[name] for name in names if form.get(name) is not None}
        said["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        raise _unsayable(f"text.format of type {form['type']!r}")


# ---------------------------------------------------------------------- answers


def _response(body: Mapping[str, Any], request: Mapping[str, Any]) -> JsonObject:
    choice = first_choice(body)
    created = body.get("created") or int(time.time())
    told = frame(request, answer_id=body["id"], model=body["model"], created=created)
    reason = incomplete_reason(choice.get("finish_reason"))
    told["output"] = list(_items(choice["message"], body["id"]))
    told["status"] = "incomplete" if reason else "completed"
    told["incomplete_details"] = {"reason": reason} if reason else None
    told["usage"] = usage_of(usage_counts(body.get("usage")))
    return told


def _items(message: Mapping[str, Any], answer_id: str) -> Iterator[JsonObject]:
    number = 0
    thought = reasoning_in(message)
    if thought:
        yield reasoning_item(answer_id, number, [reasoning_part(thought[1])])
        number += 1
    parts = [output_text_part(message["content"])] if message.get("content") else []
    parts += [refusal_part(message["refusal"])] if message.get("refusal") else []
    calls = message.get("tool_calls") or ()
    if parts or not calls:
        yield message_item(answer_id, number, parts or [output_text_part("")])
        number += 1
    for place, call in enumerate(calls):
        call_id = call.get("id") or f"{answer_id}-call-{place}"
        said = (call_id, call["function"]["name"], call["function"].get("arguments") or "")
        yield call_item(answer_id, number, said)
        number += 1


RESPONSES_ON_CHAT = Translation("responses", "chat", _request, _response, ResponsesFromChat)
