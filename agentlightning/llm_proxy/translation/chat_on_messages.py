"""Agents that speak chat, served by backends that speak Anthropic's messages."""

import time
from collections.abc import Mapping
from typing import Any, Final

from agentlightning.dialects import JsonObject
from agentlightning.llm_proxy.translation.chat_on_messages_stream import ChatFromMessages
from agentlightning.llm_proxy.translation.chat_parts import arguments_object, arguments_text, data_url, function_call
from agentlightning.llm_proxy.translation.chat_terms import HINTS, answer, answer_message, meant
from agentlightning.llm_proxy.translation.messages_terms import counts_of, finish_reason_of
from agentlightning.llm_proxy.translation.terms import Translation, UntranslatableRequest, refuse_others, unsayable

__all__ = ["CHAT_ON_MESSAGES", "DEFAULT_MAX_TOKENS"]

DEFAULT_MAX_TOKENS: Final = 4096
"""Messages must say how long an answer may be; a chat need not."""
_DROPPED: Final = HINTS | {"verbosity"}
_SAID: Final = frozenset(
    {
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "parallel_tool_calls",
        "reasoning_effort",
        "response_format",
        "stop",
        "stream",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    }
)
_SAME: Final = ("model", "temperature", "top_p", "top_k")
_CHOICES: Final = {"auto": "auto", "required": "any", "none": "none"}
_EFFORTS: Final = {"minimal": "low"}


def _unsayable(field: str) -> UntranslatableRequest:
    return unsayable(field, client="chat", backend="messages")


def _request(body: Mapping[str, Any]) -> JsonObject:
    refuse_others(meant(body), _SAID | _DROPPED, client="chat", backend="messages")
    said: JsonObject = {name: body[name] for name in _SAME if body.get(name) is not None}
    said["max_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
    _say_messages(said, body["messages"])
    if body.get("stop"):
        said["stop_sequences"] = [body["stop"]] if isinstance(body["stop"], str) else list(body["stop"])
    if body.get("tools"):
        said["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body["tools"])]
    _say_tool_choice(said, body)
    _say_thinking(said, body.get("reasoning_effort"))
    _say_format(said, body.get("response_format"))
    if body.get("stream"):
        said["stream"] = True
    return said


# ---------------------------------------------------------------------- messages


def _say_messages(said: JsonObject, messages: list[JsonObject]) -> None:
    """The conversation: what the system says stands apart, the results of tools are words of the user."""
    system: list[JsonObject] = []
    turns: list[JsonObject] = []
    takes_results = False
    for number, message in enumerate(messages):
        role, place = message["role"], f"messages[{number}]"
        if role in ("system", "developer"):
            system += _blocks(message["content"], f"{place}.content")
            continue
        if role == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            content: Any = [{**result, "content": _content(message["content"], f"{place}.content")}]
        elif role == "assistant":
            content = _assistant(message, place)
        elif role == "user":
            content = _content(message["content"], f"{place}.content")
        else:
            raise _unsayable(f"{place}.role {role!r}")
        if takes_results and role != "assistant":  # results, and the user's words after them, are one message
            turns[-1]["content"] += _as_blocks(content)
        else:
            turns.append({"role": "assistant" if role == "assistant" else "user", "content": content})
        takes_results = role == "tool"
    if system:
        said["system"] = system[0]["text"] if len(system) == 1 else system
    said["messages"] = turns


def _assistant(message: Mapping[str, Any], place: str) -> str | list[JsonObject]:
    if message.get("function_call") is not None:
        raise _unsayable(f"{place}.function_call")
    content: str | list[JsonObject] = _content(message.get("content") or "", f"{place}.content")
    if not message.get("tool_calls") and not message.get("refusal"):
        return content
    blocks = [block for block in _as_blocks(content) if block.get("text") != ""]
    if message.get("refusal"):
        blocks.append({"type": "text", "text": message["refusal"]})
    for number, call in enumerate(message.get("tool_calls") or ()):
        if call.get("type", "function") != "function":
            raise _unsayable(f"{place}.tool_calls[{number}] of type {call['type']!r}")
        function = call["function"]
        use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**use, "input": arguments_object(function.get("arguments"))})
    return blocks


def _content(content: Any, place: str) -> str | list[JsonObject]:
    return content if isinstance(content, str) else _blocks(content, place)


