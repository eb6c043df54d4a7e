"""Baseline: every task goes through the agent, and what came back is in the log."""

import asyncio
import logging
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm import Baseline
from agentlightning.emitter import emit_message
from agentlightning.errors import ConfigurationError
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import PromptTemplate
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering, stocked_store
from tests.store.test_composed import OldStore

LOGGER = "agentlightning.algorithm.fast"


def answer(task: Any) -> float:
    if task == "bad":
        raise ValueError("no")
    emit_message("hello")
    return 0.5


async def run_baseline(
    algorithm: Baseline, *, store: LightningStore | None = None, adapter: Any = None, **datasets: Any
) -> LightningStore:
    """Run it beside a runner."""
    store = store or await stocked_store()
    algorithm.set_store(store)
    if adapter is not None:
        algorithm.set_adapter(adapter)
    runner: LitAgentRunner[Any] = LitAgentRunner(DummyTracer(), heartbeat_interval=0, poll_interval=0.2)
    with runner.run_context(agent=Answering(answer), store=store):
        serving = asyncio.create_task(runner.iter())
        try:
            await asyncio.wait_for(algorithm.run(**datasets), PATIENCE_SECONDS)
        finally:
            runner.stop()
            await serving
    return store


@pytest.mark.parametrize(
    "wrong", [{"train_split": 0}, {"train_split": 1}, {"train_split": -0.5}, {"max_queue_length": -1}], ids=str
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))} must "):
        Baseline(**wrong)


@pytest.mark.parametrize("datasets", [{}, {"train_dataset": []}, {"train_dataset": [], "val_dataset": []}])
async def test_nothing_to_do_is_told(datasets: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    algorithm = Baseline()
    algorithm.set_store(InMemoryLightningStore())
    await algorithm.run(**datasets)
    assert "both data sets are empty" in caplog.text


async def test_every_sample_is_sent_once_an_epoch_with_its_mode() -> None:
    store = await run_baseline(Baseline(n_epochs=2), train_dataset=["a", "b"], val_dataset=["c"])
    sent = [(rollout.input, rollout.mode) for rollout in await store.query_rollouts()]
    assert sorted(sent) == sorted([("a", "train"), ("b", "train"), ("c", "val")] * 2)


async def test_a_small_queue_skips_no_sample() -> None:
    store = await run_baseline(Baseline(max_queue_length=1, polling_interval=0.01), train_dataset=list(range(25)))
    assert [rollout.input for rollout in await store.query_rollouts(sort_by="start_time")] == list(range(25))


async def test_initial_resources_are_published_under_their_name() -> None:
    algorithm = Baseline()
    algorithm.set_initial_resources({"prompt": PromptTemplate(template="mine", engine="f-string")})

    store = await run_baseline(algorithm, store=InMemoryLightningStore(), train_dataset=["a"])

    assert await store.get_resources_by_id("default") is not None
    assert [rollout.resources_id for rollout in await store.query_rollouts()] == ["default"]


async def test_a_store_of_the_0_2_release_will_do() -> None:
    store = OldStore()
    await store.add_resources(RESOURCES)
    await run_baseline(Baseline(polling_interval=0.05), store=store, train_dataset=list(range(6)))
    assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded"}


async def test_what_came_back_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        store = await run_baseline(Baseline(), adapter=TracerTraceToTriplet(), train_dataset=["a"])

    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    (rollout,) = await store.query_rollouts()
    (attempt,) = await store.query_attempts(rollout.rollout_id)
    spans = await store.query_spans(rollout.rollout_id)
    rid, aid = rollout.rollout_id, attempt.attempt_id
    assert f"[Rollout {rid} | Attempt 1] ID: {aid}. Status: succeeded. Worker: {attempt.worker_id}" in lines
    for span in spans:
        start = f"[Rollout {rid} | Attempt {aid} | Span {span.span_id}] #{span.sequence_id} ({span.name}) From"
        assert len([line for line in lines if line.startswith(start)]) == 1
    assert any(line.startswith(f"[Rollout {rid}] Finished with status succeeded") for line in lines)
    assert any(line.startswith(f"[Rollout {rid}] Adapted data: ") for line in lines)


@pytest.mark.parametrize(
    ("verbosity", "there", "not_there"),
    [
        ("key_values", "Attributes: {", "Attribute keys:"),
        ("keys", "Attribute keys: [", "Attributes: {"),
        ("none", "From", "Attribute"),
    ],
)
async def test_the_log_says_as_much_of_spans_as_it_is_asked_for(
    verbosity: Any, there: str, not_there: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        await run_baseline(Baseline(span_verbosity=verbosity), train_dataset=["a"])

    spans = [line for line in caplog.messages if "| Span " in line]
    assert all(there in line and not_there not in line for line in spans)
    assert spans


class Failing(TracerTraceToTriplet):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def adapt(self, source: Any) -> Any:
        raise self.error


async def test_spans_that_an_adapter_cannot_read_and_rollouts_that_fail_harm_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        await run_baseline(Baseline(), adapter=Failing(ValueError("unreadable")), train_dataset=["bad", "a", "b"])
    assert caplog.text.count("unreadable") == caplog.text.count("Finished with status succeeded") == 2
    assert caplog.text.count("Finished with status failed") == 1


async def test_an_adapter_that_is_broken_is_told() -> None:
    with pytest.raises(KeyError, match="adapter"):
        await run_baseline(Baseline(), adapter=Failing(KeyError("adapter")), train_dataset=["a"])


async def test_an_algorithm_that_is_cancelled_leaves_nothing_that_waits() -> None:
    store = await stocked_store()
    algorithm = Baseline(max_queue_length=1, polling_interval=PATIENCE_SECONDS)
    algorithm.set_store(store)
    running = asyncio.create_task(algorithm.run(train_dataset=["a", "b", "c"]))
    while len(await store.query_rollouts()) < 2:
        await asyncio.sleep(0.01)

    running.cancel()
    await asyncio.wait([running])

    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("harvest-")] == []
