"""Where a model call goes: a seam through which calls of the model SDKs can be sent elsewhere while a context lasts.

A router is asked for each call that an SDK is about to make, whatever client makes it; the client itself is not
changed. It is carried by a context variable, so that rollouts that run at the same time go to their own addresses.

A call that is sent elsewhere under another key leaves everything behind that its own provider knows its sender by:
API keys, tokens and cookies in headers and queries, and the names of organisations and projects.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from opentelemetry.trace import Span

from agentlightning.semconv import IS_EXCLUDED

_T = TypeVar("_T")
PLACEHOLDER_KEY: Final = "agentlightning"
"""Sent to whoever asks for no key, where one must stand."""
_EXCLUDED: Final = "_agentlightning_is_excluded"
"""The attribute of a client whose calls are left alone."""
_HTTP_CLIENT: Final = "_client"
"""The attribute in which an SDK's client keeps its HTTP client."""
_SECRET: Final = re.compile(
    r"(?<![a-z])auth(?![a-z])|authori|authent|(?<!idempotency-)key(?![a-z])|token(?!iz)|secret|cookie|passw|credential"
    r"|signature|^openai-(organization|project)$",
    re.IGNORECASE,
)
"""In names of headers and parameters that say who sends a call."""


@dataclass(frozen=True)
class ModelRequest:
    """A call that is about to be made."""

    sdk: Literal["openai", "anthropic"]
    """Whose API it speaks."""
    client: Any
    """The SDK's client object."""
    path: str
    """Below the client's base URL."""
    model: str | None
    url: str = ""
    """Where the call would go."""
    provider: str | None = None
    """Who serves the model, where its name stands in front of the model's: `gemini/gemini-2.0-flash`."""


@dataclass(frozen=True)
class Target:
    """Where a call is to go instead."""

    base_url: str
    """What the request's path is put behind."""
    model: str | None = None
    """None keeps the model that was asked for."""
    api_key: str | None = None
    """None keeps the client's own."""
    headers: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request, such as `temperature`, that are written over its own; None takes one out."""


Router = Callable[[ModelRequest], Target | None]
"""Says where a call is to go; None lets it go where its client sends it.

What it raises reaches the caller of the model: a call that cannot be sent where it belongs is not sent at all. A router
with a method `excludes`, which takes the same request, tells calls that it leaves alone from those that go where they
belong already.
"""

ROUTER: ContextVar[Router | None] = ContextVar("agentlightning_router", default=None)
current_router = ROUTER.get


@contextmanager
def redirected(router: Router | None) -> Iterator[None]:
    """Ask this router for every model call that is made inside; None lets all go where they would."""
    token = ROUTER.set(router)
    try:
        yield
    finally:
        ROUTER.reset(token)


# ---------------------------------------------------------------------- what is left alone


class _Leaving:
    """The router of a block whose calls are all left alone."""

    def __call__(self, request: ModelRequest) -> None:
        return None

    def excludes(self, request: ModelRequest) -> bool:
        return True


def not_redirected() -> AbstractContextManager[None]:
    """Model calls that are made inside go where their clients send them, also during a rollout."""
    return redirected(None if current_router() is None else _Leaving())


def exclude_from_redirect(client: _T) -> _T:
    """Have the calls of this client of an SDK go where it sends them, for good, and return it.

    Copies that it makes of itself (`with_options`) are excluded too, unless it was given an `http_client`, which other
    clients may share.
    """
    setattr(client, _EXCLUDED, True)
    http_client = getattr(client, _HTTP_CLIENT, None)
    if type(http_client).__name__.endswith("HttpxClientWrapper"):  # the SDK's own, made for this client
        setattr(http_client, _EXCLUDED, True)
    return client


def _is_excluded(client: object) -> bool:
    return hasattr(client, _EXCLUDED) or hasattr(getattr(client, _HTTP_CLIENT, None), _EXCLUDED)


# ---------------------------------------------------------------------- for those who send


def target_of(router: Router, request: ModelRequest) -> Target | None:
    """Where a call is to go; None where its client sends it."""
    return None if _is_excluded(request.client) else router(request)


def excluded(router: Router, request: ModelRequest) -> dict[str, bool]:
    """What the span of a call says that has no target: whether it is excluded."""
    excludes: Router | None = getattr(router, "excludes", None)
    is_excluded = _is_excluded(request.client) or (excludes is not None and excludes(request))
    return {IS_EXCLUDED: True} if is_excluded else {}


def rewritten(body: Mapping[str, object], target: Target) -> dict[str, Any]:
    """A request as it is to be sent there."""
    changed = {**body, **target.parameters}
    if target.model is not None:
        changed["model"] = target.model
    gone = [name for name, value in target.parameters.items() if value is None]
    for name in gone:
        del changed[name]
    return changed


def is_secret(name: str) -> bool:
    """Whether a header or a parameter of a query, by its name, says who sends a call."""
    return _SECRET.search(name) is not None


def parent_header(span: Span) -> dict[str, str]:
    """A span that is recorded as the parent of what the receiver does, as W3C's Trace Context writes it."""
    if not span.is_recording():
        return {}
    context = span.get_span_context()
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
