"""Foreign stores: one that knows a part of the contract, such as a store written for release 0.2 or 0.3, made whole.

`adapted(store)` returns a store that answers every operation of `LightningStore`. A store that has them all is returned
as it is. Any other is wrapped: operations that it lacks are made of those that it has, arguments that it does not know
are applied here, and workers, runs and metrics that it cannot keep are kept in this process. An operation made of
several is not one step, as it is in a store of this package.

The stores of this package recognise a repeated call by the ids that its caller made. Where a store does not know them,
the answer is remembered here: enough for a lost answer, not for a restart.

Trainer, runner, servers and tracers adapt a store where they receive it; nothing else asks what a store can do.
"""

import asyncio
import functools
import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore, LightningStoreCapabilities, LightningStoreStatistics
from agentlightning.store.claims import Claim, ResourcesVersion, claim_with
from agentlightning.store.lifecycle import WORKING_STATUSES, loss_of
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.operations import Operation, forward_operations, operations_of
from agentlightning.store.rollout_index import ROLLOUT_FIELDS, index_reader
from agentlightning.store.selection import PAGING, Selection, choose
from agentlightning.store.wrapper import StoreWrapper
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    Run,
    Span,
    Worker,
)
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import CrossLoopLock

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["ForeignStore", "adapted", "end_attempts_of"]

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.1
"""How often a queue is asked for work by a caller who waits, of a store that does not wait itself."""
GRANT_SECONDS: Final = 600.0
MOST_CALLS: Final = 10_000
"""Of which the answers are remembered; as many spans are known by their ids."""
_BY_KEYWORD: Final = frozenset(
    ["dequeue_rollout", "query_rollouts", "update_attempt", "update_rollout", "wait_for_rollouts"]
)
"""Operations whose arguments were keyword-only in release 0.2; it took those of the others by position."""
_CLAIMING: Final = ("dequeue_rollout", "dequeue_many_rollouts", "get_latest_resources", "get_resources_by_id")
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "dequeue_many_rollouts": ("dequeue_rollout",),
    "claim_rollouts": _CLAIMING,
    "finish_attempt": ("update_attempt",),
    "finish_and_claim": (*_CLAIMING, "claim_rollouts", "finish_attempt", "update_attempt", "add_many_spans"),
}
"""What an operation does the work of: a subclass that changes a part, and not the whole, wants the part called."""
_KEPT_HERE: Final = (
    *("query_workers", "get_worker_by_id", "update_worker", "start_run", "finish_run", "get_run_by_id", "query_runs"),
    *("add_metrics", "query_metrics"),
)
_IDENTIFYING: Final = ("worker_id", "rollout_id", "run_id", "step", "values")
"""Arguments that two calls with the same ids have in common if one is a copy of the other."""
_OLDER_NAMES: Final = {"status": "status_in", "rollout_ids": "rollout_id_in"}
_RECORDS: Final[Mapping[str, type[BaseModel]]] = {
    "query_attempts": Attempt,
    "query_resources": ResourcesUpdate,
    "query_rollouts": Rollout,
    "query_runs": Run,
    "query_spans": Span,
    "query_workers": Worker,
}


def adapted(store: LightningStore) -> LightningStore:
    """The store with the whole contract: itself if it has it, else in a `ForeignStore`."""
    kind: object = type(store)  # mypy: type[T] is not known to be hashable
    return store if _is_whole(kind) else ForeignStore(store)


@functools.cache
def _is_whole(kind: type) -> bool:
    """Whether a store class has every operation with all its arguments."""
    return all(
        _has(kind, name) and _knows(getattr(kind, name), op.signature.parameters)
        for name, op in operations_of(LightningStore).items()
    )


def _has(kind: type, name: str) -> bool:
    """Whether a store class implements an operation, and changes no part of it alone."""
    owners = [_owner(kind, part) for part in (name, *_PARTS.get(name, ()))]
    is_declared_only = getattr(kind, name, None) in (None, getattr(LightningStore, name))
    return not is_declared_only and all(issubclass(owners[0], owner) for owner in owners)


def _owner(kind: type, name: str) -> type:
    """The class that a method comes from; the contract itself for one that is missing."""
    return next((owner for owner in kind.__mro__ if name in vars(owner)), LightningStore)


def _knows(method: object, names: Iterable[str]) -> bool:
    known = _parameters_of(getattr(method, "__func__", method))
    return known is None or known.issuperset(names)


