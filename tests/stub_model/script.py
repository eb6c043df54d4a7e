"""What the stub model answers: scripts of turns, the requests it received, and the answers as a model generates them.

A `Script` is a list of turns, used one by one, or a function that answers each request by its content. A turn is a
text, an `Answer`, a `Failure`, a list of answers (one for each choice of a request with `n` above one), or a `Handler`,
which writes its own bytes.
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from tests.stub_model.words import END, Message, Piece, ToolCall, as_json, id_of, pieces_of, render, words_of

FinishReason = Literal["stop", "length", "tool_calls"]
TokenIdShape = Literal["vllm", "instrumented", "none"]


class BadRequest(Exception):
    """The request is not one of its dialect."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Failure:
    """An error answer, in the shape of the dialect."""

    status: int = 500
    message: str = "The stub model was told to fail."
    code: str | None = None
    param: str | None = None
    retry_after_seconds: float | None = None
    """Sent as the `retry-after` header."""


@dataclass(frozen=True)
class Answer:
    """What the model says, and how its connection behaves meanwhile."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    latency_seconds: float = 0.0
    """Silence before the first byte."""
    pause_seconds: float = 0.0
    """Silence between the events of a stream."""
    cut_after_events: int | None = None
    """The connection ends after so many events of a stream; a request that does not stream gets no answer at all."""
    cut_with: Failure | None = None
    """An error event that is sent before the end of a cut stream."""
    thought: str = ""
    """Reasoning before the answer."""


@dataclass(frozen=True)
class Request:
    """One request as it arrived, and what the stub model makes of it."""

    path: str
    headers: Mapping[str, str]
    """Names in small letters."""
    content: bytes
    dialect: str = ""
    """`chat`, `completions`, `responses`, `embeddings` or `messages`."""
    messages: tuple[Message, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()

    @cached_property
    def body(self) -> Any:
        return json.loads(self.content or b"{}")

    @property
    def text(self) -> str:
        """The last message."""
        return self.messages[-1].text if self.messages else ""

    @property
    def prompt(self) -> str:
        """All messages, one a line."""
        return "\n".join(message.text for message in self.messages)

    @property
    def is_streaming(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def attempt(self) -> tuple[str, str]:
        """The rollout and the attempt for which a request to a proxy came."""
        match = re.match("/rollout/([^/]+)/attempt/([^/]+)/", self.path)
        assert match is not None, self.path
        return match[1], match[2]


Handler = Callable[[Request, Any], Awaitable[object]]
"""Answers one request on its `Connection`."""
Turn = str | Answer | Failure | Sequence[str | Answer] | Handler
Reaction = Callable[[Request], Turn]


@dataclass
class Script:
    """What to answer to which request."""

    turns: Sequence[Turn] | Reaction
    repeats_last: bool = False
    used: int = field(default=0, init=False)

    def next_turn(self, request: Request) -> Turn:
        """The turn for a request; a list that is used up is a failure which says so."""
        if callable(self.turns):
            return self.turns(request)
        self.used += 1
        if self.used > len(self.turns) and not self.repeats_last:
            return Failure(500, f"The script has {len(self.turns)} turns, and this is request {self.used}.")
        return self.turns[min(self.used, len(self.turns)) - 1]


def echo(request: Request) -> Turn:
    """Answers with the last message."""
    return request.text


# ---------------------------------------------------------------------- generating


@dataclass(frozen=True)
class CallOptions:
    """What a request asks for, whatever its dialect calls it."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    """Rendered from the messages if empty."""
    choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | None = None
    """Of a request for JSON; an empty schema allows any object."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids or tuple(render(self.messages, self.tools))


