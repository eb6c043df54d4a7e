"""Chat completions, as OpenAI, vLLM and most others speak them."""

from collections.abc import Iterator, Sequence
from typing import Final

from agentlightning import semconv
from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import (
    Attributes,
    Thing,
    ToolParts,
    field,
    items,
    opened,
    reader,
)
from agentlightning.dialects.base import TranslatedDialect
from agentlightning.dialects.completions import ChoicesDialect, SampledToken
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
from agentlightning.dialects.sse import DONE
from agentlightning.utils.json_values import JsonMapping, JsonObject

_PLAIN_MESSAGE: Final = {"role", "content"}
_TEXTS: Final = ("content", "refusal", "reasoning_content", "reasoning")
"""Parts of an answer that come in pieces."""


class ChatDialect(ChoicesDialect, TranslatedDialect):
    """Chat completions."""

    name = "chat"
    path = "/chat/completions"
    span_name = "openai.chat.completion"
    content_fields = frozenset({"messages", "tools", "functions"})
    limit_fields = ("max_completion_tokens", "max_tokens")
    logprobs_wanted = True
    answer_names = ("chatcmpl", "chat.completion", "chat.completion.chunk")
    has_prompt_in_choice = False

    def request_attributes(self, body: JsonMapping) -> Attributes:
        attributes: Attributes = {}
        fields.write_request(attributes, body, system="openai")
        for number, message in enumerate(items(body.get("messages"))):
            _write_message(attributes, f"{semconv.PROMPT}.{number}", message)
        fields.write_tools(attributes, _tools(body))
        return attributes

    def response_attributes(self, response: Thing) -> Attributes:
        response = opened(response)
        attributes = fields.response_attributes(response)
        choices = [opened(choice) for choice in items(field(response, "choices"))]
        for number, choice in enumerate(choices):
            prefix = f"{semconv.COMPLETION}.{number}"
            message = opened(field(choice, "message"))
            _write_message(attributes, prefix, message)
            told = reader(message)
            for name, value in (
                ("finish_reason", field(choice, "finish_reason")),
                ("refusal", told("refusal")),
                ("reasoning", told("reasoning_content") or told("reasoning")),
            ):
                if value:
                    attributes[f"{prefix}.{name}"] = fields.plain_text(value)
            if number:  # those of the first choice have names of their own
                ids = fields.response_ids(response, choice, number)
                fields.write_token_ids(attributes, f"{prefix}.token_ids", ids)
                fields.write_logprobs(attributes, f"{prefix}.logprobs", field(field(choice, "logprobs"), "content"))
        first = choices[0] if choices else None
        prompt_ids = field(response, "prompt_token_ids") or field(first, "prompt_token_ids")
        fields.write_token_ids(attributes, semconv.PROMPT_IDS, prompt_ids)
        fields.write_token_ids(attributes, semconv.RESPONSE_IDS, fields.response_ids(response, first, 0))
        logprobs = field(first, "logprobs")
        fields.write_logprobs(attributes, semconv.LOGPROBS, field(logprobs, "content"))
        fields.write_logprobs(attributes, semconv.REFUSAL_LOGPROBS, field(logprobs, "refusal"))
        return attributes

    def assembler(self) -> "ChatAssembler":
        return ChatAssembler()

    def asks_for_logprobs(self, body: JsonMapping) -> bool:
        return bool(body.get("logprobs"))

    def to_chat(self, body: JsonMapping) -> JsonObject:
        return dict(body)

    def from_chat(self, body: JsonMapping) -> JsonObject:
        return dict(body)

    def read_output(self, body: JsonMapping) -> ModelOutput:
        choice = body["choices"][0]  # translated requests ask for one
        message = choice["message"]
        reasoning, reasoning_field = _reasoning_in(message)
        calls = [
            OutputCall(
                call.get("id") or f"{body['id']}-call-{number}",
                call["function"]["name"],
                call["function"].get("arguments") or "",
            )
            for number, call in enumerate(message.get("tool_calls") or ())
        ]
        return ModelOutput(
            output_id=body["id"],
            model=body["model"],
            text=message.get("content") or "",
            finish_reason=choice.get("finish_reason") or "stop",
            usage=read_openai_usage(body.get("usage"), "prompt", "completion"),
            refusal=message.get("refusal") or "",
            reasoning=reasoning,
            reasoning_field=reasoning_field,
            calls=calls,
            stop_text=_stop_text(choice),
            created=body.get("created"),
        )

    def write_output(self, output: ModelOutput, request: JsonMapping) -> JsonObject:
        del request  # a chat repeats nothing of it
        message: JsonObject = {
            "role": "assistant",
            "content": output.text or (None if output.calls else ""),
            "refusal": output.refusal or None,
        }
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["tool_calls"] = [function_call(call.call_id, call.name, call.arguments) for call in output.calls]
        return {
            **self.head(output.model, answer_id=output.output_id, created=output.created),
            "choices": [self.choice(message, output.finish_reason)],
            "usage": write_openai_usage(output.usage, "prompt", "completion"),
        }

    def body(self, message: JsonMapping) -> JsonObject:
        return {"message": message}

    def delta(self, message: JsonMapping) -> JsonObject:
        return {"delta": message}

    def logprobs(self, tokens: Sequence[SampledToken]) -> JsonObject:
        entries = [
            {**_token_entry(token), "top_logprobs": [_token_entry(other) for other in token.likeliest or ()]}
            for token in tokens
        ]
        return {"content": entries, "refusal": None}

    def reader(self, writer: StreamWriter) -> "ChatReader":
        return ChatReader(writer)

    def writer(self, request: JsonMapping) -> "ChatWriter":
        return ChatWriter(request)