@functools.cache
def _parameters_of(function: Any) -> frozenset[str] | None:
    """Names of the parameters; None if it takes any."""
    parameters = inspect.signature(function).parameters
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if is_open else frozenset(parameters)


@dataclass
class _Call:
    time: float
    task: "asyncio.Task[Any]"
    waiters: int = 0


def _derived_method(op: Operation) -> Callable[..., object]:
    async def method(self: "ForeignStore", *args: object, **kwargs: object) -> object:
        return await self._answer(op, op.name_arguments(args, kwargs))

    return method


@forward_operations(_derived_method)
class ForeignStore(StoreWrapper):
    """A store with the parts of the contract that it lacks; safe for threads, whether it is or not."""

    def __init__(self, store: LightningStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = self._target = store
        self._clock = clock
        self._kept = InMemoryLightningStore()
        is_safe = bool(self._declared_capabilities.get("thread_safe"))
        self._lock: AbstractAsyncContextManager[None] = nullcontext() if is_safe else CrossLoopLock()
        self._calls: OrderedDict[tuple[object, ...], _Call] = OrderedDict()
        """By their ids, while they run and for ten minutes after, the oldest first."""
        self._span_ids: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    @property
    def _declared_capabilities(self) -> LightningStoreCapabilities:
        return getattr(self.store, "capabilities", None) or LightningStoreCapabilities()

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {**self._declared_capabilities, "thread_safe": True, "async_safe": True}

    # ------------------------------------------------------------------ calling the store

    async def _answer(self, op: Operation, given: dict[str, object]) -> object:
        """Have the store do it, as far as it can; once for all calls with the same ids."""
        defaults = op.signature.parameters
        given = {name: value for name, value in given.items() if value is not defaults[name].default}
        if op.name in _KEPT_HERE and not _has(type(self.store), op.name):
            return await self._kept.perform(op.name, given)
        key = _identity(op, given)
        given = {name: value for name, value in given.items() if name not in op.ids or self.can(op.name, name)}
        if key is None or self._recognises_repeats(op):
            return await self._act(op, given)
        calls, oldest = self._calls, self._clock() - GRANT_SECONDS
        while calls and (len(calls) > MOST_CALLS or next(iter(calls.values())).time < oldest):
            calls.popitem(last=False)
        if key not in self._calls:
            self._calls[key] = _Call(self._clock(), asyncio.create_task(self._act_once(key, op, given)))
        call = self._calls[key]
        call.waiters += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiters -= 1
            if call.waiters == 0 and not call.task.done():
                call.task.cancel()

    async def _act_once(self, key: tuple[object, ...], op: Operation, given: dict[str, object]) -> object:
        """Act for a call and its copies; where nothing was given out or created, the next one tries again."""
        result: object = None
        try:
            result = await self._act(op, given)
            return result
        finally:
            if result is None or result == []:
                self._calls.pop(key, None)

    async def _act(self, op: Operation, given: dict[str, Any]) -> object:
        if op.name == "add_span":
            return await self._add_span(given["span"])
        if op.name in _COMPOSED and not self.can(op.name, *given):
            return await _COMPOSED[op.name](self, **given)
        return await (self._query(op, given) if op.name in _RECORDS else self.call(op.name, given))

    async def _add_span(self, span: Span) -> Span | None:
        """Drop a span id that was added here before: stores of earlier releases keep it again."""
        ids = (span.rollout_id, span.attempt_id, span.span_id)
        if ids in self._span_ids:
            return None
        added: Span | None = await self.call("add_span", {"span": span})
        self._span_ids[ids] = None
        if len(self._span_ids) > MOST_CALLS:
            self._span_ids.popitem(last=False)
        return added

    async def call(self, name: str, given: Mapping[str, object]) -> Any:
        """Call the store's own method with the arguments that it knows."""
        method = getattr(self.store, name, None)
        if method is None:
            raise NotImplementedError(f"{type(self.store).__name__} has no operation '{name}'.")
        known = _parameters_of(getattr(method, "__func__", method))
        named = {key: value for key, value in given.items() if known is None or key in known}
        positional: list[object] = []
        for parameter in operations_of(LightningStore)[name].signature.parameters.values():
            is_unknown = known is not None and parameter.name not in known
            is_keyword = parameter.kind is parameter.KEYWORD_ONLY or parameter.name == "worker_id"  # which 0.2 lacks
            if is_unknown or is_keyword or name in _BY_KEYWORD:
                break
            positional.append(named.pop(parameter.name, parameter.default))
        is_waiting = name == "wait_for_rollouts" or named.get("wait") is not None
        async with nullcontext() if is_waiting else self._lock:
            return await method(*positional, **named)

    def can(self, name: str, *arguments: str) -> bool:
        """Whether the store has the operation, with these arguments."""
        return _has(type(self.store), name) and _knows(getattr(self.store, name), arguments)

    def _recognises_repeats(self, op: Operation) -> bool:
        """Whether the store names the ids of the operation; one that takes any argument may not look at them."""
        if not op.ids or not self.can(op.name, *op.ids):
            return False
        return _parameters_of(getattr(type(self.store), op.name)) is not None

    async def _query(self, op: Operation, given: dict[str, object]) -> PaginatedResult[object]:
        """Select here what the store does not select itself; a list that it answers becomes a page."""
        if _knows(getattr(self.store, op.name), given):
            found = await self.call(op.name, given)
            return found if isinstance(found, PaginatedResult) else choose(found, Selection())
        ids = [name for name in ("rollout_id", "attempt_id") if name in given]
        found = await self.call(op.name, {name: given.pop(name) for name in ids})
        paging = {p.name: p.default for p in op.signature.parameters.values() if p.name in PAGING}
        asked = {_OLDER_NAMES.get(name, name): value for name, value in given.items()}
        if op.name == "query_rollouts":
            return choose(found, Selection.of({**paging, **asked}, ROLLOUT_FIELDS), _reader)
        return choose(found, Selection.of({**paging, **asked}, _RECORDS[op.name].model_fields))

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: "ReadableSpan", sequence_id: int | None = None
    ) -> Span | None:
        async with self._lock:
            return await super().add_otel_span(rollout_id, attempt_id, readable_span, sequence_id)


