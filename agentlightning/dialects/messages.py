"""Anthropic's messages: blocks of text, tool use and tool results. They are written as those of a chat would be."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Dialect, field, items

__all__ = ["DIALECT"]

_Entry = tuple[Any, Any, str | None, list[tuple[Any, Any, Any]]]
"""Role, content, the call it answers, and the tools it calls."""


def request_attributes(body: Mapping[str, Any]) -> Attributes:
    attributes: Attributes = {}
    fields.write_request(attributes, body, system="anthropic")
    entries: list[_Entry] = [("system", body["system"], None, [])] if body.get("system") else []
    entries += [entry for message in items(body.get("messages")) for entry in _entries(message)]
    for number, (role, content, tool_call_id, calls) in enumerate(entries):
        prefix = f"{fields.PROMPT}.{number}"
        fields.write_message(attributes, prefix, role=role, content=content, tool_call_id=tool_call_id)
        fields.write_tool_calls(attributes, prefix, calls)
    tools = items(body.get("tools"))
    fields.write_tools(
        attributes, [(field(t, "name"), field(t, "description"), field(t, "input_schema")) for t in tools]
    )
    return attributes


def _entries(message: Any) -> Iterator[_Entry]:
    """One message, or several: the results of tools are messages of their own in a chat."""
    role, content = field(message, "role") or "user", field(message, "content")
    if not isinstance(content, (list, tuple)):
        yield role, content, None, []
        return
    results = [block for block in content if field(block, "type") == "tool_result"]
    for block in results:
        yield "tool", field(block, "content") or "", field(block, "tool_use_id"), []
    rest = [block for block in content if field(block, "type") not in ("tool_result", "tool_use")]
    calls = _calls(content)
    if rest or calls or not results:
        yield role, rest or None, None, calls


def _calls(blocks: Any) -> list[tuple[Any, Any, Any]]:
    uses = [block for block in items(blocks) if field(block, "type") == "tool_use"]
    return [(field(use, "id"), field(use, "name"), field(use, "input")) for use in uses]


def _texts(blocks: Any, kind: str) -> list[str]:
    """What the blocks of a kind say, in the field of the same name."""
    said = [field(block, kind) for block in items(blocks) if field(block, "type") == kind]
    return [text for text in said if isinstance(text, str)]


def response_attributes(response: Any) -> Attributes:
    attributes: Attributes = {}
    fields.write_response(attributes, response)
    fields.write_usage(attributes, field(response, "usage"))
    prefix, content = f"{fields.COMPLETION}.0", field(response, "content")
    texts = _texts(content, "text")
    fields.write_message(attributes, prefix, role="assistant", content="".join(texts) or None)
    fields.write_tool_calls(attributes, prefix, _calls(content))
    if field(response, "stop_reason"):
        attributes[f"{prefix}.finish_reason"] = fields.plain_text(field(response, "stop_reason"))
    thinking = _texts(content, "thinking")
    if thinking:
        attributes[f"{prefix}.reasoning"] = "".join(thinking)
    fields.write_token_ids(attributes, fields.PROMPT_IDS, field(response, "prompt_token_ids"))
    ids = field(response, "response_token_ids") or field(response, "token_ids")
    fields.write_token_ids(attributes, fields.RESPONSE_IDS, ids)
    fields.write_logprobs(attributes, fields.LOGPROBS, field(field(response, "logprobs"), "content"))
    return attributes


class MessageAssembler:
    """Puts the events of a message together."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}

    def add(self, event: Mapping[str, Any]) -> bool:
        kind = event.get("type")
        if kind == "message_start":
            self._message = dict(event.get("message") or {})
            self._usage = dict(self._message.get("usage") or {})
        elif kind == "content_block_start":
            self._blocks[event.get("index") or 0] = {**(event.get("content_block") or {}), "json": ""}
        elif kind == "content_block_delta":
            self._add_delta(event.get("index") or 0, event.get("delta") or {})
            return True
        elif kind == "message_delta":
            self._message |= event.get("delta") or {}
            self._usage |= {name: value for name, value in (event.get("usage") or {}).items() if value is not None}
        return False

    def _add_delta(self, number: int, delta: Mapping[str, Any]) -> None:
        block = self._blocks.setdefault(number, {"type": "text", "json": ""})
        for name in ("text", "thinking"):
            if name in delta:
                block[name] = (block.get(name) or "") + delta[name]
        block["json"] += delta.get("partial_json") or ""

    def response(self) -> Mapping[str, Any]:
        blocks = [block for _, block in sorted(self._blocks.items())]
        for block in blocks:
            if block.get("type") == "tool_use" and block["json"]:
                block["input"] = block["json"]  # the text as it was written
        return {**self._message, "usage": self._usage, "content": blocks}


DIALECT = Dialect("anthropic.messages", request_attributes, response_attributes, MessageAssembler)
