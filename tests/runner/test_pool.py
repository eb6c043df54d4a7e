"""Several agents at once: slots, claims ahead of them, and claims that are returned."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.runner import LitAgentRunner, attempt, pool
from agentlightning.runner.pool import FIRST_ANSWER_SECONDS, ClaimAhead
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Hook
from agentlightning.types.lifecycle import LifecycleState
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Awaiting, until, work_off

SIZE = 4


class Slow(InMemoryLightningStore):
    """Takes long to finish an attempt and claim the next, so that claims ahead are worth it."""

    seconds = 0.02
    finishing = 0

    async def finish_and_claim(self, *args: Any, **kwargs: Any) -> Any:
        self.finishing += 1
        await asyncio.sleep(self.seconds)
        self.finishing -= 1
        return await super().finish_and_claim(*args, **kwargs)


class Away(Slow):
    """Cannot be reached when claims are to be given back."""

    asked = 0

    async def return_claims(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        raise StoreUnavailable("away")


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
    """A short agent that notes how many work at once, and whether one begins while others are being finished."""

    def __init__(self, store: Slow, seconds: float = 0.005) -> None:
        self.now = self.most = 0
        self.begun_early = 0
        self._store = store
        self._seconds = seconds

    async def __call__(self, task: Any) -> float:
        self.now += 1
        self.most = max(self.most, self.now)
        self.begun_early += self._store.finishing >= SIZE
        await asyncio.sleep(self._seconds)
        self.now -= 1
        return float(task)


async def test_next_agents_begin_while_attempts_are_finished_and_never_too_many() -> None:
    store = await stocked(Slow(), 0)
    agent = Watching(store)
    count = 120  # so many that the pace is found again when the machine stands still at the beginning

    worked = await work_off(Awaiting(agent), *range(count), store=store, max_concurrency=SIZE)

    assert agent.most == SIZE
    assert agent.begun_early >= 1  # none can, if an attempt keeps its place until it is finished
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


class Stuck:
    """Agents that are quick until a task comes from which on they wait to be let go."""

    def __init__(self, from_task: int) -> None:
        self.waiting = 0
        self.may_go = asyncio.Event()
        self._from_task = from_task

    async def __call__(self, task: Any) -> None:
        if task < self._from_task:
            await asyncio.sleep(0)  # what a busy machine adds to a longer one would be taken for its pace
            return
        self.waiting += 1
        await self.may_go.wait()
        self.waiting -= 1


async def holding(store: LightningStore) -> bool:
    """Whether all places are taken by agents that are stuck, and claims wait behind them."""
    found = await counts(store)
    return found.get("preparing", 0) + found.get("running", 0) > SIZE


async def until_it_holds(runner: LitAgentRunner[Any], stuck: Stuck) -> "asyncio.Task[None]":
    """Start a runner, and come back when it has claims behind agents that are stuck."""
    running = asyncio.create_task(runner.iter())
    await until(lambda: stuck.waiting == SIZE)
    await until(lambda: holding(runner.get_store()))
    return running


async def test_claims_behind_agents_that_suddenly_take_long_go_to_another_runner() -> None:
    store, stuck = await stocked(Slow(), 60), Stuck(30)
    done_elsewhere: list[Any] = []

    async def elsewhere(task: Any) -> None:
        done_elsewhere.append(task)

    first, second = make_runner(worker_name="First"), make_runner(worker_name="Second", max_concurrency=1)
    with first.run_context(agent=Awaiting(stuck), store=store):
        running = await until_it_holds(first, stuck)
        with second.run_context(agent=Awaiting(elsewhere), store=store):
            also_running = asyncio.create_task(second.iter())
            await until(lambda: len(done_elsewhere) == 60 - 30 - SIZE)
            second.stop()
            await asyncio.wait_for(also_running, PATIENCE_SECONDS)
        assert stuck.waiting == SIZE
        stuck.may_go.set()
        first.stop()
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert await counts(store) == {"succeeded": 60}


async def test_what_cannot_be_given_back_is_run_here(caplog: pytest.LogCaptureFixture) -> None:
    store, stuck = await stocked(Away(), 60), Stuck(30)
    runner = make_runner(max_rollouts=60)

    with runner.run_context(agent=Awaiting(stuck), store=store), caplog.at_level(logging.WARNING):
        running = asyncio.create_task(runner.iter())
        await until(lambda: store.asked >= 1)
        stuck.may_go.set()
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert await counts(store) == {"succeeded": 60}
    assert "could not be given back: away" in caplog.text


def stop(runner: LitAgentRunner[Any], _: "asyncio.Task[None]") -> None:
    runner.stop()


def cancel(_: LitAgentRunner[Any], running: "asyncio.Task[None]") -> None:
    running.cancel()


@pytest.mark.parametrize(("end", "outcome"), [(stop, "succeeded"), (cancel, "requeuing")])
async def test_a_runner_that_ends_gives_back_what_it_has_not_begun_with(
    end: Callable[[LitAgentRunner[Any], "asyncio.Task[None]"], None], outcome: str
) -> None:
    store, stuck = await stocked(Slow(), 60), Stuck(30)
    runner = make_runner()

    with runner.run_context(agent=Awaiting(stuck), store=store):
        running = await until_it_holds(runner, stuck)
        end(runner, running)
        asyncio.get_running_loop().call_later(0.05, stuck.may_go.set)
        await asyncio.wait([running], timeout=PATIENCE_SECONDS)

    found = await counts(store)
    assert running.done()
    assert found.pop("queuing") == 60 - 30 - SIZE
    assert sum(found.values()) == 30 + SIZE
    assert found.get(outcome, 0) >= SIZE


class Gone(Slow):
    """Answers nothing, once it is gone."""

    is_gone = False

    async def finish_and_claim(self, *args: Any, **kwargs: Any) -> Any:
        await self._answering()
        return await super().finish_and_claim(*args, **kwargs)

    async def finish_attempt(self, *args: Any, **kwargs: Any) -> Any:
        await self._answering()
        return await super().finish_attempt(*args, **kwargs)

    async def return_claims(self, *args: Any, **kwargs: Any) -> Any:
        await self._answering()
        return await super().return_claims(*args, **kwargs)

    async def _answering(self) -> None:
        if self.is_gone:
            await asyncio.Event().wait()


async def test_a_runner_that_is_cancelled_leaves_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attempt, pool):
        monkeypatch.setattr(module, "LEAVING_SECONDS", 0.05)
    store, stuck = await stocked(Gone(), 60), Stuck(30)
    runner = make_runner()

    with runner.run_context(agent=Awaiting(stuck), store=store):
        running = await until_it_holds(runner, stuck)
        store.is_gone = True
        running.cancel()
        await asyncio.wait([running], timeout=PATIENCE_SECONDS)

    assert running.cancelled()


async def test_a_pause_gives_back_what_waits_and_begins_with_nothing() -> None:
    store, stuck = await stocked(Slow(), 60), Stuck(30)
    runner = make_runner(max_rollouts=60)

    with runner.run_context(agent=Awaiting(stuck), store=store):
        running = await until_it_holds(runner, stuck)
        runner.pause()
        stuck.may_go.set()

        async def has_settled() -> bool:
            return await counts(store) == {"succeeded": 30 + SIZE, "queuing": 60 - 30 - SIZE}

        await until(has_settled)
        assert runner.state is LifecycleState.PAUSED
        runner.resume()
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert await counts(store) == {"succeeded": 60}


async def test_one_place_means_strictly_one_after_the_other() -> None:
    store = await stocked(Slow(), 0)
    order: list[tuple[str, Any]] = []

    class Noting(Hook):
        async def on_rollout_start(self, *, rollout: Any, **_: Any) -> None:
            order.append(("start", rollout.input))

        async def on_rollout_end(self, *, rollout: Any, **_: Any) -> None:
            order.append(("end", rollout.input))

    await work_off(Awaiting(Watching(store, 0.0)), *range(8), store=store, hooks=[Noting()])

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


@pytest.mark.parametrize(
    ("agent_seconds", "answer_seconds", "count"),
    [(0.05, 0.01, 26), (0.05, 0.005, 13), (5.0, 0.01, 0), (0.001, 0.01, 64), (0.0, 0.01, 64)],
)
def test_claims_ahead_are_what_is_used_up_while_the_store_answers(
    agent_seconds: float, answer_seconds: float, count: int
) -> None:
    ahead = ClaimAhead()
    assert ahead.count(64) == 0
    ahead.note_agent(FIRST_ANSWER_SECONDS)
    assert ahead.count(64) == 64
    for _ in range(200):
        ahead.note_agent(agent_seconds)
        ahead.note_answer(answer_seconds)

    assert ahead.count(64) == count


async def test_a_runner_ends_though_the_store_takes_nothing_back() -> None:
    store, stuck = await stocked(Away(), 60), Stuck(30)
    runner = make_runner()

    with runner.run_context(agent=Awaiting(stuck), store=store):
        running = await until_it_holds(runner, stuck)
        runner.stop()
        stuck.may_go.set()
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    found = await counts(store)
    assert found.get("preparing", 0) > 0
    assert found["succeeded"] >= 30 + SIZE
    assert sum(found.values()) == 60
    assert set(found) <= {"succeeded", "preparing", "queuing"}
