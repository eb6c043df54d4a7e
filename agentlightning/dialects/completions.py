"""What APIs with choices share, which may carry token ids and log-probabilities; text completions; and embeddings.

Engines write their own answers with it: `head`, then for each choice a body and its tokens.

Ids and log-probabilities are asked of backends on behalf of training, and kept from agents that did not ask. What
removes fields runs for every chunk of a stream and does little where there is nothing to do.
"""

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar, Final, NamedTuple

from agentlightning import semconv
from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Thing, as_json, field, items
from agentlightning.dialects.base import Dialect
from agentlightning.utils.json_values import JsonMapping, JsonObject

_LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one thing; a chat may have only one of them."""


class SampledToken(NamedTuple):
    """A token as its engine sampled it."""

    text: str
    logprob: float
    likeliest: "Sequence[SampledToken] | None" = None
    """The likeliest tokens in its place; None where nobody asked for them."""


class ChoicesDialect(Dialect):
    """An API of OpenAI's whose answers have choices, with the fields for tokens that vLLM takes and gives."""

    carries_tokens = True
    logprobs_wanted: ClassVar[bool | int]
    """Value of `logprobs` that asks for those of the chosen tokens alone."""

    answer_names: ClassVar[tuple[str, str, str]]
    """How ids begin, the type of an answer, and that of a chunk."""
    has_prompt_in_choice: ClassVar[bool]
    """Whether the ids of a prompt stand in each choice, or beside the choices."""

    # ------------------------------------------------------------------ answers of an engine

    def head(
        self, model: str, *, is_stream: bool = False, answer_id: str | None = None, created: float | None = None
    ) -> JsonObject:
        """The fields that an answer, or each chunk of one, begins with."""
        prefix, whole, chunk = self.answer_names
        return {
            "id": answer_id if answer_id is not None else f"{prefix}-{uuid.uuid4().hex}",
            "object": chunk if is_stream else whole,
            "created": int(created or time.time()),
            "model": model,
        }

    def choice(self, message: JsonMapping, finish_reason: str | None, *, index: int = 0) -> JsonObject:
        """A whole choice that says what an assistant's message says."""
        return {"index": index, **self.body(message), "logprobs": None, "finish_reason": finish_reason}

    def chunk(self, delta: JsonMapping, finish_reason: str | None = None, *, index: int = 0) -> JsonObject:
        """A choice of a chunk, with more of the message."""
        return {"index": index, **self.delta(delta), "logprobs": None, "finish_reason": finish_reason}

    @abstractmethod
    def body(self, message: JsonMapping) -> JsonObject:
        """The fields of a choice for a message."""

    @abstractmethod
    def delta(self, message: JsonMapping) -> JsonObject:
        """The fields of a choice for a part of a message."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[SampledToken]) -> JsonObject:
        """The log-probabilities of a choice."""

    # ------------------------------------------------------------------ requests and answers of others

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


# ---------------------------------------------------------------------- completions and embeddings


class CompletionsDialect(ChoicesDialect):
    """Text completions."""

    name = "completions"
    path = "/completions"
    span_name = "openai.completion"
    content_fields = frozenset({"prompt"})
    limit_fields = ("max_tokens",)
    logprobs_wanted = 1
    answer_names = ("cmpl", "text_completion", "text_completion")
    has_prompt_in_choice = True

    def request_attributes(self, body: JsonMapping) -> Attributes:
        attributes: Attributes = {}
        fields.write_request(attributes, body, system="openai")
        for number, prompt in enumerate(_prompts(body.get("prompt"))):
            fields.write_message(attributes, f"{semconv.PROMPT}.{number}", role="user", content=prompt)
        return attributes

    def response_attributes(self, response: Thing) -> Attributes:
        attributes = fields.response_attributes(response)
        for number, choice in enumerate(items(field(response, "choices"))):
            prefix = f"{semconv.COMPLETION}.{number}"
            fields.write_message(attributes, prefix, role="assistant", content=field(choice, "text"))
            if field(choice, "finish_reason"):
                attributes[f"{prefix}.finish_reason"] = fields.plain_text(field(choice, "finish_reason"))
            ids = fields.response_ids(response, choice, number)
            if number:
                fields.write_token_ids(attributes, f"{prefix}.token_ids", ids)
                continue
            prompt_ids = field(choice, "prompt_token_ids") or field(response, "prompt_token_ids")
            fields.write_token_ids(attributes, semconv.PROMPT_IDS, prompt_ids)
            fields.write_token_ids(attributes, semconv.RESPONSE_IDS, ids)
            fields.write_logprobs(attributes, semconv.LOGPROBS, _logprobs(field(choice, "logprobs")))
        return attributes

    def assembler(self) -> "CompletionAssembler":
        return CompletionAssembler()

    def body(self, message: JsonMapping) -> JsonObject:
        return {"text": message.get("content") or ""}

    def delta(self, message: JsonMapping) -> JsonObject:
        return self.body(message)

    def logprobs(self, tokens: Sequence[SampledToken]) -> JsonObject:
        texts = [token.text for token in tokens]
        likeliest = [
            None if token.likeliest is None else {other.text: other.logprob for other in token.likeliest}
            for token in tokens
        ]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None if None in likeliest or not likeliest else likeliest,
            "text_offset": [0, *accumulate(map(len, texts))][:-1],
        }

    def asks_for_logprobs(self, body: JsonMapping) -> bool:
        """Also with 0, for the chosen token alone."""
        wanted = body.get("logprobs")
        return wanted is not None and wanted is not False


def _prompts(prompt: object) -> list[object]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, (list, tuple)) and prompt and not isinstance(prompt[0], int):
        return list(prompt)
    return [] if prompt is None else [prompt]


def _logprobs(logprobs: Thing) -> list[JsonObject]:
    """In the form that chat has."""
    tokens, values = field(logprobs, "tokens"), field(logprobs, "token_logprobs")
    if not tokens or not values:
        return []
    return [{"token": token, "logprob": value} for token, value in zip(tokens, values, strict=False)]


class CompletionAssembler:
    """Puts chunks of a completion together."""

    def __init__(self) -> None:
        self._known: JsonObject = {}
        self._choices: dict[int, JsonObject] = {}

    def add(self, event: JsonMapping) -> bool:
        fields.keep_known(self._known, event)
        has_spoken = False
        for choice in items(event.get("choices")):
            known = self._choices.setdefault(
                choice.get("index") or 0,
                {"text": "", "token_ids": [], "logprobs": {"tokens": [], "token_logprobs": []}},
            )
            known["text"] += choice.get("text") or ""
            known["token_ids"] += choice.get("token_ids") or ()
            for name, entries in (choice.get("logprobs") or {}).items():
                if name in known["logprobs"]:
                    known["logprobs"][name] += entries or ()
            for name in ("finish_reason", "prompt_token_ids"):
                known[name] = choice.get(name) or known.get(name)
            has_spoken |= bool(choice.get("text"))
        return has_spoken

    def response(self) -> JsonMapping:
        return {**self._known, "choices": [choice for _, choice in sorted(self._choices.items())]}


class EmbeddingsDialect(Dialect):
    """Embeddings: recorded so that a trace is whole; the vectors themselves are not kept."""

    name = "embeddings"
    path = "/embeddings"
    span_name = "openai.embeddings"
    content_fields = frozenset({"input"})

    def request_attributes(self, body: JsonMapping) -> Attributes:
        attributes: Attributes = {}
        fields.write_request(attributes, body, system="openai")
        if body.get("input") is not None:
            attributes["embedding.input"] = as_json(body["input"])
        return attributes

    def response_attributes(self, response: Thing) -> Attributes:
        attributes = fields.response_attributes(response)
        attributes["embedding.count"] = len(list(items(field(response, "data"))))
        return attributes

    def sampling_parameters(self, sampling: JsonMapping) -> JsonObject:
        return {}


DIALECT: Final = CompletionsDialect()
EMBEDDINGS: Final = EmbeddingsDialect()
