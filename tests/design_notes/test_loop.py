"""The closed loop of the notes: agents, runners, algorithms and the Trainer around one store."""

import asyncio
import inspect
import multiprocessing
import os
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

import agentlightning as agl
from agentlightning.algorithm.decorator import FunctionalAlgorithm, algo
from agentlightning.execution import ExecutionEvent, ExecutionStrategy
from agentlightning.litagent.decorator import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.trainer import Trainer
from agentlightning.types import LLM, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Rollout, Task

MODEL = LLM(endpoint="http://localhost:9/v1", model="m")
PROMPT = PromptTemplate(template="Say {word}", engine="f-string")
RESOURCES: NamedResources = {"llm": MODEL, "prompt": PROMPT}


def _rollouts(trainer: Trainer) -> list[Any]:
    return list(asyncio.run(trainer.store.query_rollouts()))


def _rewards(trainer: Trainer) -> list[float | None]:
    spans = [asyncio.run(trainer.store.query_spans(one.rollout_id)) for one in _rollouts(trainer)]
    return [agl.find_final_reward(list(one)) for one in spans]


class Doubling(agl.LitAgent[int]):
    """Its reward is twice its task."""

    def rollout(self, task: int, resources: NamedResources, rollout: Rollout) -> float:
        return float(2 * task)


# ------------------------------------------------------------------ the loop


@pytest.mark.claim(99, 100, 143, 161, 163, 313, 358)
def test_the_algorithm_publishes_and_runners_pick_it_up() -> None:
    seen: list[str] = []

    @agl.algo
    async def two_rounds(*, store: LightningStore) -> None:
        for word in ("first", "second"):
            template = PromptTemplate(template=word, engine="f-string")
            await store.add_resources({"prompt": template})
            queued = await store.enqueue_rollout("task")
            [done] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=60)
            spans = await store.query_spans(done.rollout_id)
            seen.append(f"{done.status} {agl.find_final_reward(list(spans))}")

    @agl.rollout
    def agent(task: str, prompt_template: PromptTemplate) -> float:
        return {"first": 0.25, "second": 1.0}[prompt_template.format()]

    Trainer(algorithm=two_rounds, strategy="shm", progress="off").fit(agent)

    assert seen == ["succeeded 0.25", "succeeded 1.0"]


@pytest.mark.claim(60, 133, 136, 140, 164, 396, 401)
def test_fit_runs_the_loop_over_processes(capfd: pytest.CaptureFixture[str]) -> None:
    @agl.rollout
    def agent(task: int) -> float:
        return float(os.getpid())

    trainer = Trainer(algorithm=agl.Baseline(), strategy="cs", port=0, n_runners=2, progress="off")
    trainer.fit(agent, [1, 2, 3, 4])

    assert {one.status for one in _rollouts(trainer)} == {"succeeded"}
    assert float(os.getpid()) not in _rewards(trainer)
    assert not multiprocessing.active_children()


@pytest.mark.claim(134, 403)
def test_dev_runs_in_the_callers_process() -> None:
    places: list[tuple[int, bool]] = []

    def agent(task: int) -> float:
        places.append((os.getpid(), threading.current_thread() is threading.main_thread()))
        return asyncio.run(asyncio.sleep(0, 1.0))  # as in a thread of its own

    Trainer(n_runners=4, progress="off").dev(agent, [1], [2])

    assert places == [(os.getpid(), True)] * 2


@pytest.mark.claim(371, 372, 373, 374)
async def test_the_notes_first_sample_runs() -> None:
    class MyAgent(agl.LitAgent[Any]):
        async def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
            await asyncio.sleep(0)
            return 1.0

    trainer = Trainer(progress="off")
    trainer.add_agent(MyAgent())
    await trainer.run([1, 2], [3])

    done = await trainer.store.query_rollouts()
    assert [one.status for one in done] == ["succeeded"] * 3


