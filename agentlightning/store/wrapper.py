"""StoreWrapper: a store that hands everything to another; a wrapper derives from it and changes one thing."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.operations import Operation, forward_operations
from agentlightning.types import Notice, NoticeKind, Span
from agentlightning.types.lifecycle import ComponentProperty

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


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
