"""Token ids and log-probabilities: asked of backends on behalf of training, kept from agents that did not ask.

Chat and completions have fields for them, as vLLM takes and gives them. The other dialects have none, and pass as they
are. What removes fields runs for every chunk of a stream and does little where there is nothing to do.
"""

from collections.abc import Mapping

from agentlightning.dialects.attributes import DialectName
from agentlightning.utils.json_values import JsonMapping, JsonObject


def asks_for_logprobs(dialect: DialectName, body: JsonMapping) -> bool:
    """Whether a request asks for log-probabilities itself; completions do with 0 too, for the chosen token alone."""
    if dialect == "chat":
        return bool(body.get("logprobs"))
    if dialect == "completions":
        asked = body.get("logprobs")
        return asked is not None and asked is not False
    if dialect == "responses":
        return bool(body.get("top_logprobs")) or "message.output_text.logprobs" in (body.get("include") or ())
    return False


def with_tokens_asked(dialect: DialectName, body: JsonMapping, *, ids: bool, logprobs: bool) -> JsonObject:
    """A copy of a request that asks for them as well; what it asks for itself stays."""
    asking = dict(body)
    if dialect not in ("chat", "completions"):
        return asking
    if ids:
        asking["return_token_ids"] = True
    if logprobs and not asks_for_logprobs(dialect, body):
        asking["logprobs"] = True if dialect == "chat" else 1
    return asking


def with_usage_asked(dialect: DialectName, body: JsonMapping) -> JsonObject:
    """A copy of a request that asks for the usage at the end of its stream, where a dialect must be asked."""
    asking = dict(body)
    if dialect in ("chat", "completions") and body.get("stream"):
        asking["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return asking


def without_unasked(dialect: DialectName, answer: JsonObject, asked: JsonMapping) -> bool:
    """Remove from an answer or a chunk, in place, the token fields that the client's request did not ask for.

    Args:
        answer: A whole answer or a chunk; log-probabilities become None, as in an answer without them.
        asked: The client's own request.

    Returns:
        Whether anything was removed; if not, the bytes it came in can be passed on.
    """
    if dialect not in ("chat", "completions"):
        return False
    keeps_ids = bool(asked.get("return_token_ids"))
    keeps_logprobs = asks_for_logprobs(dialect, asked)
    if keeps_ids and keeps_logprobs:
        return False
    is_changed = False if keeps_ids else _without_ids(answer)
    for choice in answer.get("choices") or ():
        if not isinstance(choice, dict):
            continue
        if not keeps_ids and _without_ids(choice):
            is_changed = True
        if not keeps_logprobs and choice.get("logprobs") is not None:
            choice["logprobs"] = None
            is_changed = True
    return is_changed


def _without_ids(holder: JsonObject) -> bool:
    """Remove ids; a field that is there and empty stays, as servers send it to those who did not ask."""
    removed = [
        holder.pop(name)
        for name in ("prompt_token_ids", "token_ids", "response_token_ids")
        if holder.get(name) is not None
    ]
    return bool(removed)


def is_unasked_usage_chunk(chunk: JsonMapping, asked: JsonMapping) -> bool:
    """Whether a chunk holds nothing but a usage that the client's request did not ask for."""
    if chunk.get("choices") or chunk.get("usage") is None or "choices" not in chunk:
        return False
    options = asked.get("stream_options")
    return not (isinstance(options, Mapping) and options.get("include_usage"))
