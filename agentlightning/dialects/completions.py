"""OpenAI's two small APIs: text completions, which take token ids, and embeddings."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Thing, as_json, field, items
from agentlightning.dialects.base import Dialect
from agentlightning.dialects.choices import ChoicesDialect, SampledToken
from agentlightning.utils.json_values import JsonMapping, JsonObject


class CompletionsDialect(ChoicesDialect):
    """Text completions."""

    name = "completions"
    path = "/completions"
    span_name = "openai.completion"
    limit_fields = ("max_tokens",)
    logprobs_wanted = 1
    answer_names = ("cmpl", "text_completion", "text_completion")
    has_prompt_in_choice = True

    def request_attributes(self, body: JsonMapping) -> Attributes:
        attributes: Attributes = {}
        fields.write_request(attributes, body, system="openai")
        for number, prompt in enumerate(_prompts(body.get("prompt"))):
            fields.write_message(attributes, f"{fields.PROMPT}.{number}", role="user", content=prompt)
        return attributes

    def response_attributes(self, response: Thing) -> Attributes:
        attributes = fields.response_attributes(response)
        for number, choice in enumerate(items(field(response, "choices"))):
            prefix = f"{fields.COMPLETION}.{number}"
            fields.write_message(attributes, prefix, role="assistant", content=field(choice, "text"))
            if field(choice, "finish_reason"):
                attributes[f"{prefix}.finish_reason"] = fields.plain_text(field(choice, "finish_reason"))
            ids = fields.response_ids(response, choice, number)
            if number:
                fields.write_token_ids(attributes, f"{prefix}.token_ids", ids)
                continue
            prompt_ids = field(choice, "prompt_token_ids") or field(response, "prompt_token_ids")
            fields.write_token_ids(attributes, fields.PROMPT_IDS, prompt_ids)
            fields.write_token_ids(attributes, fields.RESPONSE_IDS, ids)
            fields.write_logprobs(attributes, fields.LOGPROBS, _logprobs(field(choice, "logprobs")))
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
