"""One task at a time: `step`, `step_sync`, and the context in which scripts use a runner."""

import asyncio
import copy
import os
import pickle
import re
import threading
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner, Runner
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Hook, PromptTemplate
from tests.runner.working import RESOURCES, Answering, stocked_store


def a_runner(**options: Any) -> LitAgentRunner[Any]:
    return LitAgentRunner(OtelTracer(), heartbeat_interval=0, **options)


async def test_a_step_runs_one_task_past_the_queue() -> None:
    store = await stocked_store()
    await store.enqueue_rollout("queued")
    runner = a_runner()

    with runner.run_context(agent=Answering(lambda task: float(task)), store=store, worker_id=3):
        rollout = await runner.step(0.5, mode="train")
        name, runner_id = runner.get_worker_id(), runner.get_store_worker_id()

    assert name == "Worker-3"
    assert (rollout.input, rollout.mode, rollout.status) == (0.5, "train", "succeeded")
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.worker_id == runner_id
    assert re.fullmatch(rf"Worker-3@.+-{os.getpid()}-[0-9a-f]{{8}}", runner_id)
    assert [r.status for r in await store.query_rollouts()] == ["queuing", "succeeded"]


async def test_resources_of_a_step_become_the_latest() -> None:
    store = InMemoryLightningStore()
    runner = a_runner()
    resources = {"prompt": PromptTemplate(template="new", engine="f-string")}

    with runner.run_context(agent=Answering(lambda _: None), store=store):
        await runner.step("task", resources=resources)

    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources == resources


async def test_a_step_raises_what_the_agent_raised_after_the_attempt_was_marked() -> None:
    store = await stocked_store()
    runner = a_runner()

    def answer(_: Any) -> None:
        raise KeyError("lost")

    with runner.run_context(agent=Answering(answer), store=store), pytest.raises(KeyError, match="lost"):
        await runner.step("task")

    assert [r.status for r in await store.query_rollouts()] == ["failed"]


async def test_a_rollout_that_is_gone_after_its_step_is_an_error() -> None:
    class Forgetful(InMemoryLightningStore):
        async def get_rollout_by_id(self, rollout_id: str) -> Any:
            return None

    store = Forgetful()
    await store.add_resources(RESOURCES)
    runner = a_runner()

    with (
        runner.run_context(agent=Answering(lambda _: None), store=store),
        pytest.raises(RuntimeError, match="Failed to fetch completed rollout by id after step"),
    ):
        await runner.step("task")


def test_a_step_may_be_run_without_an_event_loop() -> None:
    store = asyncio.run(stocked_store())
    runner = a_runner()
    before = threading.active_count()

    with runner.run_context(agent=Answering(lambda _: 1.0), store=store):
        rollout = runner.step_sync("task")

    assert rollout.status == "succeeded"
    assert "agl-runner" not in {thread.name for thread in threading.enumerate()}
    assert threading.active_count() <= before + 2


# ---------------------------------------------------------------------- parts


def test_parts_that_are_missing_are_named() -> None:
    runner = a_runner()

    for ask in (runner.get_agent, runner.init):
        with pytest.raises(ConfigurationError, match="no agent"):
            ask()
    with pytest.raises(ValueError, match="no store"):
        runner.get_store()
    assert runner.get_worker_id() == "Worker-Unknown"


def test_an_agent_may_be_given_to_the_constructor() -> None:
    agent = Answering(lambda _: None)
    runner = a_runner(agent=agent)

    runner.init()

    assert runner.get_agent() is agent
    assert agent.runner is runner
    assert agent.tracer is runner.tracer
    runner.teardown()


def test_a_runner_is_not_run() -> None:
    with pytest.raises(RuntimeError, match="await `iter`"):
        a_runner().run()


@pytest.mark.parametrize("duplicate", [copy.copy, lambda r: pickle.loads(pickle.dumps(r))], ids=["copy", "pickle"])
def test_a_copy_of_a_runner_is_as_new(duplicate: Any) -> None:
    runner = a_runner(max_concurrency=3, max_rollouts=7, worker_name="W")
    runner.worker_id = 5

    other = duplicate(runner)

    assert other.tracer is not runner.tracer
    assert other.get_worker_id() == "W-Unknown"
    assert (other.state.value, other._max_concurrency, other._max_rollouts) == ("created", 3, 7)


class Noting(Runner[Any]):
    """Writes down what is done to it, and fails where it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.fails_at = fails_at
        self.log: list[Any] = []

    def _note(self, what: str, *details: Any) -> None:
        self.log.append((what, *details))
        if what == self.fails_at:
            raise RuntimeError(f"{what} failed")

    def init(self, agent: LitAgent[Any], **kwargs: Any) -> None:
        self._note("init", list(kwargs["hooks"] or []))

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        self._note("init_worker", worker_id)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._note("teardown")

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        self._note("teardown_worker", worker_id)


def use(runner: Noting, *, worker_id: int | None = None, error: Exception | None = None) -> list[Any]:
    hook = Hook()
    with runner.run_context(
        agent=Answering(lambda _: None), store=InMemoryLightningStore(), hooks=[hook], worker_id=worker_id
    ):
        runner.log.append("body")
        if error is not None:
            raise error
    return [entry[0] if isinstance(entry, tuple) else entry for entry in runner.log]


@pytest.mark.parametrize(("given", "used"), [(None, 0), (0, 0), (4, 4)])
def test_the_context_sets_up_and_undoes_in_reverse(given: int | None, used: int) -> None:
    runner = Noting()

    order = use(runner, worker_id=given)

    assert order == ["init", "init_worker", "body", "teardown_worker", "teardown"]
    assert ("init_worker", used) in runner.log
    assert ("teardown_worker", used) in runner.log


@pytest.mark.parametrize(
    ("fails_at", "undone"), [("init", ["init"]), ("init_worker", ["init", "init_worker", "teardown"])]
)
def test_only_phases_that_succeeded_are_undone(fails_at: str, undone: list[str]) -> None:
    runner = Noting(fails_at)

    with pytest.raises(RuntimeError, match=f"{fails_at} failed"):
        use(runner)

    assert [entry[0] for entry in runner.log] == undone


@pytest.mark.parametrize(
    ("fails_at", "message"),
    [
        ("teardown_worker", "Error during runner worker teardown"),
        ("teardown", "Error during runner teardown"),
    ],
)
def test_a_teardown_that_fails_is_logged(fails_at: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    order = use(Noting(fails_at))

    assert order[-2:] == ["teardown_worker", "teardown"]
    assert message in caplog.text
