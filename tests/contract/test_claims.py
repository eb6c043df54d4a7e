"""Claims with their resources, and finishing one attempt together with the claim of the next, over every back end."""

import asyncio
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, NamedResources, PromptTemplate, RolloutConfig, Span


def prompt(text: str) -> NamedResources:
    return {"prompt": PromptTemplate(template=text, engine="f-string")}


def last_span(rollout: AttemptedRollout, name: str = "last") -> Span:
    ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return Span.from_attributes(attributes={"reward": 1.0}, sequence_id=0, name=name, **ids)


async def test_claim_brings_the_resources_the_rollout_names(store: LightningStore) -> None:
    first = await store.add_resources(prompt("one"))
    await store.enqueue_rollout("a")
    await store.add_resources(prompt("two"))

    (claim,) = await store.claim_rollouts(worker_id="w")

    assert (claim.rollout.input, claim.rollout.attempt.worker_id) == ("a", "w")
    assert claim.version == (first.resources_id, 1)
    assert claim.resources == first


async def test_rollout_that_names_no_resources_gets_the_latest_of_its_claim(store: LightningStore) -> None:
    await store.enqueue_rollout("a")
    await store.add_resources(prompt("one"))
    latest = await store.add_resources(prompt("two"))

    (claim,) = await store.claim_rollouts()

    assert claim.rollout.resources_id is None
    assert claim.resources == latest


@pytest.mark.parametrize("resources_id", [None, "rs-missing"])
async def test_claim_without_resources_says_so(store: LightningStore, resources_id: str | None) -> None:
    await store.enqueue_rollout("a", resources_id=resources_id)

    (claim,) = await store.claim_rollouts()

    assert (claim.version, claim.resources) == (None, None)


async def test_known_version_is_named_and_not_sent_again(store: LightningStore) -> None:
    known = ("mine", 1)
    await store.update_resources("mine", prompt("one"))
    for n in range(2):
        await store.enqueue_rollout(n)

    (first,) = await store.claim_rollouts(known_resources=[("other", 1), known])
    changed = await store.update_resources("mine", prompt("two"))
    (second,) = await store.claim_rollouts(known_resources=[known])

    assert (first.version, first.resources) == (known, None)
    assert (second.version, second.resources) == (("mine", 2), changed)


async def test_claims_are_limited_in_order_and_given_once(store: LightningStore) -> None:
    for n in range(3):
        await store.enqueue_rollout(n)

    first, rest = await store.claim_rollouts(limit=2), await store.claim_rollouts(limit=2)

    assert [claim.rollout.input for claim in (*first, *rest)] == [0, 1, 2]
    assert await store.claim_rollouts(wait=0.01) == []
    with pytest.raises(InvalidQuery):
        await store.claim_rollouts(limit=0)


async def test_waiting_claim_is_answered_when_there_is_work(store: LightningStore) -> None:
    waiting = asyncio.create_task(store.claim_rollouts(wait=30.0))
    await asyncio.sleep(0)
    await store.enqueue_rollout("a")

    (claim,) = await asyncio.wait_for(waiting, 20)

    assert claim.rollout.input == "a"


async def test_claimed_resources_are_the_callers_own(store: LightningStore) -> None:
    await store.add_resources(prompt("one"))
    for n in range(2):
        await store.enqueue_rollout(n)

    (first,) = await store.claim_rollouts()
    first.resources.resources["prompt"].template = "changed"  # type: ignore[union-attr]
    (second,) = await store.claim_rollouts()

    assert second.resources.resources == prompt("one")  # type: ignore[union-attr]


async def test_one_step_finishes_an_attempt_and_claims_the_next(store: LightningStore) -> None:
    await store.add_resources(prompt("one"))
    for n in range(2):
        await store.enqueue_rollout(n)
    (held,) = await store.claim_rollouts(worker_id="w")
    ids = (held.rollout.rollout_id, held.rollout.attempt.attempt_id)
    assert held.version is not None

    options: Any = {"worker_id": "w", "known_resources": [held.version]}
    claim = await store.finish_and_claim(
        *ids, "succeeded", spans=[last_span(held.rollout)], metadata={"note": 1}, **options
    )

    assert claim is not None
    assert (claim.rollout.input, claim.version, claim.resources) == (1, held.version, None)
    finished = await store.get_rollout_by_id(held.rollout.rollout_id)
    assert isinstance(finished, AttemptedRollout)
    assert (finished.status, finished.attempt.metadata) == ("succeeded", {"note": 1})
    assert [span.sequence_id for span in await store.query_spans(held.rollout.rollout_id)] == [1]
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert (worker.status, worker.current_rollout_id) == ("busy", claim.rollout.rollout_id)


async def test_nothing_is_claimed_from_an_empty_queue_and_the_worker_is_idle(store: LightningStore) -> None:
    rollout = await store.start_rollout("a", worker_id="w")

    claim = await store.finish_and_claim(rollout.rollout_id, rollout.attempt.attempt_id, "succeeded", worker_id="w")

    assert claim is None
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert (worker.status, worker.current_attempt_id) == ("idle", None)


async def test_attempt_that_is_retried_may_be_claimed_by_the_step_that_ended_it(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout = await store.start_rollout("a", config=config)

    claim = await store.finish_and_claim(rollout.rollout_id, rollout.attempt.attempt_id, "failed")

    assert claim is not None
    assert (claim.rollout.rollout_id, claim.rollout.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_refused_finish_claims_nothing(store: LightningStore) -> None:
    rollout, other = await store.start_rollout("a"), await store.start_rollout("b")
    await store.enqueue_rollout("c")

    with pytest.raises(InvalidValue, match="its own spans only"):
        await store.finish_and_claim(
            rollout.rollout_id, rollout.attempt.attempt_id, "succeeded", spans=[last_span(other)]
        )
    with pytest.raises(NotFound):
        await store.finish_and_claim(rollout.rollout_id, "at-none", "succeeded")

    assert (await store.dequeue_rollout()).input == "c"  # type: ignore[union-attr]
