"""What the APIs of models say, written as attributes of spans: a file for each dialect, and this table of them.

A dialect reads requests and responses, as the SDK's objects or as plain JSON, and puts the events of a stream together
again. Names of attributes are those that `agentlightning.adapter` and `agentlightning.events` read.
"""

from typing import Final

from agentlightning.dialects import chat, completions, embeddings, messages, responses
from agentlightning.dialects.attributes import Assembler, Dialect, DialectName
from agentlightning.utils.json_values import JsonObject

__all__ = [
    "ANTHROPIC_DIALECTS",
    "COUNT_TOKENS_PATH",
    "DIALECTS",
    "OPENAI_DIALECTS",
    "Assembler",
    "Dialect",
    "DialectName",
    "JsonObject",
    "dialect_of",
]

_OPENAI = (chat.DIALECT, completions.DIALECT, responses.DIALECT, embeddings.DIALECT)
DIALECTS: Final[dict[DialectName, Dialect]] = {dialect.name: dialect for dialect in (*_OPENAI, messages.DIALECT)}
OPENAI_DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in _OPENAI}
ANTHROPIC_DIALECTS: dict[str, Dialect] = {"/v1/messages": messages.DIALECT}
COUNT_TOKENS_PATH: Final = "/v1/messages/count_tokens"
"""Carries a whole request of Anthropic's, whose tokens are counted: it goes where the request would, unrecorded."""


def dialect_of(path: str, dialects: dict[str, Dialect]) -> Dialect | None:
    """The dialect that is spoken at the end of a path; None, if calls of it are not recorded."""
    path = path.partition("?")[0].rstrip("/")
    known = dialects.get(path)
    if known is not None:
        return known
    return next((dialect for ending, dialect in dialects.items() if path.endswith(ending)), None)
