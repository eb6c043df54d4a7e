"""Request ids: a request that comes twice acts once, over every back end."""

import asyncio
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, RequestConflict
from agentlightning.store import LightningStore
from agentlightning.types import Span

TEN_MINUTES = 600


async def test_repeated_request_gives_the_first_answer_again(store: LightningStore) -> None:
    first = await store.perform("enqueue_rollout", {"input": {"n": 1}}, request_id="q-1")
    again = await store.perform("enqueue_rollout", {"input": {"n": 1}}, request_id="q-1")
    other = await store.perform("enqueue_rollout", {"input": {"n": 1}}, request_id="q-2")

    assert first == again
    assert other.rollout_id != first.rollout_id
    assert len(await store.query_rollouts()) == 2


async def test_repeated_dequeue_does_not_lose_a_rollout(store: LightningStore) -> None:
    for n in range(2):
        await store.enqueue_rollout(n)

    first = await store.perform("dequeue_rollout", {"worker_id": "w"}, request_id="q-1")
    again = await store.perform("dequeue_rollout", {"worker_id": "w"}, request_id="q-1")

    assert first == again
    assert first.attempt.attempt_id == again.attempt.attempt_id
    assert (await store.dequeue_rollout()).input == 1  # type: ignore[union-attr]


async def test_waiting_dequeue_repeated_while_it_waits_claims_once(store: LightningStore) -> None:
    arguments = {"wait": 30.0}
    both = [asyncio.create_task(store.perform("dequeue_rollout", arguments, request_id="q")) for _ in range(2)]
    inner: Any = getattr(store, "store", store)
    while not inner._board.has_waiters:
        await asyncio.sleep(0)

    await store.enqueue_rollout("a")
    await store.enqueue_rollout("b")
    first, again = await asyncio.wait_for(asyncio.gather(*both), 10)

    assert first == again
    assert (await store.dequeue_rollout()).input == "b"  # type: ignore[union-attr]


@pytest.mark.parametrize("arguments", [{}, {"wait": 0.01}], ids=["at-once", "waiting"])
async def test_request_that_found_nothing_finds_nothing_again(store: LightningStore, arguments: Any) -> None:
    assert await store.perform("dequeue_rollout", arguments, request_id="q") is None
    await store.enqueue_rollout("a")

    again = await store.perform("dequeue_rollout", arguments, request_id="q")

    assert again is None
    assert (await store.dequeue_rollout()).input == "a"  # type: ignore[union-attr]


async def test_waiting_request_may_come_again_until_its_time_is_over(store: LightningStore) -> None:
    first = asyncio.create_task(store.perform("dequeue_rollout", {"wait": 30.0}, request_id="q"))
    inner: Any = getattr(store, "store", store)
    while not inner._board.has_waiters:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await store.enqueue_rollout("a")

    claimed = await store.perform("dequeue_rollout", {"wait": 30.0}, request_id="r")

    assert claimed.input == "a"


@pytest.mark.parametrize("operation", ["dequeue_rollout", "dequeue_many_rollouts", "claim_rollouts"])
async def test_abandoned_request_gives_its_claim_back(store: LightningStore, operation: str) -> None:
    await store.enqueue_rollout("a")
    await store.perform(operation, {"worker_id": "w"}, request_id="q")

    was_claimed = await store.abandon_request("q")
    nothing_more = await store.abandon_request("q")

    assert (was_claimed, nothing_more) == (True, False)
    claimed = await store.dequeue_rollout()
    assert (claimed.input, claimed.attempt.sequence_id) == ("a", 1)  # type: ignore[union-attr]


async def test_request_that_arrives_after_it_was_abandoned_claims_nothing(store: LightningStore) -> None:
    await store.enqueue_rollout("a")
    assert await store.abandon_request("q") is False

    with pytest.raises(RequestConflict):
        await store.perform("dequeue_rollout", {}, request_id="q")

    assert (await store.dequeue_rollout()).input == "a"  # type: ignore[union-attr]


async def test_only_claims_can_be_abandoned(store: LightningStore) -> None:
    rollout = await store.perform("enqueue_rollout", {"input": "a"}, request_id="q")

    assert await store.abandon_request("q") is False

    assert await store.perform("enqueue_rollout", {"input": "a"}, request_id="q") == rollout


