"""What vLLM 0.24 answered on a GPU, as it was recorded: `recordings/vllm_0.24.json`, an entry for each request.

An entry has a name, the request with its path, and the status and body of the answer; of a stream, its lines.
"""

import functools
import json
from pathlib import Path
from typing import Any

from tests.stub_model.raw import streamed, whole
from tests.stub_model.script import Handler

__all__ = ["agents_request", "body_of", "names", "recorded", "replayed"]

FILE = Path(__file__).parent / "recordings" / "vllm_0.24.json"
ADDED_BY_PROXY = ("return_token_ids", "logprobs", "stream_options")


@functools.cache
def _entries() -> dict[str, Any]:
    return {entry["name"]: entry for entry in json.loads(FILE.read_text(encoding="utf-8"))}


def names(*, path: str, status: int = 200) -> list[str]:
    """Recordings of one route."""
    return [name for name, entry in _entries().items() if (entry["path"], entry["status"]) == (path, status)]


def recorded(name: str) -> dict[str, Any]:
    """One recording."""
    return dict(_entries()[name])


def agents_request(name: str) -> dict[str, Any]:
    """The request without what the proxy adds to an agent's."""
    request = recorded(name)["request"]
    keeps = ("logprobs",) if "top_logprobs" in request else ()  # which asks for them itself
    return {field: value for field, value in request.items() if field not in ADDED_BY_PROXY or field in keeps}


def body_of(name: str, **changed: Any) -> bytes:
    """The body of an answer that was sent whole, with some fields of it changed."""
    return json.dumps({**recorded(name)["response"], **changed}).encode()


def replayed(name: str) -> Handler:
    """The answer, byte for byte but for the spaces of JSON."""
    entry = recorded(name)
    if "lines" in entry:
        return streamed(*(f"{line}\n\n".encode() for line in entry["lines"]))
    return whole(body_of(name), entry["status"])