def _reader(field: str, _asked: object) -> Callable[[Rollout], object]:
    return index_reader(
        field,
        lambda rollout: rollout,
        lambda rollout: rollout.attempt if isinstance(rollout, AttemptedRollout) else None,
    )


def _identity(op: Operation, given: Mapping[str, Any]) -> tuple[object, ...] | None:
    """What a copy of a call is recognised by; None if its caller has made no ids."""
    ids = [given.get(name) for name in op.ids]
    if op.many == "rollouts":
        ids = [rollout.rollout_id for rollout in given["rollouts"]]
    if not ids or None in ids:
        return None
    return (op.name, *ids, *(str(given.get(name)) for name in _IDENTIFYING))


# ---------------------------------------------------------------------- operations made of others


async def _statistics(store: ForeignStore) -> LightningStoreStatistics:
    return {}


async def _enqueue_many(store: ForeignStore, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
    requests = [{name: getattr(rollout, name) for name in rollout.model_fields_set} for rollout in rollouts]
    return [await store.enqueue_rollout(**request) for request in requests]


async def _dequeue(store: ForeignStore, worker_id: str | None = None, wait: float = 0.0) -> AttemptedRollout | None:
    """Name the worker on the attempt, and wait, where the store does not; a claim that it refuses is left out."""
    deadline = time.monotonic() + wait
    given = {} if worker_id is None else {"worker_id": worker_id}
    while (rollout := await store.call("dequeue_rollout", given)) is None:
        if time.monotonic() >= deadline:
            return None
        await asyncio.sleep(POLL_SECONDS)
    with log_failures(logger, "Rollout %s could not be claimed and is skipped.", rollout.rollout_id):
        return await _named(store, rollout, worker_id)
    return None


async def _start(name: str, store: ForeignStore, worker_id: str | None = None, **given: object) -> AttemptedRollout:
    return await _named(store, await store.call(name, given), worker_id)


async def _named(store: ForeignStore, rollout: AttemptedRollout, worker_id: str | None) -> AttemptedRollout:
    """The rollout, with the worker's name on its attempt."""
    if worker_id is None or rollout.attempt.worker_id is not None:
        return rollout
    await store.update_worker(worker_id)
    attempt = await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, worker_id=worker_id)
    return rollout.model_copy(update={"attempt": attempt})


async def _dequeue_many(store: ForeignStore, limit: int = 1, **options: Any) -> Sequence[AttemptedRollout]:
    """Wait, if that is asked for, for the first only."""
    claimed: list[AttemptedRollout] = []
    while len(claimed) < limit:
        rollout = await store.dequeue_rollout(**options)
        if rollout is None:
            break
        claimed.append(rollout)
        options.pop("wait", None)
    return claimed


