"""LightningStoreClient: a store on another process or machine, used like one that is here.

Its methods are derived from the contract. Every call that changes something carries a request id, so that it can be
sent again when the answer was lost, and acts once. What waits neither polls nor ends early: it waits on the server,
over the live channel, and goes on by itself after an outage.
"""

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import AgentLightningError, ConfigurationError, InvalidQuery, StoreUnavailable
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.claims import Claim, ResourcesVersion
from agentlightning.store.http.codec import codec_of
from agentlightning.store.http.following import follow
from agentlightning.store.http.link import Address, Link, Transport
from agentlightning.store.http.retries import (
    DEFAULT_HEALTH_RETRY_DELAYS,
    DEFAULT_OUTAGE_SECONDS,
    DEFAULT_RETRY_DELAYS,
    RetryPolicy,
    is_passing,
)
from agentlightning.store.operations import Operation, forward_operations, operations_of
from agentlightning.types import NOTICE_KINDS, AttemptedRollout, Notice, NoticeKind, Rollout
from agentlightning.utils.once import fork_handlers

__all__ = ["LightningStoreClient"]

logger = logging.getLogger(__name__)

POLLS = ("dequeue_rollout", "dequeue_many_rollouts", "claim_rollouts")
"""Operations that ask for work and nothing else."""
FINISH_AND_CLAIM = "finish_and_claim"
LEFT_CLAIMS = (FINISH_AND_CLAIM, None)
"""Where ids of unanswered requests are kept whose claims are given back, because they cannot be asked for again."""
ONE_ATTEMPT = RetryPolicy((), (), 0.0)
LONG_POLL_SECONDS = 20.0
"""How long one request waits where there is no live channel."""
LONGEST_WAIT_SECONDS = 1e9
"""Thirty years, which JSON can hold, unlike infinity."""
DEFAULT_REQUEST_TIMEOUT = 30.0
DEFAULT_CONNECTION_TIMEOUT = 5.0


def _remote_method(op: Operation) -> Callable[..., Any]:
    async def method(self: "LightningStoreClient", *args: Any, **kwargs: Any) -> Any:
        return await self._send(op, op.name_arguments(args, kwargs))

    return method


