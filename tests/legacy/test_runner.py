"""LegacyAgentRunner, with a real server and client: what it does with a task, and what it posts."""

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace as otel

from agentlightning.adapter import TracerTraceToTriplet, TraceToMessages
from agentlightning.emitter import emit_reward
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.dev_task_loader import DevTaskLoader
from agentlightning.legacy.runner import LegacyAgentRunner
from agentlightning.litagent import LitAgent
from agentlightning.tracer import DummyTracer, OtelTracer, Tracer
from agentlightning.types import RolloutLegacy, Task, Triplet
from tests.legacy.agents import EVERY_RELEASE
from tests.legacy.conftest import ServerInThread

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

Connect = Callable[..., AgentLightningClient]


class Returning(LitAgent[Any]):
    """Calls a model, as far as its trace tells, and returns or raises what it is told to."""

    def __init__(self, result: object, *, calls: int = 0) -> None:
        self.result = result
        self.calls = calls
        self.told: list[tuple[Any, ...]] = []

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        for number in range(self.calls):
            said = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": str(task)}
            attributes = {**said, "gen_ai.response.id": str(number)}
            tokens = {"prompt_token_ids": [1, number], "response_token_ids": [2, number]}
            with otel.get_tracer("agent").start_as_current_span("openai.chat.completion") as span:
                span.set_attributes({**attributes, **tokens})
            emit_reward(number / 2)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def on_rollout_start(self, *arguments: Any) -> None:
        self.told.append(("start", *arguments))

    def on_rollout_end(self, *arguments: Any) -> None:
        self.told.append(("end", *arguments))


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    with OtelTracer(instrument=False).lifespan() as tracer:
        yield tracer


def running(agent: LitAgent[Any], client: AgentLightningClient, **options: Any) -> LegacyAgentRunner:
    return LegacyAgentRunner(
        agent,
        client,
        **{"tracer": DummyTracer(), "triplet_exporter": TracerTraceToTriplet(), "max_tasks": 1, **options},
    )


def posted(agent: LitAgent[Any], tracer: Tracer, **options: Any) -> RolloutLegacy:
    """What a runner posts for one task."""
    loader = DevTaskLoader(["hello"], {})
    assert running(agent, loader, tracer=tracer, **options).iter() == 1
    return loader.rollouts[0]


# ---------------------------------------------------------------------- with a server


@pytest.mark.parametrize("manner", ["iter", "iter_async"])
@pytest.mark.parametrize("release", EVERY_RELEASE, ids=lambda release: release.__name__)
def test_tasks_of_a_server_are_done_by_agents_of_every_release(
    release: Any, manner: str, served: ServerInThread, connect: Connect, resources: Any
) -> None:
    named = served.run(served.server.update_resources(resources))
    served.run(served.server.update_resources({}))
    ids = [served.run(served.server.queue_task({"name": "Ada"}, mode, named)) for mode in ("train", "val")]
    agent = release()
    runner = running(agent, connect(served.endpoint), max_tasks=2)

    count = runner.iter() if manner == "iter" else asyncio.run(runner.iter_async())

    done = [served.run(served.server.get_completed_rollout(rollout_id)) for rollout_id in ids]
    assert count == 2
    assert [rollout.final_reward for rollout in done] == [1.0, 1.0]
    assert agent.rollout_ids == ids