@pytest.mark.claim(137, 402, 520)
def test_fit_takes_its_arguments_by_position_and_any_data_set() -> None:
    class Squares:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> int:
            return int(index) ** 2

    trainer = Trainer(algorithm=agl.Baseline(), strategy="shm", progress="off")
    trainer.fit(Doubling(), Squares(), [5])

    assert sorted(reward or 0.0 for reward in _rewards(trainer)) == [0.0, 2.0, 8.0, 10.0]


@pytest.mark.claim(390, 391, 392, 393, 394, 395, 397, 398, 399, 400, 480)
def test_the_trainer_has_the_attributes_of_the_notes() -> None:
    hook = agl.Hook()
    trainer = Trainer(
        store=InMemoryLightningStore(),
        n_runners=2,
        max_rollouts=10,
        algorithm=agl.Baseline(),
        initial_resources=RESOURCES,
        hooks=hook,
    )

    assert isinstance(trainer.store, InMemoryLightningStore)
    assert isinstance(trainer.algorithm, agl.Baseline)
    assert isinstance(trainer.runner, agl.LitAgentRunner)
    assert isinstance(trainer.strategy, ExecutionStrategy)
    assert isinstance(trainer.tracer, agl.Tracer)
    assert isinstance(trainer.adapter, agl.TraceAdapter)
    assert (trainer.n_runners, trainer.max_rollouts, trainer.llm_proxy) == (2, 10, None)
    assert list(trainer.hooks) == [hook]
    assert trainer.initial_resources == RESOURCES


@pytest.mark.claim(395)
def test_a_runner_ends_after_its_rollouts() -> None:
    runner = agl.LitAgentRunner[int](agl.OtelTracer(), max_rollouts=2)
    store = InMemoryLightningStore()

    async def work() -> list[str]:
        for number in range(3):
            await store.enqueue_rollout(number)
        with runner.run_context(agent=Doubling(), store=store):
            await runner.iter()
        return [one.status for one in await store.query_rollouts()]

    assert sorted(asyncio.run(work())) == ["queuing", "succeeded", "succeeded"]


