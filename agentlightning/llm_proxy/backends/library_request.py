"""What the litellm library is given of a caller's request: an allow-list of fields, all else is left out.

The library takes the fields of a request and its own settings as arguments of one call, so a field that a caller may
name freely could say where the call goes, with which key, or what is answered in its place. Within the fields that
pass, messages and tools are made anew of the parts that are known here. Images, audio and files come within the
request: some providers of the library download or open what an address leads to, others have it read with the
credentials of the backend.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from agentlightning.dialects import DialectName, JsonObject
from agentlightning.llm_proxy.translation import UntranslatableRequest

__all__ = ["CHAT_FIELDS", "EMBEDDINGS_FIELDS", "library_fields", "library_request"]

CHAT_FIELDS: Final = frozenset(
    {
        *("messages", "temperature", "top_p", "top_k", "n", "stop", "max_tokens", "max_completion_tokens", "seed"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort", "thinking"),
        *("verbosity", "modalities", "audio", "user", "stream_options", "service_tier", "prompt_cache_key"),
        *("safety_identifier", "return_token_ids"),
    }
)
EMBEDDINGS_FIELDS: Final = frozenset({"input", "dimensions", "encoding_format", "user"})
_MESSAGE_FIELDS: Final = ("role", "name", "tool_call_id", "refusal", "reasoning_content", "cache_control")
_THOUGHT_FIELDS: Final = ("type", "thinking", "signature", "data", "cache_control")
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")
_SIGNATURE: Final = "thought_signature"
_STORED: Final = re.compile(r"\s*(?!https?://)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
"""A text that some providers take for the address of an object, such as `gs://bucket/file`, and not for a text."""
_WAY_OUT: Final = (
    "send its bytes as a 'data:' address, or reach the provider by its OpenAI endpoint (a model 'openai/...' with an "
    "api_base), which is sent requests unchanged"
)


def library_fields(dialect: DialectName) -> frozenset[str]:
    """The fields that a caller may set."""
    return EMBEDDINGS_FIELDS if dialect == "embeddings" else CHAT_FIELDS


def library_request(dialect: DialectName, body: Mapping[str, Any]) -> JsonObject:
    """The arguments that a caller's request becomes.

    Raises:
        UntranslatableRequest: A field holds what the library must not be given.
    """
    request = {name: body[name] for name in library_fields(dialect) if name in body}
    readers = {"input": _input, "messages": _messages, "tools": _tools, "functions": _functions}
    for name in request.keys() & readers.keys():
        request[name] = readers[name](request[name])
    _refuse_remote_schemas("response_format", request.get("response_format"))
    return request


def _input(given: Any) -> Any:
    """What is embedded: texts, or the numbers of tokens."""
    for place, text in enumerate([given] if isinstance(given, str) else _list("input", given)):
        if isinstance(text, str) and _STORED.match(text) is not None:
            raise _refused(f"input[{place}]", f"the address {text[:80]!r}, which would be read in its place")
        if not isinstance(text, (str, int, list)):
            raise _refused(f"input[{place}]", "neither a text nor tokens")
    return given


def _messages(given: Any) -> list[JsonObject]:
    messages: list[JsonObject] = []
    for number, message in enumerate(_list("messages", given)):
        place = f"messages[{number}]"
        made = _chosen(_object(place, message), _MESSAGE_FIELDS)
        if "content" in message:
            made["content"] = _content(f"{place}.content", message["content"])
        if message.get("tool_calls") is not None:
            calls = _list(f"{place}.tool_calls", message["tool_calls"])
            made["tool_calls"] = [_tool_call(f"{place}.tool_calls", call) for call in calls]
        if message.get("function_call") is not None:
            call = _object(f"{place}.function_call", message["function_call"])
            made["function_call"] = _chosen(call, ("name", "arguments"))
        if message.get("thinking_blocks") is not None:
            thoughts = _list(f"{place}.thinking_blocks", message["thinking_blocks"])
            made["thinking_blocks"] = [_thought(f"{place}.thinking_blocks", thought) for thought in thoughts]
        messages.append(made)
    return messages


def _content(place: str, content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    return [_part(f"{place}[{number}]", part) for number, part in enumerate(_list(place, content))]


def _part(place: str, given: Any) -> JsonObject:
    """One part of a message, of a kind that is known."""
    if isinstance(given, str):
        return {"type": "text", "text": given}
    part = _object(place, given)
    kind = part.get("type")
    made: JsonObject = _chosen(part, ("type", "cache_control"))
    if kind in ("text", "refusal"):
        if not isinstance(part.get(kind), str):
            raise _refused(f"{place}.{kind}", "not a text")
        return {**made, kind: part[kind]}
    if kind == "image_url":
        image = part.get("image_url")
        image = {"url": image} if isinstance(image, str) else _object(f"{place}.image_url", image)
        _demand_bytes(f"{place}.image_url.url", image.get("url"))
        return {**made, "image_url": _chosen(image, ("url", "detail"))}
    if kind == "file":
        file = _object(f"{place}.file", part.get("file"))
        _demand_bytes(f"{place}.file.file_data", file.get("file_data"))
        return {**made, "file": _chosen(file, ("file_data", "filename"))}
    if kind == "input_audio":
        audio = _object(f"{place}.input_audio", part.get("input_audio"))
        sound = audio.get("data")
        if not isinstance(sound, str) or ":" in sound:
            raise _refused(f"{place}.input_audio.data", "not the bytes of a sound in base64")
        return {**made, "input_audio": _chosen(audio, ("data", "format"))}
    raise _refused(place, f"a part of type {kind!r}; known are text, refusal, image_url, input_audio and file")


def _tool_call(place: str, given: Any) -> JsonObject:
    call = _object(place, given)
    function = _object(f"{place}.function", call.get("function"))
    made = _chosen(call, ("id", "type", "index"))
    made["function"] = _chosen(function, ("name", "arguments"))
    for holder in (call, function):  # Gemini goes on only if it gets back what it signed
        fields = holder.get("provider_specific_fields")
        if isinstance(fields, Mapping) and isinstance(fields.get(_SIGNATURE), str):
            made["provider_specific_fields"] = {_SIGNATURE: fields[_SIGNATURE]}
    return made


def _thought(place: str, given: Any) -> JsonObject:
    thought = _object(place, given)
    if thought.get("type") not in ("thinking", "redacted_thinking"):
        raise _refused(place, f"a block of type {thought.get('type')!r}")
    return _chosen(thought, _THOUGHT_FIELDS)


def _tools(given: Any) -> Any:
    """Functions alone: the library and some providers run other tools themselves."""
    tools: list[JsonObject] = []
    for number, tool in enumerate(_list("tools", given or [])):
        place = f"tools[{number}]"
        if _object(place, tool).get("type") != "function":
            raise _refused(place, f"a tool of type {tool.get('type')!r}; known are functions")
        tools.append(
            {
                **_chosen(tool, ("type", "cache_control")),
                "function": _function(f"{place}.function", tool.get("function")),
            }
        )
    return tools or None


def _functions(given: Any) -> Any:
    return [_function("functions", function) for function in _list("functions", given or [])] or None


def _function(place: str, given: Any) -> JsonObject:
    made = _chosen(_object(place, given), _FUNCTION_FIELDS)
    _refuse_remote_schemas(f"{place}.parameters", made.get("parameters"))
    return made


def _refuse_remote_schemas(place: str, schema: Any) -> None:
    """Whoever validates by a schema follows its references, and may fetch them."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            for name in ("$ref", "$dynamicRef"):
                reference = value.get(name)
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise _refused(place, f"a schema with a reference to {reference[:80]!r} outside of it")
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def _demand_bytes(place: str, address: Any) -> None:
    if not isinstance(address, str) or not address.startswith("data:"):
        shown = repr(address[:80]) if isinstance(address, str) else "no address"
        raise UntranslatableRequest(place, f"'{place}' is {shown}, which the litellm library might fetch: {_WAY_OUT}.")


def _chosen(given: Mapping[str, Any], names: Iterable[str]) -> JsonObject:
    return {name: given[name] for name in names if name in given}


def _list(place: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _refused(place, "not a list")
    return value


def _object(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(place, "not an object")
    return value


def _refused(place: str, what: str) -> UntranslatableRequest:
    return UntranslatableRequest(place, f"'{place}' is {what}; a backend behind the litellm library is not sent it.")
