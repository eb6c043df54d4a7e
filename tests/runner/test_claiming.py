"""Going from one rollout to the next: how much is asked of the store, and what happens where it can do less."""

import asyncio
from typing import Any

import pytest

from agentlightning.errors import InvalidValue, StoreUnavailable
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.attempt import AttemptRun
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import Attempt, AttemptedRollout, NamedResources, PromptTemplate, Rollout, RolloutConfig
from agentlightning.utils.metrics import MetricsBackend
from tests.runner.working import RESOURCES, Answering, Awaiting, until, work_off


class Counting(MetricsBackend):
    """Writes down which operations a store runs."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def register_histogram(self, *args: Any, **kwargs: Any) -> None:
        pass

    def register_counter(self, *args: Any, **kwargs: Any) -> None:
        pass

    def inc_counter(self, *args: Any, **kwargs: Any) -> None:
        pass

    def observe_histogram(self, name: str, value: float, labels: Any = None) -> None:
        self.operations.append(labels["operation"])

    def of(self, *names: str) -> list[str]:
        return [operation for operation in self.operations if operation in names]


async def counted_store(kind: type[InMemoryLightningStore] = InMemoryLightningStore) -> tuple[Any, Counting]:
    tracker = Counting()
    store = kind(tracker=tracker)
    await store.add_resources(RESOURCES)
    return store, tracker


WORKING = (
    *("claim_rollouts", "dequeue_rollout", "dequeue_many_rollouts", "get_resources_by_id", "get_latest_resources"),
    *("finish_and_claim", "finish_attempt", "update_attempt", "add_many_spans", "get_next_span_sequence_id"),
)


async def test_each_rollout_takes_one_operation_of_the_store() -> None:
    store, tracker = await counted_store()

    worked = await work_off(Answering(lambda _: 1.0), *range(4), store=store)

    assert await worked.statuses() == ["succeeded"] * 4
    assert tracker.of(*WORKING) == ["claim_rollouts"] + ["finish_and_claim"] * 3 + ["finish_attempt"]


async def test_every_rollout_has_resources_of_its_own_in_their_latest_version() -> None:
    store = InMemoryLightningStore()
    await store.update_resources("mine", RESOURCES)
    seen: list[str] = []

    async def spoiling(task: Any, resources: NamedResources) -> None:
        prompt = resources["prompt"]
        assert isinstance(prompt, PromptTemplate)
        seen.append(prompt.template)
        prompt.template = "spoiled"
        if task == 1:
            await store.update_resources("mine", {"prompt": PromptTemplate(template="new", engine="f-string")})

    class Spoiling(Awaiting):
        async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> None:
            await spoiling(task, resources)

    worked = await work_off(Spoiling(lambda _: asyncio.sleep(0)), *range(4), store=store)

    assert await worked.statuses() == ["succeeded"] * 4
    assert seen == ["Do {task}.", "Do {task}.", "new", "new"]


async def test_a_claim_without_resources_costs_no_further_call_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse() -> None:
        raise AssertionError("the claim says it already")

    class Looking(LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> None:
            assert resources == {}

    store = InMemoryLightningStore()
    monkeypatch.setattr(store, "get_latest_resources", refuse)
    worked = await work_off(Looking(), 1, 2, 3, store=store)

    assert await worked.statuses() == ["succeeded"] * 3


class Away(InMemoryLightningStore):
    """Cannot be reached when the first attempt is finished."""

    error: Exception = StoreUnavailable("away")
    times = 1
    asked = 0

    async def finish_and_claim(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        if self.asked <= self.times:
            raise self.error
        return await super().finish_and_claim(*args, **kwargs)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), InvalidValue("odd")], ids=lambda e: type(e).__name__)
async def test_an_outage_or_a_refused_span_does_not_make_later_attempts_go_the_longer_way(error: Exception) -> None:
    store, tracker = await counted_store(Away)
    store.error = error

    worked = await work_off(Answering(lambda _: 1.0), *range(4), store=store)

    assert await worked.statuses() == ["succeeded"] * 4
    assert [await worked.rewards(number) for number in range(4)] == [[1.0]] * 4
    assert len(tracker.of("finish_and_claim")) == 2
    assert len(tracker.of("add_many_spans")) == 1


class LosesItsAnswer(InMemoryLightningStore):
    """Finishes an attempt, and says that it could not."""

    async def finish_attempt(self, *args: Any, **kwargs: Any) -> Attempt:  # type: ignore[override] # as it comes
        await super().finish_attempt(*args, **kwargs)
        raise StoreUnavailable("the answer was lost")


async def test_spans_whose_arrival_was_not_confirmed_are_stored_once() -> None:
    store = LosesItsAnswer()
    await store.add_resources(RESOURCES)

    worked = await work_off(Answering(lambda _: 1.0), store=store)

    assert await worked.statuses() == ["succeeded"]
    assert await worked.span_names() == ["agentlightning.reward"]


async def test_a_callback_that_is_interrupted_does_not_keep_an_attempt_from_its_status() -> None:
    class Interrupted(Answering):
        def on_rollout_end(self, *_: Any) -> None:
            raise KeyboardInterrupt

    store, _ = await counted_store()
    started = await store.start_rollout("task")
    runner: LitAgentRunner[Any] = LitAgentRunner(DummyTracer())

    with (
        runner.run_context(agent=Interrupted(lambda _: None), store=store),
        pytest.raises(KeyboardInterrupt),
    ):
        await AttemptRun(runner, started).run()

    assert (await store.get_rollout_by_id(started.rollout_id)).status == "succeeded"


async def test_silent_agents_are_alive_while_their_runner_beats() -> None:
    concurrency = 3
    now, is_over = [1000.0], asyncio.Event()
    store = InMemoryLightningStore(clock=lambda: now[0])
    await store.add_resources(RESOURCES)

    async def have_all_beaten() -> bool:
        rollouts = await store.query_rollouts(status_in=["preparing", "running"])
        beats = [rollout.attempt.last_heartbeat_time for rollout in rollouts if isinstance(rollout, AttemptedRollout)]
        return beats == [now[0]] * concurrency

    async def silent(task: int) -> None:
        if task > 0:
            await is_over.wait()
            return
        for _ in range(3):
            now[0] += 8
            await until(have_all_beaten)
        is_over.set()

    options: dict[str, Any] = {"heartbeat_interval": 0.05, "interval_jitter": 0.0, "max_concurrency": concurrency}
    config = RolloutConfig(unresponsive_seconds=10)
    worked = await work_off(Awaiting(silent), *range(concurrency), store=store, config=config, **options)

    assert await worked.statuses() == ["succeeded"] * concurrency
    assert [len(await store.query_attempts(rollout_id)) for rollout_id in worked.rollout_ids] == [1] * concurrency


async def test_a_runner_that_ends_with_nothing_to_do_says_nothing_of_lost_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, _ = await counted_store()

    with caplog.at_level("INFO"):
        await store.update_worker("Worker-0", {})
        assert list(await store.mark_worker_lost("Worker-0", "the runner stopped")) == []

    assert caplog.messages == []