def _as_blocks(content: str | list[JsonObject]) -> list[JsonObject]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _blocks(content: Any, place: str) -> list[JsonObject]:
    if isinstance(content, str):
        return _as_blocks(content)
    return [_block(part, f"{place}[{number}]") for number, part in enumerate(content)]


def _block(part: Mapping[str, Any], place: str) -> JsonObject:
    kind = part["type"]
    if kind in ("text", "refusal"):
        return {"type": "text", "text": part[kind]}
    if kind == "image_url":
        url = part["image_url"]["url"]
        found = data_url(url, place)
        if found is None:
            return {"type": "image", "source": {"type": "url", "url": url}}
        return {"type": "image", "source": {"type": "base64", "media_type": found.media_type, "data": found.data}}
    file = part.get("file") or {}
    found = data_url(file["file_data"], place) if kind == "file" and file.get("file_data") else None
    if found is None or found.media_type != "application/pdf":
        raise _unsayable(f"{place} of type {kind!r}")
    source = {"type": "base64", "media_type": found.media_type, "data": found.data}
    title = {"title": file["filename"]} if file.get("filename") else {}
    return {"type": "document", "source": source, **title}


# ---------------------------------------------------------------------- options


def _tool(tool: Mapping[str, Any], place: str) -> JsonObject:
    if tool["type"] != "function":
        raise _unsayable(f"{place} of type {tool['type']!r}")
    function = tool["function"]
    said: JsonObject = {"name": function["name"]}
    said |= {name: function[name] for name in ("description", "strict") if function.get(name) is not None}
    return {**said, "input_schema": function.get("parameters") or {"type": "object", "properties": {}}}


def _say_tool_choice(said: JsonObject, body: Mapping[str, Any]) -> None:
    choice, is_parallel = body.get("tool_choice"), body.get("parallel_tool_calls")
    if isinstance(choice, Mapping):
        if choice["type"] != "function":
            raise _unsayable(f"tool_choice of type {choice['type']!r}")
        said["tool_choice"] = {"type": "tool", "name": choice["function"]["name"]}
    elif choice is not None:
        if choice not in _CHOICES:
            raise _unsayable(f"tool_choice {choice!r}")
        said["tool_choice"] = {"type": _CHOICES[choice]}
    if is_parallel is None or not body.get("tools") or choice == "none":
        return
    said.setdefault("tool_choice", {"type": "auto"})["disable_parallel_tool_use"] = not is_parallel


def _say_thinking(said: JsonObject, effort: str | None) -> None:
    if effort == "none":
        said["thinking"] = {"type": "disabled"}
    elif effort:
        said["thinking"] = {"type": "adaptive"}
        said["output_config"] = {"effort": _EFFORTS.get(effort, effort)}


def _say_format(said: JsonObject, form: Mapping[str, Any] | None) -> None:
    if form is None or form["type"] == "text":
        return
    if form["type"] != "json_schema":
        told = f"'response_format' of type {form['type']!r} in a chat request cannot be said to a backend that speaks"
        raise UntranslatableRequest("response_format", f"{told} messages; give a 'json_schema' instead.")
    schema = {"type": "json_schema", "schema": form["json_schema"]["schema"]}
    said.setdefault("output_config", {})["format"] = schema


# ---------------------------------------------------------------------- answers


def _response(body: Mapping[str, Any], request: Mapping[str, Any]) -> JsonObject:
    del request  # nothing of it is repeated
    return answer(
        _message(body),
        finish_reason_of(body.get("stop_reason")),
        answer_id=body["id"],
        model=body["model"],
        created=int(time.time()),
        counts=counts_of(body.get("usage") or {}),
    )


def _message(body: Mapping[str, Any]) -> JsonObject:
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[JsonObject] = []
    for block in body["content"]:
        kind = block["type"]
        if kind in texts:
            texts[kind].append(block[kind])
        elif kind == "tool_use":
            calls.append(function_call(block["id"], block["name"], arguments_text(block["input"])))
    refusal = (body.get("stop_details") or {}).get("explanation")
    text, reasoning = "".join(texts["text"]), "".join(texts["thinking"])
    return answer_message(text, refusal=refusal, reasoning=reasoning, calls=calls)


CHAT_ON_MESSAGES = Translation("chat", "messages", _request, _response, ChatFromMessages)
