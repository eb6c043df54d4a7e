"""Operations made of others, for stores that were written against an earlier contract, or change a part of ours.

The contract grows. A subclass that lacks an operation gets one that is made of those that it has; arguments that its
methods do not know are applied here, or left out if they only make a call repeatable. A subclass that overrides a part
of an operation, such as `dequeue_rollout`, and not the whole, such as `claim_rollouts`, has the part called for the
whole. An operation made of several is not one step. Workers, runs and metrics that a store cannot keep are kept
beside it in memory.
"""

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import BaseModel

from agentlightning.errors import StoreError
from agentlightning.store.claims import Claim, ResourcesVersion, claim_with, slot_of
from agentlightning.store.lifecycle import WORKING_STATUSES, loss_of
from agentlightning.store.operations import Operation, operations_of
from agentlightning.store.selection import PAGING, ROLLOUT_FIELDS, Selection, choose, index_reader
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    Span,
)

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

__all__ = ["ComposedOperations"]

POLL_SECONDS: Final = 0.05
"""How long a claim waits at most for a store that does not wait itself; its caller asks again."""
_CLAIMING: Final = ("dequeue_rollout", "dequeue_many_rollouts", "get_latest_resources", "get_resources_by_id")
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "dequeue_many_rollouts": ("dequeue_rollout",),
    "claim_rollouts": _CLAIMING,
    "finish_attempt": ("update_attempt",),
    "finish_and_claim": (*_CLAIMING, "claim_rollouts", "finish_attempt", "update_attempt", "add_many_spans"),
}
"""What an operation does the work of."""
_KEPT_BESIDE: Final = (
    *("query_workers", "get_worker_by_id", "update_worker", "start_run", "finish_run", "get_run_by_id", "query_runs"),
    *("add_metrics", "query_metrics"),
)
_LEFT_OUT: Final = frozenset(["wait", "worker_id", "heartbeat_interval", "known_resources", "request_id"])
"""Arguments without which a call does the same; the first two are made good for."""
_EARLIER_NAMES: Final = {"status": "status_in", "rollout_ids": "rollout_id_in"}
_RECORDS: Final[Mapping[str, type[BaseModel]]] = {
    "query_attempts": Attempt,
    "query_resources": ResourcesUpdate,
    "query_rollouts": Rollout,
    "query_spans": Span,
}


