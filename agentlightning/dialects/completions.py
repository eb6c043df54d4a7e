"""Text completions: the API before chat, which servers for training still speak because it takes token ids."""

from agentlightning.dialects import attributes as fields
from agentlightning.dialects.attributes import Attributes, Dialect, Thing, field, items
from agentlightning.utils.json_values import JsonMapping, JsonObject


def request_attributes(body: JsonMapping) -> Attributes:
    attributes: Attributes = {}
    fields.write_request(attributes, body, system="openai")
    for number, prompt in enumerate(_prompts(body.get("prompt"))):
        fields.write_message(attributes, f"{fields.PROMPT}.{number}", role="user", content=prompt)
    return attributes


def _prompts(prompt: object) -> list[object]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, (list, tuple)) and prompt and not isinstance(prompt[0], int):
        return list(prompt)
    return [] if prompt is None else [prompt]


def response_attributes(response: Thing) -> Attributes:
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


DIALECT = Dialect(
    "completions", "/completions", "openai.completion", request_attributes, response_attributes, CompletionAssembler
)