@forward_operations(_remote_method)
class LightningStoreClient(LightningStore):
    """A store behind a `LightningStoreServer`."""

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
            transport: "auto" opens a WebSocket when it is worth it, "http" never does, "ws" always.
        """
        if not server_address.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"server_address is '{server_address}'; it must begin with http:// or https://, "
                "for example http://127.0.0.1:4747."
            )
        if transport not in ("auto", "http", "ws"):
            raise ConfigurationError(f"transport is '{transport}'; it must be 'auto', 'http' or 'ws'.")
        has_own_delays = (tuple(retry_delays), tuple(health_retry_delays)) != (
            DEFAULT_RETRY_DELAYS,
            DEFAULT_HEALTH_RETRY_DELAYS,
        )
        if outage_seconds is None:
            outage_seconds = 0.0 if has_own_delays else DEFAULT_OUTAGE_SECONDS
        self.server_address = server_address.rstrip("/")
        self._address = Address(
            self.server_address,
            resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, token) or None,
            request_timeout,
            connection_timeout,
            transport,
        )
        self._policy = RetryPolicy(tuple(retry_delays), tuple(health_retry_delays), outage_seconds)
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        self._guard = threading.Lock()  # protects `_links`, which several threads' loops look into
        self._unanswered: defaultdict[tuple[Any, ...], deque[str]] = defaultdict(deque)
        self._is_told_of_outage = False
        self._background: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._left_behind: list[Link] = []  # a parent process's, which this one must not touch
        fork_handlers().add(self, _leave_behind)

    def __repr__(self) -> str:
        return f"LightningStoreClient('{self.server_address}')"

    def __getstate__(self) -> tuple[Address, RetryPolicy]:
        return self._address, self._policy

    def __setstate__(self, state: tuple[Address, RetryPolicy]) -> None:
        address, policy = state
        LightningStoreClient.__init__(
            self,
            address.url,
            retry_delays=policy.retry_delays,
            health_retry_delays=policy.health_retry_delays,
            request_timeout=address.request_timeout,
            connection_timeout=address.connection_timeout,
            outage_seconds=policy.outage_seconds,
            token=address.token,
            transport=address.transport,
        )

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
        for keys in self._unanswered.values():
            while keys:  # claims whose answers were lost, and that nobody will ask for again
                self._in_background(self._abandon(self._link(), keys.popleft()))
        if own := [task for task in self._background if task.get_loop() is here]:
            await asyncio.wait(own, timeout=self._address.connection_timeout)
        with self._guard:
            links, self._links = list(self._links.values()), {}
            self._is_closed = True
        for link in links:
            if link.loop is here:
                await link.close()
            elif link.loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(link.close(), link.loop)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.wrap_future(closing), self._address.connection_timeout)
            elif link.session.connector is not None:
                with suppress(RuntimeError):  # its loop is closed, so nothing can be done there
                    link.session.connector._close()

    def _link(self) -> Link:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is not None:
            return link
        with self._guard:
            link = self._links.get(loop)
            if link is None:
                self._links = {known: old for known, old in self._links.items() if not known.is_closed()}
                link = self._links[loop] = Link(self._address)
                self._is_closed = False
            return link

    # ------------------------------------------------------------------ calls

    async def perform(self, name: str, arguments: Mapping[str, Any], *, request_id: str | None = None) -> Any:
        op = operations_of(LightningStore).get(name)
        if op is None:
            raise InvalidQuery(f"There is no store operation '{name}'.")
        if name == "wait_for_rollouts":
            return await self.wait_for_rollouts(**arguments)
        return await self._send(op, dict(arguments), request_id=request_id)

    async def _send(self, op: Operation, arguments: dict[str, Any], *, request_id: str | None = None) -> Any:
        """Have the server perform an operation, however often that must be asked."""
        link, codec = self._link(), codec_of(op.name)
        if not op.mutates:
            return await self._policy.persist(lambda: link.call(codec, arguments, key=None), link.is_healthy)
        if op.name in POLLS:
            return await self._claim(link, op, arguments, self._policy, request_id)
        key = request_id or link.new_request_id()
        try:
            result = await self._policy.persist(lambda: link.call(codec, arguments, key=key), link.is_healthy)
        except (Exception, asyncio.CancelledError) as error:
            if op.name == FINISH_AND_CLAIM and request_id is None:
                self._leave_claim(link, key, error)
            raise
        if request_id is None:
            self._settle(link, key)
        return result

    async def _claim(
        self, link: Link, op: Operation, arguments: dict[str, Any], policy: RetryPolicy, request_id: str | None
    ) -> Any:
        """Ask for work, and wait for it; a caller who is cancelled gives back what was on its way to him.

        Every poll has an id of its own, because one that found nothing must find nothing again. An id whose answer
        never came is asked for by the next call of the same kind, before it asks for more.
        """
        wait = min(arguments.get("wait") or 0.0, LONGEST_WAIT_SECONDS)
        codec, deadline = codec_of(op.name), time.monotonic() + wait
        unanswered = self._unanswered[op.name, arguments.get("worker_id")]
        polls = _Polls(link, request_id, unanswered)

        async def attempt() -> Any:
            while True:
                left = max(deadline - time.monotonic(), 0.0)
                has_live = await link.live(wanted=left > 0.0) is not None
                patience = left if has_live else min(left, LONG_POLL_SECONDS)
                given = {**arguments, "wait": patience} if wait else arguments
                result = await link.call(codec, given, key=polls.key, wait=patience)
                if request_id is None:
                    self._settle(link, polls.key)
                if result or (patience == left and not polls.is_of_an_earlier_call):
                    return result
                polls.go_on()

        try:
            result = await policy.persist(attempt, link.is_healthy, waits=True)
            if left := self._unanswered.get(LEFT_CLAIMS):
                self._in_background(self._abandon(link, left.popleft()))
            return result
        except asyncio.CancelledError:
            self._in_background(self._abandon(link, polls.key))
            raise
        except Exception as error:
            if is_passing(error) and request_id is None:
                unanswered.append(polls.key)
            raise

    def _leave_claim(self, link: Link, key: str, error: BaseException) -> None:
        """Have taken back what a request may have claimed besides what it did: now, or when the server is back."""
        if isinstance(error, asyncio.CancelledError):
            self._in_background(self._abandon(link, key))
        elif is_passing(error):
            self._unanswered[LEFT_CLAIMS].append(key)

    async def _abandon(self, link: Link, key: str) -> None:
        """Have the server take back what a request may have claimed."""
        codec, arguments = codec_of("abandon_request"), {"request_id": key}
        await self._policy.persist(lambda: link.call(codec, arguments, key=None), link.is_healthy)

    async def dequeue_rollout(
        self, worker_id: str | None = None, *, wait: float | None = None
    ) -> AttemptedRollout | None:
        """As in the contract, but in an outage the answer is None; what got lost then comes with the next call."""
        op = operations_of(LightningStore)["dequeue_rollout"]
        arguments: dict[str, Any] = {"worker_id": worker_id} | ({"wait": wait} if wait is not None else {})
        policy = self._policy.within(wait) if wait is not None and wait > 0 else ONE_ATTEMPT
        try:
            claim: AttemptedRollout | None = await self._claim(self._link(), op, arguments, policy, None)
        except Exception as error:
            if not is_passing(error):
                raise
            self._tell_of_outage(error)
            return None
        self._is_told_of_outage = False
        return claim

    async def claim_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        wait: float | None = None,
        known_resources: Sequence[ResourcesVersion] = (),
    ) -> Sequence[Claim]:
        """As in the contract; in an outage it gives up when the time to wait is over, or else at once."""
        op = operations_of(LightningStore)["claim_rollouts"]
        arguments: dict[str, Any] = {"limit": limit, "worker_id": worker_id, "known_resources": known_resources}
        policy = self._policy.within(wait) if wait is not None and wait > 0 else ONE_ATTEMPT
        arguments |= {"wait": wait} if wait is not None else {}
        try:
            claims: Sequence[Claim] = await self._claim(self._link(), op, arguments, policy, None)
        except aiohttp.ClientResponseError as error:
            if not is_passing(error):
                raise
            raise StoreUnavailable(f"The store gives no work now (status {error.status}); ask again later.") from error
        return claims

    def _tell_of_outage(self, error: Exception) -> None:
        if not self._is_told_of_outage:
            self._is_told_of_outage = True
            logger.warning("The store %s gives no work: %s: %s", self.server_address, type(error).__name__, error)

    async def wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[AttemptedRollout | Rollout]:
        link, codec = self._link(), codec_of("wait_for_rollouts")
        deadline = math.inf if timeout is None else time.monotonic() + timeout

        async def attempt() -> list[AttemptedRollout | Rollout]:
            while True:
                left = max(deadline - time.monotonic(), 0.0)
                has_live = await link.live(wanted=left > 0.0) is not None
                patience = left if has_live else min(left, LONG_POLL_SECONDS)
                wait = None if math.isinf(patience) else patience
                began = time.monotonic()
                finished: list[AttemptedRollout | Rollout] = await link.call(
                    codec, {"rollout_ids": list(rollout_ids), "timeout": wait}, key=None, wait=wait
                )
                if patience == left or time.monotonic() - began < patience:
                    return finished  # an answer before its time means that all are finished

        return await self._policy.persist(attempt, link.is_healthy, waits=True)

    # ------------------------------------------------------------------ changes

    def subscribe(
        self, kinds: Iterable[NoticeKind] | None = None, *, after: int | None = None
    ) -> AsyncIterator[Notice]:
        wanted = list(NOTICE_KINDS if kinds is None else kinds)
        unknown = set(wanted).difference(NOTICE_KINDS)
        if unknown:
            raise InvalidQuery(f"There are no notices of kind {sorted(unknown)}; use some of {list(NOTICE_KINDS)}.")
        return follow(self._link(), self._policy, wanted, after)

    # ------------------------------------------------------------------ beside the calls

    def _settle(self, link: Link, key: str) -> None:
        """A request was answered; from time to time the server may forget the old ones."""
        if old := link.settle(key):
            self._in_background(self._forget(link, old))

    async def _forget(self, link: Link, request_ids: Sequence[str]) -> None:
        await link.call(codec_of("forget_requests"), {"request_ids": request_ids}, key=None)

    def _in_background(self, doing: Any) -> None:
        """Do something nobody waits for; if it fails, the server's own time limits do the same later."""

        async def quietly() -> None:
            try:
                await doing
            except (AgentLightningError, aiohttp.ClientError, ConnectionError, asyncio.TimeoutError) as error:
                logger.debug("A request in the background failed: %r", error)

        task = asyncio.create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _Polls:
    """The request ids of one call that may ask several times."""

    def __init__(self, link: Link, request_id: str | None, unanswered: "deque[str]") -> None:
        self._link = link
        self._request_id = request_id
        self._count = 1
        self.is_of_an_earlier_call = request_id is None and bool(unanswered)
        self.key = request_id or (unanswered.popleft() if unanswered else link.new_request_id())

    def go_on(self) -> None:
        """Ask once more; the ids of a call that has one itself follow from it, so that it can be repeated whole."""
        self.is_of_an_earlier_call = False
        self.key = self._link.new_request_id() if self._request_id is None else f"{self._request_id}/{self._count}"
        self._count += 1


def _leave_behind(client: LightningStoreClient) -> None:
    """In a forked child: the connections are the parent's, whose loops do not run here."""
    client._guard = threading.Lock()
    client._left_behind += client._links.values()
    client._links, client._background = {}, set()
