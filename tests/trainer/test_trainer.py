"""Trainer: its parts in every form, and what it says of wrong use."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning.algorithm
from agentlightning.adapter import TracerTraceToTriplet, TraceToMessages
from agentlightning.algorithm import Algorithm, Baseline, algo
from agentlightning.emitter import find_final_reward
from agentlightning.errors import ConfigurationError
from agentlightning.execution import (
    ClientServerExecutionStrategy,
    ExecutionEvent,
    ExecutionStrategy,
    SharedMemoryExecutionStrategy,
)
from agentlightning.litagent import rollout
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner import LitAgentRunner
from agentlightning.store import LightningStore, LightningStoreClient, SqliteLightningStore
from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.trainer import Trainer
from agentlightning.types import Hook, PromptTemplate
from tests import warm_python
from tests.e2e.server_process import free_port
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering
from tests.trainer.trainings import Halving, a_trainer, endless, rewards_of

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# ---------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    "spec",
    [
        DummyTracer(),
        DummyTracer,
        lambda: DummyTracer(),
        "agentlightning.tracer.DummyTracer",
        {"type": "agentlightning.tracer.DummyTracer"},
    ],
    ids=["instance", "class", "factory", "path", "dict"],
)
def test_a_part_may_be_given_in_every_form(spec: Any) -> None:
    trainer = Trainer(tracer=spec, progress="off")

    assert isinstance(trainer.tracer, DummyTracer)
    assert isinstance(trainer.runner, LitAgentRunner)
    assert trainer.runner.tracer is trainer.tracer


@pytest.mark.parametrize("algorithm", ["GRPO", "SFT"])
@pytest.mark.parametrize("name", ["adapter", "triplet_exporter"])
@pytest.mark.filterwarnings("ignore:triplet_exporter is deprecated")
def test_an_adapter_that_an_algorithm_would_not_use_is_refused(algorithm: str, name: str) -> None:
    pytest.importorskip("torch")
    learning = getattr(agentlightning.algorithm, algorithm)("tiny")

    with pytest.raises(ConfigurationError, match=rf"{algorithm} reads model calls by itself.*agent_match"):
        Trainer(algorithm=learning, **{name: TraceToMessages()})
    assert Trainer(algorithm=learning, progress="off").algorithm is learning


def test_an_adapter_s_arguments_need_no_type() -> None:
    trainer = Trainer(adapter={"agent_match": "writer"}, progress="off")

    assert isinstance(trainer.adapter, TracerTraceToTriplet)
    assert trainer.adapter.agent_match == "writer"


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("shm", SharedMemoryExecutionStrategy),
        ("cs", ClientServerExecutionStrategy),
        (SharedMemoryExecutionStrategy, SharedMemoryExecutionStrategy),
        ({"type": "shm"}, SharedMemoryExecutionStrategy),
        ({"name": "cs"}, ClientServerExecutionStrategy),
    ],
    ids=["shm", "cs", "class", "type", "name"],
)
def test_a_strategy_gets_the_number_of_runners(spec: Any, kind: type[ExecutionStrategy]) -> None:
    trainer = Trainer(strategy=spec, n_runners=3, progress="off")

    assert isinstance(trainer.strategy, kind)
    assert (trainer.strategy.n_runners, trainer.n_runners) == (3, 3)


def test_a_strategy_s_number_of_runners_wins() -> None:
    trainer = Trainer(strategy=ClientServerExecutionStrategy(n_runners=5), n_runners=2, progress="off")

    assert trainer.n_runners == trainer.n_workers == 5


def test_a_port_is_that_of_the_strategy() -> None:
    strategy = ClientServerExecutionStrategy(server_port=1)

    assert Trainer(port=9, progress="off").strategy.server_port == 9  # type: ignore[attr-defined] # it is a cs
    assert Trainer(strategy="cs", port=9, progress="off").strategy.server_port == 9  # type: ignore[attr-defined] # as above
    Trainer(strategy=strategy, port=9, progress="off")
    assert strategy.server_port == 9
    Trainer(strategy=strategy, port=0, progress="off")
    assert strategy.server_port not in (0, 9)  # a free one


def test_a_runner_s_arguments_need_no_type() -> None:
    trainer = Trainer(runner={"max_concurrency": 8}, max_rollouts=3, progress="off")

    assert isinstance(trainer.runner, LitAgentRunner)
    assert (trainer.runner._max_concurrency, trainer.runner._max_rollouts, trainer.max_tasks) == (8, 3, 3)


@pytest.mark.parametrize(
    "spec",
    [LLMProxy, {"port": 0}],
    ids=["class", "arguments"],
)
def test_a_proxy_is_built_from_its_class_or_its_arguments(spec: Any) -> None:
    assert isinstance(Trainer(llm_proxy=spec).llm_proxy, LLMProxy)


def test_a_proxy_of_another_make_is_taken_as_it_is() -> None:
    class Other:
        def set_store(self, store: LightningStore) -> None: ...

    proxy = Other()

    assert Trainer(llm_proxy=proxy).llm_proxy is proxy


def test_hooks_may_be_one_or_several() -> None:
    hook = Hook()

    assert Trainer(hooks=hook, progress="off").hooks == (hook,)
    assert Trainer(hooks=[hook, hook], progress="off").hooks == (hook, hook)


@pytest.mark.parametrize(
    ("options", "message", "attribute", "value"),
    [
        ({"n_workers": 3}, "n_workers", "n_runners", 3),
        ({"max_tasks": 3}, "max_tasks", "max_rollouts", 3),
        ({"n_workers": 3, "n_runners": 2}, "'n_workers' is ignored", "n_runners", 2),
        ({"max_tasks": 3, "max_rollouts": 2}, "'max_tasks' is ignored", "max_rollouts", 2),
        ({"dev": True}, "dev=True", "n_runners", 1),
        ({"triplet_exporter": {"agent_match": "x"}}, "triplet_exporter", "n_runners", 1),
        ({"triplet_exporter": {}, "adapter": {}}, "adapter is used", "n_runners", 1),
    ],
    ids=str,
)
def test_old_arguments_are_deprecated(options: dict[str, Any], message: str, attribute: str, value: Any) -> None:
    with pytest.warns(DeprecationWarning, match="deprecated|are given") as warned:
        trainer = Trainer(**options, progress="off")

    assert any(message in str(warning.message) for warning in warned)
    assert {warning.filename for warning in warned} == {__file__}
    assert getattr(trainer, attribute) == value


def test_daemon_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    Trainer(daemon=False, progress="off")

    assert "daemon=False has no effect" in caplog.text


def test_a_sqlite_store_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    for spec in (f"sqlite:///{path}", str(path), path):
        store = Trainer(store=spec, progress="off").store

        assert isinstance(store, SqliteLightningStore)
        assert Path(str(store.path)) == path
        asyncio.run(store.close())


def test_a_server_s_store_may_be_named() -> None:
    store = Trainer(store="http://127.0.0.1:9999", progress="off").store

    assert isinstance(store, LightningStoreClient)
    asyncio.run(store.close())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"store": "sqlite://"}, ValueError, "names no file"),
        ({"store": "sqlit:///runs.db"}, ConfigurationError, "unknown scheme 'sqlit'; write sqlite:///"),
        ({"store": 7}, ValueError, "store"),
        ({"strategy": "ipc2"}, ValueError, "strategy"),
        ({"tracer": {"level": 1}}, ValueError, "tracer dict must have a 'type' key"),
        ({"algorithm": lambda: 7}, TypeError, "algorithm factory returned int"),
        ({"tracer": "agentlightning.tracer.Missing"}, ValueError, "Missing"),
        ({"progress": "jsn"}, ConfigurationError, "progress must be one of auto, rich, plain, json, off; it is 'jsn'"),
        ({"n_runners": 0}, ConfigurationError, "n_runners must be at least 1; it is 0"),
        ({"llm_proxy": 7}, ConfigurationError, r"llm_proxy cannot be 7 \(int\)"),
    ],
    ids=[
        *("no file", "unknown scheme", "number", "unknown strategy", "no type", "wrong type", "no such class"),
        *("progress", "no runners", "proxy"),
    ],
)
def test_a_part_that_cannot_be_built_is_told(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Trainer(**{"progress": "off", **options})


# ---------------------------------------------------------------------- wrong use


def plain_function(task: Any) -> float:
    return task / 2


def greedy_function(task: Any, budget: float) -> float:
    return task / budget


def test_a_plain_function_is_an_agent() -> None:
    rewards: list[float | None] = []

    async def algorithm(*, store: Any, train_dataset: Any) -> None:
        await store.add_resources(RESOURCES)
        for task in train_dataset:
            rollout = await store.enqueue_rollout(task)
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=PATIENCE_SECONDS)
            rewards.append(find_final_reward(await store.query_spans(rollout.rollout_id)))

    a_trainer(algorithm=algo(algorithm)).fit(plain_function, [1, 2])

    assert rewards == [0.5, 1.0]


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (greedy_function, "asks for budget"),
        (Halving, r"make an instance: Halving\(\)"),
        ("my_agent", "must be a function or a LitAgent; 'my_agent' is neither"),
        (int, "a class derived from LitAgent"),
        (1.0, "give a function without calling it"),
    ],
    ids=["function", "class", "text", "other class", "result"],
)
def test_what_is_no_agent_is_told(agent: Any, words: str) -> None:
    for use in (a_trainer().fit, a_trainer().dev, a_trainer().add_agent):
        with pytest.raises(ConfigurationError, match=words):
            use(agent)


async def test_a_training_without_an_agent_is_refused() -> None:
    with pytest.raises(ValueError, match="There is no agent"):
        a_trainer().fit(train_dataset=[1])
    with pytest.raises(ValueError, match="There is no agent"):
        await a_trainer().run([1])


@pytest.mark.parametrize(
    ("dataset", "hint"),
    [
        ((n for n in range(3)), r"generator; make a list of it: list\(\.\.\.\)"),
        ({1, 2}, "set; make a list of it"),
        ({"train": [1]}, "dict; give one of its values, such as a split"),
        (7, "int; give a list of tasks"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("label", ["train_dataset", "val_dataset"])
def test_a_data_set_that_is_not_indexable_is_told(dataset: Any, hint: str, label: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{label} must have a length.* is of type {hint}"):
        a_trainer().fit(Halving(), **{label: dataset})


@pytest.mark.parametrize("label", ["train_dataset", "val_dataset"])
def test_a_text_is_the_path_of_a_data_set(label: str) -> None:
    for use in (a_trainer().dev, a_trainer(algorithm=Baseline()).fit):
        with pytest.raises(ConfigurationError, match=f"The {label} 'away.jsonl' cannot be read"):
            use(Halving(), **{label: "away.jsonl"})


def test_data_sets_without_an_algorithm_are_told() -> None:
    with pytest.raises(ConfigurationError, match="no algorithm to read the data sets"):
        a_trainer(algorithm=None).fit(Halving(), [1])


def test_dev_with_an_algorithm_that_offers_no_resources_is_told() -> None:
    class Learning(Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            raise AssertionError("it is not run")

    with pytest.raises(TypeError, match=r"define dev_resources\(\).* or call fit"):
        a_trainer(algorithm=Learning()).dev(Halving(), [1])


def test_a_data_set_that_the_algorithm_does_not_declare_is_told() -> None:
    with pytest.raises(TypeError, match="val_dataset is provided but not supported"):
        a_trainer(algorithm=endless).fit(Halving(), val_dataset=[1])


@rollout
def prompted(task: Any, prompt_template: PromptTemplate) -> float:
    return task / 2


@pytest.mark.slow
def test_an_agent_that_can_be_imported_is_trained_under_spawn() -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port(), start_method="spawn", graceful_timeout=20)
    trainer = a_trainer(strategy=strategy, tracer=OtelTracer())

    trainer.fit(prompted, [1])

    assert rewards_of(trainer.store) == [0.5]


def test_an_agent_that_cannot_be_pickled_is_told_under_spawn() -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port(), start_method="spawn")

    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        a_trainer(strategy=strategy).fit(Answering(lambda _: 1.0), [1])


def test_a_custom_strategy_gets_both_sides() -> None:
    class Counting(ExecutionStrategy):
        def execute(self, algorithm: Any, runner: Any, store: LightningStore) -> None:
            async def both() -> None:
                event: ExecutionEvent = __import__("agentlightning").ThreadingEvent()
                serving = asyncio.create_task(runner(store, 0, event))
                await algorithm(store, event)
                event.set()
                await serving

            asyncio.run(both())

    trainer = a_trainer(strategy=Counting())
    trainer.fit(Halving(), [1])

    assert rewards_of(trainer.store) == [0.5]


@pytest.mark.slow
def test_a_program_without_a_guard_of_its_main_module_is_told_under_spawn(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import agentlightning as agl\n"
        "@agl.rollout\n"
        "def agent(task, resources):\n"
        "    return 1.0\n"
        "strategy = {'type': 'cs', 'start_method': 'spawn', 'server_port': 0}\n"
        "agl.Trainer(algorithm=agl.Baseline(), strategy=strategy, progress='off').fit(agent, [1])\n"
    )

    ended = warm_python.run([sys.executable, program], timeout=120)

    assert ended.returncode == 1
    assert "put what starts the training under `if __name__ == '__main__':`" in ended.stderr