async def test_forgotten_request_acts_again(store: LightningStore) -> None:
    first = await store.perform("enqueue_rollout", {"input": "a"}, request_id="q")

    await store.forget_requests(["q", "never-seen"])
    again = await store.perform("enqueue_rollout", {"input": "a"}, request_id="q")

    assert first.rollout_id != again.rollout_id


async def test_answers_are_kept_for_ten_minutes(store: LightningStore, clock: Any) -> None:
    first = await store.perform("start_run", {"name": "a"}, request_id="q")
    clock.advance(TEN_MINUTES)
    assert await store.perform("start_run", {"name": "a"}, request_id="q") == first

    clock.advance(1)
    later = await store.perform("start_run", {"name": "a"}, request_id="q")

    assert later.run_id != first.run_id


async def test_one_id_for_two_operations_is_refused(store: LightningStore) -> None:
    await store.perform("start_run", {"name": "a"}, request_id="q")

    with pytest.raises(RequestConflict, match="was used for start_run"):
        await store.perform("enqueue_rollout", {"input": 1}, request_id="q")

    assert await store.query_rollouts() == []


SPAN = Span.from_attributes(name="s", attributes={"a": 1}, sequence_id=1, rollout_id="r", attempt_id="at", span_id="1")


@pytest.mark.parametrize(
    ("operation", "first", "other"),
    [
        ("enqueue_rollout", {"input": 1}, {"input": 2}),
        ("enqueue_rollout", {"input": 1}, {"input": 1, "mode": "train"}),
        ("start_run", {"name": "a", "config": {"b": 1}}, {"name": "a", "config": {"b": 2}}),
        ("update_worker", {"worker_id": "w"}, {"worker_id": "v"}),
        ("dequeue_rollout", {"worker_id": "w"}, {"worker_id": "v"}),
    ],
)
async def test_one_id_for_other_arguments_is_refused(
    store: LightningStore, operation: str, first: dict[str, Any], other: dict[str, Any]
) -> None:
    answer = await store.perform(operation, first, request_id="q")

    with pytest.raises(RequestConflict, match=f"'q' was used for another {operation}, with other arguments"):
        await store.perform(operation, other, request_id="q")

    assert await store.perform(operation, first, request_id="q") == answer


@pytest.mark.parametrize(("operation", "changed"), [("add_span", "attributes"), ("add_many_spans", "span_id")])
async def test_one_id_for_other_spans_is_refused(store: LightningStore, operation: str, changed: str) -> None:
    rollout = await store.start_rollout(1)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    other = {"attributes": {"a": 2}, "span_id": "2"}[changed]
    spans = [SPAN.model_copy(update=ids), SPAN.model_copy(update={**ids, changed: other})]

    def arguments(span: Span) -> dict[str, Any]:
        return {"span": span} if operation == "add_span" else {"spans": [span]}

    await store.perform(operation, arguments(spans[0]), request_id="q")

    with pytest.raises(RequestConflict):
        await store.perform(operation, arguments(spans[1]), request_id="q")
    assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_a_lost_claim_may_be_asked_for_with_other_limits(store: LightningStore) -> None:
    await store.enqueue_rollout("a")

    first = await store.perform("claim_rollouts", {"worker_id": "w", "limit": 2}, request_id="q")
    asked_again = {"worker_id": "w", "limit": 1, "wait": 5.0, "known_resources": [("r", 1)]}

    assert await store.perform("claim_rollouts", asked_again, request_id="q") == first


async def test_a_long_request_id_is_refused(store: LightningStore) -> None:
    long = "q" * 257

    with pytest.raises(InvalidValue, match="has 257 characters; use at most 256"):
        await store.perform("enqueue_rollout", {"input": 1}, request_id=long)
    with pytest.raises(InvalidValue, match="has 257 characters; use at most 256"):
        await store.abandon_request(long)


async def test_failed_request_may_be_tried_again(store: LightningStore) -> None:
    with pytest.raises(ValueError, match="not found"):
        await store.perform("start_attempt", {"rollout_id": "mine"}, request_id="q")
    await store.enqueue_rollout("a", rollout_id="mine")

    started = await store.perform("start_attempt", {"rollout_id": "mine"}, request_id="q")

    assert started.attempt.sequence_id == 1


async def test_unknown_operation_is_refused(store: LightningStore) -> None:
    with pytest.raises(InvalidQuery, match="no store operation 'explode'"):
        await store.perform("explode", {}, request_id="q")