@pytest.mark.parametrize("resources_id", [None, "res-unknown"])
@pytest.mark.parametrize("manner", ["run", "run_async"])
def test_a_task_without_resources_is_left_to_the_server(
    manner: str, resources_id: str | None, served: ServerInThread, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    rollout_id = served.run(served.server.queue_task("hello", "train", resources_id))
    runner = running(Returning(1.0), connect(served.endpoint))

    assert (runner.run() if manner == "run" else asyncio.run(runner.run_async())) is False

    assert served.run(served.server.get_completed_rollout(rollout_id)) is None
    assert f"of rollout {rollout_id} cannot be had" in caplog.text


@pytest.mark.parametrize("manner", ["iter", "iter_async"])
def test_closing_the_client_ends_the_loop(manner: str, served: ServerInThread, connect: Connect) -> None:
    client = connect(served.endpoint)
    runner = running(Returning(1.0), client, max_tasks=None)
    counts: list[int] = []

    def work() -> None:
        counts.append(runner.iter() if manner == "iter" else asyncio.run(runner.iter_async()))

    thread = threading.Thread(target=work)
    thread.start()
    client.close()
    thread.join(timeout=30)

    assert counts == [0]


def test_a_result_that_does_not_arrive_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(DevTaskLoader):
        def post_rollout(self, rollout: Any) -> Any:
            return None

    assert running(Returning(1.0), Deaf(["hello"], {})).run()

    assert "did not reach the server" in caplog.text


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("manner", ["run", "run_async"])
@pytest.mark.parametrize("error", [ValueError("no idea"), SystemExit(1), BaseException("worse")], ids=repr)
def test_what_the_agent_raises_is_posted(error: BaseException, manner: str, caplog: pytest.LogCaptureFixture) -> None:
    loader = DevTaskLoader(["hello"], {})
    runner = running(Returning(error), loader)

    assert runner.run() if manner == "run" else asyncio.run(runner.run_async())

    (rollout,) = loader.rollouts
    assert (rollout.rollout_id, rollout.final_reward, rollout.triplets) == ("local_task_001", None, None)
    assert str(error) in rollout.metadata["error"]["message"]
    assert type(error).__name__ in rollout.metadata["error"]["traceback"]
    assert "Rollout local_task_001 failed" in caplog.text


@pytest.mark.parametrize(
    "result", [[Triplet(prompt=1, response=2), object()], {"final_reward": "much"}], ids=["list", "mapping"]
)
def test_a_result_that_means_nothing_is_a_failure(result: object) -> None:
    rollout = posted(Returning(result), DummyTracer())

    assert rollout.final_reward is None
    assert rollout.metadata["error"]["message"]


@pytest.mark.parametrize("manner", ["run", "run_async"])
def test_a_result_that_json_cannot_hold_is_a_failure(
    manner: str, served: ServerInThread, connect: Connect, resources: Any
) -> None:
    served.run(served.server.update_resources(resources))
    rollout_id = served.run(served.server.queue_task("hello"))
    runner = running(Returning([Triplet(prompt=object(), response="")]), connect(served.endpoint))

    assert runner.run() if manner == "run" else asyncio.run(runner.run_async())

    rollout = served.run(served.server.get_completed_rollout(rollout_id))
    assert "serialize" in rollout.metadata["error"]["message"]


def test_an_interrupted_rollout_is_not_posted() -> None:
    loader = DevTaskLoader(["hello"], {})

    with pytest.raises(KeyboardInterrupt):
        running(Returning(KeyboardInterrupt()), loader).iter()

    assert loader.rollouts == []


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "coroutine"])
def test_ctrl_c_ends_an_agent_that_is_at_work_and_posts_nothing(is_async: bool) -> None:
    began, loader, left = threading.Event(), DevTaskLoader(["hello"], {}), []

    class Waiting(LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            began.set()
            while not threading.Event().wait(0.05):  # a signal that comes just before a wait is seen after it
                pass

    class WaitingAsync(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.append(task)

    def interrupt() -> None:
        began.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        running(WaitingAsync() if is_async else Waiting(), loader).iter()

    assert (loader.rollouts, left) == ([], ["hello"] if is_async else [])


# ---------------------------------------------------------------------- callbacks


def test_the_agent_is_told_before_and_after() -> None:
    agent, loader = Returning(0.5), DevTaskLoader(["hello"], {})
    runner = running(agent, loader)

    runner.run()

    (start, task, *around), (end, same_task, rollout, *same_around) = agent.told
    assert (start, end, same_task) == ("start", "end", task)
    assert (task.input, rollout) == ("hello", loader.rollouts[0])
    assert around == same_around == [runner, runner.tracer]
    assert agent.runner is runner


def test_failing_callbacks_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Touchy(Returning):
        def on_rollout_start(self, *arguments: Any) -> None:
            raise ValueError("too early")

        def on_rollout_end(self, *arguments: Any) -> None:
            raise ValueError("too late")

    assert posted(Touchy(0.5), DummyTracer()).final_reward == 0.5

    assert "too early" in caplog.text
    assert "too late" in caplog.text


# ---------------------------------------------------------------------- what is posted


def test_a_number_is_the_reward_and_the_trace_gives_the_rest(tracer: Tracer) -> None:
    rollout = posted(Returning(0.75, calls=2), tracer)

    assert (rollout.final_reward, rollout.task and rollout.task.input) == (0.75, "hello")
    assert [triplet.response["token_ids"] for triplet in rollout.triplets or []] == [[2, 0], [2, 1]]
    assert [entry["name"] for entry in rollout.trace or []].count("openai.chat.completion") == 2


def test_without_a_result_the_reward_is_that_of_the_last_triplet(tracer: Tracer) -> None:
    assert posted(Returning(None, calls=2), tracer).final_reward == 0.5


def test_without_triplets_the_reward_is_the_last_that_was_emitted(tracer: Tracer) -> None:
    rollout = posted(Returning(None, calls=3), tracer, triplet_exporter=TracerTraceToTriplet(llm_call_match="none"))

    assert (rollout.triplets, rollout.final_reward) == ([], 1.0)


def test_returned_spans_are_the_trace(tracer: Tracer) -> None:
    with tracer._trace_context_sync():
        Returning(None, calls=3).rollout("elsewhere", {}, None)
    spans = tracer.get_last_trace()

    rollout = posted(Returning(spans, calls=1), tracer)

    assert rollout.trace == [json.loads(span.to_json()) for span in spans]
    assert len(rollout.triplets or []) == 3
    assert rollout.final_reward == 1.0


def test_a_returned_rollout_is_completed(tracer: Tracer) -> None:
    mine = RolloutLegacy(rollout_id="other", final_reward=0.3, logs=["a line"])

    rollout = posted(Returning(mine, calls=1), tracer)

    assert (rollout.rollout_id, rollout.final_reward, rollout.logs) == ("local_task_001", 0.3, ["a line"])
    assert (len(rollout.triplets or []), bool(rollout.trace)) == (1, True)
    assert (mine.rollout_id, mine.triplets) == ("other", None)


def test_an_adapter_that_fails_costs_only_the_triplets(tracer: Tracer, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TracerTraceToTriplet):
        def adapt(self, source: Any, /) -> list[Triplet]:
            raise ValueError("unreadable")

    rollout = posted(Returning(0.5, calls=1), tracer, triplet_exporter=Broken())

    assert (rollout.final_reward, rollout.triplets, bool(rollout.trace)) == (0.5, None, True)
    assert "unreadable" in caplog.text


def test_an_adapter_that_makes_something_else_makes_no_triplets(
    tracer: Tracer, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = posted(Returning(0.5, calls=1), tracer, triplet_exporter=TraceToMessages())

    assert rollout.triplets is None
    assert "makes no triplets" in caplog.text


def test_the_trace_of_a_rollout_is_not_that_of_the_one_before(tracer: Tracer) -> None:
    loader, agent = DevTaskLoader(["hello"], {}), Returning(None, calls=2)
    runner = running(agent, loader, tracer=tracer)
    runner.run()
    agent.calls = 0
    runner.run()

    assert [rollout.final_reward for rollout in loader.rollouts] == [0.5, None]
    assert loader.rollouts[1].trace is None


async def test_runners_share_a_loop_and_keep_their_traces_apart(tracer: Tracer) -> None:
    agents = [Returning(None, calls=calls) for calls in range(1, 9)]
    loaders = [DevTaskLoader([Task(rollout_id=f"r{agent.calls}", input="hello")], {}) for agent in agents]

    await asyncio.gather(
        *(running(agent, loader, tracer=tracer).run_async() for agent, loader in zip(agents, loaders, strict=True))
    )

    assert [len(loader.rollouts[0].triplets or []) for loader in loaders] == list(range(1, 9))