@pytest.mark.claim(393)
@pytest.mark.parametrize("kind", ["algo", "class"])
def test_initial_resources_are_published_whatever_the_algorithm(kind: str) -> None:
    async def one(store: LightningStore) -> None:
        queued = await store.enqueue_rollout("task")
        await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=60)

    class Own(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            await one(self.get_store())

    @agl.algo
    async def function(*, store: LightningStore) -> None:
        await one(store)

    @agl.rollout
    def agent(task: str, prompt_template: PromptTemplate) -> float:
        return float(prompt_template == PROMPT)

    algorithm = function if kind == "algo" else Own()
    trainer = Trainer(algorithm=algorithm, initial_resources=RESOURCES, strategy="shm", progress="off")
    trainer.fit(agent)

    assert _rewards(trainer) == [1.0]


@pytest.mark.claim(401)
@pytest.mark.parametrize(
    "store", ["memory", InMemoryLightningStore, {"type": "agentlightning.store.memory.InMemoryLightningStore"}]
)
def test_a_part_is_made_from_a_name_a_class_or_a_dictionary(store: Any) -> None:
    assert isinstance(Trainer(store=store).store, InMemoryLightningStore)


@pytest.mark.claim(479)
def test_the_notes_imports_work() -> None:
    from agentlightning.litagent.decorator import llm_rollout
    from agentlightning.store.memory import InMemoryLightningStore
    from agentlightning.trainer import Trainer

    assert callable(llm_rollout)
    assert issubclass(InMemoryLightningStore, LightningStore)
    assert callable(Trainer.fit)


# ------------------------------------------------------------------ strategies


@pytest.mark.claim(135, 138, 139, 140, 166, 404, 405)
@pytest.mark.parametrize("kind", ["shm", "cs"])
def test_a_strategy_runs_an_algorithm_and_runners_around_a_store(kind: str) -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        queued = await store.enqueue_rollout("task")
        await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=60)

    async def worker(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        while not event.is_set():
            claimed = await store.dequeue_rollout()
            if claimed is not None:
                await store.update_attempt(
                    claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded", metadata={"worker": worker_id}
                )
            await asyncio.sleep(0.01)

    options: dict[str, Any] = {} if kind == "shm" else {"server_port": 0}
    made = agl.SharedMemoryExecutionStrategy if kind == "shm" else agl.ClientServerExecutionStrategy
    strategy: ExecutionStrategy = made(n_runners=1, **options)
    store = InMemoryLightningStore()
    strategy.execute(algorithm, worker, store)

    [done] = asyncio.run(store.query_rollouts())
    attempt = asyncio.run(store.get_latest_attempt(done.rollout_id))
    assert done.status == "succeeded"
    assert attempt is not None
    assert attempt.metadata == {"worker": 0}


# ------------------------------------------------------------------ the algorithm


@pytest.mark.claim(152, 153, 154, 155, 156, 368)
def test_an_algorithm_is_given_what_it_works_with() -> None:
    class Plain(agl.Algorithm):
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None: ...

    class Coroutine(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None: ...

    algorithm, trainer, store, adapter = Plain(), Trainer(), InMemoryLightningStore(), agl.TraceToTriplet()
    algorithm.set_trainer(trainer)
    algorithm.set_store(store)
    algorithm.set_adapter(adapter)
    algorithm.set_initial_resources(RESOURCES)

    assert (algorithm.is_async(), Coroutine().is_async()) == (False, True)
    assert algorithm.get_trainer() is trainer
    assert algorithm.get_store() is store
    assert algorithm.get_adapter() is adapter
    assert algorithm.get_initial_resources() == RESOURCES


@pytest.mark.claim(158, 159, 160, 505)
def test_baseline_is_a_fast_algorithm() -> None:
    assert issubclass(agl.FastAlgorithm, agl.Algorithm)
    assert issubclass(agl.Baseline, agl.FastAlgorithm)
    assert list(inspect.signature(agl.Baseline.run).parameters) == ["self", "train_dataset", "val_dataset"]
    assert inspect.signature(agl.Baseline.run).return_annotation is None


@pytest.mark.claim(474, 475, 476, 477, 478)
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_algo_hands_over_what_a_function_asks_for(kind: str) -> None:
    seen: dict[str, Any] = {}

    @algo
    def plain(
        *,
        store: Any,
        train_dataset: Any,
        val_dataset: Any,
        llm_proxy: Any,
        adapter: Any,
        initial_resources: Any,
    ) -> None:
        seen.update(locals())
        seen["queued"] = store.enqueue_rollout(train_dataset[0])

    @algo
    async def coroutine(*, store: Any, train_dataset: Any, adapter: Any, initial_resources: Any) -> None:
        seen.update(locals())
        seen["queued"] = await store.enqueue_rollout(train_dataset[0])

    function = plain if kind == "plain" else coroutine
    trainer = Trainer(algorithm=function, initial_resources=RESOURCES, strategy="shm", progress="off")
    trainer.fit(Doubling(), [1], [2] if kind == "plain" else None)

    assert isinstance(function, FunctionalAlgorithm)
    assert (seen["train_dataset"], seen["initial_resources"]) == ([1], RESOURCES)
    assert isinstance(seen["adapter"], agl.TraceAdapter)
    assert seen["queued"].status == "queuing"


@pytest.mark.claim(475, 476)
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_an_algo_function_is_called_by_hand_with_a_store(kind: str) -> None:
    @algo
    def plain(*, store: Any, train_dataset: Any) -> list[str]:
        return [store.enqueue_rollout(one).status for one in train_dataset]

    @algo
    async def coroutine(*, store: Any, train_dataset: Any) -> list[str]:
        return [(await store.enqueue_rollout(one)).status for one in train_dataset]

    store = InMemoryLightningStore()
    statuses = (plain if kind == "plain" else coroutine)(store=store, train_dataset=[1, 2])

    assert (asyncio.run(statuses) if kind == "coroutine" else statuses) == ["queuing", "queuing"]
    assert [one.input for one in asyncio.run(store.query_rollouts())] == [1, 2]


@pytest.mark.claim(274, 378, 379)
@pytest.mark.parametrize("name", ["apo.APO", "verl.VERL"])
def test_an_algorithm_of_the_notes_needs_no_arguments(name: str) -> None:
    import importlib

    module, kind = name.split(".")
    algorithm = getattr(importlib.import_module(f"agentlightning.algorithm.{module}"), kind)()

    class CustomAdapter(agl.TraceAdapter[int]):
        def adapt(self, source: Any, /) -> int:
            return len(source)

    algorithm.set_store(InMemoryLightningStore())
    algorithm.set_adapter(CustomAdapter())

    assert isinstance(algorithm, agl.Algorithm)


# ------------------------------------------------------------------ the runner


def _stepped(agent: agl.LitAgent[Any], task: Any, **options: Any) -> tuple[Any, list[Any]]:
    """One task, past the queue: the rollout and its spans."""
    store = InMemoryLightningStore()

    async def step() -> tuple[Any, list[Any]]:
        runner = agl.LitAgentRunner[Any](agl.OtelTracer())
        with runner.run_context(agent=agent, store=store):
            done = await runner.step(task, **{"resources": RESOURCES, **options})
        return done, list(await store.query_spans(done.rollout_id))

    return asyncio.run(step())


@pytest.mark.claim(168, 367)
def test_a_runner_is_given_its_agent_and_works_asynchronously() -> None:
    assert inspect.iscoroutinefunction(agl.Runner.iter)
    done, spans = _stepped(Doubling(), 3)

    assert done.status == "succeeded"
    assert agl.find_final_reward(spans) == 6.0


@pytest.mark.claim(439, 519)
@pytest.mark.parametrize("kind", ["none", "number", "opentelemetry", "own"])
def test_an_agent_returns_none_a_number_or_spans(kind: str) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    @rollout
    def agent(task: str, rollout: AttemptedRollout) -> Any:
        if kind == "opentelemetry":
            span: Any = TracerProvider().get_tracer("notes").start_span("returned")
            span.end()
            assert isinstance(span, ReadableSpan)
            return [span]
        own = agl.Span.from_attributes(
            name="returned",
            attributes={"a": 1},
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=1,
        )
        return {"none": None, "number": 0.5, "own": [own]}[kind]

    done, spans = _stepped(agent, "task")

    names = {"none": [], "number": ["agentlightning.reward"]}.get(kind, ["returned"])
    assert done.status == "succeeded"
    assert [span.name for span in spans] == names


@pytest.mark.claim(518)
def test_hooks_are_called_in_their_order() -> None:
    calls: list[str] = []

    class Noting(agl.Hook):
        async def on_rollout_start(self, **parts: Any) -> None:
            calls.append("rollout start")

        async def on_trace_start(self, **parts: Any) -> None:
            calls.append("trace start")

        async def on_trace_end(self, **parts: Any) -> None:
            calls.append("trace end")

        async def on_rollout_end(self, **parts: Any) -> None:
            calls.append("rollout end")

    trainer = Trainer(algorithm=agl.Baseline(), hooks=[Noting()], strategy="shm", progress="off")
    trainer.fit(Doubling(), [1])

    assert calls == ["rollout start", "trace start", "trace end", "rollout end"]


# ------------------------------------------------------------------ agents


@pytest.mark.claim(425, 427, 428, 429)
def test_an_agent_knows_its_trainer_runner_and_tracer() -> None:
    seen: list[Any] = []

    class Curious(agl.LitAgent[int]):
        def rollout(self, task: int, resources: NamedResources, rollout: Rollout) -> float:
            seen.extend([self.get_trainer(), self.get_runner(), self.get_tracer()])
            return 1.0

    with pytest.warns(DeprecationWarning, match="agent_match"):
        agent = Curious(trained_agents="solver")
    trainer = Trainer(algorithm=agl.Baseline(), strategy="shm", progress="off")
    trainer.fit(agent, [1])

    assert agent.trained_agents == "solver"
    assert seen[0] is trainer
    assert isinstance(seen[1], agl.LitAgentRunner)
    assert isinstance(seen[2], agl.Tracer)


@pytest.mark.claim(430, 431)
def test_an_agent_is_called_around_each_rollout() -> None:
    calls: list[tuple[str, Any]] = []

    class Noting(Doubling):
        async def on_rollout_start(self, task: Task, runner: Any, tracer: Any) -> None:  # or a coroutine function
            await asyncio.sleep(0)
            calls.append(("start", task.input))

        def rollout(self, task: int, resources: NamedResources, rollout: Rollout) -> float:
            calls.append(("rollout", task))
            return 1.0

        def on_rollout_end(self, task: Task, rollout: Any, runner: Any, tracer: Any) -> None:
            calls.append(("end", task.input))

    _stepped(Noting(), 3)

    assert calls == [("start", 3), ("rollout", 3), ("end", 3)]


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        pytest.param("rollout", "train", marks=pytest.mark.claim(432)),
        pytest.param("rollout_async", "train", marks=pytest.mark.claim(433)),
        pytest.param("training_rollout", "train", marks=pytest.mark.claim(434)),
        pytest.param("validation_rollout", "val", marks=pytest.mark.claim(435)),
        pytest.param("training_rollout_async", "train", marks=pytest.mark.claim(436)),
        pytest.param("validation_rollout_async", "val", marks=pytest.mark.claim(437)),
    ],
)
@pytest.mark.claim(426)
def test_a_method_of_an_agent_is_called_in_its_mode(method: str, mode: Any) -> None:
    def plain(self: Any, task: int, resources: NamedResources, rollout: Rollout) -> float:
        return 0.5

    async def coroutine(self: Any, task: int, resources: NamedResources, rollout: Rollout) -> float:
        return 0.5

    is_async = method.endswith("_async")
    agent = type("Agent", (agl.LitAgent,), {method: coroutine if is_async else plain})()

    done, spans = _stepped(agent, 1, mode=mode)

    assert agent.is_async() == is_async
    assert (done.status, agl.find_final_reward(spans)) == ("succeeded", 0.5)


