"""Rollouts in groups: sent, waited for, read, withdrawn; and the calls of one model out of several."""

from typing import Any

import pytest

from agentlightning.adapter import TraceToTrajectory
from agentlightning.algorithm.grpo.collecting import (
    Collector,
    FinishedRollout,
    check_token_ids,
    outcomes_of,
    spans_of_model,
)
from agentlightning.algorithm.grpo.samples import RolloutOutcome
from agentlightning.errors import SpansEvicted, TrainingError
from agentlightning.llm_proxy.spans import CALL_SPAN, RAW_SPAN
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Rollout, Span
from tests.adapter.spans import CHAT, span
from tests.conftest import MakeSpan


async def finish(store: InMemoryLightningStore, make_span: MakeSpan, *, status: Any = "succeeded") -> Rollout:
    """Do the next rollout of the queue, with its number in the queue as reward."""
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": float(claimed.input)}
    await store.add_span(make_span(claimed, name="agentlightning.annotation", attributes=reward))
    error = None if status == "succeeded" else {"error": {"type": "ValueError", "message": "no\nsecond line"}}
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status, metadata=error)
    return claimed


async def test_copies_of_a_task_are_a_group_and_come_back_in_order(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    collector = Collector(store)
    sent = await collector.send([1, 2, 3], copies=2, metadata={"step": 7})
    for _ in range(6):
        await finish(store, make_span)

    finished = await collector.finished(sent)

    assert [one.rollout.input for one in finished] == [1, 1, 2, 2, 3, 3]
    assert [one.reward for one in finished] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert [one.group for one in finished[::2]] == [one.group for one in finished[1::2]]
    assert len({one.group for one in finished}) == 3
    assert all(one.rollout.metadata == {"step": 7, "group": one.group} for one in finished)


async def test_failed_rollout_says_why_and_has_no_trajectory(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    collector = Collector(store)
    sent = await collector.send([1])
    await finish(store, make_span, status="failed")

    finished = await collector.finished(sent)
    (outcome,) = await outcomes_of(finished, TraceToTrajectory())

    assert not finished[0].has_succeeded
    assert (outcome.status, outcome.error, outcome.trajectory) == ("failed", "ValueError: no", None)


async def test_spans_that_were_dropped_are_an_error_of_that_rollout_alone(make_span: MakeSpan) -> None:
    class Forgetful(InMemoryLightningStore):
        forgotten: str | None = None

        async def query_spans(self, rollout_id: str, *args: Any, **options: Any) -> Any:
            if rollout_id == self.forgotten:
                raise SpansEvicted(f"The spans of '{rollout_id}' are gone.")
            return await super().query_spans(rollout_id, *args, **options)

    store = Forgetful()
    sent = await Collector(store).send([1, 2])
    store.forgotten = next(iter(sent.group_of))
    for _ in range(2):
        await finish(store, make_span)

    finished = await Collector(store).finished(sent)

    assert [one.reward for one in finished] == [None, 2.0]
    assert "SpansEvicted" in (finished[0].error or "")


async def test_withdrawn_rollouts_are_cancelled_and_finished_ones_are_not(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    collector = Collector(store)
    sent, others = await collector.send([1, 2, 3]), await collector.send([4])
    done = await finish(store, make_span)

    await collector.withdraw(sent.group_of)

    statuses = {rollout.rollout_id: rollout.status for rollout in await store.query_rollouts()}
    assert [statuses[one] for one in sent.group_of] == ["succeeded", "cancelled", "cancelled"]
    assert statuses[done.rollout_id] == "succeeded"
    assert [statuses[one] for one in others.group_of] == ["queuing"]


async def test_only_the_rollouts_that_are_withdrawn_are_looked_for() -> None:
    class Watched(InMemoryLightningStore):
        read: list[int] = []  # noqa: RUF012 # one store

        async def query_rollouts(self, *args: Any, **options: Any) -> Any:
            found = await super().query_rollouts(*args, **options)
            self.read.append(len(found))
            return found

    store = Watched()
    collector = Collector(store)
    await collector.send(list(range(50)))
    mine = await collector.send([1, 2])

    await collector.withdraw(mine.group_of)
    await collector.withdraw([])

    assert store.read == [2]


async def test_what_a_killed_run_left_is_found_by_its_resources(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    for name in ("mine", "theirs"):
        await store.update_resources(name, {})
    left = await Collector(store).send([1, 2], resources_id="mine")
    theirs = await Collector(store).send([3], resources_id="theirs")

    await Collector(store).withdraw_all(["mine"])

    statuses = {rollout.rollout_id: rollout.status for rollout in await store.query_rollouts()}
    assert [statuses[one] for one in left.group_of] == ["cancelled", "cancelled"]
    assert [statuses[one] for one in theirs.group_of] == ["queuing"]


PROXIED = {
    "agentlightning.proxy.dialect": "responses",
    "agentlightning.proxy.backend": "m#0 at http://model/v1",
    "gen_ai.response.id": "r1",
}
IDS = {"prompt_token_ids": [1, 2], "response_token_ids": [3]}


async def outcomes(*calls: tuple[str, dict[str, Any]]) -> tuple[list[FinishedRollout], list[RolloutOutcome]]:
    """A rollout with these calls, by name and attributes, each a second after the one before."""
    rollout = Rollout(rollout_id="ro-1", input=1, start_time=0.0, status="succeeded")
    spans = [
        span(f"call-{number}", name=name, start=float(number), end=number + 0.5, attributes=attributes)
        for number, (name, attributes) in enumerate(calls)
    ]
    finished = [FinishedRollout(rollout, "group", spans, 1.0)]
    return finished, await outcomes_of(finished, TraceToTrajectory())


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([(CHAT, {"server.address": "http://gpt"})], r"1 model calls .*\(1 'openai.chat.completion' by 'http://gpt'\)"),
        ([(CALL_SPAN, PROXIED)], r"\(1 in the responses dialect by backend 'm#0 at http://model/v1'\)"),
        (
            [("openai.responses", {"gen_ai.response.id": "r1"}), (CALL_SPAN, PROXIED)],
            r"1 model calls .*\(1 in the resp",
        ),
        ([(CHAT, {**IDS, "prompt_token_ids": []})], "None of the 1 model calls"),
    ],
    ids=["tracer", "proxy", "both", "no prompt"],
)
async def test_calls_without_token_ids_are_an_error_that_names_who_answered(calls: Any, told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        check_token_ids(*await outcomes(*calls))


@pytest.mark.parametrize(
    "calls",
    [[], [(CHAT, IDS)], [(CHAT, IDS), (CHAT, {"gen_ai.response.id": "judge"})]],
    ids=["no calls", "with ids", "one of two with ids"],
)
async def test_some_token_ids_are_enough(calls: Any) -> None:
    check_token_ids(*await outcomes(("step", {}), *calls))


async def test_calls_of_other_models_are_left_out_with_what_belongs_to_them(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    attempt = await store.start_rollout("task")

    def call(number: int, model: str) -> list[Span]:
        asked = {"agentlightning.proxy.requested_model": model, "gen_ai.request.model": "the backend's name"}
        own = make_span(attempt, 2 * number, name="chat", attributes=asked)
        return [make_span(attempt, 2 * number + 1, name=RAW_SPAN, parent_id=own.span_id, attributes={}), own]

    reward = make_span(attempt, 9, name="reward", attributes={"x": 1})
    spans = [*call(1, "planner"), *call(2, "solver"), reward]

    kept = spans_of_model(spans, "solver")

    assert {span.span_id for span in kept} == {spans[2].span_id, spans[3].span_id, reward.span_id}


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_only_success_counts_as_success(status: Any) -> None:
    store = InMemoryLightningStore()
    rollout = await store.enqueue_rollout("task")
    changed = await store.update_rollout(rollout.rollout_id, status=status)

    assert not FinishedRollout(changed, "group", [], None).has_succeeded
