"""Where a model call goes: a seam through which calls of the model SDKs can be sent elsewhere while a context lasts.

A router is asked for each call that an SDK is about to make, whatever client makes it; the client itself is not
changed. It is carried by a context variable, so that rollouts that run at the same time go to their own addresses.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ROUTER", "ModelRequest", "Router", "Target", "current_router", "redirected"]


@dataclass(frozen=True)
class ModelRequest:
    """A call that is about to be made."""

    sdk: Literal["openai", "anthropic"]
    client: Any
    """The SDK's client object."""
    path: str
    """Below the client's base URL."""
    model: str | None


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


Router = Callable[[ModelRequest], Target | None]
"""Says where a call is to go; None lets it go where its client sends it.

What it raises reaches the caller of the model: a call that cannot be sent where it belongs is not sent at all.
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
