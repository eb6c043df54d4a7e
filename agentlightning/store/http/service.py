"""Operations on behalf of clients: decoded, permitted, performed and measured, whichever way they came.

The routes and the live channel both call `StoreService.call`. Calls that wait are known here, so that a server that
shuts down can end them and let the callers ask elsewhere or later.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from agentlightning.asgi.caller import CallerCheck
from agentlightning.dashboard import DASHBOARD_PATH
from agentlightning.errors import InvalidToken, StoreUnavailable
from agentlightning.store.base import LightningStore
from agentlightning.store.forwarding import LightningStoreThreaded
from agentlightning.store.http.codec import OperationCodec, check_levels
from agentlightning.store.http.credentials import AnswerCredentials
from agentlightning.store.http.permissions import check_permission
from agentlightning.store.http.tokens import Scope, describe_token, verify_token
from agentlightning.store.local import LocalStore
from agentlightning.utils.metrics import MetricsBackend

__all__ = ["StoreService", "is_page"]

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

OPERATION_SECONDS = "agl_server_operation_seconds"
FAILURES = "agl_server_failures_total"
DEFAULT_MAX_REQUEST_BYTES = 64 * 1024 * 1024
BODY_TIMEOUT_SECONDS = 30.0
READY_SECONDS = 5.0
"""How long a store may take to write before it counts as not ready."""
DOCS_PATH = "/docs"
_GRANTED_UNDER = frozenset(["claim_id", "request_id"])
"""Arguments under which work and sequence ids are given out again."""
_BEARER = "bearer "
_ADMIN = Scope("admin")


def is_page(path: str) -> bool:
    """Whether a path is a static page: it holds nothing of the store, and asks for a token itself."""
    return path in ("/", DOCS_PATH, DASHBOARD_PATH) or path.startswith(DASHBOARD_PATH + "/")


class StoreService:
    """What every connection of one server shares."""

    def __init__(
        self,
        store: LightningStore,
        *,
        token: str | None = None,
        allowed_origins: Sequence[str] = (),
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
        body_timeout_seconds: float = BODY_TIMEOUT_SECONDS,
        tracker: MetricsBackend | None = None,
    ) -> None:
        self.store = store
        self.max_request_bytes = max_request_bytes
        self.body_timeout_seconds = body_timeout_seconds
        self.live_connections = 0
        self.is_closing = False
        self.callers = CallerCheck(
            has_key=token is not None,
            allowed_origins=frozenset(allowed_origins),
            origin_option="--cors-origin",
            is_page=is_page,
        )
        self._token = token
        self._tracker = tracker
        self._waiting: set[asyncio.Task[Any]] = set()
        self._credentials = AnswerCredentials(store, token)
        if tracker is not None:
            tracker.register_histogram(OPERATION_SECONDS, ["operation"])
            tracker.register_counter(FAILURES, ["operation", "error_type"])

    @property
    def waiting_calls(self) -> int:
        return len(self._waiting)

    def admit(self, authorization: str) -> Scope:
        """What the bearer of an Authorization header may do; `InvalidToken` if nothing."""
        if self._token is None:
            return _ADMIN
        if authorization[: len(_BEARER)].lower() != _BEARER:
            raise InvalidToken("This server wants a token; send it as 'Authorization: Bearer TOKEN'.")
        return verify_token(self._token, authorization[len(_BEARER) :].strip(), time.time())

    def expires_at(self, authorization: str) -> float | None:
        """When an admitted token expires, in seconds since the epoch; None if it never does."""
        shown = authorization[len(_BEARER) :].strip()
        if self._token is None or shown == self._token:
            return None
        return describe_token(shown).expires_at

    async def call(self, codec: OperationCodec, given: Any, scope: Scope, authorization: str) -> Any:
        """Run an operation whose arguments came as plain values, for a caller who was admitted with this scope."""
        if self._tracker is None:
            return await self._call(codec, given, scope, authorization)
        name, began = codec.op.name, time.perf_counter()
        try:
            return await self._call(codec, given, scope, authorization)
        except Exception as error:
            self._tracker.inc_counter(FAILURES, 1, {"operation": name, "error_type": type(error).__name__})
            raise
        finally:
            self._tracker.observe_histogram(OPERATION_SECONDS, time.perf_counter() - began, {"operation": name})

    async def _call(self, codec: OperationCodec, given: Any, scope: Scope, authorization: str) -> Any:
        op = codec.op
        if op.mutates:
            check_levels(given)
        arguments = codec.decode_arguments(given)
        if scope is not _ADMIN:
            check_permission(scope, op, arguments)
        if self._token is not None:
            for name in _GRANTED_UNDER.intersection(op.ids, arguments):
                arguments[name] = _own_id(authorization, arguments[name])
        running = self.store.perform(op.name, arguments)
        result = await (self.waiting(running) if op.may_wait(arguments) else running)
        return await self._credentials.shown_to(scope, result)

    async def waiting(self, awaited: Awaitable[ResultT]) -> ResultT:
        """Await something that may take long, unless the server shuts down meanwhile."""
        if self.is_closing:
            if asyncio.iscoroutine(awaited):
                awaited.close()
            raise _closing()
        task = asyncio.ensure_future(awaited)
        self._waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._has_closed() and task.cancelled():
                raise _closing() from None
            raise
        finally:
            self._waiting.discard(task)

    def _has_closed(self) -> bool:
        return self.is_closing

    def open(self) -> None:
        """Take calls that wait, also after a `close`."""
        self.is_closing = False

    def close(self) -> None:
        """End the calls that wait; those at work finish."""
        self.is_closing = True
        for task in tuple(self._waiting):
            task.cancel()

    async def is_ready(self) -> bool:
        """Whether the store can be read and, if it is one of this package, written to."""
        if self.is_closing or await self.counts() is None:
            return False
        store = self.store.store if isinstance(self.store, LightningStoreThreaded) else self.store
        if not isinstance(store, LocalStore):
            return True
        try:
            await asyncio.wait_for(store.check_writable(), READY_SECONDS)
        except Exception as error:  # noqa: BLE001 # whatever a broken store raises, the server goes on
            logger.warning("The store cannot be written to: %s: %s", type(error).__name__, error)
            return False
        return True

    async def counts(self) -> Mapping[str, Any] | None:
        """What the store holds; None if it cannot be asked."""
        try:
            return await self.store.statistics()
        except Exception as error:  # noqa: BLE001 # whatever a broken store raises, the server goes on
            logger.warning("The store cannot be asked: %s: %s", type(error).__name__, error)
            return None


def _own_id(authorization: str, given: str | None) -> str | None:
    """An id as the store knows it: of every token another one, so that nobody is given what is another caller's."""
    if given is None:
        return None
    return hashlib.blake2b(
        given.encode(), key=hashlib.sha256(authorization.encode()).digest(), digest_size=16
    ).hexdigest()


def _closing() -> StoreUnavailable:
    return StoreUnavailable("The store server is shutting down; ask again in a moment.")
