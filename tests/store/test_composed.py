"""Stores that know a part of the contract: those written for release 0.2, and subclasses that change an operation."""

import asyncio
import time
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    SqliteLightningStore,
)
from agentlightning.store.base import UNSET
from agentlightning.store.operations import operations_of
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PromptTemplate,
    Rollout,
    Span,
)
from tests.contract.conftest import known

PROMPT = PromptTemplate(template="Do {task}.", engine="f-string")


class OldStore(LightningStore):
    """A store written for the 0.2 release: fewer operations, with fewer arguments."""

    def __init__(self) -> None:
        self._inner = InMemoryLightningStore()
        self.refuses_claims = 0

    async def start_rollout(
        self, input: Any, mode: Any = None, resources_id: str | None = None, config: Any = None, metadata: Any = None
    ) -> AttemptedRollout:
        return await self._inner.start_rollout(input, mode, resources_id, config, metadata)

    async def enqueue_rollout(
        self, input: Any, mode: Any = None, resources_id: str | None = None, config: Any = None, metadata: Any = None
    ) -> Rollout:
        return await self._inner.enqueue_rollout(input, mode, resources_id, config, metadata)

    async def dequeue_rollout(self) -> AttemptedRollout | None:  # type: ignore[override] # as in 0.2
        return await self._inner.dequeue_rollout()

    async def update_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> Attempt:  # type: ignore[override] # as in 0.2
        if "worker_id" in changes and self.refuses_claims > 0:
            self.refuses_claims -= 1
            raise ValueError("not yours")
        return await self._inner.update_attempt(rollout_id, attempt_id, **changes)

    async def update_rollout(  # type: ignore[override] # as in 0.2
        self,
        rollout_id: str,
        *,
        input: Any = UNSET,
        mode: Any = UNSET,
        resources_id: Any = UNSET,
        status: Any = UNSET,
        config: Any = UNSET,
        metadata: Any = UNSET,
    ) -> Any:
        given = {"input": input, "mode": mode, "resources_id": resources_id, "status": status}
        return await self._inner.update_rollout(rollout_id, config=config, metadata=metadata, **given)

    async def start_attempt(self, rollout_id: str) -> AttemptedRollout:  # type: ignore[override] # as in 0.2
        return await self._inner.start_attempt(rollout_id)

    async def get_rollout_by_id(self, rollout_id: str) -> Any:
        return await self._inner.get_rollout_by_id(rollout_id)

    async def query_rollouts(self, *, status: Any = None, rollout_ids: Any = None) -> Any:  # type: ignore[override] # as in 0.2
        return list(await self._inner.query_rollouts(status=status, rollout_ids=rollout_ids))

    async def query_attempts(self, rollout_id: str) -> Any:  # type: ignore[override] # as in 0.2
        return list(await self._inner.query_attempts(rollout_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return await self._inner.get_latest_attempt(rollout_id)

    async def add_span(self, span: Any) -> Any:
        return await self._inner.add_span(span)

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Any:
        return await self._inner.add_otel_span(rollout_id, attempt_id, readable_span, sequence_id)

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self._inner.get_next_span_sequence_id(rollout_id, attempt_id)

    async def query_spans(self, rollout_id: str, attempt_id: Any = None) -> Any:  # type: ignore[override] # as in 0.2
        return list(await self._inner.query_spans(rollout_id, attempt_id))

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> Any:  # type: ignore[override] # as in 0.2
        return await self._inner.wait_for_rollouts(rollout_ids=rollout_ids, timeout=timeout)

    async def add_resources(self, resources: Any) -> Any:
        return await self._inner.add_resources(resources)

    async def update_resources(self, resources_id: str, resources: Any) -> Any:  # type: ignore[override] # as in 0.2
        return await self._inner.update_resources(resources_id, resources)

    async def get_resources_by_id(self, resources_id: str) -> Any:
        return await self._inner.get_resources_by_id(resources_id)

    async def get_latest_resources(self) -> Any:
        return await self._inner.get_latest_resources()


class Choosy(InMemoryLightningStore):
    """Changes a part of claiming, and not the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    async def dequeue_rollout(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return await super().dequeue_rollout(*args, **kwargs)


class Whole(Choosy):
    async def claim_rollouts(self, **options: Any) -> Any:
        return await InMemoryLightningStore.claim_rollouts(self, **options)


@pytest.mark.parametrize("kind", [Choosy, Whole])
@pytest.mark.parametrize("wrap", [lambda store: store, LightningStoreThreaded], ids=["alone", "threaded"])
async def test_a_changed_part_is_called_in_the_place_of_the_whole(kind: type[Choosy], wrap: Any) -> None:
    inner = kind()
    store = wrap(inner)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])

    (first,) = await store.claim_rollouts()
    await store.dequeue_many_rollouts()
    await store.finish_and_claim(first.rollout.rollout_id, first.rollout.attempt.attempt_id, "succeeded")

    assert inner.calls == (3 if kind is Choosy else 1)
    assert {rollout.status for rollout in await inner.query_rollouts()} == {"succeeded", "preparing"}


async def test_claims_through_a_changed_part_have_leases_and_are_known_again() -> None:
    store = Choosy()
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    options: Any = {"limit": 2, "worker_id": "w", "claim_id": "0:1", "heartbeat_interval": 10}

    first, again = [await store.claim_rollouts(**options) for _ in range(2)]

    assert [claim.rollout.input for claim in first] == [0, 1]
    assert first == again
    assert all(claim.rollout.attempt.lease_until is not None for claim in first)


def test_a_store_with_the_whole_contract_is_left_alone() -> None:
    for kind in (InMemoryLightningStore, SqliteLightningStore, LightningStoreClient, LightningStoreServer):
        for name in operations_of(LightningStore):  # each has a method of its own, or of the class it is made from
            assert getattr(kind, name) is not getattr(LightningStore, name), (kind, name)


async def test_an_operation_that_cannot_be_made_of_others_says_so() -> None:
    with pytest.raises(NotImplementedError, match="LightningStore has no operation 'get_latest_resources'"):
        await LightningStore().get_latest_resources()


# ---------------------------------------------------------------------- operations made of others


@pytest.fixture
def old() -> OldStore:
    return OldStore()


@pytest.fixture
def store(old: OldStore) -> LightningStore:
    return old


async def test_claims_have_a_worker_and_resources_and_are_as_many_as_there_are(store: LightningStore) -> None:
    await store.update_resources("mine", {"prompt": PROMPT})
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, resources_id="mine") for n in range(3)])

    (first,) = await store.claim_rollouts(worker_id="w")
    others = await store.claim_rollouts(limit=5, worker_id="w", known_resources=[("mine", 1)])

    assert (first.rollout.input, first.rollout.attempt.worker_id, first.version) == (0, "w", ("mine", 1))
    assert first.resources is not None
    assert [(claim.rollout.input, claim.resources) for claim in others] == [(1, None), (2, None)]
    assert [worker.worker_id for worker in await store.query_workers()] == ["w"]
    assert await store.claim_rollouts() == []


async def test_a_claim_that_waits_is_a_poll(store: LightningStore) -> None:
    began = time.monotonic()
    assert list(await store.claim_rollouts(wait=30, worker_id="w")) == []
    assert 0.0 < time.monotonic() - began < 20.0
    assert await store.dequeue_rollout(wait=0.001) is None


async def test_a_claim_that_waits_in_one_thread_lets_others_in(old: OldStore) -> None:
    store = LightningStoreThreaded(old)

    async def claim() -> str:
        while not (claims := await store.claim_rollouts(wait=30, worker_id="w")):
            pass
        return str(claims[0].rollout.input)

    waiting = asyncio.create_task(claim())
    await asyncio.sleep(0)
    await store.enqueue_rollout("late")

    assert await asyncio.wait_for(waiting, 30) == "late"


def span_of(rollout: AttemptedRollout, name: str) -> Span:
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return Span.from_attributes(attributes={}, name=name, **ids)  # type: ignore[arg-type] # all are texts


@pytest.mark.parametrize(("metadata", "kept"), [({}, {"note": 1}), ({"metadata": {"b": 2}}, {"b": 2})])
async def test_last_spans_and_the_output_are_kept_with_the_attempt(
    store: LightningStore, metadata: dict[str, Any], kept: dict[str, Any]
) -> None:
    rollout = await store.start_rollout("a")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    await store.update_attempt(*ids, metadata={"note": 1})

    spans = [span_of(rollout, "one"), span_of(rollout, "two")]
    attempt = await store.finish_attempt(*ids, "succeeded", spans=spans, output="text", **metadata)

    assert (attempt.status, attempt.metadata) == ("succeeded", {**kept, "output": "text"})
    assert [(span.name, span.sequence_id) for span in await store.query_spans(ids[0])] == [("one", 1), ("two", 2)]


async def test_attempts_of_a_lost_worker_are_ended(store: LightningStore) -> None:
    lost, other = await store.start_rollout("a", worker_id="w"), await store.start_rollout("b", worker_id="v")

    assert await store.mark_worker_lost("w", "it died") == [lost.rollout_id]

    (ended,) = await store.query_attempts(lost.rollout_id)
    assert ended.status == "unresponsive"
    assert "it died" in str(ended.metadata)
    assert (await store.query_attempts(other.rollout_id))[0].status == "preparing"


async def test_runs_and_metrics_are_kept_beside_the_store(store: LightningStore) -> None:
    run = await store.start_run("mine")
    await store.add_metrics(run.run_id, 1, {"reward": 0.5})
    await store.finish_run(run.run_id)

    assert [(run.name, run.status) for run in await store.query_runs()] == [("mine", "succeeded")]
    assert [point.values for point in await store.query_metrics(run.run_id)] == [{"reward": 0.5}]
    assert await store.statistics() == {}
    await store.add_open_spans([])
    assert await store.query_open_spans("ro") == []


SELECTED: list[tuple[dict[str, Any], list[int], int]] = [
    ({}, [0, 1, 2], 3),
    ({"status": ["queuing"]}, [1, 2], 2),
    ({"status_in": ["queuing"], "limit": 1}, [1], 2),
    ({"mode_in": ["train"], "sort_by": "start_time", "sort_order": "desc"}, [2, 0], 2),
    ({"mode_in": ["val"], "status_in": ["failed"], "filter_logic": "or"}, [0, 1], 2),
    ({"rollout_id_contains": "no such"}, [], 0),
]


async def test_queries_select_what_the_store_cannot(store: LightningStore) -> None:
    modes: list[Any] = ["train", "val", "train"]
    rollouts = [await store.enqueue_rollout(number, mode) for number, mode in enumerate(modes)]
    await store.update_rollout(rollouts[0].rollout_id, status="failed")

    for asked, inputs, total in SELECTED:
        found = await store.query_rollouts(**asked)
        assert ([rollout.input for rollout in found], found.total) == (inputs, total)
    with pytest.raises(InvalidQuery):
        await store.query_rollouts(sort_by="nonsense")


async def test_resources_are_merged(store: LightningStore) -> None:
    await store.update_resources("mine", {"a": PROMPT})
    await store.update_resources("mine", {"b": PROMPT}, merge=True)
    assert set(known(await store.get_latest_resources()).resources) == {"a", "b"}
