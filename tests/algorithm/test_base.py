"""Algorithms: what they work with, as classes and as functions."""

import gc
import inspect
import math
import sys
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm import Algorithm, FunctionalAlgorithm, algo
from agentlightning.algorithm.utils import batch_iter_over_dataset, report_metrics, shuffled_batches, with_llm_proxy
from agentlightning.errors import ConfigurationError
from agentlightning.store import InMemoryLightningStore
from tests import warm_python


class Careless(Algorithm):
    """Does not call our constructor."""

    def __init__(self) -> None:
        self.own = 1


def test_parts_that_are_missing_are_named() -> None:
    algorithm = Careless()

    for get, part in (
        (algorithm.get_trainer, "trainer"),
        (algorithm.get_adapter, "adapter"),
        (algorithm.get_store, "store"),
    ):
        with pytest.raises(ValueError, match=f"Careless has no {part}"):
            get()
    assert algorithm.get_llm_proxy() is None
    assert algorithm.get_initial_resources() is None


def test_a_local_adapter_is_kept_alive() -> None:
    algorithm = Careless()
    algorithm.set_adapter(TracerTraceToTriplet())
    gc.collect()
    assert isinstance(algorithm.get_adapter(), TracerTraceToTriplet)


def test_an_algorithm_must_say_how_it_runs() -> None:
    with pytest.raises(NotImplementedError, match="Careless must define run"):
        Careless()()
    with pytest.raises(NotImplementedError):
        Careless().get_client()


# ---------------------------------------------------------------------- functions


def prepared(algorithm: FunctionalAlgorithm) -> FunctionalAlgorithm:
    algorithm.set_store(InMemoryLightningStore())
    algorithm.set_adapter(TracerTraceToTriplet())
    return algorithm


@pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
def test_a_data_set_that_is_not_declared_is_refused(name: str) -> None:
    @algo
    def algorithm(*, store: Any) -> None: ...

    with pytest.raises(TypeError, match=f"{name} is provided but not supported"):
        prepared(algorithm).run(**{name: [1]})


# ---------------------------------------------------------------------- parts that algorithms share


def test_batches_give_every_sample_before_any_comes_again() -> None:
    batches = batch_iter_over_dataset(list(range(10)), 3)
    drawn = [next(batches) for _ in range(10)]

    flat = [sample for batch in drawn for sample in batch]
    assert all(len(set(batch)) == 3 for batch in drawn)
    assert set(flat[:12]) == set(range(10))


@pytest.mark.parametrize("batch_size", [3, 4, 100])
def test_a_small_data_set_comes_whole(batch_size: int) -> None:
    batches = batch_iter_over_dataset([1, 2, 3], batch_size)
    assert [sorted(next(batches)) for _ in range(3)] == [[1, 2, 3]] * 3


@pytest.mark.parametrize(("dataset", "size"), [([], 3), ([1, 2], 0)], ids=["empty data set", "batch_size"])
def test_batches_of_nothing_are_refused(dataset: list[int], size: int, request: pytest.FixtureRequest) -> None:
    with pytest.raises(ConfigurationError, match=request.node.callspec.id):
        next(batch_iter_over_dataset(dataset, size))


def test_a_batch_of_two_passes_has_no_number_twice() -> None:
    orders = iter([[0, 1, 2], [2, 1, 0]])

    def shuffle(order: list[int]) -> None:
        order[:] = next(orders)

    batches = shuffled_batches(3, 2, shuffle)

    assert [next(batches) for _ in range(2)] == [[0, 1], [2, 1]]


async def test_metrics_that_are_finite_go_to_the_run_of_the_algorithm() -> None:
    algorithm, store = Careless(), InMemoryLightningStore()
    run = await store.start_run("a run")
    algorithm.set_store(store)
    algorithm.set_run_id(run.run_id)

    await report_metrics(algorithm, 3, {"reward": 0.5, "low": -math.inf, "loss": math.nan})

    assert [(point.step, point.values) for point in await store.query_metrics(run.run_id)] == [(3, {"reward": 0.5})]


class FakeProxy:
    """A proxy that notes what is done to it."""

    def __init__(self, *, running: bool = False) -> None:
        self.log: list[str] = []
        self.running = running

    def is_running(self) -> bool:
        return self.running

    async def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")


class Using(Algorithm):
    @with_llm_proxy()
    async def ask(self, proxy: Any, question: str) -> Any:
        if question == "fail":
            raise ValueError("no")
        return proxy, question

    @with_llm_proxy(auto_start=False)
    async def ask_as_it_is(self, proxy: Any) -> Any:
        return proxy


async def test_a_proxy_is_started_and_stopped_around_a_method() -> None:
    algorithm, proxy = Using(), FakeProxy()
    algorithm.set_llm_proxy(proxy)

    assert await algorithm.ask("why") == (proxy, "why")  # type: ignore[call-arg] # as above
    with pytest.raises(ValueError, match="no"):
        await algorithm.ask("fail")  # type: ignore[call-arg] # as above
    assert proxy.log == ["start", "stop", "start", "stop"]


async def test_a_proxy_that_runs_is_left_running() -> None:
    algorithm, proxy = Using(), FakeProxy(running=True)
    algorithm.set_llm_proxy(proxy)

    await algorithm.ask("why")  # type: ignore[call-arg] # as above
    await algorithm.ask_as_it_is()  # type: ignore[call-arg] # as above

    assert proxy.log == []


def test_what_cannot_have_a_proxy_handed_in_is_refused() -> None:
    def run(self: Any, proxy: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="write it as async def run"):
        with_llm_proxy()(run)
    with pytest.raises(ConfigurationError, match="used with parentheses"):
        with_llm_proxy(run)  # type: ignore[arg-type] # as a user may who forgets them


def test_algorithms_can_be_imported_and_set_up_without_what_they_compute_with() -> None:
    packages = "agentlightning.algorithm.grpo, agentlightning.algorithm.sft, agentlightning.algorithm.gepa"
    made = "agentlightning.algorithm.grpo.LearnerSettings(); agentlightning.algorithm.verl.VERL({'data': {}})"
    heavy = "{'torch', 'gepa', 'verl', 'ray', 'vllm'}"
    code = f"import sys, {packages}, agentlightning.algorithm.verl; {made}; assert not {heavy} & sys.modules.keys()"

    warm_python.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_algorithm_is_still_the_function() -> None:
    @algo
    def algorithm(a: int, b: int) -> int:
        """Adds."""
        return a + b

    algorithm.note = "kept"  # type: ignore[attr-defined] # users put what they like on it

    assert algorithm(1, b=2) == 3
    assert (algorithm.__name__, algorithm.__doc__) == ("algorithm", "Adds.")
    assert list(inspect.signature(algorithm).parameters) == ["a", "b"]