class ComposedOperations:
    """What makes every subclass of the contract answer all of it."""

    polls_for_claims: ClassVar[bool] = False
    """Whether a claim that waits comes back at once, and must not run beside other calls."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        operations = operations_of(cls)  # type: ignore[arg-type] # mypy: type[T] is not known to be hashable
        written = {
            name: method
            for name, method in vars(cls).items()
            if name in operations and not hasattr(method, "__operation__")
        }
        for name, op in operations.items():
            if name in written:
                known = _parameters_of(written[name])
                if known is not None and not known.issuperset(op.signature.parameters):
                    setattr(cls, name, _taking_all(op, written[name], known))
                    cls.polls_for_claims |= name == "dequeue_rollout" and "wait" not in known
            elif name not in vars(cls) and not written.keys().isdisjoint(_PARTS.get(name, ())):
                setattr(cls, name, op.declared)

    async def _compose(self, name: str, *args: object, **kwargs: object) -> object:
        """Answer an operation that the store does not define."""
        if name not in _COMPOSED:
            raise NotImplementedError(f"{type(self).__name__} has no operation '{name}'.")
        op = operations_of(type(self))[name]  # type: ignore[arg-type] # mypy: type[T] is not known to be hashable
        return await _COMPOSED[name](self, **op.name_arguments(args, kwargs))


def _parameters_of(function: Any) -> frozenset[str] | None:
    """Names of the parameters; None if it takes any."""
    parameters = inspect.signature(function).parameters
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if is_open else frozenset(parameters)


def _taking_all(op: Operation, method: Callable[..., Awaitable[Any]], known: frozenset[str]) -> Callable[..., object]:
    """The method, with the arguments of the contract that it does not know."""

    @functools.wraps(op.declared)
    async def complete(self: "LightningStore", *args: object, **kwargs: object) -> object:
        given = op.name_arguments(args, kwargs)
        unknown = {name: given.pop(name) for name in tuple(given) if name not in known}
        unknown = {name: value for name, value in unknown.items() if value != op.signature.parameters[name].default}
        if op.name in _RECORDS:
            return await _query(self, op, method, given, unknown)
        needed = unknown.keys() - _LEFT_OUT - set(op.ids) - {"version"}
        if needed and op.name in _COMPOSED:
            return await _COMPOSED[op.name](self, **given, **unknown)
        result = await method(self, **given, **{name: unknown[name] for name in needed})
        if result is None and unknown.get("wait"):
            await asyncio.sleep(min(unknown["wait"], POLL_SECONDS))
        worker_id = unknown.get("worker_id")
        if worker_id is None or not isinstance(result, AttemptedRollout) or result.attempt.worker_id is not None:
            return result
        await self.update_worker(worker_id)
        attempt = await self.update_attempt(result.rollout_id, result.attempt.attempt_id, worker_id=worker_id)
        return result.model_copy(update={"attempt": attempt})

    return complete


async def _query(
    store: "LightningStore",
    op: Operation,
    method: Callable[..., Awaitable[Any]],
    given: dict[str, Any],
    unknown: dict[str, Any],
) -> PaginatedResult[Any]:
    """Select here what the store does not select itself; a list that it answers becomes a page."""
    if not unknown:
        page = await method(store, **given)
        return page if isinstance(page, PaginatedResult) else choose(page, Selection())
    ids = [name for name in ("rollout_id", "attempt_id") if name in given]
    records = await method(store, **{name: given.pop(name) for name in ids})
    paging = {p.name: p.default for p in op.signature.parameters.values() if p.name in PAGING}
    asked = {_EARLIER_NAMES.get(name, name): value for name, value in (given | unknown).items()}
    if op.name == "query_rollouts":
        return choose(records, Selection.of({**paging, **asked}, ROLLOUT_FIELDS), _reader)
    return choose(records, Selection.of({**paging, **asked}, _RECORDS[op.name].model_fields))


def _reader(field: str) -> Callable[[Rollout], object]:
    return index_reader(
        field,
        lambda rollout: rollout,
        lambda rollout: rollout.attempt if isinstance(rollout, AttemptedRollout) else None,
    )


# ---------------------------------------------------------------------- operations made of others


async def _statistics(store: "LightningStore") -> Mapping[str, Any]:
    return {}


async def _enqueue_many(store: "LightningStore", rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
    requests = [{name: getattr(rollout, name) for name in rollout.model_fields_set} for rollout in rollouts]
    return [await store.enqueue_rollout(**request) for request in requests]


async def _dequeue_many(
    store: "LightningStore", limit: int = 1, claim_id: str | None = None, **options: Any
) -> Sequence[AttemptedRollout]:
    """Wait, if that is asked for, for the first only; each has a slot of its own."""
    claimed: list[AttemptedRollout] = []
    while len(claimed) < limit:
        if claim_id is not None:
            slot, counter = slot_of(claim_id)
            options["claim_id"] = f"{slot}/{len(claimed)}:{counter}" if claimed else claim_id
        rollout = await store.dequeue_rollout(**options)
        if rollout is None:
            break
        claimed.append(rollout)
        options.pop("wait", None)
    return claimed


async def _claim(
    store: "LightningStore", known_resources: Sequence[ResourcesVersion] = (), **options: Any
) -> Sequence[Claim]:
    claims = []
    for rollout in await store.dequeue_many_rollouts(**options):
        named = rollout.resources_id
        resources = store.get_latest_resources() if named is None else store.get_resources_by_id(named)
        claims.append(claim_with(rollout, await resources, known_resources))
    return claims


async def _finish(
    store: "LightningStore", rollout_id: str, attempt_id: str, status: Any, spans: Sequence[Span] = (), **changes: Any
) -> Attempt:
    """Keep the output in the attempt's metadata, where rollouts have no place for it."""
    if spans:
        numbers = await store.get_many_span_sequence_ids([(rollout_id, attempt_id)] * len(spans))
        numbered = zip(spans, numbers, strict=True)
        await store.add_many_spans([span.model_copy(update={"sequence_id": number}) for span, number in numbered])
    output = {"output": changes.pop("output")} if "output" in changes else {}
    if output:
        try:
            await store.update_rollout(rollout_id, **output)
        except TypeError:
            latest = await store.get_latest_attempt(rollout_id)
            before = latest.metadata if latest is not None and latest.attempt_id == attempt_id else None
            changes["metadata"] = {**(changes.get("metadata", before) or {}), **output}
    return await store.update_attempt(rollout_id, attempt_id, status=status, **changes)


