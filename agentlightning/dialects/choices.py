"""What chat and completions share: choices, which may carry token ids and log-probabilities.

Ids and log-probabilities are asked of backends on behalf of training, and kept from agents that did not ask. What
removes fields runs for every chunk of a stream and does little where there is nothing to do.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from agentlightning.dialects.attributes import field
from agentlightning.dialects.base import Dialect
from agentlightning.utils.json_values import JsonMapping, JsonObject

_LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one thing; a chat may have only one of them."""


class ChoicesDialect(Dialect):
    """An API of OpenAI's whose answers have choices, with the fields for tokens that vLLM takes and gives."""

    carries_tokens = True
    logprobs_wanted: ClassVar[bool | int]
    """Value of `logprobs` that asks for those of the chosen tokens alone."""

    @abstractmethod
    def asks_for_logprobs(self, body: JsonMapping) -> bool:
        """Whether a request asks for log-probabilities itself."""

    def has_token_ids(self, answer: JsonMapping) -> bool:
        choices = answer.get("choices") or ()
        first = choices[0] if choices and isinstance(choices[0], Mapping) else {}
        has_prompt = answer.get("prompt_token_ids") or first.get("prompt_token_ids")
        return bool(has_prompt and (answer.get("response_token_ids") or field(first, "token_ids")))

    def ended_choices(self, event: JsonMapping) -> Iterator[int]:
        for choice in event.get("choices") or ():
            if isinstance(choice, dict) and choice.get("finish_reason"):
                yield choice.get("index") or 0

    def sampling_parameters(self, sampling: JsonMapping) -> JsonObject:
        limits = dict.fromkeys(_LIMITS) if any(name in sampling for name in _LIMITS) else {}
        return {**limits, **sampling}

    def with_tokens(self, body: JsonMapping, *, ids: bool, logprobs: bool) -> JsonObject:
        asking = dict(body)
        if ids:
            asking["return_token_ids"] = True
        if logprobs and not self.asks_for_logprobs(body):
            asking["logprobs"] = self.logprobs_wanted
        return asking

    def with_usage(self, body: JsonMapping) -> JsonObject:
        asking = dict(body)
        if body.get("stream"):
            asking["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return asking

    def without_extras(self, answer: JsonObject, request: JsonMapping) -> bool:
        """As for any dialect; log-probabilities become None, as in an answer without them."""
        keeps_ids = bool(request.get("return_token_ids"))
        keeps_logprobs = self.asks_for_logprobs(request)
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

    def is_extra(self, event: JsonMapping, request: JsonMapping) -> bool:
        """Whether a chunk holds nothing but a usage that the client's request did not ask for."""
        if event.get("choices") or event.get("usage") is None or "choices" not in event:
            return False
        options = request.get("stream_options")
        return not (isinstance(options, Mapping) and options.get("include_usage"))


def _without_ids(holder: JsonObject) -> bool:
    """Remove ids; a field that is there and empty stays, as servers send it to those who did not ask."""
    removed = [
        holder.pop(name)
        for name in ("prompt_token_ids", "token_ids", "response_token_ids")
        if holder.get(name) is not None
    ]
    return bool(removed)