def _write_message(attributes: Attributes, prefix: str, message: Thing) -> None:
    content = field(message, "content")
    if type(message) is dict and type(content) is str and message.keys() == _PLAIN_MESSAGE:  # as most
        attributes[f"{prefix}.role"] = fields.plain_text(message["role"])
        attributes[f"{prefix}.content"] = content
        return
    fields.write_message(
        attributes,
        prefix,
        role=field(message, "role") or "assistant",
        content=content,
        tool_call_id=field(message, "tool_call_id"),
    )
    fields.write_tool_calls(attributes, prefix, _tool_calls(message))


def _tool_calls(message: Thing) -> Iterator[ToolParts]:
    for call in items(field(message, "tool_calls")):
        function = field(call, "function") or field(call, "custom")
        arguments = field(function, "arguments")
        yield (
            field(call, "id"),
            field(function, "name"),
            arguments if arguments is not None else field(function, "input"),
        )
    called = field(message, "function_call")  # the form before tools
    if called is not None:
        yield None, field(called, "name"), field(called, "arguments")


def _tools(body: JsonMapping) -> Iterator[ToolParts]:
    for tool in (*items(body.get("tools")), *items(body.get("functions"))):
        function = field(tool, "function") or field(tool, "custom") or tool
        yield field(function, "name"), field(function, "description"), field(function, "parameters")


class _Choice:
    """One choice of a stream."""

    def __init__(self) -> None:
        self.role = "assistant"
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, JsonObject] = {}
        self.logprobs: dict[str, list[object]] = {}
        self.token_ids: list[int] = []
        self.prompt_ids: object = None
        self.finish_reason: str | None = None

    def add(self, choice: JsonMapping) -> bool:
        delta = choice.get("delta") or {}
        self.role = delta.get("role") or self.role
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.prompt_ids = self.prompt_ids or choice.get("prompt_token_ids")
        self.token_ids += choice.get("token_ids") or ()
        for name, entries in (choice.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(items(entries))
        for name in _TEXTS:
            if isinstance(delta.get(name), str):
                self.texts.setdefault(name, []).append(delta[name])
        calls = list(items(delta.get("tool_calls")))
        if delta.get("function_call"):  # the form before tools
            calls.append({"index": 0, "function": delta["function_call"]})
        for call in calls:
            self._add_call(call)
        return bool(calls or any(delta.get(name) for name in _TEXTS))

    def _add_call(self, delta: JsonMapping) -> None:
        function = delta.get("function") or delta.get("custom") or {}
        number = delta.get("index")
        if number is None:  # some servers do not number them: then what has no name goes on with the last
            number = len(self.calls) if function.get("name") or not self.calls else max(self.calls)
        known = self.calls.setdefault(number, {"id": None, "name": "", "parts": []})
        known["id"] = delta.get("id") or known["id"]
        known["name"] = function.get("name") or known["name"]
        known["parts"].append(function.get("arguments") or function.get("input") or "")

    def response(self) -> JsonObject:
        texts = {name: "".join(parts) for name, parts in self.texts.items()}
        message: JsonObject = {"role": self.role, **texts}
        if self.calls and not texts.get("content"):  # a whole answer has none then
            message["content"] = None
        message["tool_calls"] = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": "".join(call["parts"])}}
            for _, call in sorted(self.calls.items())
        ]
        return {
            "message": message,
            "finish_reason": self.finish_reason,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_ids,
            "logprobs": self.logprobs,
        }


