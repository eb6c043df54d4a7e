"""What the stub model says: scripts of answers and failures, and the requests it was given.

A `Script` is a list of turns, used one by one, or a function that answers each request by what stands in it. A turn is
a text, an `Answer`, a `Failure`, or a list of answers, one for each choice of a request with `n` above one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.stub_model.words import Message, ToolCall


@dataclass(frozen=True)
class Failure:
    """An answer that is none, told in the shape of the dialect."""

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


@dataclass(frozen=True)
class Request:
    """One request as it arrived, and what the stub model makes of it."""

    path: str
    headers: Mapping[str, str]
    """Names in small letters."""
    body: dict[str, Any]
    dialect: str
    """`chat`, `completions`, `responses`, `embeddings`, `messages` or `models`."""
    messages: tuple[Message, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """What was said last."""
        return self.messages[-1].text if self.messages else ""

    @property
    def prompt(self) -> str:
        """Everything that was said, a message a line."""
        return "\n".join(message.text for message in self.messages)

    @property
    def is_streaming(self) -> bool:
        return bool(self.body.get("stream"))


Turn = str | Answer | Failure | Sequence[str | Answer]
Reaction = Callable[[Request], Turn]


@dataclass
class Script:
    """What to answer to which request."""

    turns: Sequence[Turn] | Reaction
    used: int = field(default=0, init=False)

    def next_turn(self, request: Request) -> Turn:
        """The turn for a request; a list that is used up is a failure which says so."""
        if callable(self.turns):
            return self.turns(request)
        self.used += 1
        if self.used > len(self.turns):
            return Failure(500, f"The script has {len(self.turns)} turns, and this is request {self.used}.")
        return self.turns[self.used - 1]


def echo(request: Request) -> Turn:
    """Says again what was said last."""
    return request.text


def by_prompt(turns: Mapping[str, Turn], otherwise: Turn = "I do not know.") -> Reaction:
    """Answers by the first pattern that is found in the prompt."""

    def react(request: Request) -> Turn:
        return next((turn for pattern, turn in turns.items() if re.search(pattern, request.prompt)), otherwise)

    return react