async def _claim(
    store: ForeignStore, known_resources: Sequence[ResourcesVersion] = (), **options: Any
) -> Sequence[Claim]:
    claims = []
    for rollout in await store.dequeue_many_rollouts(**options):
        named = rollout.resources_id
        found = store.get_latest_resources() if named is None else store.get_resources_by_id(named)
        claims.append(claim_with(rollout, await found, known_resources))
    return claims


async def _finish(
    store: ForeignStore,
    rollout_id: str,
    attempt_id: str,
    status: AttemptStatus,
    spans: Sequence[Span] = (),
    **changes: Any,
) -> Attempt:
    """Keep the output in the attempt's metadata, where rollouts have no place for it."""
    if spans:
        numbers = await store.get_many_span_sequence_ids([(rollout_id, attempt_id)] * len(spans))
        numbered = zip(spans, numbers, strict=True)
        await store.add_many_spans([span.model_copy(update={"sequence_id": number}) for span, number in numbered])
    if "output" in changes and store.can("update_rollout", "output"):
        await store.update_rollout(rollout_id, output=changes.pop("output"))
    elif "output" in changes:
        latest = await store.get_latest_attempt(rollout_id)
        before = latest.metadata if latest is not None and latest.attempt_id == attempt_id else None
        changes["metadata"] = {**(changes.get("metadata", before) or {}), "output": changes.pop("output")}
    return await store.update_attempt(rollout_id, attempt_id, status=status, **changes)


async def _finish_and_claim(
    store: ForeignStore,
    worker_id: str | None = None,
    known_resources: Sequence[ResourcesVersion] = (),
    **finished: Any,
) -> Claim | None:
    await store.finish_attempt(**finished)
    return next(iter(await store.claim_rollouts(worker_id=worker_id, known_resources=known_resources)), None)


async def _add_spans(store: ForeignStore, spans: Sequence[Span]) -> Sequence[Span | None]:
    added = []
    for span in spans:
        number = span.sequence_id or await store.get_next_span_sequence_id(span.rollout_id, span.attempt_id)
        added.append(await store.add_span(span.model_copy(update={"sequence_id": number})))
    return added


async def _sequence_ids(store: ForeignStore, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
    return [await store.get_next_span_sequence_id(*ids) for ids in rollout_attempt_ids]


async def _no_open_spans(store: ForeignStore, **_: object) -> Sequence[Span]:
    return []


async def _merge_resources(
    store: ForeignStore, resources_id: str, resources: NamedResources, merge: bool = False, version: int | None = None
) -> ResourcesUpdate:
    """Publish them whole; a store that numbers no versions takes any."""
    before = await store.get_resources_by_id(resources_id) if merge else None
    return await store.update_resources(resources_id, {**({} if before is None else before.resources), **resources})


async def end_attempts_of(store: LightningStore, worker_id: str, reason: str, **_: object) -> Sequence[str]:
    """As `mark_worker_lost`, one attempt after the other; returns the ids of their rollouts."""
    lost = []
    for rollout in await store.query_rollouts(status_in=["preparing", "running"]):
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        if attempt is None or attempt.worker_id != worker_id or attempt.status not in WORKING_STATUSES:
            continue
        metadata = {**(attempt.metadata or {}), "error": loss_of(reason, time.time())}
        with suppress(StoreError):  # it has ended meanwhile
            await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="unresponsive", metadata=metadata)
            lost.append(rollout.rollout_id)
    return lost


_COMPOSED: Final[Mapping[str, Callable[..., Awaitable[Any]]]] = {
    "statistics": _statistics,
    "start_rollout": functools.partial(_start, "start_rollout"),
    "start_attempt": functools.partial(_start, "start_attempt"),
    "enqueue_many_rollouts": _enqueue_many,
    "dequeue_rollout": _dequeue,
    "dequeue_many_rollouts": _dequeue_many,
    "claim_rollouts": _claim,
    "finish_attempt": _finish,
    "finish_and_claim": _finish_and_claim,
    "add_many_spans": _add_spans,
    "get_many_span_sequence_ids": _sequence_ids,
    "add_open_spans": _no_open_spans,
    "query_open_spans": _no_open_spans,
    "update_resources": _merge_resources,
    "mark_worker_lost": end_attempts_of,
}
