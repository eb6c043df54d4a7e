"""What a request says: its body, and whose call it is, by its path, its API key, or its headers.

The path is the usual way: `/rollout/{id}/attempt/{id}/v1/chat/completions`, with `/agent/{name}` after the attempt
where one of several agents calls. A client that cannot take a path shows a key made for its attempt, or sends the
headers `x-rollout-id`, `x-attempt-id` and `x-agent-name`.

`Attempts` looks up what the store knows of an attempt. Most calls need none of it. Where it is needed, it is kept for a
second. Facts that are older are used only while the store is away: nobody can end an attempt in a store that is away.
"""

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from urllib.parse import unquote

import orjson

from agentlightning.dialects import COUNT_PATHS, DIALECTS, PATHS, Dialect
from agentlightning.dialects.failures import Failure
from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.llm_proxy.recorder import Origin
from agentlightning.store.base import LightningStore, is_finished
from agentlightning.store.http.tokens import check_secret
from agentlightning.types import LLM, AttemptedRollout, NamedResources
from agentlightning.types.resources import PROXY_SECRET_PREFIX, pinned_id, read_attempt_key, resources_for

logger = logging.getLogger(__name__)

MOST_LEVELS: Final = 254
"""Of lists and objects within each other, that orjson can write; it reads some more."""
SPARE_LEVELS: Final = 32
"""Left for what translations and records put around a request."""
FRESH_SECONDS: Final = 1.0
STALE_SECONDS: Final = 60.0
"""Facts older than this are not used, not even while the store is away."""
MOST_ATTEMPTS: Final = 20_000
MOST_RESOURCES: Final = 256
_PREFIX: Final = re.compile(r"^/rollout/([^/]+)/attempt/([^/]+)(?:/agent/([^/]+))?(/.*)?$")
_TRACEPARENT: Final = re.compile(rb"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

_PASSED_TO_BACKENDS: Final = frozenset(name for dialect in DIALECTS.values() for name in dialect.passed_headers)

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

Headers = dict[bytes, bytes]
"""By name, in lower case as ASGI has them; of several, the last."""


@dataclass(frozen=True)
class Route:
    """What a path means."""

    origin: Origin | None
    path: str
    """Below the attempt, without `/v1`."""
    dialect: Dialect | None
    """None, if no dialect has it."""
    is_count: bool = False
    """Whether it counts the tokens of a call that is not made."""


@dataclass(frozen=True)
class Caller:
    """Who calls."""

    origin: Origin | None
    is_trusted: bool
    """Showed the proxy's own key."""


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
    is_count = path in COUNT_PATHS
    return Route(origin, path, COUNT_PATHS[path] if is_count else PATHS.get(path), is_count=is_count)


def trace_parent(headers: Headers) -> tuple[str, str] | None:
    """The trace and span of the caller, as the header `traceparent` names them."""
    matched = _TRACEPARENT.match(headers.get(b"traceparent", b""))
    if matched is None or not matched[1].strip(b"0") or not matched[2].strip(b"0"):  # zeros stand for no span
        return None
    return matched[1].decode(), matched[2].decode()


def read_request(body: bytes) -> dict[str, Any]:
    """The request as an object that names a model; raises `Refused` for what is none."""
    try:
        request = orjson.loads(body)
    except ValueError as error:
        raise Refused(Failure(400, f"The request is not JSON: {error}", "invalid_request_error")) from None
    if not isinstance(request, dict):
        raise Refused(Failure(400, "The request must be a JSON object.", "invalid_request_error"))
    if not isinstance(request.get("model"), str) or not request["model"]:
        raise Refused(Failure(400, "The request names no model.", "invalid_request_error", param="model"))
    most_levels = MOST_LEVELS - SPARE_LEVELS
    if body.count(b"{") + body.count(b"[") > most_levels:
        nested: object = request
        for _ in range(SPARE_LEVELS):
            nested = [nested]
        try:
            orjson.dumps(nested)  # which counts levels far faster than we could
        except orjson.JSONEncodeError:
            message = f"The request has more than {most_levels} lists and objects within each other."
            raise Refused(Failure(400, message, "invalid_request_error")) from None
    return request


def request_headers(headers: Headers) -> dict[str, str]:
    """Those of the caller's headers that a backend is sent."""
    return {name.decode(): headers[name].decode("latin-1") for name in _PASSED_TO_BACKENDS if name in headers}


class Authenticator:
    """Checks keys. Without an API key of its own the proxy serves everybody."""

    def __init__(self, api_key: str | None = None) -> None:
        if api_key is not None:
            check_secret(api_key, "The API key of the LLM proxy")
        self.is_locked = api_key is not None
        secret = api_key if api_key is not None else secrets.token_urlsafe(24)
        self.secret = secret if secret.startswith(PROXY_SECRET_PREFIX) else PROXY_SECRET_PREFIX + secret
        """Makes and reads the keys of attempts; accepted like the key that it is made of."""
        self._accepted = [self.secret.encode()] + ([api_key.encode()] if api_key is not None else [])

    def admit(self, route: Route, headers: Headers) -> Caller:
        """Who calls; raises `Refused` for a key that is wrong or made for another attempt."""
        key = _key_in(headers)
        named = route.origin or _origin_in(headers)
        if key is not None and any(hmac.compare_digest(key.encode(), accepted) for accepted in self._accepted):
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
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    for name in (b"x-api-key", b"api-key"):
        if name in headers:
            return headers[name].decode("latin-1").strip()
    return None


def _origin_in(headers: Headers) -> Origin | None:
    names = (b"x-rollout-id", b"x-attempt-id", b"x-agent-name")
    rollout_id, attempt_id, agent = (headers.get(name, b"").decode("latin-1") for name in names)
    return Origin(rollout_id, attempt_id, agent or None) if rollout_id and attempt_id else None


@dataclass(frozen=True)
class AttemptFacts:
    """What the store knows of an attempt."""

    is_known: bool
    is_running: bool
    rollout: AttemptedRollout | None = None


class _Lookups(Generic[_Key, _Value]):
    """What the store was asked for: each once at a time, and again when the answer is older than a second."""

    def __init__(
        self, look_up: Callable[[_Key], Coroutine[None, None, _Value]], clock: Callable[[], float], most: int
    ) -> None:
        self._look_up = look_up
        self._clock = clock
        self._most = most
        self._known: dict[_Key, tuple[float, _Value]] = {}
        self._running: dict[_Key, asyncio.Task[_Value]] = {}

    async def get(self, key: _Key) -> _Value:
        """The answer; StoreUnavailable if there is none and the store is away."""
        known = self._known.get(key)
        age = float("inf") if known is None else self._clock() - known[0]
        if known is not None and age < FRESH_SECONDS:
            return known[1]
        if key not in self._running:
            self._running[key] = asyncio.create_task(self._renew(key), name="agl-proxy-lookup")
        try:
            return await asyncio.shield(self._running[key])
        except StoreUnavailable:
            if known is None or age >= STALE_SECONDS:
                raise
            return known[1]

    async def _renew(self, key: _Key) -> _Value:
        try:
            value = await self._look_up(key)
        finally:
            del self._running[key]
        self._known.pop(key, None)  # so that it is the newest
        if len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[key] = self._clock(), value
        return value


class Attempts:
    """Facts of attempts, looked up where a call needs them."""

    def __init__(self, store: LightningStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._facts = _Lookups(self._look_up, clock, MOST_ATTEMPTS)
        self._resources = _Lookups(self._look_up_resources, clock, MOST_RESOURCES)

    async def facts(self, origin: Origin) -> AttemptFacts:
        """What is known of an attempt; StoreUnavailable if nothing is and the store is away."""
        return await self._facts.get(origin.attempt)

    async def _look_up(self, attempt: Origin) -> AttemptFacts:
        try:
            rollout = await self._store.get_rollout_by_id(attempt.rollout_id)
            attempts = [] if rollout is None else await self._store.query_attempts(attempt.rollout_id)
            for one in attempts:
                if one.attempt_id == attempt.attempt_id:
                    whole = AttemptedRollout.model_construct(**{**vars(rollout), "attempt": one})
                    is_open = one.status in ("preparing", "running", "unresponsive") and one is attempts[-1]
                    is_running = is_open and not is_finished(whole)  # a cancel ends the rollout alone
                    return AttemptFacts(is_known=True, is_running=is_running, rollout=whole)
        except StoreUnavailable:
            raise
        except StoreError as error:
            logger.debug("%s is not known to the store: %s", attempt, error)
        return AttemptFacts(is_known=False, is_running=False)

    async def llm_of(self, origin: Origin) -> LLM | None:
        """The model that an attempt's resources give to the agent which calls; None if they give none."""
        facts = await self.facts(origin)
        if facts.rollout is None:
            return None
        resources_id = facts.rollout.resources_id
        if origin.agent is not None:
            resources_id = pinned_id(origin.agent, facts.rollout) or resources_id
        own = resources_for(origin.agent, await self._resources.get(resources_id))
        models = {name: resource for name, resource in own.items() if isinstance(resource, LLM)}
        return models.get("main_llm") or next(iter(models.values()), None)

    async def _look_up_resources(self, resources_id: str | None) -> NamedResources:
        """Those of a version, or the latest."""
        if resources_id is None:
            update = await self._store.get_latest_resources()
        else:
            update = await self._store.get_resources_by_id(resources_id)
        return {} if update is None else update.resources
