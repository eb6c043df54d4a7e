"""Wrappers: stores that hand every operation to another store and add one thing.

`StoreWrapper` hands on everything; a wrapper derives from it and changes one thing. `LightningStoreThreaded` adds
mutual exclusion, `BlockingStore` lets synchronous code call without `await`. Their methods are derived from the
contract; an operation added there is forwarded here without another line.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from agentlightning.errors import StoreUnavailable
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.operations import Operation, forward_operations, operations_of
from agentlightning.types import Notice, NoticeKind, Span
from agentlightning.types.lifecycle import ComponentProperty
from agentlightning.utils.loop_thread import CrossLoopLock, LoopThread, LoopThreadEnded

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["BlockingStore", "LightningStoreThreaded", "StoreWrapper", "innermost"]

ResultT = TypeVar("ResultT")


def innermost(store: LightningStore) -> LightningStore:
    """The store behind its wrappers."""
    while isinstance(inner := getattr(store, "store", None), LightningStore):
        store = inner
    return store


def _forwarded_method(op: Operation) -> Callable[..., object]:
    async def method(self: "StoreWrapper", *args: object, **kwargs: object) -> object:
        forwarded: Callable[..., Awaitable[object]] = getattr(self._target, op.name)
        return await forwarded(*args, **kwargs)

    return method


@forward_operations(_forwarded_method)
class StoreWrapper(LightningStore):
    """Its methods are derived from the contract; an operation added there is forwarded without another line."""

    _target: LightningStore

    @ComponentProperty
    def state(self) -> str:
        """That of the store behind it."""
        return getattr(self._target, "state", "open")

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return self._target.capabilities

    def otlp_traces_endpoint(self) -> str:
        return self._target.otlp_traces_endpoint()

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: "ReadableSpan", sequence_id: int | None = None
    ) -> Span | None:
        return await self._target.add_otel_span(rollout_id, attempt_id, readable_span, sequence_id)

    def subscribe(
        self, kinds: Iterable[NoticeKind] | None = None, *, after: int | None = None
    ) -> AsyncIterator[Notice]:
        return self._target.subscribe(kinds, after=after)

    async def close(self) -> None:
        await self._target.close()


def _locked_method(op: Operation) -> Callable[..., object]:
    async def method(self: "LightningStoreThreaded", *args: object, **kwargs: object) -> object:
        forwarded: Callable[..., Coroutine[object, object, object]] = getattr(self._target, op.name)
        is_waiting = op.may_wait(kwargs) and not (op.is_claim and self._target.polls_for_claims)
        async with self._exclusion(may_wait=is_waiting):
            return await forwarded(*args, **kwargs)

    return method


@forward_operations(_locked_method)
class LightningStoreThreaded(StoreWrapper):
    """Makes any store safe for threads that each run their own event loop; one that already is passes through."""

    def __init__(self, store: LightningStore) -> None:
        self.store = store
        self._target = store
        self._lock = CrossLoopLock()
        self._needs_no_lock = bool(self._target.capabilities.get("thread_safe"))

    def _exclusion(self, *, may_wait: bool = False) -> AbstractAsyncContextManager[None]:
        """The lock, unless the store needs none, or others must be able to act while a call waits."""
        return nullcontext() if self._needs_no_lock or may_wait else self._lock

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {**super().capabilities, "thread_safe": True, "async_safe": True}

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: "ReadableSpan", sequence_id: int | None = None
    ) -> Span | None:
        async with self._exclusion():
            return await super().add_otel_span(rollout_id, attempt_id, readable_span, sequence_id)


class BlockingStore:
    """A store for synchronous code: every method runs to its end and returns its value.

    The methods are those of `LightningStore`, with the same arguments, without `await`; `subscribe` is an ordinary
    iterator. Waiting happens on a loop thread of its own, which `close` ends.
    """

    def __init__(self, store: "LightningStore | BlockingStore") -> None:
        self.store: LightningStore = store.store if isinstance(store, BlockingStore) else store
        self._thread = LoopThread("agl-blocking-store")
        self._is_closed = False

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return self.store.capabilities

    @property
    def state(self) -> str:
        """`closed` after `close`, otherwise that of the store behind it."""
        return "closed" if self._is_closed else self.store.state

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in operations_of(LightningStore) and name not in ("add_otel_span", "perform"):
            raise AttributeError(f"A store has no operation '{name}'.")
        method = getattr(self.store, name)

        def blocking(*args: object, **kwargs: object) -> object:
            return self._run(method(*args, **kwargs))

        blocking.__name__, blocking.__doc__ = name, getattr(LightningStore, name).__doc__
        return blocking

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *operations_of(LightningStore)]

    def subscribe(self, kinds: Iterable[NoticeKind] | None = None, *, after: int | None = None) -> Iterator[Notice]:
        """Changes as they are committed, for ever; the subscription begins with this call."""

        async def begin() -> AsyncIterator[Notice]:
            return self.store.subscribe(kinds, after=after)

        notices = self._run(begin())

        async def next_notice() -> Notice:
            return await notices.__anext__()

        return iter(lambda: self._run(next_notice()), None)

    def _run(self, coroutine: Coroutine[object, object, ResultT]) -> ResultT:
        try:
            return self._thread.run(coroutine)
        except (LoopThreadEnded, CancelledError) as error:
            raise StoreUnavailable("This way to the store was closed; what used it should end.") from error

    def close(self) -> None:
        """End the loop thread for good: later calls raise `StoreUnavailable`. The store behind it stays open."""
        self._is_closed = True
        self._thread.end()
