"""Anthropic's messages: blocks of text, tool use and tool results. They are written as those of a chat would be."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from agentlightning import semconv
from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Thing, ToolParts, field, items
from agentlightning.dialects.base import TranslatedDialect
from agentlightning.dialects.chat_messages import chat_from_messages, messages_from_chat
from agentlightning.dialects.failures import ANTHROPIC_STATUSES, Failure, dumped
from agentlightning.dialects.output import (
    REASONING_FIELDS,
    ModelOutput,
    OutputCall,
    StreamReader,
    StreamWriter,
    TextKind,
    TokenUsage,
    arguments_object,
    arguments_text,
)
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.utils.json_values import JsonMapping, JsonObject

COUNT_PATH: Final = "/messages/count_tokens"
_ERROR_TYPES: Final[Mapping[int, str]] = {
    **{status: kind for kind, status in ANTHROPIC_STATUSES.items()},
    503: "overloaded_error",
}
_Entry = tuple[Any, Any, str | None, list[ToolParts]]
"""Role, content, the call it answers, and the tools it calls."""


class MessagesDialect(TranslatedDialect):
    """Anthropic's messages."""

    name = "messages"
    path = "/messages"
    span_name = "anthropic.messages"
    span_match = r"anthropic\.messages(?!\.(batches|count_tokens))"
    """The SDK writes spans of other requests by itself."""
    sdk = "anthropic"
    count_path = COUNT_PATH
    client_header = b"anthropic-version"
    passed_headers = (b"anthropic-version", b"anthropic-beta")
    content_fields = frozenset({"system", "messages", "tools"})
    limit_fields = ("max_tokens",)
    renamed_parameters: ClassVar[Mapping[str, str]] = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
    last_events = frozenset({"message_stop"})

    def request_attributes(self, body: JsonMapping) -> Attributes:
        attributes: Attributes = {}
        fields.write_request(attributes, body, system="anthropic")
        entries: list[_Entry] = [("system", body["system"], None, [])] if body.get("system") else []
        entries += [entry for message in items(body.get("messages")) for entry in _entries(message)]
        for number, (role, content, tool_call_id, calls) in enumerate(entries):
            prefix = f"{semconv.PROMPT}.{number}"
            fields.write_message(attributes, prefix, role=role, content=content, tool_call_id=tool_call_id)
            fields.write_tool_calls(attributes, prefix, calls)
        tools = items(body.get("tools"))
        fields.write_tools(
            attributes, [(field(t, "name"), field(t, "description"), field(t, "input_schema")) for t in tools]
        )
        return attributes

    def response_attributes(self, response: Thing) -> Attributes:
        attributes = fields.response_attributes(response)
        prefix, content = f"{semconv.COMPLETION}.0", field(response, "content")
        texts = _texts(content, "text")
        fields.write_message(attributes, prefix, role="assistant", content="".join(texts) or None)
        fields.write_tool_calls(attributes, prefix, _calls(content))
        if field(response, "stop_reason"):
            attributes[f"{prefix}.finish_reason"] = fields.plain_text(field(response, "stop_reason"))
        thinking = _texts(content, "thinking")
        if thinking:
            attributes[f"{prefix}.reasoning"] = "".join(thinking)
        fields.write_token_ids(attributes, semconv.PROMPT_IDS, field(response, "prompt_token_ids"))
        ids = field(response, "response_token_ids") or field(response, "token_ids")
        fields.write_token_ids(attributes, semconv.RESPONSE_IDS, ids)
        fields.write_logprobs(attributes, semconv.LOGPROBS, field(field(response, "logprobs"), "content"))
        return attributes

    def assembler(self) -> "MessageAssembler":
        return MessageAssembler()

    def sampling_parameters(self, sampling: JsonMapping) -> JsonObject:
        parameters = super().sampling_parameters(sampling)
        if isinstance(parameters.get("stop_sequences"), str):  # a chat takes a single one
            parameters["stop_sequences"] = [parameters["stop_sequences"]]
        return parameters

    def to_chat(self, body: JsonMapping) -> JsonObject:
        return chat_from_messages(body)

    def from_chat(self, body: JsonMapping) -> JsonObject:
        return messages_from_chat(body)

    def read_output(self, body: JsonMapping) -> ModelOutput:
        texts = {"text": "", "thinking": ""}
        calls: list[OutputCall] = []
        for block in body["content"]:
            kind = block["type"]
            if kind in texts:
                texts[kind] += block[kind]
            elif kind == "tool_use":
                calls.append(OutputCall(block["id"], block["name"], arguments_text(block["input"])))
        return ModelOutput(
            output_id=body["id"],
            model=body["model"],
            text=texts["text"],
            finish_reason=_FINISH_REASONS.get(body.get("stop_reason") or "", "stop"),
            usage=read_usage(body.get("usage") or {}),
            refusal=(body.get("stop_details") or {}).get("explanation") or "",
            reasoning=texts["thinking"],
            calls=calls,
        )

    def write_output(self, output: ModelOutput, request: JsonMapping) -> JsonObject:
        del request  # a message repeats nothing of it
        blocks: list[JsonObject] = []
        if output.reasoning:
            blocks.append({"type": "thinking", "thinking": output.reasoning, "signature": output.reasoning_field})
        blocks += [{"type": "text", "text": text} for text in (output.text, output.refusal) if text]
        for call in output.calls:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name}
            blocks.append({**block, "input": arguments_object(call.arguments)})
        has_calls, has_refusal = bool(output.calls), bool(output.refusal)
        return {
            "id": output.output_id,
            "type": "message",
            "role": "assistant",
            "model": output.model,
            "content": blocks,
            **_stop_reason(output.finish_reason, output.stop_text, has_calls=has_calls, has_refusal=has_refusal),
            "usage": write_usage(output.usage),
        }

    def reader(self, writer: StreamWriter) -> "MessagesReader":
        return MessagesReader(writer)

    def writer(self, request: JsonMapping) -> "MessagesWriter":
        return MessagesWriter(request)

    def error_body(self, failure: Failure) -> bytes:
        otherwise = "invalid_request_error" if 400 <= failure.status < 500 else "api_error"
        kind = failure.kind if failure.kind in ANTHROPIC_STATUSES else _ERROR_TYPES.get(failure.status, otherwise)
        return dumped({"type": "error", "error": {"type": kind, "message": failure.message}})

    def error_event(self, failure: Failure, *, sequence_number: int = 0) -> bytes:
        return ServerSentEvent(self.error_body(failure), "error").encoded()

    def described_model(self, name: str) -> JsonObject:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

    def model_list(self, names: Sequence[str]) -> JsonObject:
        listed = [self.described_model(name) for name in names]
        ends = [names[0], names[-1]] if names else [None, None]
        return {"data": listed, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


def _entries(message: Thing) -> Iterator[_Entry]:
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


def _calls(blocks: Thing) -> list[ToolParts]:
    uses = [block for block in items(blocks) if field(block, "type") == "tool_use"]
    return [(field(use, "id"), field(use, "name"), field(use, "input")) for use in uses]


def _texts(blocks: Thing, kind: str) -> list[str]:
    """What the blocks of a kind say, in the field of the same name."""
    said = [field(block, kind) for block in items(blocks) if field(block, "type") == kind]
    return [text for text in said if isinstance(text, str)]


class MessageAssembler:
    """Puts the events of a message together."""

    def __init__(self) -> None:
        self._message: JsonObject = {}
        self._usage: JsonObject = {}
        self._blocks: dict[int, JsonObject] = {}

    def add(self, event: JsonMapping) -> bool:
        kind = event.get("type")
        if kind == "message_start":
            self._message = dict(event.get("message") or {})
            self._usage = dict(self._message.get("usage") or {})
        elif kind == "content_block_start":
            self._blocks[event.get("index") or 0] = {**(event.get("content_block") or {}), "json": ""}
        elif kind == "content_block_delta":
            delta = event.get("delta") or {}
            block = self._blocks.setdefault(event.get("index") or 0, {"type": "text", "json": ""})
            for name in delta.keys() & {"text", "thinking"}:
                block[name] = (block.get(name) or "") + delta[name]
            block["json"] += delta.get("partial_json") or ""
            return True
        elif kind == "message_delta":
            self._message |= event.get("delta") or {}
            self._usage |= {name: value for name, value in (event.get("usage") or {}).items() if value is not None}
        return False

    def response(self) -> JsonMapping:
        blocks = [block for _, block in sorted(self._blocks.items())]
        for block in blocks:
            if block.get("type") == "tool_use" and block["json"]:
                block["input"] = block["json"]  # the text as it was written
        return {**self._message, "usage": self._usage, "content": blocks}


_STOP_REASONS: Final[Mapping[str, str]] = {
    "length": "max_tokens",
    "abort": "max_tokens",  # vLLM's; the nearest word that says that it was cut off
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_FINISH_REASONS: Final[Mapping[str, str]] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def _stop_reason(finish_reason: str, stop_text: str | None, *, has_calls: bool, has_refusal: bool) -> JsonObject:
    reason = _STOP_REASONS.get(finish_reason, "end_turn")
    stop_sequence = None
    if reason == "end_turn":
        if has_calls:  # as OpenAI ends a call that was asked for by name
            reason = "tool_use"
        elif has_refusal:
            reason = "refusal"
        elif stop_text is not None:
            reason, stop_sequence = "stop_sequence", stop_text
    return {"stop_reason": reason, "stop_sequence": stop_sequence}


def read_usage(usage: JsonMapping) -> TokenUsage:
    cached, written = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
    return TokenUsage(
        prompt=(usage.get("input_tokens") or 0) + cached + written,
        completion=usage.get("output_tokens") or 0,
        cached=cached,
        cache_written=written,
        reasoning=(usage.get("output_tokens_details") or {}).get("thinking_tokens") or 0,
    )


def write_usage(usage: TokenUsage) -> JsonObject:
    """Tokens from the cache and for it are not part of the input."""
    written: JsonObject = {
        "input_tokens": max(usage.prompt - usage.cached - usage.cache_written, 0),
        "cache_creation_input_tokens": usage.cache_written,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
    if usage.reasoning:
        written["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return written


class MessagesReader(StreamReader):
    """Reads events of blocks."""

    def __init__(self, writer: StreamWriter) -> None:
        super().__init__(writer)
        self._calls = 0
        self._inputs: dict[int, object] = {}
        """By block, the input in its first event while no delta has replaced it."""
        self._usage: JsonObject = {}

    def read(self, event: JsonMapping) -> None:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
            self._usage = dict(message.get("usage") or {})
            self.start(message.get("id"), message.get("model"))
        elif kind == "content_block_start":
            self._open(event["index"], event["content_block"])
        elif kind == "content_block_delta":
            self._add(event["index"], event["delta"])
        elif kind == "content_block_stop":
            if event["index"] in self._inputs:
                self.writer.add_arguments(self._calls - 1, arguments_text(self._inputs.pop(event["index"])))
        elif kind == "message_delta":
            self._read_ending(event)
        elif kind == "message_stop":
            self.end()

    def _open(self, index: int, block: JsonMapping) -> None:
        kind = block["type"]
        if kind == "tool_use":
            self._inputs[index] = block.get("input")
            self.writer.open_call(self._calls, block["id"], block["name"])
            self._calls += 1
        elif kind in ("text", "thinking") and block.get(kind):
            self.writer.add_text("content" if kind == "text" else "reasoning", block[kind])

    def _add(self, index: int, delta: JsonMapping) -> None:
        kind = delta["type"]
        if kind == "text_delta":
            self.writer.add_text("content", delta["text"])
        elif kind == "thinking_delta":
            self.writer.add_text("reasoning", delta["thinking"])
        elif kind == "input_json_delta" and delta["partial_json"]:
            self._inputs.pop(index, None)
            self.writer.add_arguments(self._calls - 1, delta["partial_json"])

    def _read_ending(self, event: JsonMapping) -> None:
        delta = event.get("delta") or {}
        self._usage |= {name: value for name, value in (event.get("usage") or {}).items() if value is not None}
        self.usage = read_usage(self._usage)
        explanation = (delta.get("stop_details") or {}).get("explanation")
        if explanation:
            self.writer.add_text("refusal", explanation)
        if delta.get("stop_reason"):
            self.close(_FINISH_REASONS.get(delta["stop_reason"], "stop"))


class MessagesWriter(StreamWriter):
    """Writes events of blocks: each is opened, filled and closed before the next."""

    def __init__(self, request: JsonMapping) -> None:
        super().__init__(request)
        self._blocks = 0
        self._open: TextKind | int | None = None
        """The block that is open: the kind of its text, or the number of its call."""
        self._seen: set[TextKind | int] = set()
        self._signature = ""
        self._ending: JsonObject = {}

    def start(self, output_id: str, model: str, created: float) -> None:
        message: JsonObject = {"id": output_id, "type": "message", "role": "assistant", "model": model, "content": []}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": write_usage(TokenUsage())}
        self.send({"type": "message_start", "message": message})

    def add_text(self, kind: TextKind, text: str, reasoning_field: str = REASONING_FIELDS[0]) -> None:
        if kind == "reasoning":
            self._open_block(kind, {"type": "thinking", "thinking": "", "signature": ""})
            self._signature = reasoning_field
            self._fill({"type": "thinking_delta", "thinking": text})
        else:
            self._open_block(kind, {"type": "text", "text": ""})
            self._fill({"type": "text_delta", "text": text})

    def open_call(self, number: int, call_id: str, name: str) -> None:
        self._open_block(number, {"type": "tool_use", "id": call_id, "name": name, "input": {}})

    def add_arguments(self, number: int, arguments: str) -> None:
        if self._open != number:
            raise ValueError(f"it goes on with tool call {number}, which has ended")
        self._fill({"type": "input_json_delta", "partial_json": arguments})

    def _open_block(self, block: TextKind | int, content: JsonObject) -> None:
        if self._open != block:
            self._close_block()
            self._open = block
            self._seen.add(block)
            self.send({"type": "content_block_start", "index": self._blocks, "content_block": content})

    def _fill(self, delta: JsonObject) -> None:
        self.send({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close_block(self) -> None:
        if self._open is None:
            return
        if self._open == "reasoning":
            self._fill({"type": "signature_delta", "signature": self._signature})
        self.send({"type": "content_block_stop", "index": self._blocks})
        self._open = None
        self._blocks += 1

    def close(self, finish_reason: str, stop_text: str | None) -> None:
        self._close_block()
        has_calls = any(isinstance(block, int) for block in self._seen)
        has_refusal = "refusal" in self._seen
        self._ending = _stop_reason(finish_reason, stop_text, has_calls=has_calls, has_refusal=has_refusal)

    def end(self, usage: TokenUsage) -> None:
        self.send({"type": "message_delta", "delta": self._ending, "usage": write_usage(usage)})
        self.send({"type": "message_stop"})


DIALECT: Final = MessagesDialect()
