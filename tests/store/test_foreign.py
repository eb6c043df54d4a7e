"""Stores that know a part of the contract: those written for release 0.2, and subclasses that change an operation."""

import asyncio
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
    foreign,
)
from agentlightning.store.base import UNSET
from agentlightning.store.foreign import ForeignStore, adapted
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PromptTemplate,
    Rollout,
    RolloutConfig,
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


class Recorder(LightningStore):
    """Notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("calls", "capabilities") or name.startswith("_"):
            return super().__getattribute__(name)

        async def record(*args: Any, **kwargs: Any) -> list[str] | None:
            self.calls.append((name, args, kwargs))
            return None if name == "dequeue_rollout" else [name]

        return record


CONFIG = RolloutConfig()
OPTIONS = {"mode": "val", "resources_id": "rs-1", "config": CONFIG, "metadata": {}}
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
    ("start_rollout", ("in",), {}, ("in", None, None, None, None), {}),
    ("start_rollout", (), {"input": "in", **OPTIONS}, ("in", "val", "rs-1", CONFIG, {}), {}),
    ("enqueue_rollout", ("in", "train"), {}, ("in", "train", None, None, None), {}),
    ("start_attempt", ("ro-1",), {}, ("ro-1",), {}),
    ("query_spans", ("ro-1",), {}, ("ro-1", None), {}),
    ("query_spans", ("ro-1",), {"attempt_id": "latest"}, ("ro-1", "latest"), {}),
    ("query_spans", ("ro-1",), {"name": "n"}, ("ro-1", None), {"name": "n"}),
    ("query_rollouts", (["failed"],), {}, (), {"status": ["failed"]}),
    ("query_rollouts", (), {}, (), {}),
    ("wait_for_rollouts", (["ro-1"], 0.5), {}, (), {"rollout_ids": ["ro-1"], "timeout": 0.5}),
    ("dequeue_rollout", (), {}, (), {}),
    (
        *("update_rollout", ("ro-1",), {"status": "cancelled", "mode": UNSET, "metadata": None}),
        *((), {"rollout_id": "ro-1", "status": "cancelled", "metadata": None}),
    ),
    (
        *("update_attempt", ("ro-1", "latest", "failed"), {}),
        *((), {"rollout_id": "ro-1", "attempt_id": "latest", "status": "failed"}),
    ),
]


@pytest.mark.parametrize("wrap", [adapted, LightningStoreThreaded], ids=["adapted", "threaded"])
async def test_a_foreign_store_is_called_as_release_0_2_called_it(wrap: Any) -> None:
    for name, args, kwargs, *expected in CALLS:
        recorder = Recorder()
        await getattr(wrap(recorder), name)(*args, **kwargs)
        assert recorder.calls == [(name, *expected)]


# ---------------------------------------------------------------------- which stores are foreign


@pytest.mark.parametrize(
    "store",
    [
        InMemoryLightningStore(),
        SqliteLightningStore(),
        LightningStoreThreaded(OldStore()),
        LightningStoreClient("http://127.0.0.1:1"),
        LightningStoreServer(OldStore()),
        ForeignStore(OldStore()),
    ],
    ids=lambda store: type(store).__name__,
)
def test_a_store_with_the_whole_contract_is_left_alone(store: LightningStore) -> None:
    assert adapted(store) is store


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
        return await super().claim_rollouts(**options)


@pytest.mark.parametrize("kind", [Choosy, Whole])
@pytest.mark.parametrize("wrap", [adapted, LightningStoreThreaded], ids=["adapted", "threaded"])
async def test_a_changed_part_is_called_in_the_place_of_the_whole(kind: type[Choosy], wrap: Any) -> None:
    inner = kind()
    store = wrap(inner)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])

    (first,) = await store.claim_rollouts()
    await store.dequeue_many_rollouts()
    await store.finish_and_claim(first.rollout.rollout_id, first.rollout.attempt.attempt_id, "succeeded")

    assert inner.calls == (3 if kind is Choosy else 1)
    assert {rollout.status for rollout in await inner.query_rollouts()} == {"succeeded", "preparing"}


async def test_what_is_no_store_but_has_its_methods_will_do() -> None:
    class Unrelated:
        async def dequeue_rollout(self) -> str:
            return "claimed"

    store = LightningStoreThreaded(Unrelated())  # type: ignore[arg-type]

    assert await store.dequeue_rollout() == "claimed"  # type: ignore[comparison-overlap]
    assert store.capabilities == {"thread_safe": True, "async_safe": True}
    with pytest.raises(NotImplementedError, match="Unrelated has no operation 'get_latest_resources'"):
        await store.get_latest_resources()


# ---------------------------------------------------------------------- operations made of others


@pytest.fixture
def old() -> OldStore:
    return OldStore()


@pytest.fixture
def store(old: OldStore) -> LightningStore:
    return adapted(old)


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


async def test_a_claim_waits_for_work(store: LightningStore) -> None:
    waiting = asyncio.create_task(store.claim_rollouts(wait=30, worker_id="w"))
    await asyncio.sleep(0)
    await store.enqueue_rollout("late")

    assert [claim.rollout.input for claim in await waiting] == ["late"]
    assert await store.dequeue_rollout(wait=0.01) is None


async def test_a_claim_that_the_store_refuses_is_left_out(old: OldStore, store: LightningStore) -> None:
    old.refuses_claims = 1
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="refused"), EnqueueRolloutRequest(input="taken")])
    assert await store.dequeue_rollout("w") is None
    assert known(await store.dequeue_rollout("w")).input == "taken"


async def test_returned_claims_are_in_the_queue_again(store: LightningStore) -> None:
    await store.enqueue_rollout("a")
    claimed = known(await store.dequeue_rollout())

    assert await store.return_claims([(claimed.rollout_id, claimed.attempt.attempt_id)]) == [True]

    (again,) = await store.dequeue_many_rollouts(limit=2)
    assert again.rollout_id == claimed.rollout_id


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


# ---------------------------------------------------------------------- calls that come twice


@pytest.mark.parametrize(
    ("operation", "ids"),
    [
        ("enqueue_rollout", {"input": 1, "rollout_id": "mine"}),
        ("enqueue_many_rollouts", {"rollouts": [EnqueueRolloutRequest(input=1, rollout_id="mine")]}),
        ("start_rollout", {"input": 1, "rollout_id": "mine", "attempt_id": "first"}),
        ("claim_rollouts", {"limit": 2, "worker_id": "w", "claim_id": "mine"}),
        ("get_many_span_sequence_ids", {"rollout_attempt_ids": [("r", "a"), ("r", "a")], "request_id": "mine"}),
        ("add_resources", {"resources": {}, "resources_id": "mine"}),
        ("add_metrics", {"run_id": "run", "step": 1, "values": {"reward": 0.5}, "time": 1.0}),
    ],
)
async def test_a_repeated_call_acts_once(store: LightningStore, operation: str, ids: dict[str, Any]) -> None:
    await store.start_run(run_id="run")
    for number in range(5):
        await store.enqueue_rollout(number)

    answers = [await store.perform(operation, ids) for _ in range(3)]

    assert answers == [answers[0]] * 3
    rollouts, points = await store.query_rollouts(), await store.query_metrics("run")
    assert len(rollouts) == 5 + operation.startswith(("enqueue", "start"))
    begun = [each for each in rollouts if each.status == "preparing"]
    assert len(begun) == {"claim_rollouts": 2, "start_rollout": 1}.get(operation, 0)
    assert len(points) == (operation == "add_metrics")


async def test_a_call_repeated_while_the_first_is_cancelled_is_answered(store: LightningStore) -> None:
    first, again = [asyncio.ensure_future(store.dequeue_rollout(wait=60.0, claim_id="c")) for _ in range(2)]
    await asyncio.sleep(0)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await store.enqueue_rollout("a")

    assert known(await asyncio.wait_for(again, 30)).input == "a"


async def test_a_call_that_nobody_waits_for_claims_nothing(store: LightningStore) -> None:
    waiting = asyncio.ensure_future(store.dequeue_rollout(wait=60.0, claim_id="c"))
    await asyncio.sleep(0)

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await store.enqueue_rollout("a")
    await asyncio.sleep(2 * foreign.POLL_SECONDS)

    assert len(await store.query_rollouts(status_in=["queuing"])) == 1


async def test_claims_under_one_id_are_each_workers_own(store: LightningStore) -> None:
    for number in range(2):
        await store.enqueue_rollout(number)
    claimed = [await store.dequeue_rollout(worker, claim_id="c") for worker in ("a", "b", "a")]
    assert [rollout.input for rollout in claimed if rollout is not None] == [0, 1, 0]


async def test_a_span_that_comes_again_is_dropped() -> None:
    class KeepsRepeats(OldStore):
        added = 0

        async def add_span(self, span: Span) -> Span:
            self.added += 1
            return span

    inner = KeepsRepeats()
    store = adapted(inner)
    span = span_of(await store.start_rollout("a"), "s")

    answers = [await store.add_span(span) for _ in range(2)]

    assert (answers, inner.added) == ([span, None], 1)


async def test_remembered_answers_are_bounded_and_expire(monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    monkeypatch.setattr(foreign, "MOST_CALLS", 5)
    store = ForeignStore(OldStore(), clock)

    for number in range(20):
        await store.enqueue_rollout(number, rollout_id=f"ro-{number}")
    clock.advance(601)
    await store.enqueue_rollout(19, rollout_id="ro-19")

    assert len(await store.query_rollouts()) == 21
    assert len(store._calls) <= 6


async def test_resources_are_merged(store: LightningStore) -> None:
    await store.update_resources("mine", {"a": PROMPT})
    await store.update_resources("mine", {"b": PROMPT}, merge=True)
    assert set(known(await store.get_latest_resources()).resources) == {"a", "b"}