@dataclass(frozen=True)
class Choice:
    """One answer as it was generated."""

    index: int
    pieces: tuple[Piece, ...]
    tool_call_ids: tuple[str, ...]
    finish_reason: FinishReason
    stop_text: str | None = None
    """The stop text that ended it, if one did."""

    def texts(self, kind: str, tool: int = 0) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind == kind and piece.tool == tool]

    @property
    def text(self) -> str:
        return "".join(self.texts("text"))

    @property
    def thought(self) -> str:
        return "".join(self.texts("thought"))

    @property
    def token_ids(self) -> list[int]:
        return [token_id for piece in self.pieces for token_id in piece.token_ids]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls as far as they were generated, with their ids."""
        opened = [piece for piece in self.pieces if piece.kind == "tool_call"]
        return [
            ToolCall(piece.text, "".join(self.texts("arguments", piece.tool)), call_id)
            for piece, call_id in zip(opened, self.tool_call_ids, strict=False)
        ]

    @property
    def tokens(self) -> list[tuple[str, int]]:
        """Every token as text and id."""
        tokens: list[tuple[str, int]] = []
        for piece in self.pieces:
            texts = {"end": [END], "tool_call": ["<|tool_call|>", *words_of(piece.text)]}.get(piece.kind, [piece.text])
            tokens += zip(texts, piece.token_ids, strict=True)
        return tokens


@dataclass(frozen=True)
class Reply:
    """Everything a dialect needs to write an answer."""

    id: str
    created: int
    request: Request
    choices: tuple[Choice, ...]
    token_id_shape: TokenIdShape = "vllm"
    cached_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = self.request.body
        return body

    @property
    def model(self) -> str:
        return str(self.body["model"])

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def returns_token_ids(self) -> bool:
        return self.token_id_shape == "vllm" and bool(self.body.get("return_token_ids"))


def answers_of(turn: Turn, count: int) -> list[Answer]:
    """One answer for each choice; a single one is repeated."""
    turns: Sequence[str | Answer] = [turn] if isinstance(turn, (str, Answer)) else turn  # type: ignore[assignment]
    answers = [Answer(text) if isinstance(text, str) else text for text in turns]
    return [answers[min(number, len(answers) - 1)] for number in range(count)]


def generate(answer: Answer, options: CallOptions, *, index: int, call_ids: Sequence[str]) -> Choice:
    """The answer as a model generates it under the limits of the request."""
    text = answer.text
    if options.json_schema is not None and not answer.tool_calls:
        text = _as_json_text(text, options.json_schema)
    found = [(text.index(stop), stop) for stop in options.stop if stop and stop in text]
    place, stop_text = min(found, default=(None, None))
    calls = () if stop_text is not None else answer.tool_calls
    named = [replace(call, id=call.id or made_up) for call, made_up in zip(calls, call_ids, strict=False)]
    pieces = [*pieces_of(text[:place], named, answer.thought)]
    if stop_text is None:
        pieces.append(Piece("end", "", (id_of(END),)))
    kept = _within(pieces, options.max_tokens)
    reason: FinishReason = "length" if len(kept) < len(pieces) else "tool_calls" if named else "stop"
    return Choice(index, kept, tuple(str(call.id) for call in named), reason, stop_text if reason == "stop" else None)


def _within(pieces: Sequence[Piece], max_tokens: int | None) -> tuple[Piece, ...]:
    used = 0
    for number, piece in enumerate(pieces):
        used += len(piece.token_ids)
        if max_tokens is not None and used > max_tokens:
            return tuple(pieces[:number])
    return tuple(pieces)


def _as_json_text(text: str, schema: Mapping[str, Any]) -> str:
    """The scripted text if it is JSON; else the smallest value the schema allows, with the text for its strings."""
    try:
        json.loads(text)
    except ValueError:
        return as_json(_sample(schema, schema, text) if schema else {"text": text})
    return text


def _sample(schema: Mapping[str, Any], root: Mapping[str, Any], text: str) -> Any:
    if "$ref" in schema:
        target: Any = root
        for name in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target[name]
        return _sample(target, root, text)
    if schema.get("enum") or "const" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if schema.get("anyOf"):
        return _sample(schema["anyOf"][0], root, text)
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: _sample(part, root, text) for name, part in schema.get("properties", {}).items()}
    plain: dict[str, Any] = {"string": text, "integer": 0, "number": 0.0, "boolean": False, "array": [], "null": None}
    return plain.get(kind)