@pytest.mark.claim(465, 467, 468, 469, 473, 478)
@pytest.mark.parametrize("signature", ["(task, llm)", "(task, llm, rollout)"])
@pytest.mark.parametrize("prefix", ["", "async "])
def test_an_agent_of_a_model_is_a_function(prefix: str, signature: str) -> None:
    seen: dict[str, Any] = {}
    names: dict[str, Any] = {"seen": seen}
    exec(f"{prefix}def agent{signature}:\n    seen.update(locals())\n    return 0.5", names)  # four signatures
    agent = llm_rollout(names["agent"])
    proxied = ProxyLLM(endpoint="http://localhost:9/v1", model="m")

    done, _ = _stepped(agent, "task", resources={"llm": proxied})

    assert isinstance(agent, FunctionalLitAgent)
    assert done.status == "succeeded"
    assert type(seen["llm"]) is LLM
    assert "/attempt/" in seen["llm"].endpoint


@pytest.mark.claim(466, 468)
def test_a_proxied_model_is_handed_over_as_it_is_if_asked_for() -> None:
    seen: list[Any] = []

    @llm_rollout(strip_proxy=False)
    def agent(task: str, llm: LLM) -> float:
        seen.append(llm)
        return 0.5

    _stepped(agent, "task", resources={"llm": ProxyLLM(endpoint="http://localhost:9/v1", model="m")})

    assert [type(one) for one in seen] == [ProxyLLM]


