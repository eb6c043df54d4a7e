"""OpenAI's completions of plain prompts, which may be several, and may be token ids."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from tests.stub_model.chat import instrumented_ids_of, usage_of
from tests.stub_model.dialect import Dialect, data_event, openai_error, openai_error_event
from tests.stub_model.reply import BadRequest, Choice, Reply, Wish, logprob_of, positive, stops_of, token_texts
from tests.stub_model.words import Message, Piece, encode

DEFAULT_MAX_TOKENS = 16


def read(body: dict[str, Any]) -> Wish:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        text, ids = prompt, encode(prompt)
    elif isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        text, ids = "", prompt
    else:
        raise BadRequest("Invalid 'prompt': expected one text or one list of token ids.", "prompt")
    return Wish(
        messages=(Message("user", text),),
        prompt_token_ids=tuple(ids),
        choices=positive(body, "n") or 1,
        max_tokens=positive(body, "max_tokens") or DEFAULT_MAX_TOKENS,
        stop=stops_of(body.get("stop")),
    )


def tell(reply: Reply) -> dict[str, Any]:
    choices = [
        {**_choice(reply, choice, choice.pieces), "finish_reason": choice.finish_reason} for choice in reply.choices
    ]
    return {**_head(reply), "choices": choices, "usage": usage_of(reply), **instrumented_ids_of(reply)}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "object": "text_completion", "created": reply.created, "model": reply.model}


def _choice(reply: Reply, choice: Choice, pieces: tuple[Piece, ...]) -> dict[str, Any]:
    part = Choice(choice.index, pieces, (), choice.finish_reason)
    told: dict[str, Any] = {"index": choice.index, "text": part.text, "finish_reason": None}
    told["logprobs"] = _logprobs(part) if reply.body.get("logprobs") is not None else None
    if reply.returns_token_ids:
        told |= {"prompt_token_ids": list(reply.request.prompt_token_ids), "token_ids": part.token_ids}
    return told


def _logprobs(part: Choice) -> dict[str, Any]:
    tokens = token_texts(part)
    texts = [text for text, _ in tokens]
    values = [logprob_of(token_id) for _, token_id in tokens]
    top = [{text: value} for text, value in zip(texts, values, strict=True)]
    offsets = list(accumulate((len(text) for text in texts[:-1]), initial=0)) if texts else []
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def stream(reply: Reply) -> Iterator[bytes]:
    for choice in reply.choices:
        ends = tuple(piece for piece in choice.pieces if piece.kind == "end")
        for piece in choice.pieces:
            if piece.kind != "end":
                yield data_event({**_head(reply), "choices": [_choice(reply, choice, (piece,))]})
        last = {**_choice(reply, choice, ends), "finish_reason": choice.finish_reason}
        yield data_event({**_head(reply), "choices": [last]})
    if (reply.body.get("stream_options") or {}).get("include_usage"):
        yield data_event({**_head(reply), "choices": [], "usage": usage_of(reply)})
    yield data_event("[DONE]")


COMPLETIONS = Dialect(
    "completions", "/completions", "cmpl", "call", read, tell, stream, openai_error, openai_error_event
)
