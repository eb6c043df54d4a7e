"""Agents that misbehave: whatever they do, the attempt gets its status, and the runner goes on with the next."""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.emitter import emit_message, emit_reward
from agentlightning.errors import PayloadTooLarge
from agentlightning.litagent import LitAgent
from agentlightning.runner import attempt as attempt_module
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
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
    SystemExit(3),
    KeyboardInterrupt("pressed"),
    asyncio.CancelledError("from within"),
    GeneratorExit(),
    StopIteration("over"),
    Peculiar("odd"),
]


@pytest.mark.parametrize(("make", "concurrency"), [(Answering, 4), (awaiting, 1)], ids=["plain", "async"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_whatever_an_agent_raises_fails_its_attempt_and_no_other(
    error: BaseException, make: Callable[[Any], LitAgent[Any]], concurrency: int
) -> None:
    worked = await work_off(make(failing_once(error)), "bad", "good", max_concurrency=concurrency)

    assert await worked.statuses() == ["failed", "succeeded"]
    assert (await worked.error())["traceback"]


async def test_what_an_agent_raised_is_on_the_attempt_with_its_traceback() -> None:
    def answer(_: Any) -> None:
        emit_message("before")
        raise ValueError("a reason")

    worked = await work_off(Answering(answer))

    error = await worked.error()
    assert (error["type"], error["message"]) == ("ValueError", "a reason")
    frames = [line for line in error["traceback"].splitlines() if line.startswith("  File ")]
    assert "working.py" in frames[0]  # where the agent begins
    assert frames[-1].endswith("in answer")
    assert await worked.span_names() == ["agentlightning.message", "agentlightning.exception"]


async def test_an_endless_traceback_and_message_are_cut() -> None:
    worked = await work_off(Answering(failing_once(ValueError("x" * 1_000_000))), "bad")

    error = await worked.error()
    assert max(len(error["traceback"]), len(error["message"])) <= 20_000


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


class Refusing(InMemoryLightningStore):
    """Takes no spans."""

    async def add_many_spans(self, spans: Any) -> Any:
        raise PayloadTooLarge("no spans today")

    add_span = add_otel_span = add_many_spans  # type: ignore[assignment] # none of them reads its arguments

    async def finish_attempt(self, *args: Any, **options: Any) -> Any:
        if options.get("spans"):
            raise PayloadTooLarge("no spans today")
        return await super().finish_attempt(*args, **options)


async def test_lost_spans_are_noted_on_the_attempt() -> None:
    store = Refusing()
    await store.add_resources(RESOURCES)

    def answer(_: Any) -> None:
        emit_reward(0.5)

    worked = await work_off(Answering(answer), store=store, tracer=OtelTracer())

    metadata = (await worked.attempt()).metadata or {}
    assert (await worked.statuses(), metadata["lost_spans"]["count"]) == (["succeeded"], 1)


# ---------------------------------------------------------------------- agents in every form


def plain(reward: float) -> Any:
    def method(self: Any, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return reward

    return method


def coroutine(reward: float) -> Any:
    async def method(self: Any, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        await asyncio.sleep(0)
        return reward

    return method


FORMS: dict[str, dict[str, Any]] = {
    "plain": {"rollout": plain(0.75)},
    "coroutine under the plain name": {"rollout": coroutine(0.75)},
    "coroutine": {"rollout_async": coroutine(0.75)},
    "by mode": {"training_rollout": plain(0.25), "validation_rollout": plain(0.75)},
    "coroutines by mode": {"training_rollout_async": coroutine(0.25), "validation_rollout_async": coroutine(0.75)},
    "coroutines under plain names": {"training_rollout": coroutine(0.25), "validation_rollout": coroutine(0.75)},
    "coroutine and plain": {"training_rollout_async": coroutine(0.25), "validation_rollout": plain(0.75)},
    "coroutine to train": {"training_rollout": coroutine(0.25), "rollout": plain(0.75)},
}


@pytest.mark.parametrize("form", FORMS)
async def test_an_agent_may_be_written_in_every_form_and_the_mode_chooses_the_method(form: str) -> None:
    agent = type("Written", (LitAgent,), FORMS[form])
    training_reward = 0.25 if any(name.startswith("training") for name in FORMS[form]) else 0.75

    for mode, reward in ((None, 0.75), ("train", training_reward), ("val", 0.75), ("test", 0.75)):
        worked = await work_off(agent(), mode=mode)  # type: ignore[arg-type] # one of the modes
        assert await worked.rewards() == [reward]


# ---------------------------------------------------------------------- rows that are no tasks


def reads_a_field(task: Any) -> float:
    return float(len(task.input))


def reads_another(task: Any) -> float:
    return float(len(task.inptu))


def reads_of_a_part(task: Any) -> float:
    return float(len([task][0].upper().input))


@pytest.mark.parametrize("kind", [Answering, awaiting], ids=["plain", "async"])
@pytest.mark.parametrize(
    ("answer", "is_explained"),
    [(reads_a_field, True), (reads_another, False), (reads_of_a_part, False)],
    ids=["field of Task", "typing error", "another object"],
)
async def test_agent_that_takes_a_plain_row_for_a_task_is_told_of_rows_that_are(
    kind: Any, answer: Any, is_explained: bool
) -> None:
    worked = await work_off(kind(answer), "hello")

    error = await worked.error()
    assert error["message"].startswith("'str' object has no attribute")
    assert ("agl.Task(rollout_id=..., input=...)" in error["message"]) is is_explained
    assert answer.__name__ in error["traceback"]


async def test_an_agent_that_fails_when_its_rollout_was_cancelled_is_no_failure_to_show(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when a training is stopped: the models that it calls are gone before it is."""
    store = await stocked_store()

    async def answer(_: Any) -> None:
        (rollout,) = await store.query_rollouts()
        await store.update_rollout(rollout.rollout_id, status="cancelled")
        raise ConnectionError("the model is gone")

    with caplog.at_level("WARNING"):
        worked = await work_off(Awaiting(answer), store=store)

    assert caplog.messages == []
    assert (await worked.statuses(), (await worked.attempt()).status) == (["cancelled"], "failed")