@pytest.mark.claim(469, 470)
@pytest.mark.parametrize("signature", ["(task, prompt_template)", "(task, prompt_template, rollout)"])
@pytest.mark.parametrize("prefix", ["", "async "])
def test_an_agent_of_a_prompt_is_a_function(prefix: str, signature: str) -> None:
    names: dict[str, Any] = {}
    text = f"{prefix}def agent{signature}:\n    return float(prompt_template.format(word=task) == 'Say hello')"
    exec(text, names)  # four signatures
    agent = prompt_rollout(names["agent"])

    _, spans = _stepped(agent, "hello")

    assert isinstance(agent, FunctionalLitAgent)
    assert agl.find_final_reward(spans) == 1.0


@pytest.mark.claim(471, 472, 473)
def test_rollout_reads_the_signature() -> None:
    seen: list[Any] = []

    @rollout
    def of_a_model(task: str, llm: LLM) -> None:
        seen.append(llm)

    @rollout
    def of_a_prompt(task: str, prompt_template: PromptTemplate) -> None:
        seen.append(prompt_template)

    for agent in (of_a_model, of_a_prompt):
        _stepped(agent, "task")

    assert seen == [MODEL, PROMPT]
    with pytest.raises(NotImplementedError):

        @rollout
        def of_nothing_known(task: str, weather: str) -> None: ...


