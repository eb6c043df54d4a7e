"""OpenAI's responses: items in, items out. They are written as the messages of a chat would be."""

import time
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

import orjson

from agentlightning import semconv
from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Thing, ToolParts, field, items
from agentlightning.dialects.base import TranslatedDialect
from agentlightning.dialects.chat_responses import chat_from_responses, reasoning_text, responses_from_chat
from agentlightning.dialects.failures import BackendStreamError, Failure, dumped, failure_in_stream, openai_error
from agentlightning.dialects.output import (
    REASONING_FIELDS,
    ModelOutput,
    OutputCall,
    StreamReader,
    StreamWriter,
    TextKind,
    TokenUsage,
    read_openai_usage,
    write_openai_usage,
)
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.utils.json_values import JsonMapping, JsonObject

_LAST_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesDialect(TranslatedDialect):
    """OpenAI's responses."""

    name = "responses"
    path = "/responses"
    span_name = "openai.responses"
    is_below_deployment = False
    content_fields = frozenset({"instructions", "input", "tools"})
    limit_fields = ("max_output_tokens",)
    renamed_parameters: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("max_tokens", "max_completion_tokens"), "max_output_tokens"
    )
    last_events = _LAST_EVENTS
    failed_event = "response.failed"

    def request_attributes(self, body: JsonMapping) -> Attributes:
        attributes: Attributes = {}
        fields.write_request(attributes, body, system="openai")
        number = 0
        if body.get("instructions"):
            fields.write_message(attributes, f"{semconv.PROMPT}.0", role="system", content=body["instructions"])
            number = 1
        given = body.get("input")
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else items(given):
            _write_item(attributes, f"{semconv.PROMPT}.{number}", item)
            number += 1
        fields.write_tools(attributes, _tools(body))
        return attributes

    def response_attributes(self, response: Thing) -> Attributes:
        attributes = fields.response_attributes(response)
        prefix = f"{semconv.COMPLETION}.0"
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
        fields.write_token_ids(attributes, semconv.PROMPT_IDS, field(response, "prompt_token_ids"))
        fields.write_token_ids(attributes, semconv.RESPONSE_IDS, _response_ids(response))
        logprobs = [entry for part in parts for entry in items(field(part, "logprobs"))]
        fields.write_logprobs(attributes, semconv.LOGPROBS, logprobs)
        return attributes

    def assembler(self) -> "ResponseAssembler":
        return ResponseAssembler()

    def to_chat(self, body: JsonMapping) -> JsonObject:
        return chat_from_responses(body)

    def from_chat(self, body: JsonMapping) -> JsonObject:
        return responses_from_chat(body)

    def read_output(self, body: JsonMapping) -> ModelOutput:
        if body.get("status") == "failed" or body.get("error"):
            raise BackendStreamError(failure_in_stream(orjson.dumps(body)))
        texts = {"output_text": "", "refusal": "", "reasoning": ""}
        calls: list[OutputCall] = []
        for item in body["output"]:
            if item["type"] == "message":
                for part in item["content"]:
                    texts[part["type"]] += part["refusal" if part["type"] == "refusal" else "text"]
            elif item["type"] == "function_call":
                calls.append(OutputCall(item["call_id"], item["name"], item["arguments"] or "{}"))
            elif item["type"] == "reasoning":
                texts["reasoning"] += reasoning_text(item)
        return ModelOutput(
            output_id=body["id"],
            model=body["model"],
            text=texts["output_text"],
            finish_reason=_finish_reason(body, has_calls=bool(calls)),
            usage=read_openai_usage(body.get("usage"), "input", "output"),
            refusal=texts["refusal"],
            reasoning=texts["reasoning"],
            calls=calls,
            created=body.get("created_at"),
        )

    def write_output(self, output: ModelOutput, request: JsonMapping) -> JsonObject:
        """The response that a stream of the same output ends with."""
        writer = ResponsesWriter(request)
        writer.start(output.output_id, output.model, output.created or time.time())
        if output.reasoning:
            writer.add_text("reasoning", output.reasoning)
        if output.text or not (output.refusal or output.calls):
            writer.add_text("content", output.text)
        if output.refusal:
            writer.add_text("refusal", output.refusal)
        for number, call in enumerate(output.calls):
            writer.open_call(number, call.call_id, call.name)
            writer.add_arguments(number, call.arguments)
        writer.close(output.finish_reason, None)
        return writer.ended(output.usage)

    def reader(self, writer: StreamWriter) -> "ResponsesReader":
        return ResponsesReader(writer)

    def writer(self, request: JsonMapping) -> "ResponsesWriter":
        return ResponsesWriter(request)

    def error_event(self, failure: Failure, *, sequence_number: int = 0) -> bytes:
        error = openai_error(failure)
        # OpenAI documents the fields at the top and sends them below `error`; its SDK raises on the latter alone.
        event = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
        return ServerSentEvent(dumped({**event, "sequence_number": sequence_number, "error": error}), "error").encoded()


