"""LightningStoreClient: a store on another process or machine, used like one that is here.

Its methods are derived from the contract. The client makes the ids of what a call creates or is given, so that the call
can be sent again when the answer was lost, and acts once. What waits neither polls nor ends early: it waits on the
server, over the live channel, and goes on by itself after an outage.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import aiohttp

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import (
    ConfigurationError,
    PayloadTooLarge,
    RequestConflict,
    StoreUnavailable,
)
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.http.codec import codec_of
from agentlightning.store.http.connection import Address, ClientConnection, RemoteSubscription, Transport
from agentlightning.store.http.failures import given_up, has_waited, is_outage, is_passing
from agentlightning.store.notices import checked_kinds
from agentlightning.store.operations import ALL_ITEMS, Operation, forward_operations, operations_of
from agentlightning.types import (
    AttemptedRollout,
    NamedResources,
    Notice,
    NoticeKind,
    ResourcesUpdate,
    Rollout,
)
from agentlightning.utils import id as ids
from agentlightning.utils.once import fork_handlers
from agentlightning.utils.retries import RetryPolicy, retry

__all__ = ["LightningStoreClient"]

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_NEW_IDS: dict[str, Callable[[], Any]] = {
    "rollout_id": ids.rollout_id,
    "attempt_id": ids.attempt_id,
    "resources_id": ids.resources_id,
    "run_id": ids.run_id,
    "time": time.time,
}
"""How the ids of what a call creates are made; those of claims are a connection's."""
LONGEST_WAIT_SECONDS = 1e9
"""Thirty years, which JSON can hold, unlike infinity."""
DEFAULT_RETRY_DELAYS = (1.0, 2.0, 5.0)
DEFAULT_HEALTH_RETRY_DELAYS = (0.1, 0.2, 0.5)
DEFAULT_OUTAGE_SECONDS = 60.0
DEFAULT_REQUEST_TIMEOUT = 30.0
DEFAULT_CONNECTION_TIMEOUT = 5.0


def _remote_method(op: Operation) -> Callable[..., object]:
    async def method(self: "LightningStoreClient", *args: object, **kwargs: object) -> object:
        return await self._send(op, op.name_arguments(args, kwargs))

    return method