@pytest.mark.claim(511)
@pytest.mark.parametrize(
    ("kind", "output"),
    [("llm", MODEL.endpoint), ("prompt", "Say hello"), ("response", MODEL.model_dump(exclude_none=True))],
    ids=["llm", "prompt", "response"],
)
def test_a_decorated_agent_may_return_anything(kind: str, output: Any) -> None:
    @rollout
    def agent(task: str, llm: LLM) -> Any:
        return {"llm": llm.endpoint, "prompt": PROMPT.format(word=task), "response": MODEL}[kind]

    done, spans = _stepped(agent, "hello")

    assert (done.status, done.output) == ("succeeded", output)
    assert agl.find_final_reward(spans) is None


@pytest.mark.claim(503)
def test_shared_memory_spares_a_row_the_way_through_json() -> None:
    seen: list[Any] = []

    @rollout
    def agent(task: Any) -> float:
        seen.append(task)
        return 1.0

    Trainer(algorithm=agl.Baseline(), strategy="shm", progress="off").fit(agent, [{"set": {1, 2}}])

    assert seen == [{"set": {1, 2}}]


@pytest.mark.claim(512)
@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_a_row_that_is_a_task_reaches_the_agent_as_one(strategy: str) -> None:
    @rollout
    def agent(task: Any) -> float:
        return float(isinstance(task, Task) and task.input == {"q": 1})

    port = {"port": 0} if strategy == "cs" else {}
    trainer = Trainer(algorithm=agl.Baseline(), strategy=strategy, progress="off", **port)  # type: ignore[arg-type] # a mapping of options
    trainer.fit(agent, [Task(rollout_id="mine", input={"q": 1})])

    assert _rewards(trainer) == [1.0]


@pytest.mark.claim(514, 515)
def test_one_trainer_takes_several_agents_with_resources_of_their_own() -> None:
    seen: dict[str, str] = {}

    class Solver(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
            prompt = resources["prompt"]
            assert isinstance(prompt, PromptTemplate)
            seen["solver"] = prompt.template
            return 1.0

    def critic(task: Any, prompt_template: PromptTemplate) -> float:
        seen["critic"] = prompt_template.template
        return 0.5

    own = {"solver/prompt": PromptTemplate(template="solve", engine="f-string")}
    trainer = Trainer(
        algorithm=agl.Baseline(), strategy="shm", progress="off", initial_resources={"prompt": PROMPT, **own}
    )
    trainer.add_agent(Solver(), name="solver")
    trainer.add_agent(critic, name="critic", when=lambda task: "review" in task)
    trainer.fit(train_dataset=[{"agent": "solver"}, {"review": True}])

    assert seen == {"solver": "solve", "critic": PROMPT.template}
