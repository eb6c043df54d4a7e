"""A tokenizer of words, and the chat template of the stub model.

Every word with the space before it is one token, and its id is a checksum of its text: the same in every process and on
every machine. A message is rendered as its role, its tokens and an end mark, and an answer ends with the same mark; so
the prompt of a conversation that merely goes on begins with the prompt and the answer of the turn before it.
"""

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TOKEN = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")
FIRST_WORD_ID = 1000
"""Ids below belong to the marks."""
WORD_IDS = 2**30
END = "<|end|>"
TOOL_CALL = "<|tool_call|>"
TOOLS = "<|tools|>"
IMAGE = "<|image|>"
ROLES = ("system", "developer", "user", "assistant", "tool")
_MARKS = {mark: number for number, mark in enumerate((END, TOOL_CALL, TOOLS, IMAGE, *map("<|{}|>".format, ROLES)), 1)}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, in an answer or in the history of a conversation."""

    name: str
    arguments: str = "{}"
    """JSON text, passed on letter by letter."""
    id: str | None = None
    """Made up by the server if left out."""

    @classmethod
    def of(cls, name: str, id: str | None = None, /, **arguments: Any) -> "ToolCall":
        """A call with these arguments: `ToolCall.of("search", query="bread")`."""
        return cls(name, as_json(arguments), id)


@dataclass(frozen=True)
class Message:
    """One message of a conversation, whatever dialect it came in."""

    role: str
    text: str = ""
    images: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Piece:
    """What a model adds to its answer in one step."""

    kind: Literal["thought", "text", "tool_call", "arguments", "end"]
    text: str
    token_ids: tuple[int, ...]
    tool: int = 0
    """Which of the tool calls it belongs to."""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def words_of(text: str) -> list[str]:
    """The text in tokens, which joined give the text again."""
    return TOKEN.findall(text)


def id_of(token: str) -> int:
    return _MARKS.get(token) or FIRST_WORD_ID + zlib.crc32(token.encode("utf-8", "surrogatepass")) % WORD_IDS


def encode(text: str) -> list[int]:
    """The ids of a text."""
    return [id_of(word) for word in words_of(text)]


def pieces_of(text: str, tool_calls: Sequence[ToolCall] = (), thought: str = "") -> Iterator[Piece]:
    """The steps in which a model says this, without the end mark."""
    for word in words_of(thought):
        yield Piece("thought", word, (id_of(word),))
    for word in words_of(text):
        yield Piece("text", word, (id_of(word),))
    for number, call in enumerate(tool_calls):
        yield Piece("tool_call", call.name, (id_of(TOOL_CALL), *encode(call.name)), number)
        for word in words_of(call.arguments):
            yield Piece("arguments", word, (id_of(word),), number)


def render(messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
    """The ids a model reads: tools, messages, and an invitation to answer, or to go on behind an assistant's words."""
    ids = [id_of(TOOLS), *encode(as_json(list(tools))), id_of(END)] if tools else []
    for message in messages:
        ids += [*_content(message), id_of(END)]
    if messages and messages[-1].role == "assistant":
        return ids[:-1]
    return [*ids, id_of("<|assistant|>")]


def _content(message: Message) -> Iterable[int]:
    yield id_of(f"<|{message.role}|>")
    for image in message.images:
        yield from (id_of(IMAGE), id_of(image))
    for piece in pieces_of(message.text, message.tool_calls):
        yield from piece.token_ids
