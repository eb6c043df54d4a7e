"""OpenAI's embeddings: bags of words as directions, so that texts with common words lie close together."""

import base64
import math
import struct
from typing import Any

from tests.stub_model.reply import BadRequest, positive
from tests.stub_model.words import encode

DEFAULT_DIMENSIONS = 16


def tell(body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    inputs = _inputs(body.get("input"))
    size = positive(body, "dimensions") or DEFAULT_DIMENSIONS
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadRequest(f"Invalid 'encoding_format': {form!r}.", "encoding_format")
    vectors = [_vector(ids, size) for ids in inputs]
    embedded = [_packed(vector) if form == "base64" else vector for vector in vectors]
    items = [{"object": "embedding", "index": n, "embedding": told} for n, told in enumerate(embedded)]
    used = sum(map(len, inputs))
    return {
        "object": "list",
        "data": items,
        "model": body["model"],
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }


def _inputs(given: Any) -> list[list[int]]:
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise BadRequest("Invalid 'input': expected a text, token ids, or a list of them.", "input")
    return [encode(item) if isinstance(item, str) else item for item in given]


def _vector(ids: list[int], size: int) -> list[float]:
    sums = [0.0] * size
    for token_id in ids:
        sums[token_id % size] += 1.0 if token_id // size % 2 else -1.0
    length = math.hypot(*sums) or 1.0
    return [value / length for value in sums]


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