class ChatAssembler:
    """Puts chunks of a chat completion together."""

    def __init__(self) -> None:
        self._known: JsonObject = {}
        self._choices: dict[int, _Choice] = {}

    def add(self, event: JsonMapping) -> bool:
        fields.keep_known(self._known, event)
        has_spoken = False
        for choice in items(event.get("choices")):
            has_spoken |= self._choices.setdefault(choice.get("index") or 0, _Choice()).add(choice)
        return has_spoken

    def response(self) -> JsonMapping:
        return {**self._known, "choices": [choice.response() for _, choice in sorted(self._choices.items())]}


def function_call(call_id: str, name: str, arguments: str) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _token_entry(token: SampledToken) -> JsonObject:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode("utf-8", "replace"))}


def _reasoning_in(message: JsonMapping) -> tuple[str, str]:
    """The reasoning in a message or delta, and the field that holds it."""
    for name in REASONING_FIELDS:
        if isinstance(message.get(name), str) and message[name]:
            return message[name], name
    return "", REASONING_FIELDS[0]


def _stop_text(choice: JsonMapping) -> str | None:
    reason = choice.get("stop_reason")  # vLLM's: the text, or the id of a token
    return reason if isinstance(reason, str) else None


class ChatReader(StreamReader):
    """Reads chunks, which may leave out the number or the id of a call, or bring its name late."""

    def __init__(self, writer: StreamWriter) -> None:
        super().__init__(writer)
        self._output_id = ""
        self._ids: dict[int, str] = {}
        self._opened: set[int] = set()
        self._waiting: dict[int, str] = {}
        """Arguments that came before the name of their call."""
        self._last = -1

    def read(self, event: JsonMapping) -> None:
        self._output_id = self._output_id or event.get("id") or ""
        self.start(event.get("id"), event.get("model"), event.get("created"))
        if event.get("usage"):
            self.usage = read_openai_usage(event["usage"], "prompt", "completion")
        for choice in event.get("choices") or ():
            if choice.get("index"):
                continue  # translated requests ask for one
            self._read_delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self.close(choice["finish_reason"], _stop_text(choice))

    def _read_delta(self, delta: JsonMapping) -> None:
        reasoning, reasoning_field = _reasoning_in(delta)
        if reasoning:
            self.writer.add_text("reasoning", reasoning, reasoning_field)
        if delta.get("content"):
            self.writer.add_text("content", delta["content"])
        if delta.get("refusal"):
            self.writer.add_text("refusal", delta["refusal"])
        for call in delta.get("tool_calls") or ():
            self._read_call(call, call.get("function") or {})

    def _read_call(self, call: JsonMapping, function: JsonMapping) -> None:
        name, number = function.get("name"), call.get("index")
        if number is None:
            number = self._last + 1 if name or self._last < 0 else self._last
        self._last = number
        self._ids[number] = self._ids.get(number) or call.get("id") or f"{self._output_id}-call-{number}"
        arguments = self._waiting.pop(number, "") + (function.get("arguments") or "")
        if number not in self._opened:
            if not name:
                self._waiting[number] = arguments
                return
            self._opened.add(number)
            self.writer.open_call(number, self._ids[number], name)
        if arguments:
            self.writer.add_arguments(number, arguments)


class ChatWriter(StreamWriter):
    """Writes chunks, with the usage at the end if the client asked for it."""

    def __init__(self, request: JsonMapping) -> None:
        super().__init__(request)
        self._has_usage = bool((request.get("stream_options") or {}).get("include_usage"))
        self._frame: JsonObject = {}

    def start(self, output_id: str, model: str, created: float) -> None:
        self._frame = DIALECT.head(model, is_stream=True, answer_id=output_id, created=created)
        if self._has_usage:
            self._frame["usage"] = None
        self._send_delta({"role": "assistant", "content": ""})

    def _send_delta(self, delta: JsonObject, finish_reason: str | None = None) -> None:
        self.send({**self._frame, "choices": [DIALECT.chunk(delta, finish_reason)]})

    def add_text(self, kind: TextKind, text: str, reasoning_field: str = REASONING_FIELDS[0]) -> None:
        self._send_delta({reasoning_field if kind == "reasoning" else kind: text})

    def open_call(self, number: int, call_id: str, name: str) -> None:
        self._send_delta({"tool_calls": [{"index": number, **function_call(call_id, name, "")}]})

    def add_arguments(self, number: int, arguments: str) -> None:
        self._send_delta({"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})

    def close(self, finish_reason: str, stop_text: str | None) -> None:
        self._send_delta({}, finish_reason)

    def end(self, usage: TokenUsage) -> None:
        if self._has_usage:
            self.send({**self._frame, "choices": [], "usage": write_openai_usage(usage, "prompt", "completion")})
        self.events.append(DONE)


DIALECT: Final = ChatDialect()
