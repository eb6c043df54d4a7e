"""Several agents at once: slots that claim for themselves, and what a runner leaves that has claimed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.runner import LitAgentRunner, attempt
from agentlightning.runner import agent as agent_module
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Hook
from agentlightning.types.lifecycle import LifecycleState
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Awaiting, until, work_off

SIZE = 4


async def stocked(store: InMemoryLightningStore, count: int) -> Any:
    await store.add_resources(RESOURCES)
    for number in range(count):
        await store.enqueue_rollout(number)
    return store


def make_runner(**options: Any) -> LitAgentRunner[Any]:
    options = {"poll_interval": 0.05, "heartbeat_interval": 0, "max_concurrency": SIZE, **options}
    return LitAgentRunner(OtelTracer(), **options)


async def counts(store: LightningStore) -> dict[str, int]:
    """Rollouts by status."""
    found: dict[str, int] = {}
    for rollout in await store.query_rollouts():
        found[rollout.status] = found.get(rollout.status, 0) + 1
    return found


class Watching:
    """A short agent that notes how many work at once."""

    def __init__(self, seconds: float = 0.005) -> None:
        self.now = self.most = 0
        self._seconds = seconds

    async def __call__(self, task: Any) -> float:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self._seconds)
        self.now -= 1
        return float(task)


async def test_as_many_agents_run_at_once_as_there_are_slots_and_never_more() -> None:
    store = await stocked(InMemoryLightningStore(), 0)
    agent = Watching()
    count = 60

    worked = await work_off(Awaiting(agent), *range(count), store=store, max_concurrency=SIZE)

    assert agent.most == SIZE
    assert await worked.statuses() == ["succeeded"] * count
    assert [await worked.rewards(number) for number in range(count)] == [[float(number)] for number in range(count)]
    assert [len(await store.query_attempts(rollout_id)) for rollout_id in worked.rollout_ids] == [1] * count
    spans = [span for rollout_id in worked.rollout_ids for span in await store.query_spans(rollout_id)]
    assert len({span.trace_id for span in spans}) == count  # none began in the trace of one that was ending


class Generous(InMemoryLightningStore):
    """Gives one more than it is asked for, once, as after an outage, when a lost answer comes instead of a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    async def claim_rollouts(self, *, limit: int = 1, **options: Any) -> Any:
        self.limits.append(limit)
        return await super().claim_rollouts(limit=limit + (len(self.limits) == 1), **options)


async def test_a_runner_that_got_more_than_it_may_run_ends_after_them() -> None:
    store = await stocked(Generous(), 10)
    runner = make_runner(max_rollouts=2)

    with runner.run_context(agent=Awaiting(lambda _: asyncio.sleep(0)), store=store):
        await asyncio.wait_for(runner.iter(), PATIENCE_SECONDS)

    assert await counts(store) == {"succeeded": 3, "queuing": 7}
    assert store.limits == [2]


class Recording(InMemoryLightningStore):
    """Records the ids of claims; the answers to some of them are lost."""

    def __init__(self, *lost: int) -> None:
        super().__init__()
        self.claim_ids: list[str] = []
        self._lost = lost

    async def claim_rollouts(self, **options: Any) -> Any:
        return self._answered(options, await super().claim_rollouts(**options))

    async def finish_and_claim(self, *args: Any, **options: Any) -> Any:
        return self._answered(options, await super().finish_and_claim(*args, **options))

    def _answered(self, options: dict[str, Any], answer: Any) -> Any:
        self.claim_ids.append(options["claim_id"])
        if len(self.claim_ids) in self._lost:
            raise StoreUnavailable("the answer was lost")
        return answer


async def test_a_claim_whose_answer_was_lost_is_repeated_under_its_id() -> None:
    store = await stocked(Recording(1, 4), 0)

    worked = await work_off(Awaiting(Watching()), *range(4), store=store)

    assert await worked.statuses() == ["succeeded"] * 4
    assert [len(await store.query_attempts(rollout_id)) for rollout_id in worked.rollout_ids] == [1] * 4
    slots, counters = zip(*(claim_id.rsplit(":", 1) for claim_id in store.claim_ids), strict=True)
    assert (len(set(slots)), counters) == (1, ("0", "0", "1", "2", "2", "3"))


async def test_a_claim_id_is_not_used_again_after_an_empty_answer() -> None:
    store = await stocked(Recording(), 0)
    runner = make_runner(poll_interval=0.01)

    with runner.run_context(agent=Awaiting(Watching()), store=store):
        running = asyncio.create_task(runner.iter())
        await until(lambda: len(store.claim_ids) >= 3)
        runner.stop()
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert len(set(store.claim_ids)) == len(store.claim_ids)