async def _finish_and_claim(
    store: "LightningStore",
    worker_id: str | None = None,
    claim_id: str | None = None,
    heartbeat_interval: float | None = None,
    known_resources: Sequence[ResourcesVersion] = (),
    **finished: Any,
) -> Claim | None:
    await store.finish_attempt(**finished)
    claims = await store.claim_rollouts(
        worker_id=worker_id, claim_id=claim_id, heartbeat_interval=heartbeat_interval, known_resources=known_resources
    )
    return next(iter(claims), None)


async def _add_spans(store: "LightningStore", spans: Sequence[Span]) -> Sequence[Span | None]:
    added = []
    for span in spans:
        number = span.sequence_id or await store.get_next_span_sequence_id(span.rollout_id, span.attempt_id)
        added.append(await store.add_span(span.model_copy(update={"sequence_id": number})))
    return added


async def _sequence_ids(
    store: "LightningStore", rollout_attempt_ids: Sequence[tuple[str, str]], **_: object
) -> Sequence[int]:
    return [await store.get_next_span_sequence_id(*ids) for ids in rollout_attempt_ids]


async def _no_open_spans(store: "LightningStore", **_: object) -> Sequence[Span]:
    return []


async def _merge_resources(
    store: "LightningStore", resources_id: str, resources: NamedResources, **_: object
) -> ResourcesUpdate:
    """Publish them whole; a store that numbers no versions takes any."""
    before = await store.get_resources_by_id(resources_id)
    return await store.update_resources(resources_id, {**({} if before is None else before.resources), **resources})


async def _mark_lost(store: "LightningStore", worker_id: str, reason: str, **_: object) -> Sequence[str]:
    """One attempt after the other."""
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


async def _keep_beside(name: str, store: "LightningStore", /, **given: object) -> object:
    from agentlightning.store.memory import InMemoryLightningStore  # here: it is a store of this contract

    kept: LightningStore = vars(store).setdefault("_kept_beside", InMemoryLightningStore())
    return await kept.perform(name, given)


_COMPOSED: Final[Mapping[str, Callable[..., Awaitable[Any]]]] = {
    "statistics": _statistics,
    "enqueue_many_rollouts": _enqueue_many,
    "dequeue_many_rollouts": _dequeue_many,
    "claim_rollouts": _claim,
    "finish_attempt": _finish,
    "finish_and_claim": _finish_and_claim,
    "add_many_spans": _add_spans,
    "get_many_span_sequence_ids": _sequence_ids,
    "add_open_spans": _no_open_spans,
    "query_open_spans": _no_open_spans,
    "update_resources": _merge_resources,
    "mark_worker_lost": _mark_lost,
    **{name: functools.partial(_keep_beside, name) for name in _KEPT_BESIDE},
}
