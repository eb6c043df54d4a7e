"""The real SDKs with a transport that answers what a test gives it."""

import importlib
from collections.abc import Iterable
from typing import Any

import anthropic
import openai

from agentlightning.dialects import DIALECTS, TranslatedDialect
from agentlightning.dialects.base import Translation
from agentlightning.dialects.sse import ServerSentEvent


def _transport(default_client: type, content: bytes, status: int, kind: str) -> Any:
    """A client of the HTTP library that an SDK is built on, whichever that is in its release."""
    base = next(cls for cls in default_client.__mro__ if cls.__name__ == "Client")
    http = importlib.import_module(base.__module__.partition(".")[0])
    return http.Client(
        transport=http.MockTransport(
            lambda _: http.Response(status, content=content, headers={"content-type": kind}),
        )
    )


def openai_client(content: bytes, *, status: int = 200, kind: str = "text/event-stream") -> openai.OpenAI:
    http = _transport(openai.DefaultHttpxClient, content, status, kind)
    return openai.OpenAI(api_key="k", base_url="http://model.test/v1", http_client=http, max_retries=0)


def anthropic_client(content: bytes, *, status: int = 200, kind: str = "text/event-stream") -> anthropic.Anthropic:
    http = _transport(anthropic.DefaultHttpxClient, content, status, kind)
    return anthropic.Anthropic(api_key="k", base_url="http://model.test", http_client=http, max_retries=0)


def sent(events: Iterable[ServerSentEvent]) -> bytes:
    return b"".join(event.encoded() for event in events)


def translation(client: str, backend: str) -> Translation:
    """Serves clients of one dialect from backends of another, both by name."""
    ours, theirs = DIALECTS[client], DIALECTS[backend]
    assert isinstance(ours, TranslatedDialect)
    assert isinstance(theirs, TranslatedDialect)
    return Translation(ours, theirs)