class Parting(InMemoryLightningStore):
    """Gives rollouts in answer to a claim, and does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.has_given = asyncio.Event()

    async def claim_rollouts(self, **options: Any) -> Any:
        await super().claim_rollouts(**options)
        self.has_given.set()
        await asyncio.Event().wait()


def stop(runner: LitAgentRunner[Any], _: "asyncio.Task[None]") -> None:
    runner.stop()


def cancel(_: LitAgentRunner[Any], running: "asyncio.Task[None]") -> None:
    running.cancel()


@pytest.mark.parametrize("end", [stop, cancel])
async def test_what_a_runner_was_given_as_it_left_is_given_back(end: Callable[..., None]) -> None:
    store, runner = await stocked(Parting(), SIZE), make_runner()

    with runner.run_context(agent=Awaiting(Watching()), store=store):
        running = asyncio.create_task(runner.iter())
        await store.has_given.wait()
        assert await counts(store) == {"preparing": SIZE}
        end(runner, running)
        await asyncio.wait([running], timeout=PATIENCE_SECONDS)

    assert await counts(store) == {"requeuing": SIZE}


class Gone(InMemoryLightningStore):
    """Answers nothing, once it is gone."""

    is_gone = False

    async def perform_or_hang(self) -> None:
        if self.is_gone:
            await asyncio.Event().wait()

    async def finish_attempt(self, *args: Any, **kwargs: Any) -> Any:
        await self.perform_or_hang()
        return await super().finish_attempt(*args, **kwargs)

    async def mark_worker_lost(self, *args: Any, **kwargs: Any) -> Any:
        await self.perform_or_hang()
        return await super().mark_worker_lost(*args, **kwargs)


async def test_a_runner_that_is_cancelled_leaves_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attempt, agent_module):
        monkeypatch.setattr(module, "LEAVING_SECONDS", 0.05)
    store, started = await stocked(Gone(), SIZE - 1), list[Any]()

    async def stuck(task: Any) -> None:
        started.append(task)
        await asyncio.Event().wait()

    runner = make_runner(poll_interval=60.0)
    with runner.run_context(agent=Awaiting(stuck), store=store):
        running = asyncio.create_task(runner.iter())
        await until(lambda: len(started) == SIZE - 1)
        store.is_gone = True
        running.cancel()
        await asyncio.wait([running], timeout=PATIENCE_SECONDS)

    assert running.cancelled()


async def test_a_runner_that_pauses_claims_nothing_until_it_goes_on() -> None:
    store, may_go = await stocked(InMemoryLightningStore(), 20), asyncio.Event()
    running_count = 0

    async def held(task: Any) -> None:
        nonlocal running_count
        running_count += 1
        await may_go.wait()

    runner = make_runner(max_rollouts=20)
    with runner.run_context(agent=Awaiting(held), store=store):
        running = asyncio.create_task(runner.iter())
        await until(lambda: running_count == SIZE)
        runner.pause()
        may_go.set()

        async def have_ended() -> bool:
            return await counts(store) == {"succeeded": SIZE, "queuing": 20 - SIZE}

        await until(have_ended)
        assert runner.state is LifecycleState.PAUSED
        runner.resume()
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert await counts(store) == {"succeeded": 20}


async def test_one_place_means_strictly_one_after_the_other() -> None:
    store = await stocked(InMemoryLightningStore(), 0)
    order: list[tuple[str, Any]] = []

    class Noting(Hook):
        async def on_rollout_start(self, *, rollout: Any, **_: Any) -> None:
            order.append(("start", rollout.input))

        async def on_rollout_end(self, *, rollout: Any, **_: Any) -> None:
            order.append(("end", rollout.input))

    await work_off(Awaiting(Watching(0.0)), *range(8), store=store, hooks=[Noting()])

    assert order == [(what, number) for number in range(8) for what in ("start", "end")]


async def test_free_places_wait_for_work_instead_of_asking_for_it() -> None:
    asked: list[float] = []

    class Asked(InMemoryLightningStore):
        async def claim_rollouts(self, **options: Any) -> Any:
            asked.append(options.get("wait") or 0.0)
            return await super().claim_rollouts(**options)

    store = await stocked(Asked(), 1)
    may_go, second_began = asyncio.Event(), asyncio.Event()

    async def working(task: Any) -> None:
        if task == "second":
            second_began.set()
        await may_go.wait()

    runner = make_runner(max_rollouts=2, poll_interval=60.0)
    with runner.run_context(agent=Awaiting(working), store=store):
        running = asyncio.create_task(runner.iter())
        await until(lambda: len(asked) == 2)
        await store.enqueue_rollout("second")
        await asyncio.wait_for(second_began.wait(), PATIENCE_SECONDS)
        may_go.set()
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert asked == [60.0, 60.0]
