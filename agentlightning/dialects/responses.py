"""OpenAI's responses: items in, items out. They are written as the messages of a chat would be."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Dialect, field, items

__all__ = ["DIALECT"]

_LAST_EVENTS: Final = ("response.completed", "response.incomplete", "response.failed")


def request_attributes(body: Mapping[str, Any]) -> Attributes:
    attributes: Attributes = {}
    fields.write_request(attributes, body, system="openai")
    number = 0
    if body.get("instructions"):
        fields.write_message(attributes, f"{fields.PROMPT}.0", role="system", content=body["instructions"])
        number = 1
    given = body.get("input")
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else items(given):
        _write_item(attributes, f"{fields.PROMPT}.{number}", item)
        number += 1
    fields.write_tools(attributes, _tools(body))
    return attributes


def _write_item(attributes: Attributes, prefix: str, item: Any) -> None:
    kind = field(item, "type")
    if kind in ("function_call", "custom_tool_call"):
        attributes[f"{prefix}.role"] = "assistant"
        fields.write_tool_calls(attributes, prefix, [_call(item)])
    elif kind in ("function_call_output", "custom_tool_call_output"):
        fields.write_message(
            attributes, prefix, role="tool", content=field(item, "output"), tool_call_id=field(item, "call_id")
        )
    else:
        content = field(item, "content") if kind in (None, "message") else item
        role = field(item, "role")
        fields.write_message(attributes, prefix, role=role or "assistant", content=_plain(content))


def _plain(content: Any) -> Any:
    dump = getattr(content, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else content


def _call(item: Any) -> tuple[Any, Any, Any]:
    arguments = field(item, "arguments")
    return field(item, "call_id"), field(item, "name"), arguments if arguments is not None else field(item, "input")


def _tools(body: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    for tool in items(body.get("tools")):
        name = field(tool, "name") or field(tool, "type")  # those that run at OpenAI have no name
        yield name, field(tool, "description"), field(tool, "parameters")


def response_attributes(response: Any) -> Attributes:
    attributes: Attributes = {}
    fields.write_response(attributes, response)
    fields.write_usage(attributes, field(response, "usage"))
    prefix = f"{fields.COMPLETION}.0"
    output = list(items(field(response, "output")))
    parts = [part for item in output if field(item, "type") == "message" for part in items(field(item, "content"))]
    texts = [field(part, "text") for part in parts if field(part, "type") == "output_text"]
    content = "".join(text for text in texts if isinstance(text, str))
    fields.write_message(attributes, prefix, role="assistant", content=content or None)
    calls = [_call(item) for item in output if field(item, "type") in ("function_call", "custom_tool_call")]
    fields.write_tool_calls(attributes, prefix, calls)
    reason = field(field(response, "incomplete_details"), "reason") or field(response, "status")
    if reason:
        attributes[f"{prefix}.finish_reason"] = fields.plain_text(reason)
    refusals = [field(part, "refusal") for part in parts if field(part, "type") == "refusal"]
    if refusals:
        attributes[f"{prefix}.refusal"] = "".join(str(refusal) for refusal in refusals)
    fields.write_token_ids(attributes, fields.PROMPT_IDS, field(response, "prompt_token_ids"))
    fields.write_token_ids(attributes, fields.RESPONSE_IDS, _response_ids(response))
    logprobs = [entry for part in parts for entry in items(field(part, "logprobs"))]
    fields.write_logprobs(attributes, fields.LOGPROBS, logprobs)
    return attributes


def _response_ids(response: Any) -> Any:
    ids = field(response, "response_token_ids") or field(response, "token_ids")
    return ids[0] if ids and isinstance(ids[0], (list, tuple)) else ids


class ResponseAssembler:
    """Takes the response from the last event; of a stream that was cut, what had come until then."""

    def __init__(self) -> None:
        self._response: Mapping[str, Any] = {}
        self._is_whole = False
        self._texts: list[str] = []

    def add(self, event: Mapping[str, Any]) -> bool:
        kind = str(event.get("type") or "")
        if isinstance(event.get("response"), Mapping):
            self._response = event["response"]
            self._is_whole = kind in _LAST_EVENTS
        if kind == "response.output_text.delta":
            self._texts.append(str(event.get("delta") or ""))
        return kind.endswith(".delta")

    def response(self) -> Mapping[str, Any]:
        if self._is_whole or not self._texts:
            return self._response
        said = {"type": "message", "content": [{"type": "output_text", "text": "".join(self._texts)}]}
        return {**self._response, "output": [said]}


DIALECT = Dialect("openai.responses", request_attributes, response_attributes, ResponseAssembler)
