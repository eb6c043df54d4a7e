"""Claims: with their resources, and with the finish of the attempt before; over every back end."""

import asyncio
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, NamedResources, PromptTemplate, RolloutConfig, Span
from tests.contract.conftest import known


def prompt(text: str) -> NamedResources:
    return {"prompt": PromptTemplate(template=text, engine="f-string")}


def last_span(rollout: AttemptedRollout, name: str = "last") -> Span:
    ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return Span.from_attributes(attributes={"reward": 1.0}, sequence_id=0, name=name, **ids)


def ids_of(*rollouts: AttemptedRollout) -> list[tuple[str, str]]:
    return [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in rollouts]


async def test_claim_brings_the_resources_the_rollout_names_as_the_callers_own(store: LightningStore) -> None:
    first = await store.add_resources(prompt("one"))
    for name in "ab":
        await store.enqueue_rollout(name)
    await store.add_resources(prompt("two"))

    (claim,) = await store.claim_rollouts(worker_id="w")
    assert claim.resources == first
    claim.resources.resources["prompt"].template = "changed"  # type: ignore[union-attr]
    (second,) = await store.claim_rollouts()

    assert (claim.rollout.input, claim.rollout.attempt.worker_id) == ("a", "w")
    assert claim.version == (first.resources_id, 1)
    assert second.resources == first


async def test_rollout_that_names_no_resources_gets_the_latest_of_its_claim(store: LightningStore) -> None:
    await store.enqueue_rollout("a")
    await store.add_resources(prompt("one"))
    latest = await store.add_resources(prompt("two"))

    (claim,) = await store.claim_rollouts()

    assert claim.rollout.resources_id is None
    assert claim.resources == latest


async def test_claim_without_resources_says_so(store: LightningStore) -> None:
    for resources_id in (None, "rs-missing"):
        await store.enqueue_rollout("a", resources_id=resources_id)
    claims = await store.claim_rollouts(limit=2)
    assert [(claim.version, claim.resources) for claim in claims] == [(None, None)] * 2


async def test_known_version_is_named_and_not_sent_again(store: LightningStore) -> None:
    version = ("mine", 1)
    await store.update_resources("mine", prompt("one"))
    for n in range(2):
        await store.enqueue_rollout(n)

    (first,) = await store.claim_rollouts(known_resources=[("other", 1), version])
    changed = await store.update_resources("mine", prompt("two"))
    (second,) = await store.claim_rollouts(known_resources=[version])

    assert (first.version, first.resources) == (version, None)
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


async def test_one_step_finishes_an_attempt_and_claims_the_next(store: LightningStore) -> None:
    await store.add_resources(prompt("one"))
    for n in range(2):
        await store.enqueue_rollout(n)
    (held,) = await store.claim_rollouts(worker_id="w")
    ids = (held.rollout.rollout_id, held.rollout.attempt.attempt_id)

    options: Any = {"worker_id": "w", "known_resources": [held.version]}
    claim = await store.finish_and_claim(
        *ids, "succeeded", spans=[last_span(held.rollout)], metadata={"note": 1}, output="text", **options
    )
    nothing = await store.finish_and_claim(*ids_of(known(claim).rollout)[0], "succeeded", worker_id="w")

    assert (known(claim).rollout.input, known(claim).version, known(claim).resources) == (1, held.version, None)
    finished = await store.get_rollout_by_id(ids[0])
    assert isinstance(finished, AttemptedRollout)
    assert (finished.status, finished.output, finished.attempt.metadata) == ("succeeded", "text", {"note": 1})
    assert [span.sequence_id for span in await store.query_spans(ids[0])] == [1]
    assert nothing is None
    worker = known(await store.get_worker_by_id("w"))
    assert (worker.status, worker.current_attempt_id) == ("idle", None)


async def test_attempt_that_is_retried_may_be_claimed_by_the_step_that_ended_it(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout = await store.start_rollout("a", config=config)

    claim = known(await store.finish_and_claim(*ids_of(rollout)[0], "failed", worker_id="w"))

    assert (claim.rollout.rollout_id, claim.rollout.attempt.sequence_id) == (rollout.rollout_id, 2)
    worker = known(await store.get_worker_by_id("w"))
    assert (worker.status, worker.current_rollout_id) == ("busy", rollout.rollout_id)


async def test_refused_finish_claims_nothing(store: LightningStore) -> None:
    rollout, other = await store.start_rollout("a"), await store.start_rollout("b")
    await store.enqueue_rollout("c")

    with pytest.raises(InvalidValue, match="its own spans only"):
        await store.finish_and_claim(*ids_of(rollout)[0], "succeeded", spans=[last_span(other)])
    with pytest.raises(NotFound):
        await store.finish_and_claim(rollout.rollout_id, "at-none", "succeeded")

    assert known(await store.dequeue_rollout()).input == "c"
