"""Agents that misbehave: whatever they do, the attempt gets its status, and the runner goes on with the next."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.emitter import emit_message, emit_reward
from agentlightning.errors import PayloadTooLarge
from agentlightning.litagent import LitAgent
from agentlightning.runner import attempt as attempt_module
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.types import NamedResources, Rollout, RolloutConfig, RolloutRawResult
from tests.e2e.server_process import left_behind
from tests.runner.working import RESOURCES, Answering, Awaiting, stocked_store, until, work_off


def failing_once(error: BaseException) -> Callable[[Any], float]:
    """The task `bad` raises; others are done."""

    def answer(task: Any) -> float:
        if task == "bad":
            raise error
        return 1.0

    return answer


def awaiting(answer: Callable[[Any], Any]) -> Awaiting:
    async def coroutine(task: Any) -> Any:
        return answer(task)

    return Awaiting(coroutine)


class Peculiar(BaseException):
    """Neither an Exception nor one that Python knows."""


ERRORS = [
    ValueError("no"),
    KeyError("missing"),
    SystemExit(3),
    KeyboardInterrupt("pressed"),
    asyncio.CancelledError("from within"),
    GeneratorExit(),
    StopIteration("over"),
    StopAsyncIteration("over"),
    MemoryError("full"),
    RecursionError("deep"),
    TimeoutError("slow"),
    Peculiar("odd"),
]


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("make", [Answering, awaiting], ids=["plain", "async"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_whatever_an_agent_raises_fails_its_attempt_and_no_other(
    error: BaseException, make: Callable[[Any], LitAgent[Any]], concurrency: int
) -> None:
    worked = await work_off(make(failing_once(error)), "bad", "good", max_concurrency=concurrency)

    assert await worked.statuses() == ["failed", "succeeded"]
    assert (await worked.error())["traceback"]


async def test_what_an_agent_raised_is_on_the_attempt_with_its_traceback() -> None:
    worked = await work_off(Answering(failing_once(ValueError("a reason"))), "bad")

    error = await worked.error()
    assert (error["type"], error["message"]) == ("ValueError", "a reason")
    assert "in answer" in error["traceback"]
    assert "agentlightning.exception" in await worked.span_names()


async def test_an_endless_traceback_is_cut() -> None:
    worked = await work_off(Answering(failing_once(ValueError("x" * 1_000_000))), "bad")

    assert len((await worked.error())["traceback"]) <= 20_000


async def test_an_endless_message_is_cut() -> None:
    worked = await work_off(Answering(failing_once(ValueError("x" * 10_000_000))), "bad")

    assert len((await worked.error())["message"]) < 1_000_000


async def test_an_exception_that_cannot_be_shown_fails_the_attempt_all_the_same() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    worked = await work_off(Answering(failing_once(Unspeakable())), "bad", "good")

    assert await worked.statuses() == ["failed", "succeeded"]


async def test_spans_of_an_agent_that_failed_are_kept() -> None:
    def answer(_: Any) -> None:
        emit_message("before")
        raise ValueError("no")

    worked = await work_off(Answering(answer))

    assert len(await worked.span_names()) == 2


async def test_an_agent_in_a_store_without_resources_gets_an_empty_mapping() -> None:
    seen: list[NamedResources] = []

    class Looking(LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
            seen.append(resources)
            return 1.0

    worked = await work_off(Looking(), store=InMemoryLightningStore())

    assert await worked.statuses() == ["succeeded"]
    assert seen == [{}]


async def test_missing_resources_of_an_id_are_named() -> None:
    store = await stocked_store()
    rollout = await store.enqueue_rollout("task", resources_id="rs-lost")

    await work_off(Answering(lambda _: 1.0), "good", store=store, max_rollouts=2)

    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.status == "failed"
    assert "rs-lost" in (attempt.metadata or {})["error"]["message"]


async def test_a_rollout_runs_with_the_resources_it_names() -> None:
    seen: list[Any] = []

    class Looking(Answering):
        def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
            seen.append(resources["prompt"].template)  # type: ignore[union-attr] # it is a prompt
            return None

    store = await stocked_store()
    first = await store.get_latest_resources()
    assert first is not None
    other = RESOURCES["prompt"].model_copy(update={"template": "Other"})
    await store.add_resources({"prompt": other})
    await store.enqueue_rollout("pinned", resources_id=first.resources_id)

    await work_off(Looking(lambda _: None), "latest", store=store, max_rollouts=2)

    assert seen == ["Do {task}.", "Other"]


# ---------------------------------------------------------------------- agents that take too long


async def test_a_coroutine_that_hangs_is_timed_out_and_the_next_one_runs() -> None:
    ended: list[str] = []

    async def answer(task: Any) -> float:
        try:
            await asyncio.sleep(1000 if task == "bad" else 0)
        finally:
            ended.append(task)
        return 1.0

    worked = await work_off(Awaiting(answer), "bad", "good", config=RolloutConfig(timeout_seconds=0.2))

    assert [(await worked.attempt(n)).status for n in (0, 1)] == ["timeout", "succeeded"]
    assert ended == ["bad", "good"]


async def test_a_plain_agent_that_hangs_is_timed_out_and_lends_its_thread_to_no_other() -> None:
    leave = threading.Event()
    threads: dict[str, str] = {}

    def answer(task: Any) -> float:
        threads[task] = threading.current_thread().name
        if task == "bad":
            leave.wait()
        return 1.0

    worked = await work_off(Answering(answer), "bad", "good", config=RolloutConfig(timeout_seconds=0.2))
    leave.set()

    assert [(await worked.attempt(n)).status for n in (0, 1)] == ["timeout", "succeeded"]
    assert "0.2 s" in (await worked.error())["message"]
    assert threads["bad"] != threads["good"]
    await until(lambda: threads["bad"] not in {thread.name for thread in threading.enumerate()})


async def test_a_coroutine_that_ignores_being_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "CANCEL_SECONDS", 0.1)
    leave = asyncio.Event()

    async def answer(task: Any) -> float:
        while task == "bad" and not leave.is_set():
            try:
                await leave.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    worked = await work_off(Awaiting(answer), "bad", "good", config=RolloutConfig(timeout_seconds=0.2))
    leave.set()

    assert [(await worked.attempt(n)).status for n in (0, 1)] == ["timeout", "succeeded"]


async def test_spans_of_an_agent_left_behind_go_to_no_other_rollout() -> None:
    leave, done = threading.Event(), threading.Event()

    def answer(task: Any) -> float:
        if task == "bad":
            leave.wait()
            emit_message("from the dead")
            done.set()
        else:
            leave.set()
            done.wait()
            emit_message("from the living")
        return 1.0

    worked = await work_off(Answering(answer), "bad", "good", config=RolloutConfig(timeout_seconds=0.3))

    spans = await worked.store.query_spans(worked.rollout_ids[1])
    assert [s.attributes.get("message") for s in spans if "message" in s.attributes] == ["from the living"]


async def test_a_result_that_comes_after_the_time_limit_is_no_reward() -> None:
    leave, done = threading.Event(), threading.Event()

    def answer(task: Any) -> float:
        leave.wait()
        done.set()
        return 1.0

    worked = await work_off(Answering(answer), "bad", config=RolloutConfig(timeout_seconds=0.2))
    leave.set()
    done.wait(10)

    assert (await worked.attempt()).status == "timeout"
    assert await worked.rewards() == []


async def test_an_attempt_that_the_store_gave_up_meanwhile_stays_given_up() -> None:
    store = await stocked_store()

    async def answer(task: Any) -> float:
        (rollout,) = await store.query_rollouts()
        (attempt,) = await store.query_attempts(rollout.rollout_id)
        await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="timeout")
        return 1.0

    worked = await work_off(Awaiting(answer), store=store)

    assert (await worked.rollout()).status in ("failed", "succeeded")
    assert len(await store.query_attempts(worked.rollout_ids[0])) == 1


async def test_the_loser_of_a_race_does_not_undo_the_winner() -> None:
    """The store gave the rollout to a second attempt, which won while the first was still running."""
    store = await stocked_store()
    config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])

    async def answer(task: Any) -> float:
        (rollout,) = await store.query_rollouts()
        first = await store.get_latest_attempt(rollout.rollout_id)
        assert first is not None
        await store.update_attempt(rollout.rollout_id, first.attempt_id, status="unresponsive")
        second = await store.dequeue_rollout()
        assert second is not None
        await store.update_attempt(rollout.rollout_id, second.attempt.attempt_id, status="succeeded")
        raise ValueError("too late")

    worked = await work_off(Awaiting(answer), store=store, config=config)

    assert await worked.statuses() == ["succeeded"]


# ---------------------------------------------------------------------- agents that do odd things


async def test_a_plain_agent_may_run_an_event_loop_of_its_own() -> None:
    async def think() -> float:
        await asyncio.sleep(0)
        emit_message("inside")
        return 0.5

    worked = await work_off(Answering(lambda _: asyncio.run(think())))

    assert await worked.rewards() == [0.5]
    assert len(await worked.span_names()) == 2


async def test_an_agent_that_leaks_threads_leaves_the_runner_alone() -> None:
    leave = threading.Event()
    threads: list[threading.Thread] = []

    def answer(_: Any) -> float:
        for _number in range(20):
            threads.append(threading.Thread(target=leave.wait, daemon=True))
            threads[-1].start()
        return 1.0

    worked = await work_off(Answering(answer), "one", "two")
    leave.set()
    for thread in threads:
        thread.join(10)

    assert await worked.statuses() == ["succeeded", "succeeded"]


async def test_an_agent_that_prints_megabytes_is_let(capfd: pytest.CaptureFixture[str]) -> None:
    def answer(_: Any) -> float:
        for _number in range(8):
            print("x" * 1024 * 1024)
        return 1.0

    worked = await work_off(Answering(answer))

    assert await worked.statuses() == ["succeeded"]
    assert len(capfd.readouterr().out) > 8 * 1024 * 1024


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_an_agent_that_forks_a_child_is_done_once() -> None:
    def answer(_: Any) -> float:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return 1.0

    worked = await work_off(Answering(answer))

    assert await worked.statuses() == ["succeeded"]
    assert await worked.rewards() == [1.0]
    assert left_behind() == []


async def test_an_agent_that_blocks_the_loop_only_delays_itself() -> None:
    async def answer(_: Any) -> float:
        time.sleep(0.2)  # noqa: ASYNC251 # that is what is wrong with it
        return 1.0

    worked = await work_off(Awaiting(answer), "one", "two", max_concurrency=2)

    assert await worked.statuses() == ["succeeded", "succeeded"]


async def test_an_agent_that_returns_a_coroutine_from_a_plain_method_is_told() -> None:
    async def later() -> float:
        return 1.0

    forgotten = later()
    worked = await work_off(Answering(lambda _: forgotten))
    forgotten.close()

    assert await worked.statuses() == ["failed"]
    assert "coroutine" in (await worked.error())["message"]


async def test_an_agent_that_emits_thousands_of_spans_loses_none() -> None:
    def answer(_: Any) -> float:
        for number in range(2000):
            emit_message(str(number))
        return 1.0

    worked = await work_off(Answering(answer))

    assert len(await worked.span_names()) == 2001


class Refusing(InMemoryLightningStore):
    """Takes no spans."""

    error: Exception = PayloadTooLarge("no spans today")

    async def add_many_spans(self, spans: Any) -> Any:
        raise self.error

    async def add_span(self, span: Any) -> Any:
        raise self.error

    async def add_otel_span(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error

    async def finish_attempt(self, *args: Any, **options: Any) -> Any:
        if options.get("spans"):
            raise self.error
        return await super().finish_attempt(*args, **options)


async def test_lost_spans_are_noted_on_the_attempt() -> None:
    store = Refusing()
    await store.add_resources(RESOURCES)

    def answer(_: Any) -> None:
        emit_reward(0.5)

    worked = await work_off(Answering(answer), store=store, tracer=OtelTracer())

    metadata = (await worked.attempt()).metadata or {}
    assert metadata["lost_spans"]["count"] == 1


@pytest.mark.parametrize("error", [PayloadTooLarge("large"), RuntimeError("odd")], ids=lambda e: type(e).__name__)
async def test_spans_that_the_store_refuses_do_not_keep_an_attempt_from_its_status(error: Exception) -> None:
    store = Refusing()
    store.error = error
    await store.add_resources(RESOURCES)

    worked = await work_off(Answering(lambda _: 1.0), store=store)

    assert (await worked.attempt()).status in ("succeeded", "failed")


# ---------------------------------------------------------------------- agents in every form


class Plain(LitAgent[Any]):
    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.1


class PlainCoroutine(LitAgent[Any]):
    async def rollout(  # type: ignore[override] # the coroutine under the plain name that SPEC 20.1 asks for
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        await asyncio.sleep(0)
        return 0.1


class NamedCoroutine(LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.1


class ByMode(LitAgent[Any]):
    def training_rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.25

    def validation_rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.75


class ByModeAsync(LitAgent[Any]):
    async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.25

    async def validation_rollout_async(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        return 0.75


class PlainCoroutineByMode(LitAgent[Any]):
    async def training_rollout(  # type: ignore[override] # as above
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        return 0.25

    async def validation_rollout(  # type: ignore[override] # as above
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        return 0.75


class CoroutineToTrainAndPlainToValidate(LitAgent[Any]):
    async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.25

    def validation_rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.75


class PlainCoroutineToTrainAndPlainToValidate(LitAgent[Any]):
    async def training_rollout(  # type: ignore[override] # as above
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        return 0.25

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return 0.75


@pytest.mark.parametrize("agent", [Plain, PlainCoroutine, NamedCoroutine], ids=lambda a: a.__name__)
@pytest.mark.parametrize("mode", [None, "train", "val", "test"])
async def test_an_agent_may_be_written_plainly_or_as_a_coroutine(agent: type[LitAgent[Any]], mode: Any) -> None:
    worked = await work_off(agent(), mode=mode)

    assert await worked.rewards() == [0.1]


@pytest.mark.parametrize(
    "agent",
    [
        ByMode,
        ByModeAsync,
        PlainCoroutineByMode,
        CoroutineToTrainAndPlainToValidate,
        PlainCoroutineToTrainAndPlainToValidate,
    ],
    ids=lambda a: a.__name__,
)
@pytest.mark.parametrize(("mode", "reward"), [(None, 0.75), ("train", 0.25), ("val", 0.75), ("test", 0.75)])
async def test_the_mode_chooses_the_method(agent: type[LitAgent[Any]], mode: Any, reward: float) -> None:
    worked = await work_off(agent(), mode=mode)

    assert await worked.rewards() == [reward]


async def test_an_agent_that_defines_nothing_is_told_what_to_define() -> None:
    worked = await work_off(LitAgent[Any](), tracer=DummyTracer())

    assert "must define rollout" in (await worked.error())["message"]
