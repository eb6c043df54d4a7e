"""Operations on behalf of clients: decoded, permitted, performed and measured, whichever way they came.

The routes and the live channel both call `StoreService.call`. Calls that wait are known here, so that a server that
shuts down can end them and let the callers ask elsewhere or later.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from agentlightning.asgi.answers import Answers
from agentlightning.asgi.bodies import LARGE_BYTES, Bodies
from agentlightning.asgi.caller import CallerCheck
from agentlightning.dashboard import DASHBOARD_PATH
from agentlightning.errors import InvalidQuery, InvalidToken, InvalidValue, PayloadTooLarge, StoreUnavailable
from agentlightning.store.base import LightningStore
from agentlightning.store.claims import slot_of
from agentlightning.store.forwarding import LightningStoreThreaded
from agentlightning.store.http.codec import OperationCodec, notice_fields
from agentlightning.store.http.credentials import AnswerCredentials
from agentlightning.store.http.failures import BadArguments
from agentlightning.store.http.tokens import (
    ENDED_ATTEMPT_SECONDS,
    Scope,
    admit,
    bearer_token,
    check_permission,
    check_subscription,
    describe_token,
)
from agentlightning.store.local import LocalStore
from agentlightning.store.operations import Operation
from agentlightning.types import Notice, NoticeKind
from agentlightning.utils.id import generate_id
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.metrics import MetricsBackend

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
BoundCall = Callable[[Any], Awaitable[Any]]

OPERATION_SECONDS = "agl_server_operation_seconds"
FAILURES = "agl_server_failures_total"
DEFAULT_MAX_REQUEST_BYTES = 64 * 1024 * 1024
BODY_TIMEOUT_SECONDS = 30.0
READY_SECONDS = 5.0
"""How long a store may take to write before it counts as not ready."""
MOST_NOTICES = 1000
"""In one answer; the rest follows with the next."""
AT_HAND_SECONDS = 0.005
"""A notice that does not come within this time is not there yet."""
SUBSCRIBERS_AT_ONCE = 4
"""That are told of changes before other requests have their turn."""
MOST_ID_CHARACTERS = 2048
MOST_ITEMS = 10_000
"""Rollouts or spans in one call."""
MOST_ATTEMPTS = 10_000
"""Attempts whose tokens were checked lately."""
_ADMIN = Scope("admin")


class NoticesQuery(TypedDict):
    """What may stand in the query string of the route for notices."""

    kinds: NotRequired[Sequence[NoticeKind]]
    after: NotRequired[int]
    log: NotRequired[str]
    wait: NotRequired[float]


_NOTICES_QUERY = TypeAdapter(NoticesQuery)


def is_page(path: str) -> bool:
    """Whether a path is a static page: it holds nothing of the store, and asks for a token itself."""
    return path in ("/", "/docs", DASHBOARD_PATH) or path.startswith(DASHBOARD_PATH + "/")


class StoreService:
    """What every connection of one server shares."""

    def __init__(
        self,
        store: LightningStore,
        *,
        token: str | None = None,
        allowed_origins: Sequence[str] = (),
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
        trackers: Sequence[MetricsBackend] = (),
    ) -> None:
        self.store = store
        self.max_request_bytes = max_request_bytes
        self.body_timeout_seconds = BODY_TIMEOUT_SECONDS
        self.log_id = "" if store.capabilities.get("zero_copy") else generate_id(8)
        """Of the log of changes; empty where other servers may have the same log."""
        self.bodies = Bodies()
        self.answers = Answers()
        self.live_connections = 0
        self.subscriptions = 0
        self.turns = asyncio.Semaphore(SUBSCRIBERS_AT_ONCE)
        self.is_closing = False
        """While it is set, nothing waits."""
        self.callers = CallerCheck(
            has_key=token is not None,
            allowed_origins=frozenset(allowed_origins),
            origin_option="--cors-origin",
            is_page=is_page,
        )
        self.token = token
        self.trackers = trackers
        self._waiting: set[asyncio.Task[object]] = set()
        self.credentials = AnswerCredentials(store, token)
        self._attempts_until: dict[Scope, float] = {}
        for tracker in trackers:
            tracker.register_histogram(OPERATION_SECONDS, ["operation"])
            tracker.register_counter(FAILURES, ["operation", "error_type"])

    @property
    def waiting_calls(self) -> int:
        return len(self._waiting)

    def caller(self, authorization: str | None) -> "Caller":
        """The bearer of an Authorization header, or anybody where no token is needed; `InvalidToken` for a bad one."""
        if self.token is None or authorization is None:
            return Caller(self, _ADMIN)
        scope, token = admit(self.token, authorization), bearer_token(authorization)
        return Caller(self, scope, token, None if token == self.token else describe_token(token).expires_at)

    async def check_attempt(self, scope: Scope) -> None:
        """Refuse the token of an attempt that has been over, or followed by another, for a minute.

        One that runs now will not have been over for so long within a minute, so the store is asked once a minute.
        """
        if scope.rollout_id is None or time.time() < self._attempts_until.get(scope, 0.0):
            return
        rollout = await self.store.get_rollout_by_id(scope.rollout_id)
        attempts = () if rollout is None else await self.store.query_attempts(scope.rollout_id)
        attempt = next((each for each in attempts if each.attempt_id == scope.attempt_id), None)
        if rollout is None or attempt is None:
            return  # which the operation tells better
        now = time.time()
        ends = [attempt.end_time, rollout.end_time, *(each.start_time for each in attempts[attempt.sequence_id :])]
        until = ENDED_ATTEMPT_SECONDS + min((end for end in ends if end is not None), default=now)
        if now >= until:
            raise InvalidToken(
                f"The token of {scope} ended {now - until:.0f} seconds ago, {ENDED_ATTEMPT_SECONDS:.0f} seconds after "
                "the attempt; send spans before that, or with a runner's token."
            )
        if len(self._attempts_until) >= MOST_ATTEMPTS:
            del self._attempts_until[next(iter(self._attempts_until))]
        self._attempts_until[scope] = until

    async def waiting(self, awaited: Awaitable[ResultT]) -> ResultT:
        """Await something that may take long, unless the server shuts down meanwhile."""
        task = asyncio.ensure_future(awaited)
        if self.is_closing:
            task.cancel()
        self._waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_closing and task.cancelled():
                raise StoreUnavailable("The store server is shutting down; ask again in a moment.") from None
            raise
        finally:
            self._waiting.discard(task)

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
        with log_failures(logger, "The store cannot be written to", level=logging.WARNING):
            await asyncio.wait_for(store.check_writable(), READY_SECONDS)
            return True
        return False

    async def counts(self) -> Mapping[str, Any] | None:
        """What the store holds; None if it cannot be asked."""
        with log_failures(logger, "The store cannot be asked", level=logging.WARNING):
            return await self.store.statistics()
        return None

    async def read_notices(self, scope: Scope, query: Sequence[tuple[str, str]]) -> bytes:
        """A cursor and the notices before it, as JSON, for clients without a WebSocket.

        Without `after` it tells where the log of changes stands; with `after` and `wait` it answers as soon as there is
        something behind that cursor, or with nothing when the time is over. A client that asks again with the cursor it
        was told misses nothing; one that also gives the `log` it was told hears of a gap if there is another one now.
        """
        check_subscription(scope)
        given: dict[str, Any] = {name: value for name, value in query if name != "kinds"}
        if kinds := [value for name, value in query if name == "kinds"]:
            given["kinds"] = kinds
        try:
            wanted = _NOTICES_QUERY.validate_python(given)
        except ValidationError as error:
            raise BadArguments(InvalidQuery, error) from error
        is_other_log = wanted.get("log", self.log_id) != self.log_id
        after = None if is_other_log else wanted.get("after")
        subscription: Any = self.store.subscribe(wanted.get("kinds"), after=after)
        try:
            notices = [Notice("gap", subscription.cursor)] if is_other_log else []
            if after is not None:
                notices = await self.waiting(gather_notices(subscription, wanted.get("wait", 0.0)))
            fields = [notice_fields(notice) for notice in notices]
            return orjson.dumps({"cursor": subscription.cursor, "log": self.log_id, "notices": fields})
        finally:
            await subscription.aclose()


async def gather_notices(subscription: AsyncIterator[Notice], wait_seconds: float) -> list[Notice]:
    """The notices there are, waiting for the first one only."""
    notices: list[Notice] = []
    patience = max(wait_seconds, AT_HAND_SECONDS) if math.isfinite(wait_seconds) else AT_HAND_SECONDS
    is_late = False
    while not is_late and len(notices) < MOST_NOTICES:
        following = asyncio.ensure_future(subscription.__anext__())
        try:
            await asyncio.wait([following], timeout=AT_HAND_SECONDS if notices else patience)
        except asyncio.CancelledError:  # the caller has gone; nobody would fetch what the task ends with
            following.cancel()
            raise
        is_late = not following.done()
        if is_late:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if not following.cancelled():  # also one that came as it was given up
            notices.append(following.result())
    return notices


class Caller:
    """Who calls, over one connection or in one request: what a token permits, decided once for each operation."""

    def __init__(
        self, service: StoreService, scope: Scope, token: str | None = None, expires_at: float | None = None
    ) -> None:
        self.scope = scope
        self.expires_at = expires_at
        """In seconds since the epoch; None if the token never expires."""
        self.max_bytes = (
            service.max_request_bytes if scope.kind == "admin" else min(service.max_request_bytes, LARGE_BYTES)
        )
        """How large a request may be."""
        self._service = service
        self._key = None if token is None else hashlib.sha256(token.encode()).digest()
        self._calls: dict[str, BoundCall] = {}

    def call_of(self, codec: OperationCodec) -> BoundCall:
        """Runs an operation whose arguments came as plain values; `NotAllowed` if the scope permits it for nothing."""
        name = codec.op.name
        call = self._calls.get(name)
        if call is None:
            check_permission(self.scope, codec.op)
            call = self._calls[name] = self._measured(name, self._bind(codec))
        return call

    def _bind(self, codec: OperationCodec) -> BoundCall:
        op, scope, service, store = codec.op, self.scope, self._service, self._service.store
        ids = [name for name in op.hints if name.endswith("_id")]
        many, is_attempt = op.many, scope.kind == "attempt"

        async def call(given: Any) -> Any:
            items = given.get(many) if many is not None and isinstance(given, dict) else None
            if isinstance(items, list) and len(items) > MOST_ITEMS:
                raise PayloadTooLarge(f"{len(items)} {many} in one call; send up to {MOST_ITEMS} at a time.")
            arguments = codec.decode_arguments(given)
            for name in ids:
                _check_id(name, arguments.get(name))
            if many == "rollouts":
                for request in arguments[many]:
                    _check_id("rollout_id", request.rollout_id)
            if is_attempt:
                check_permission(scope, op, arguments)
                await service.check_attempt(scope)
            if self._key is not None:
                self._mark_owner(op, arguments, self._key)
            running = getattr(store, op.name)(**arguments)
            if op.is_query:
                async with service.answers.making.taken(1):
                    result = await running
            else:
                result = await (service.waiting(running) if op.may_wait(arguments) else running)
            return await service.credentials.shown_to(scope, result)

        return call

    def _measured(self, name: str, call: BoundCall) -> BoundCall:
        trackers, labels = self._service.trackers, {"operation": name}

        async def measured(given: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(given)
            except Exception as error:
                for tracker in trackers:
                    tracker.inc_counter(FAILURES, 1, {**labels, "error_type": type(error).__name__})
                raise
            finally:
                for tracker in trackers:
                    tracker.observe_histogram(OPERATION_SECONDS, time.perf_counter() - began, labels)

        return measured if trackers else call

    def _mark_owner(self, op: Operation, arguments: dict[str, Any], key: bytes) -> None:
        """Give the slot of a claim a name of the caller's token, so that nobody is given what is another caller's.

        Such a name begins with what stands for the token, by which a runner's token finds what was claimed with it.
        """
        if arguments.get("claim_id") is not None:
            slot, counter = slot_of(arguments["claim_id"])
            named = hashlib.blake2b(slot.encode(), key=key, digest_size=16).hexdigest()
            arguments["claim_id"] = f"{_owner_of(key)}-{named}:{counter}"
        if op.name == "mark_worker_lost" and self.scope.kind != "admin":
            arguments["claimed_with"] = f"{_owner_of(key)}-"


def _owner_of(key: bytes) -> str:
    return hashlib.blake2b(key=key, digest_size=8).hexdigest()


def _check_id(name: str, value: object) -> None:
    """Refuse ids that would cost more to keep than what they name."""
    if isinstance(value, str) and len(value) > MOST_ID_CHARACTERS:
        raise InvalidValue(f"'{name}' has {len(value)} characters; ids have up to {MOST_ID_CHARACTERS}.")