def _write_item(attributes: Attributes, prefix: str, item: Thing) -> None:
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


def _plain(content: Thing) -> Thing:
    dump = getattr(content, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else content


def _call(item: Thing) -> ToolParts:
    arguments = field(item, "arguments")
    return field(item, "call_id"), field(item, "name"), arguments if arguments is not None else field(item, "input")


def _tools(body: JsonMapping) -> Iterator[ToolParts]:
    for tool in items(body.get("tools")):
        name = field(tool, "name") or field(tool, "type")  # those that run at OpenAI have no name
        yield name, field(tool, "description"), field(tool, "parameters")


def _response_ids(response: Thing) -> Thing:
    ids = field(response, "response_token_ids") or field(response, "token_ids")
    return ids[0] if ids and isinstance(ids[0], (list, tuple)) else ids


class ResponseAssembler:
    """Takes the response from the last event; of a stream that was cut, what had come until then."""

    def __init__(self) -> None:
        self._response: JsonMapping = {}
        self._is_whole = False
        self._texts: list[str] = []

    def add(self, event: JsonMapping) -> bool:
        kind = str(event.get("type") or "")
        if isinstance(event.get("response"), Mapping):
            self._response = event["response"]
            self._is_whole = kind in _LAST_EVENTS
        if kind == "response.output_text.delta":
            self._texts.append(str(event.get("delta") or ""))
        return kind.endswith(".delta")

    def response(self) -> JsonMapping:
        if self._is_whole or not self._texts:
            return self._response
        said = {"type": "message", "content": [{"type": "output_text", "text": "".join(self._texts)}]}
        return {**self._response, "output": [said]}


_REPEATED: Final[JsonMapping] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its response repeats, and their values where the request does not set them."""
_INCOMPLETE_REASONS: Final[Mapping[str, str]] = {
    "length": "max_output_tokens",
    "abort": "max_output_tokens",  # of the two reasons there are, the one that says that it was cut off
    "content_filter": "content_filter",
}
_TEXT_DELTAS: Final[Mapping[str, TextKind]] = {
    "response.output_text.delta": "content",
    "response.refusal.delta": "refusal",
}
_REASONING_DELTAS: Final = {
    "response.reasoning_text.delta": "content_index",
    "response.reasoning_summary_text.delta": "summary_index",
}
_PART_TYPES: Final[Mapping[TextKind, str]] = {
    "content": "output_text",
    "refusal": "refusal",
    "reasoning": "reasoning_text",
}


def _finish_reason(response: JsonMapping, *, has_calls: bool) -> str:
    if response.get("status") == "incomplete":
        reason = (response.get("incomplete_details") or {}).get("reason")
        return "content_filter" if reason == "content_filter" else "length"
    return "tool_calls" if has_calls else "stop"


def _started(request: JsonMapping, output_id: str, model: str, created: float) -> JsonObject:
    """A response that has only begun; nothing is stored, so its id cannot be referred to."""
    response: JsonObject = {"id": output_id, "object": "response", "created_at": created, "status": "in_progress"}
    response |= {"model": model, "error": None, "incomplete_details": None, "output": [], "usage": None, "store": False}
    for name, default in _REPEATED.items():
        value = request.get(name)
        response[name] = default if value is None else value
    return response


def _part(kind: TextKind, text: str) -> JsonObject:
    part: JsonObject = {"type": _PART_TYPES[kind], "refusal" if kind == "refusal" else "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "content" else part


def _text_item(response_id: str, number: int, kind: TextKind, parts: list[JsonObject]) -> JsonObject:
    if kind == "reasoning":
        item: JsonObject = {"id": f"rs_{response_id}_{number}", "type": "reasoning", "summary": []}
    else:
        item = {"id": f"msg_{response_id}_{number}", "type": "message", "role": "assistant"}
    return {**item, "status": "completed", "content": parts}


class ResponsesReader(StreamReader):
    """Reads events of items."""

    def __init__(self, writer: StreamWriter) -> None:
        super().__init__(writer)
        self._calls: dict[int, int] = {}
        """The number of a call, by its place in the output."""
        self._has_arguments: set[int] = set()
        self._reasoning: dict[int, tuple[str, int]] = {}
        """By place in the output, the event that brought reasoning first, and the part that it is in."""

    def read(self, event: JsonMapping) -> None:
        kind = event["type"]
        if kind in _TEXT_DELTAS:
            self.writer.add_text(_TEXT_DELTAS[kind], event["delta"])
        elif kind == "response.function_call_arguments.delta":
            if event["delta"]:
                self._add_arguments(event["output_index"], event["delta"])
        elif kind in _REASONING_DELTAS:
            self._read_reasoning(event, kind)
        elif kind == "response.created":
            response = event["response"]
            self.start(response.get("id"), response.get("model"), response.get("created_at"))
        elif kind in ("response.output_item.added", "response.output_item.done"):
            self._read_item(event["output_index"], event["item"], is_done=kind.endswith("done"))
        elif kind in ("response.completed", "response.incomplete"):
            self.usage = read_openai_usage(event["response"].get("usage"), "input", "output")
            self.close(_finish_reason(event["response"], has_calls=bool(self._calls)))
            self.end()

    def _read_item(self, place: int, item: JsonMapping, *, is_done: bool) -> None:
        if item["type"] != "function_call":
            return
        if place not in self._calls:
            self._calls[place] = len(self._calls)
            self.writer.open_call(self._calls[place], item["call_id"], item["name"])
        if is_done and place not in self._has_arguments:  # none came in pieces
            self._add_arguments(place, item.get("arguments") or "{}")

    def _add_arguments(self, place: int, text: str) -> None:
        self._has_arguments.add(place)
        self.writer.add_arguments(self._calls[place], text)

    def _read_reasoning(self, event: JsonMapping, kind: str) -> None:
        """Take the text or its summary, whichever comes first, but not both."""
        place, part = event["output_index"], event.get(_REASONING_DELTAS[kind]) or 0
        first, last = self._reasoning.get(place, (kind, part))
        if first == kind:
            self._reasoning[place] = (kind, part)
            self.writer.add_text("reasoning", ("\n\n" if part != last else "") + event["delta"])


class ResponsesWriter(StreamWriter):
    """Writes events of items: each is opened, filled and closed before the next."""

    def __init__(self, request: JsonMapping) -> None:
        super().__init__(request)
        self._response: JsonObject = {}
        self._finish_reason = "stop"
        self._sequence_number = 0
        self._output: list[JsonObject] = []
        self._item: JsonObject | None = None
        """The item that is open, as it will be when it is whole."""
        self._call: int | None = None
        """The number of the call that the open item is."""
        self._part: TextKind | None = None
        """The kind of the part that is open."""
        self._texts: list[str] = []
        """The open part, or the arguments of the open call, so far."""

    def _event(self, kind: str, **fields: object) -> None:
        self.send({"type": f"response.{kind}", "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1

    def start(self, output_id: str, model: str, created: float) -> None:
        self._response = _started(self.request, output_id, model, int(created))
        self._event("created", response=self._response)
        self._event("in_progress", response=self._response)

    def add_text(self, kind: TextKind, text: str, reasoning_field: str = REASONING_FIELDS[0]) -> None:
        self._open_part(kind)
        logprobs: JsonObject = {"logprobs": []} if kind == "content" else {}
        self._fill(f"{_PART_TYPES[kind]}.delta", text, **logprobs)

    def open_call(self, number: int, call_id: str, name: str) -> None:
        self._close_item()
        self._call = number
        item_id = f"fc_{self._response['id']}_{len(self._output)}"
        item: JsonObject = {"id": item_id, "type": "function_call", "status": "completed"}
        self._open_item({**item, "call_id": call_id, "name": name, "arguments": ""})

    def add_arguments(self, number: int, arguments: str) -> None:
        if self._call != number:
            raise ValueError(f"it goes on with tool call {number}, which has ended")
        self._fill("function_call_arguments.delta", arguments)

    def _fill(self, kind: str, text: str, **fields: object) -> None:
        self._texts.append(text)
        self._event(kind, **self._place(), delta=text, **fields)

    def _place(self) -> JsonObject:
        item = self._item or {}
        place: JsonObject = {"item_id": item.get("id"), "output_index": len(self._output)}
        return place if self._part is None else {**place, "content_index": len(item["content"])}

    def _open_item(self, item: JsonObject) -> None:
        self._item = item
        opened = {**item, "status": "in_progress"}
        if "content" in item:
            opened["content"] = []
        self._event("output_item.added", output_index=len(self._output), item=opened)

    def _open_part(self, kind: TextKind) -> None:
        """Open a part within the open item if that can hold it, or within one of its own."""
        if self._part == kind:
            return
        item_type = "reasoning" if kind == "reasoning" else "message"
        if self._item is not None and self._item["type"] == item_type:
            self._close_part()
        else:
            self._close_item()
            self._open_item(_text_item(self._response["id"], len(self._output), kind, []))
        self._part = kind
        self._event("content_part.added", **self._place(), part=_part(kind, ""))

    def _close_part(self) -> None:
        if self._part is None or self._item is None:
            return
        part = _part(self._part, "".join(self._texts))
        shown = {name: value for name, value in part.items() if name not in ("type", "annotations")}
        self._event(f"{part['type']}.done", **self._place(), **shown)
        self._event("content_part.done", **self._place(), part=part)
        self._item["content"].append(part)
        self._part = None
        self._texts.clear()

    def _close_item(self) -> None:
        if self._item is None:
            return
        self._close_part()
        if self._item["type"] == "function_call":
            self._item["arguments"] = "".join(self._texts)
            self._texts.clear()
            done = {"name": self._item["name"], "arguments": self._item["arguments"]}
            self._event("function_call_arguments.done", **self._place(), **done)
        self._event("output_item.done", output_index=len(self._output), item=self._item)
        self._output.append(self._item)
        self._item = self._call = None

    def close(self, finish_reason: str, stop_text: str | None) -> None:
        self._close_item()
        if all(item["type"] == "reasoning" for item in self._output):  # an output without text is one all the same
            self._open_part("content")
            self._close_item()
        self._finish_reason = finish_reason

    def end(self, usage: TokenUsage) -> None:
        response = self.ended(usage)
        self._event(response["status"], response=response)

    def ended(self, usage: TokenUsage) -> JsonObject:
        """The whole response, after `close`."""
        reason = _INCOMPLETE_REASONS.get(self._finish_reason)
        return {
            **self._response,
            "status": "incomplete" if reason else "completed",
            "incomplete_details": {"reason": reason} if reason else None,
            "output": self._output,
            "usage": write_openai_usage(usage, "input", "output"),
        }


DIALECT: Final = ResponsesDialect()