@forward_operations(_remote_method)
class LightningStoreClient(LightningStore):
    """A store behind a `LightningStoreServer`.

    In an outage `dequeue_rollout` answers None, and `claim_rollouts` raises `StoreUnavailable`, both when the time to
    wait is over, or else at once.
    """

    def __init__(
        self,
        server_address: str,
        *,
        retry_delays: Sequence[float] = DEFAULT_RETRY_DELAYS,
        health_retry_delays: Sequence[float] = DEFAULT_HEALTH_RETRY_DELAYS,
        request_timeout: float = DEFAULT_REQUEST_TIMEOUT,
        connection_timeout: float = DEFAULT_CONNECTION_TIMEOUT,
        outage_seconds: float | None = None,
        token: str | None = None,
        transport: Transport = "auto",
    ) -> None:
        """Name the server; nothing is connected yet.

        Args:
            server_address: For example `http://127.0.0.1:4747`.
            retry_delays: Seconds between attempts at a request that failed in passing.
            health_retry_delays: Seconds between looks at whether the server is back.
            request_timeout: Seconds after which an answer counts as lost; what waits may take longer.
            connection_timeout: Seconds for connecting.
            outage_seconds: How long an unreachable server is waited for; a minute, unless delays are given, which
                then are all the patience there is.
            token: Sent with everything; by default the environment's `AGL_STORE_TOKEN`.
            transport: "auto" opens a WebSocket, and uses plain HTTP where that is refused; "http" never opens one, and
                "ws" fails where it is refused.
        """
        if not server_address.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"server_address is '{server_address}'; it must begin with http:// or https://, "
                "for example http://127.0.0.1:4747."
            )
        if transport not in ("auto", "http", "ws"):
            raise ConfigurationError(f"transport is '{transport}'; it must be 'auto', 'http' or 'ws'.")
        delays = tuple(retry_delays), tuple(health_retry_delays)
        if outage_seconds is None:
            has_default_delays = delays == (DEFAULT_RETRY_DELAYS, DEFAULT_HEALTH_RETRY_DELAYS)
            outage_seconds = DEFAULT_OUTAGE_SECONDS if has_default_delays else 0.0
        self.server_address = server_address.rstrip("/")
        token = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, token) or None
        self._address = Address(self.server_address, token, request_timeout, connection_timeout, transport, delays[1])
        self._policy = RetryPolicy(
            delays=delays[0], outage_seconds=outage_seconds, is_passing=is_passing, is_outage=is_outage
        )
        self._set_up()

    def _set_up(self) -> None:
        self._connections: dict[asyncio.AbstractEventLoop, ClientConnection] = {}
        self._guard = threading.Lock()  # protects `_connections`, which several threads' loops look into
        self._has_warned = False  # of an outage
        self._is_closed = False  # what `state` shows
        self._left_behind: list[ClientConnection] = []  # a parent process's, which this one must not touch
        fork_handlers().add(self, _leave_behind)

    def __repr__(self) -> str:
        return f"LightningStoreClient('{self.server_address}')"

    def __getstate__(self) -> tuple[Address, RetryPolicy]:
        return self._address, self._policy

    def __setstate__(self, state: tuple[Address, RetryPolicy]) -> None:
        self._address, self._policy = state
        self.server_address = self._address.url
        self._set_up()

    # ------------------------------------------------------------------ the store itself

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": True}

    def otlp_traces_endpoint(self) -> str:
        return f"{self.server_address}/v1/traces"

    async def __aenter__(self) -> "LightningStoreClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of every loop; those of other threads as far as their loops still run.

        A later call opens new ones, and the client is open again.
        """
        here = asyncio.get_running_loop()
        with self._guard:
            connections, self._connections, self._is_closed = list(self._connections.values()), {}, True
        for connection in connections:
            if connection.loop is here:
                await connection.close()
            elif connection.loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(connection.close(), connection.loop)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.wrap_future(closing), self._address.connection_timeout)
            elif connection.session.connector is not None:
                with suppress(RuntimeError):  # its loop is closed, so nothing can be done there
                    connection.session.connector._close()

    def _connection(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is not None:
            return connection
        with self._guard:
            self._connections = {known: old for known, old in self._connections.items() if not known.is_closed()}
            connection = self._connections[loop] = ClientConnection(self._address)
            self._is_closed = False
            return connection

    # ------------------------------------------------------------------ calls

    async def _send(self, op: Operation, arguments: dict[str, Any]) -> Any:
        """Have the server perform an operation, however often that must be asked; with the same ids each time."""
        if op.is_claim:
            return await self._claim(op, arguments)
        connection, codec = self._connection(), codec_of(op.name)
        if "limit" in op.hints and not op.mutates:
            arguments.setdefault("limit", ALL_ITEMS)
        arguments.update({name: _NEW_IDS[name]() for name in op.ids if arguments.get(name) is None})
        if op.many == "rollouts":
            arguments["rollouts"] = [
                each if each.rollout_id is not None else each.model_copy(update={"rollout_id": ids.rollout_id()})
                for each in arguments["rollouts"]
            ]
        try:
            return await self._persist(connection, lambda: connection.call(codec, arguments))
        except PayloadTooLarge:
            items = arguments.get(op.many or "", ())
            if len(items) < 2:  # there is nothing to split
                raise
            middle = len(items) // 2
            halves = [
                await self._send(op, {**arguments, str(op.many): part}) for part in (items[:middle], items[middle:])
            ]
            return [*halves[0], *halves[1]]

    async def update_resources(
        self, resources_id: str, resources: NamedResources, *, merge: bool = False, version: int | None = None
    ) -> ResourcesUpdate:
        op = operations_of(LightningStore)["update_resources"]
        given: dict[str, Any] = {"resources_id": resources_id, "resources": resources, "merge": merge}
        while True:
            number = version
            if number is None:
                latest = await self.get_resources_by_id(resources_id)
                number = 1 if latest is None else latest.version + 1
            try:
                update: ResourcesUpdate = await self._send(op, {**given, "version": number})
                return update
            except RequestConflict:
                if version is not None:  # else another caller was faster, and the next number is taken
                    raise

    async def wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[AttemptedRollout | Rollout]:
        connection, codec = self._connection(), codec_of("wait_for_rollouts")
        arguments: dict[str, Any] = {"rollout_ids": list(rollout_ids)}
        seconds = LONGEST_WAIT_SECONDS if timeout is None else min(timeout, LONGEST_WAIT_SECONDS)
        deadline = time.monotonic() + seconds
        finished: list[AttemptedRollout | Rollout] = await self._persist(
            connection,
            lambda: connection.call_patiently(codec, arguments, "timeout", deadline),
            replace(self._policy, has_begun=has_waited),
        )
        return finished

    def subscribe(
        self, kinds: Iterable[NoticeKind] | None = None, *, after: int | None = None
    ) -> AsyncIterator[Notice]:
        connection = self._connection()
        return RemoteSubscription(connection, partial(self._persist, connection), sorted(checked_kinds(kinds)), after)

    async def _claim(self, op: Operation, arguments: dict[str, Any]) -> Any:
        """Claim, and wait for work; what is sent again has the same id, and gets the same rollouts.

        `dequeue_rollout` and `claim_rollouts` have no more patience in an outage than the time to wait.
        """
        connection, codec, policy = self._connection(), codec_of(op.name), self._policy
        wait = min(arguments.get("wait") or 0.0, LONGEST_WAIT_SECONDS)
        deadline = time.monotonic() + wait
        if op.name in ("dequeue_rollout", "claim_rollouts"):
            outage_seconds = min(wait, policy.outage_seconds)
            policy = replace(policy, outage_seconds=outage_seconds, delays=policy.delays if wait > 0 else ())
        try:
            with connection.claim_slot() as claim_ids:
                if arguments.get("claim_id") is None:
                    arguments["claim_id"] = next(claim_ids)
                if wait <= 0:
                    claimed = await self._persist(connection, lambda: connection.call(codec, arguments), policy)
                else:
                    claimed = await self._persist(
                        connection,
                        lambda: connection.call_patiently(codec, arguments, "wait", deadline, claim_ids),
                        replace(policy, has_begun=has_waited),
                    )
        except Exception as error:
            if op.name == "dequeue_rollout" and is_passing(error):
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "The store %s gives no work: %s: %s", self.server_address, type(error).__name__, error
                    )
                return None
            if op.name == "claim_rollouts" and is_passing(error) and isinstance(error, aiohttp.ClientResponseError):
                message = f"The store gives no work now (status {error.status}); ask again later."
                raise StoreUnavailable(message) from error
            raise
        self._has_warned = False
        return claimed

    async def _persist(
        self,
        connection: ClientConnection,
        call: Callable[[], Awaitable[ResultT]],
        policy: RetryPolicy | None = None,
    ) -> ResultT:
        """Call as often as the policy says, each further time once the server answers its health check."""
        try:
            return await retry(call, policy or self._policy, recovers=connection.recovers)
        except Exception as error:
            if not is_passing(error):
                raise
            raise given_up(error) from error


def _leave_behind(client: LightningStoreClient) -> None:
    """In a forked child: the connections are the parent's, whose loops do not run here."""
    client._guard = threading.Lock()
    client._left_behind += client._connections.values()
    client._connections = {}
