"""The APIs of models: an object for each, with everything in which it differs, and this registry of them.

A dialect reads requests and responses, as the SDK's objects or as plain JSON, puts the events of a stream together,
and writes answers and errors. A further one is a module with a subclass of `Dialect`, and an entry of `DIALECTS`.
"""

from typing import Final

from agentlightning.dialects import chat, completions, messages, responses
from agentlightning.dialects.base import Assembler, Dialect, TranslatedDialect
from agentlightning.utils.json_values import JsonObject

__all__ = [
    "ANTHROPIC_DIALECTS",
    "CHAT",
    "COMPLETIONS",
    "COUNT_PATHS",
    "COUNT_TOKENS_PATH",
    "DIALECTS",
    "OPENAI_DIALECTS",
    "PATHS",
    "SPAN_MATCH",
    "Assembler",
    "Dialect",
    "JsonObject",
    "TranslatedDialect",
    "dialect_of",
]

CHAT: Final = chat.DIALECT
COMPLETIONS: Final = completions.DIALECT
DIALECTS: Final[dict[str, Dialect]] = {
    dialect.name: dialect
    for dialect in (CHAT, COMPLETIONS, messages.DIALECT, responses.DIALECT, completions.EMBEDDINGS)
}
"""By name. Of those that are translated into each other, a backend is spoken to in the first that it speaks."""
PATHS: Final = {dialect.path: dialect for dialect in DIALECTS.values()}
OPENAI_DIALECTS: Final = {dialect.path: dialect for dialect in DIALECTS.values() if dialect.sdk == "openai"}
ANTHROPIC_DIALECTS: Final = {
    f"/v1{dialect.path}": dialect for dialect in DIALECTS.values() if dialect.sdk == "anthropic"
}
"""By the paths of requests, which Anthropic's SDK begins with the version."""
COUNT_PATHS: Final = {dialect.count_path: dialect for dialect in DIALECTS.values() if dialect.count_path is not None}
"""By paths that count the tokens of a request: it goes where the request itself would, unrecorded."""
COUNT_TOKENS_PATH: Final = f"/v1{messages.COUNT_PATH}"
SPAN_MATCH: Final = "|".join(dialect.span_match for dialect in DIALECTS.values() if dialect.limit_fields)
"""Matches the names of spans of calls that generate text, as SDKs record them."""


def dialect_of(path: str, dialects: dict[str, Dialect]) -> Dialect | None:
    """The dialect that is spoken at the end of a path; None, if calls of it are not recorded."""
    path = path.partition("?")[0].rstrip("/")
    known = dialects.get(path)
    if known is not None:
        return known
    return next((dialect for ending, dialect in dialects.items() if path.endswith(ending)), None)
