"""Hooks and the agent's own callbacks: in which order they are told, and that their faults are theirs alone."""

from collections.abc import Sequence
from typing import Any

import pytest

from agentlightning.emitter import emit_message
from agentlightning.litagent import LitAgent
from agentlightning.types import Hook, NamedResources, Rollout, RolloutRawResult, Task
from tests.runner.working import Answering, work_off


class Noting(Hook):
    """Writes down what it is told."""

    def __init__(self, log: list[str], name: str = "hook") -> None:
        self.log = log
        self.name = name

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        self.log.append(f"{self.name} rollout start")

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.log.append(f"{self.name} trace start")

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.log.append(f"{self.name} trace end")

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Sequence[Any]) -> None:
        self.log.append(f"{self.name} rollout end with {len(spans)}")


class Failing(Hook):
    """Fails whatever it is told."""

    async def on_rollout_start(self, **_: Any) -> None:
        raise RuntimeError("start")

    async def on_trace_start(self, **_: Any) -> None:
        raise RuntimeError("trace start")

    async def on_trace_end(self, **_: Any) -> None:
        raise RuntimeError("trace end")

    async def on_rollout_end(self, **_: Any) -> None:
        raise SystemExit(3)


class Telling(LitAgent[Any]):
    """An agent with callbacks of its own."""

    def __init__(self, log: list[str], error: Exception | None = None) -> None:
        super().__init__()
        self.log = log
        self.error = error

    def on_rollout_start(self, task: Task, runner: Any, tracer: Any) -> None:
        self.log.append(f"agent start {task.input} {task.mode}")

    def on_rollout_end(self, task: Task, rollout: Any, runner: Any, tracer: Any) -> None:
        self.log.append(f"agent end {task.rollout_id == rollout.rollout_id}")

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        self.log.append("agent")
        emit_message("hello")
        if self.error is not None:
            raise self.error
        return None


async def test_the_status_is_written_after_the_hooks_were_told() -> None:
    seen: list[str] = []

    class Looking(Hook):
        async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Sequence[Any]) -> None:
            attempt = await runner.get_store().get_latest_attempt(rollout.rollout_id)
            seen.append(attempt.status)

    worked = await work_off(Answering(lambda _: 1.0), hooks=[Looking()])

    assert seen in (["running"], ["preparing"])
    assert await worked.statuses() == ["succeeded"]


async def test_a_hook_that_fails_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []

    worked = await work_off(Answering(lambda _: 1.0), hooks=[Failing(), Noting(log)])

    assert (await worked.statuses(), await worked.rewards()) == (["succeeded"], [1.0])
    assert len(log) == 4
    assert caplog.text.count("Hook Failing.") == 4


async def test_what_a_hook_emits_around_the_agent_is_in_its_trace() -> None:
    class Emitting(Hook):
        async def on_trace_start(self, **_: Any) -> None:
            emit_message("from the hook")

        async def on_trace_end(self, **_: Any) -> None:
            emit_message("from the hook")

    worked = await work_off(Answering(lambda _: 1.0), hooks=[Emitting()])

    assert len(await worked.span_names()) == 3


async def test_hooks_are_told_in_order_and_after_the_agent_s_own_callbacks() -> None:
    log: list[str] = []

    await work_off(Telling(log), "the task", mode="train", hooks=[Noting(log, "a"), Noting(log, "b")])

    assert log == [
        *("agent start the task train", "a rollout start", "b rollout start", "a trace start", "b trace start"),
        *("agent", "a trace end", "b trace end", "agent end True", "a rollout end with 1", "b rollout end with 1"),
    ]


async def test_agent_and_hooks_are_told_of_the_end_of_a_rollout_that_failed() -> None:
    log: list[str] = []

    await work_off(Telling(log, ValueError("no")), hooks=[Noting(log)])

    assert log[-3:] == ["hook trace end", "agent end True", "hook rollout end with 2"]


async def test_an_agent_s_own_callback_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Clumsy(Telling):
        def on_rollout_start(self, task: Task, runner: Any, tracer: Any) -> None:
            raise RuntimeError("oh")

    worked = await work_off(Clumsy([]))

    assert await worked.statuses() == ["succeeded"]
    assert "Clumsy.on_rollout_start failed" in caplog.text


async def test_a_hook_is_told_of_no_end_without_a_start() -> None:
    log: list[str] = []
    row = Task(rollout_id="mine", input="task", resources_id="missing")

    worked = await work_off(Answering(lambda _: 1.0), row, hooks=[Noting(log)])

    assert await worked.statuses() == ["failed"]  # before it began
    assert "Resources 'missing' are missing" in (await worked.error())["message"]
    assert log == []
