"""From a turn of the script to what a model would have generated: choices of pieces, cut by limits and stop texts.

Dialects only differ in how they ask and in how they tell; everything that is said is decided here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tests.stub_model.script import Answer, Request, Turn
from tests.stub_model.words import END, Message, Piece, ToolCall, as_json, id_of, pieces_of, render, words_of

FinishReason = Literal["stop", "length", "tool_calls"]
TokenIdShape = Literal["vllm", "instrumented", "none"]


class BadRequest(Exception):
    """The request is not one of this dialect."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Wish:
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

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == "text")

    @property
    def token_ids(self) -> list[int]:
        return [token_id for piece in self.pieces for token_id in piece.token_ids]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls as far as they were generated, with their ids."""
        opened = [piece for piece in self.pieces if piece.kind == "tool_call"]
        return [
            ToolCall(piece.text, self._arguments(piece.tool), call_id)
            for piece, call_id in zip(opened, self.tool_call_ids, strict=False)
        ]

    def _arguments(self, tool: int) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == "arguments" and piece.tool == tool)


@dataclass(frozen=True)
class Reply:
    """Everything a dialect needs to tell an answer."""

    id: str
    created: int
    request: Request
    choices: tuple[Choice, ...]
    token_id_shape: TokenIdShape = "vllm"

    @property
    def body(self) -> dict[str, Any]:
        return self.request.body

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
    answers = [Answer(said) if isinstance(said, str) else said for said in turns]
    return [answers[min(number, len(answers) - 1)] for number in range(count)]


def generate(answer: Answer, wish: Wish, *, index: int, call_ids: Sequence[str]) -> Choice:
    """The answer as a model would have generated it under the limits of the request."""
    text = answer.text
    if wish.json_schema is not None and not answer.tool_calls:
        text = _as_json_text(text, wish.json_schema)
    text, stop_text = _stopped(text, wish.stop)
    calls = () if stop_text is not None else answer.tool_calls
    named = [replace(call, id=call.id or made_up) for call, made_up in zip(calls, call_ids, strict=False)]
    pieces = list(pieces_of(text, named))
    if stop_text is None:
        pieces.append(Piece("end", "", (id_of(END),)))
    kept = _within(pieces, wish.max_tokens)
    reason: FinishReason = "length" if len(kept) < len(pieces) else "tool_calls" if named else "stop"
    return Choice(index, kept, tuple(str(call.id) for call in named), reason, stop_text if reason == "stop" else None)


def _within(pieces: Sequence[Piece], max_tokens: int | None) -> tuple[Piece, ...]:
    if max_tokens is None:
        return tuple(pieces)
    kept, used = [], 0
    for piece in pieces:
        used += len(piece.token_ids)
        if used > max_tokens:
            break
        kept.append(piece)
    return tuple(kept)


def _stopped(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text up to the first stop text, and which one that was."""
    found = [(text.index(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return text, None
    place, stop = min(found)
    return text[:place], stop


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


def stops_of(value: Any) -> tuple[str, ...]:
    """Stop texts, given as one or as a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def positive(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these numbers that is given; each must be a whole number above zero."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"Invalid '{name}': expected a whole number above 0, but got {as_json(value)}.", name)
        return value
    return None


def logprob_of(token_id: int) -> float:
    """A log probability that only depends on the token, between -1 and 0."""
    return -(token_id % 1000) / 1000


def token_texts(choice: Choice) -> list[tuple[str, int]]:
    """Every token of a choice as text and id."""
    told: list[tuple[str, int]] = []
    for piece in choice.pieces:
        texts = {"end": [END], "tool_call": ["<|tool_call|>", *words_of(piece.text)]}.get(piece.kind, [piece.text])
        told += zip(texts, piece.token_ids, strict=True)
    return told
