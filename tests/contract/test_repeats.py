"""Repeats: a call that comes again with the ids its caller made does nothing new, over every back end."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, RequestConflict
from agentlightning.store import LightningStore
from agentlightning.store.claims import MOST_CLAIM_SLOTS
from agentlightning.store.operations import operations_of
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, PromptTemplate, RolloutConfig, Span
from tests.contract.conftest import known

PROMPT = {"p": PromptTemplate(template="x", engine="f-string")}
OTHER_PROMPT = {"p": PromptTemplate(template="y", engine="f-string")}
CLAIMS = ["dequeue_rollout", "dequeue_many_rollouts", "claim_rollouts"]


def last_span(rollout: AttemptedRollout) -> Span:
    ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return Span.from_attributes(attributes={}, sequence_id=0, name="last", **ids)


REPEATED: Mapping[str, dict[str, Any]] = {
    "start_rollout": {"input": 1, "rollout_id": "new", "attempt_id": "first"},
    "enqueue_rollout": {"input": 1, "rollout_id": "new"},
    "enqueue_many_rollouts": {"rollouts": [EnqueueRolloutRequest(input=n, rollout_id=f"new-{n}") for n in range(2)]},
    "dequeue_rollout": {"worker_id": "w", "claim_id": "0:1"},
    "dequeue_many_rollouts": {"limit": 2, "worker_id": "w", "claim_id": "0:1"},
    "claim_rollouts": {"limit": 2, "worker_id": "w", "claim_id": "random-1"},
    "finish_and_claim": {"status": "succeeded", "worker_id": "w", "claim_id": "0:1"},
    "start_attempt": {"attempt_id": "second"},
    "add_resources": {"resources": PROMPT, "resources_id": "new"},
    "update_resources": {"resources_id": "mine", "resources": PROMPT, "version": 1},
    "start_run": {"name": "new", "run_id": "new"},
    "add_metrics": {"run_id": "run", "step": 1, "values": {"loss": 0.5}, "time": 7.0},
}
"""A call with ids of every operation that has some; a rollout 'held' is at work and a run 'run' is open."""


def test_every_operation_with_ids_is_repeated_here() -> None:
    with_ids = {name for name, op in operations_of(LightningStore).items() if op.ids}
    assert with_ids | {"enqueue_many_rollouts", "update_resources"} == set(REPEATED)


@pytest.mark.parametrize("operation", REPEATED)
async def test_repeated_call_gives_the_same_answer_and_changes_nothing(store: LightningStore, operation: str) -> None:
    held = await store.start_rollout("held", rollout_id="held")
    await store.start_run(run_id="run")
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(4)])
    needed = operations_of(LightningStore)[operation].signature.parameters
    ids = {"rollout_id": "held", "attempt_id": held.attempt.attempt_id, "spans": [last_span(held)]}
    arguments = {name: value for name, value in ids.items() if name in needed} | REPEATED[operation]

    first = await store.perform(operation, arguments)
    counts = await store.statistics()
    again = await store.perform(operation, arguments)

    assert first == again
    assert {**await store.statistics(), "uptime": 0} == {**counts, "uptime": 0}
    assert len(await store.query_metrics("run")) == (operation == "add_metrics")


async def test_repeated_span_is_kept_once(store: LightningStore) -> None:
    held = await store.start_rollout("held")
    ids = (held.rollout_id, held.attempt.attempt_id)
    one, many, last = (last_span(held) for _ in range(3))

    for _ in range(2):
        await store.add_span(one)
        await store.add_many_spans([one, many])
        await store.finish_attempt(*ids, "succeeded", spans=[many, last])

    assert {kept.span_id for kept in await store.query_spans(ids[0])} == {one.span_id, many.span_id, last.span_id}
    assert len(await store.query_spans(ids[0])) == 3


# ---------------------------------------------------------------------- claims


async def test_claim_that_found_nothing_finds_nothing_again(store: LightningStore) -> None:
    calls: list[Any] = [
        (name, {"worker_id": "w", "wait": wait, "claim_id": f"{name} {wait}:1"})
        for name in CLAIMS
        for wait in (None, 0.01)
    ]
    assert not any([await store.perform(*call) for call in calls])
    await store.enqueue_rollout("a")

    assert not any([await store.perform(*call) for call in calls])
    assert known(await store.dequeue_rollout("w", claim_id=f"{CLAIMS[0]} None:2")).input == "a"


async def test_claim_that_was_overtaken_in_its_slot_gives_nothing(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    claims = [await store.dequeue_rollout("w", claim_id=claim_id) for claim_id in ("0:7", "0:9", "0:7", "0:8", "0:9")]
    assert [claim and claim.input for claim in claims] == [0, 1, None, None, 1]


async def test_slots_of_a_worker_are_apart_and_so_are_the_workers(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(6)])
    calls = [("w", "0:1"), ("w", "1:1"), ("v", "0:1"), ("w", "other"), ("w", "one"), ("w", "other"), ("v", "0:1")]

    claims = [known(await store.dequeue_rollout(worker, claim_id=claim_id)).input for worker, claim_id in calls]

    assert claims == [0, 1, 2, 3, 4, 3, 2]


async def test_claims_that_wait_under_one_id_are_given_the_same_rollout(store: LightningStore) -> None:
    both = [asyncio.create_task(store.dequeue_rollout("w", wait=30.0, claim_id="0:1")) for _ in range(2)]
    await asyncio.sleep(0.1)

    await store.enqueue_rollout("a")
    first, again = await asyncio.wait_for(asyncio.gather(*both), 20)
    await store.enqueue_rollout("b")

    assert known(first) == again
    assert known(await store.dequeue_rollout()).input == "b"


async def test_first_claims_of_a_worker_made_at_once_under_one_id_are_one(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(4)])
    claims = await asyncio.gather(*[store.claim_rollouts(worker_id="w", claim_id="0:1") for _ in range(4)])
    assert [[claim.rollout.input for claim in given] for given in claims] == [[0]] * 4


async def test_claim_whose_caller_left_while_it_waited_takes_nothing(store: LightningStore) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout("w", wait=30.0, claim_id="0:1"))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    await store.enqueue_rollout("a")

    assert await store.dequeue_rollout("w", wait=20.0, claim_id="0:2") is not None


async def test_repeated_claim_gives_what_of_it_is_still_open(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(5)])
    options: Any = {"limit": 4, "worker_id": "w", "claim_id": "0:1"}
    finished, replaced, cancelled, held = await store.dequeue_many_rollouts(**options)
    await store.update_attempt(finished.rollout_id, finished.attempt.attempt_id, status="succeeded")
    await store.start_attempt(replaced.rollout_id)
    await store.update_rollout(cancelled.rollout_id, status="cancelled")

    assert await store.dequeue_many_rollouts(**options) == [held]


async def test_repeated_step_does_not_finish_a_later_attempt(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout = await store.start_rollout("a", config=config, worker_id="w")
    step = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id, "status": "failed"}
    step |= {"worker_id": "w", "claim_id": "0:1"}

    first = await store.perform("finish_and_claim", step)
    await store.update_attempt(rollout.rollout_id, first.rollout.attempt.attempt_id, status="running")
    again = await store.perform("finish_and_claim", step)

    assert (again.rollout.attempt.sequence_id, again.rollout.status) == (2, "running")


async def test_slots_are_bounded_and_nobody_is_shown_them(store: LightningStore) -> None:
    for number in range(MOST_CLAIM_SLOTS + 2):
        await store.dequeue_rollout("w", claim_id=f"{number}:1")
    await store.enqueue_rollout("a")

    newest = await store.dequeue_rollout("w", claim_id=f"{MOST_CLAIM_SLOTS + 1}:1")
    oldest = known(await store.dequeue_rollout("w", claim_id="0:1"))  # forgotten, so that it is a new one

    assert (newest, oldest.input) == (None, "a")
    assert "claims" not in known(await store.get_worker_by_id("w")).model_dump()


async def test_strange_ids_of_claims_are_refused(store: LightningStore) -> None:
    for given in ("", "c" * 257, "\0"):
        with pytest.raises(InvalidValue, match="give one of 1 to 256"):
            await store.dequeue_many_rollouts(claim_id=given)


async def test_sequence_ids_are_new_each_time(store: LightningStore) -> None:
    numbers = [await store.get_next_span_sequence_id("held", "a", request_id="q") for _ in range(2)]
    assert numbers == [1, 2]


# ---------------------------------------------------------------------- what is created


async def test_rollout_of_that_id_is_not_started_twice(store: LightningStore) -> None:
    await store.enqueue_rollout("a", rollout_id="mine")
    with pytest.raises(RequestConflict, match="use start_attempt to run it once more"):
        await store.start_rollout("b", rollout_id="mine", attempt_id="one")
    assert known(await store.get_rollout_by_id("mine")).input == "a"


REUSED: Mapping[str, dict[str, Any]] = {
    "start_rollout": {"input": {"n": 2}, "rollout_id": "mine", "attempt_id": "one"},
    "enqueue_rollout": {"input": {"n": 2}, "rollout_id": "mine"},
    "enqueue_many_rollouts": {
        "rollouts": [
            EnqueueRolloutRequest(input="new", rollout_id="new"),
            EnqueueRolloutRequest(input={"n": 2}, rollout_id="mine"),
        ]
    },
}


async def test_id_of_a_rollout_with_another_input_is_refused(store: LightningStore) -> None:
    first = await store.start_rollout({"n": 1}, rollout_id="mine", attempt_id="one")

    for operation, arguments in REUSED.items():
        with pytest.raises(RequestConflict, match="a rollout 'mine' with another input already") as refusal:
            await store.perform(operation, arguments)
        assert refusal.value.http_status == 409

    assert await store.query_rollouts() == [first]


async def test_rollout_that_is_sent_again_may_differ_in_all_but_its_input(store: LightningStore) -> None:
    first = await store.enqueue_rollout({"n": [1, 2], "m": 0}, "train", rollout_id="mine", metadata={"group": "1"})
    await store.add_resources(PROMPT)

    again = await store.enqueue_rollout(
        {"m": 0, "n": (1, 2)}, "train", None, RolloutConfig(max_attempts=2), {"group": "2"}, rollout_id="mine"
    )

    assert again == first


async def test_attempt_cannot_be_called_latest(store: LightningStore) -> None:
    await store.enqueue_rollout("a", rollout_id="mine")
    with pytest.raises(InvalidValue, match="cannot be called 'latest'"):
        await store.start_attempt("mine", attempt_id="latest")


async def test_version_that_another_has_published_is_refused(store: LightningStore) -> None:
    first = await store.update_resources("mine", PROMPT, version=1)

    with pytest.raises(RequestConflict, match="at version 1, so version 1 cannot be published"):
        await store.update_resources("mine", OTHER_PROMPT, version=1)
    with pytest.raises(RequestConflict, match="at version 1, so version 3"):
        await store.update_resources("mine", OTHER_PROMPT, version=3)

    assert await store.get_resources_by_id("mine") == first
    assert (await store.update_resources("mine", OTHER_PROMPT, version=2)).version == 2


async def test_resources_that_were_changed_since_are_not_added_again(store: LightningStore) -> None:
    await store.add_resources(PROMPT, resources_id="mine")
    changed = await store.update_resources("mine", OTHER_PROMPT)
    assert await store.add_resources(PROMPT, resources_id="mine") == changed


async def test_callers_who_update_one_resource_at_once_all_publish(store: LightningStore) -> None:
    prompts: Any = [{"p": PromptTemplate(template=str(n), engine="f-string")} for n in range(5)]
    updates = await asyncio.gather(*[store.update_resources("mine", prompt) for prompt in prompts])
    assert sorted(update.version for update in updates) == [1, 2, 3, 4, 5]


async def test_figures_that_differ_are_both_kept(store: LightningStore) -> None:
    await store.start_run(run_id="run")
    for loss in (0.5, 0.25):
        await store.add_metrics("run", 1, {"loss": loss}, time=7.0)
    assert [point.values["loss"] for point in await store.query_metrics("run")] == [0.5, 0.25]


async def test_run_that_is_finished_again_keeps_its_end(store: LightningStore, clock: Any) -> None:
    await store.start_run(run_id="run")
    first = await store.finish_run("run", summary={"best": 1})
    clock.advance(5)

    assert await store.finish_run("run", summary={"best": 1}) == first
    assert (await store.finish_run("run", "failed")).end_time != first.end_time


async def test_unknown_operation_is_refused(store: LightningStore) -> None:
    with pytest.raises(InvalidQuery, match="no store operation 'explode'"):
        await store.perform("explode", {})
