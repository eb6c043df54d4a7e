"""Whose call is this: the rollout and attempt that a request names in its path, its API key, or its headers.

The path is the usual way: `/rollout/{id}/attempt/{id}/v1/chat/completions`, with `/agent/{name}` after the attempt
where one of several agents calls. A client that cannot take a path shows a key made for its attempt, or sends the
headers `x-rollout-id`, `x-attempt-id` and `x-agent-name`.
"""

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from agentlightning.dialects import DialectName
from agentlightning.dialects.failures import Failure
from agentlightning.llm_proxy.records import Origin
from agentlightning.store.http.tokens import check_secret
from agentlightning.types.attempt_keys import PROXY_SECRET_PREFIX, read_attempt_key

__all__ = ["Caller", "Authenticator", "Headers", "Parent", "Refused", "Route", "as_headers", "parent_of", "route_of"]

_PREFIX: Final = re.compile(r"^/rollout/([^/]+)/attempt/([^/]+)(?:/agent/([^/]+))?(/.*)?$")
_TRACEPARENT: Final = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

_DIALECTS: Final[dict[str, DialectName]] = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/embeddings": "embeddings",
    "/messages": "messages",
}

Headers = dict[bytes, bytes]


@dataclass(frozen=True)
class Route:
    """What a path means."""

    origin: Origin | None
    path: str
    """Below the attempt, without `/v1`."""
    dialect: DialectName | None
    """None, if it is not a model call."""


@dataclass(frozen=True)
class Caller:
    """Who calls, and whether his key was one of ours."""

    origin: Origin | None
    is_trusted: bool
    """Showed the proxy's own key."""


@dataclass(frozen=True)
class Parent:
    """The span of the caller, as the header `traceparent` names it."""

    trace_id: str
    span_id: str


class Refused(Exception):  # it is an answer, not a fault
    """The call is not served; the failure says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def route_of(path: str) -> Route:
    """What a path means, as it was sent: a slash within an id is written `%2F`."""
    origin = None
    prefixed = _PREFIX.match(path)
    if prefixed is not None:
        rollout_id, attempt_id, agent, rest = prefixed.groups()
        origin = Origin(unquote(rollout_id), unquote(attempt_id), None if agent is None else unquote(agent))
        path = rest or "/"
    while path.startswith("/v1/"):  # some clients append it to a base URL that has it already
        path = path[3:]
    path = path.rstrip("/") or "/"
    return Route(origin, path, _DIALECTS.get(path))


def parent_of(headers: Headers) -> Parent | None:
    told = headers.get(b"traceparent")
    if told is None:
        return None
    matched = _TRACEPARENT.match(told.decode("latin-1"))
    if matched is None or not matched[1].strip("0") or not matched[2].strip("0"):  # zeros stand for no span
        return None
    return Parent(matched[1], matched[2])


def as_headers(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    """By name, in lower case as ASGI has them; of several, the last."""
    return dict(pairs)


class Authenticator:
    """Looks at keys. Without an API key of its own the proxy serves everybody."""

    def __init__(self, api_key: str | None = None) -> None:
        if api_key is not None:
            check_secret(api_key, "The API key of the LLM proxy")
        self.is_locked = api_key is not None
        secret = api_key if api_key is not None else secrets.token_urlsafe(24)
        self.secret = secret if secret.startswith(PROXY_SECRET_PREFIX) else PROXY_SECRET_PREFIX + secret
        """Makes and reads the keys of attempts; it opens as well as the key that it is made of."""
        self._opening = [self.secret.encode()] + ([api_key.encode()] if api_key is not None else [])

    def admit(self, route: Route, headers: Headers) -> Caller:
        """Who calls; raises `Refused` for a key that is wrong or made for another attempt."""
        key = _key_in(headers)
        named = route.origin or _origin_in(headers)
        if key is not None and any(hmac.compare_digest(key.encode(), opening) for opening in self._opening):
            return Caller(named, is_trusted=True)
        attempt_key = None if key is None else read_attempt_key(self.secret, key)
        if attempt_key is not None:
            keyed = Origin(attempt_key.rollout_id, attempt_key.attempt_id, attempt_key.agent)
            if named is None:
                return Caller(keyed, is_trusted=False)
            if (named.rollout_id, named.attempt_id) != (keyed.rollout_id, keyed.attempt_id) or (
                keyed.agent is not None and named.agent not in (None, keyed.agent)
            ):
                raise Refused(Failure(403, "This key was made for another attempt.", "permission_error"))
            return Caller(Origin(named.rollout_id, named.attempt_id, named.agent or keyed.agent), is_trusted=False)
        if self.is_locked:
            missing = (
                "Show the key of this attempt, or the proxy's own" if key is None else "This key is not known here"
            )
            raise Refused(Failure(401, f"{missing}: the LLM proxy serves nobody else.", "authentication_error"))
        return Caller(named, is_trusted=False)


def _key_in(headers: Headers) -> str | None:
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    scheme, _, token = bearer.partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    for name in (b"x-api-key", b"api-key"):
        if name in headers:
            return headers[name].decode("latin-1").strip()
    return None


def _origin_in(headers: Headers) -> Origin | None:
    rollout_id, attempt_id = headers.get(b"x-rollout-id"), headers.get(b"x-attempt-id")
    if not rollout_id or not attempt_id:
        return None
    agent = headers.get(b"x-agent-name")
    return Origin(
        rollout_id.decode("latin-1"), attempt_id.decode("latin-1"), agent.decode("latin-1") if agent else None
    )
