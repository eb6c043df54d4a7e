"""What an agent returns, with every tracer: the reward and the spans are in the store, once."""

import logging
import math
from collections.abc import Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from opentelemetry import trace

from agentlightning.emitter import emit_message, find_final_reward, get_rewards_from_span
from agentlightning.runner import LitAgentRunner
from agentlightning.store import LightningStore
from agentlightning.tracer import AgentOpsTracer, DummyTracer, OtelTracer, Tracer
from agentlightning.types import NamedResources, Rollout, RolloutRawResult, Span, SpanCoreFields, TraceStatus
from tests.runner.working import Answering, stocked_store, work_off


class OldTracer(Tracer):
    """A tracer of the 0.2 kind: it knows traces and nothing of spans that are created or operations."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        self.number = worker_id

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> Any:
        yield None

    def get_last_trace(self) -> list[Any]:
        return []


KINDS: dict[str, type[Tracer]] = {
    "otel": OtelTracer,
    "dummy": DummyTracer,
    "agentops": AgentOpsTracer,
    "old": OldTracer,
}


@pytest.fixture(params=KINDS)
def any_tracer(request: pytest.FixtureRequest) -> Iterator[Tracer]:
    return KINDS[request.param]()


def core_span(name: str) -> SpanCoreFields:
    return SpanCoreFields(name=name, status=TraceStatus(status_code="OK"), attributes={}, start_time=1.0, end_time=2.0)


class ArrayOfNoDimensions:
    """As numpy and torch give a single number."""

    ndim = 0

    def item(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "array"


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        *((0.5, 0.5), (0.0, 0.0), (-1.25, -1.25), (1, 1.0), (True, 1.0), (False, 0.0)),
        *((Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5), (ArrayOfNoDimensions(), 1.0)),
    ],
    ids=repr,
)
async def test_a_number_is_stored_once_as_the_reward(
    result: Any, reward: float, caplog: pytest.LogCaptureFixture
) -> None:
    worked = await work_off(Answering(lambda _: result))

    assert await worked.statuses() == ["succeeded"]
    assert [record for record in caplog.records if record.name.startswith("agentlightning")] == []
    assert await worked.rewards() == [reward]
    assert find_final_reward(list(await worked.store.query_spans(worked.rollout_ids[0]))) == reward


async def test_rewards_are_stored_with_every_tracer(any_tracer: Tracer) -> None:
    results: list[Any] = [0.25, True, {"speed": 0.5, "reward": 0.75}, "text", None]

    worked = await work_off(Answering(lambda number: results[number]), *range(5), tracer=any_tracer)

    assert await worked.statuses() == ["succeeded"] * 5
    assert [await worked.rewards(number) for number in range(5)] == [[0.25], [1.0], [0.75], [], []]
    assert (await worked.rollout(3)).output == "text"
    assert await worked.span_names(4) == []


@pytest.mark.parametrize(
    ("result", "words"),
    [(math.nan, "finite"), (math.inf, "finite"), ({"a": 1.0, "b": math.nan}, "nan as its reward 'b'")],
    ids=repr,
)
async def test_a_reward_that_is_not_finite_is_refused_in_words(result: Any, words: str) -> None:
    worked = await work_off(Answering(lambda _: result))

    assert await worked.statuses() == ["failed"]
    assert words in (await worked.error())["message"]


@pytest.mark.parametrize(
    ("result", "output"),
    [
        ("0.5", "0.5"),
        ({"text": "why", "score": 1}, {"text": "why", "score": 1}),
        ({}, {}),
        ((1.0,), [1.0]),
        ([{"name": "span"}], [{"name": "span"}]),
        ([None], [None]),
    ],
    ids=repr,
)
async def test_anything_else_is_the_rollout_s_output(result: Any, output: Any) -> None:
    worked = await work_off(Answering(lambda _: result))

    assert await worked.statuses() == ["succeeded"]
    assert (await worked.rollout()).output == output
    assert await worked.rewards() == []


@pytest.mark.parametrize(
    ("result", "named"),
    [
        ({"quality": 0.5}, {"quality": 0.5}),
        ({"speed": 0.25, "quality": 0.5}, {"speed": 0.25, "quality": 0.5}),
        ({"speed": 0.25, "reward": 0.5}, {"reward": 0.5, "speed": 0.25}),
        ({"reward": 0.5, "primary": True}, {"primary": 1.0, "reward": 0.5}),
        ({1: 2}, {"1": 2.0}),
    ],
    ids=repr,
)
async def test_a_mapping_of_numbers_is_rewards_by_name(result: Any, named: dict[str, float]) -> None:
    worked = await work_off(Answering(lambda _: result))

    (span,) = await worked.store.query_spans(worked.rollout_ids[0])
    assert {reward.name: reward.value for reward in get_rewards_from_span(span)} == named
    assert find_final_reward([span]) == next(iter(named.values()))
    assert (await worked.rollout()).output is None


async def test_a_hint_comes_once_for_each_type_of_output(caplog: pytest.LogCaptureFixture) -> None:
    class FirstAnswer(str):
        pass

    class SecondAnswer(str):
        pass

    kinds = [FirstAnswer, FirstAnswer, SecondAnswer]
    await work_off(Answering(lambda number: kinds[number]("x")), *range(3))

    hints = [record.message for record in caplog.records if "kept as the rollout's output" in record.message]
    assert [hint.split(":")[0] for hint in hints] == [
        "The agent returned a FirstAnswer",
        "The agent returned a SecondAnswer",
    ]
    assert "return a number or call emit_reward" in hints[0]


@pytest.mark.parametrize("is_async", [False, True], ids=["generator", "async_generator"])
async def test_an_agent_that_yields_is_told(is_async: bool) -> None:
    async def later() -> Any:
        yield 1.0

    worked = await work_off(Answering(lambda _: later() if is_async else (number for number in [1.0])))

    assert await worked.statuses() == ["failed"]
    assert "generator that has not run" in (await worked.error())["message"]


async def test_a_success_without_an_output_takes_that_of_an_earlier_attempt_away() -> None:
    results = iter(["first", 1.0])
    worked = await work_off(Answering(lambda _: next(results)))
    await worked.store.update_rollout(worked.rollout_ids[0], status="queuing")

    again: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), max_rollouts=1, heartbeat_interval=0)
    with again.run_context(agent=Answering(lambda _: next(results)), store=worked.store):
        await again.iter()

    assert ((await worked.rollout()).status, (await worked.rollout()).output) == ("succeeded", None)


async def test_an_empty_list_succeeds_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    worked = await work_off(Answering(lambda _: []))
    assert await worked.statuses() == ["succeeded"]
    assert "empty list" in caplog.text


async def test_returned_core_spans_are_stored_in_order(any_tracer: Tracer) -> None:
    worked = await work_off(Answering(lambda _: [core_span("one"), core_span("two")]), tracer=any_tracer)

    spans = await worked.store.query_spans(worked.rollout_ids[0])
    assert [span.name for span in spans] == ["one", "two"]
    assert len({span.sequence_id for span in spans}) == 2


async def test_returned_spans_are_stored_under_their_attempt(any_tracer: Tracer) -> None:
    class Spanning(Answering):
        def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
            attempt_id = rollout.attempt.attempt_id  # type: ignore[attr-defined] # a runner hands in attempted ones
            ids: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": attempt_id, "sequence_id": 1}
            return [Span.from_attributes(attributes={"reward": 0.75}, name="mine", **ids)]

    worked = await work_off(Spanning(lambda _: None), tracer=any_tracer)

    assert await worked.span_names() == ["mine"]
    assert await worked.rewards() == [0.75]


async def test_returned_otel_spans_that_nobody_traced_are_stored() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    elsewhere = TracerProvider().get_tracer("elsewhere")

    def answer(_: Any) -> list[Any]:
        with elsewhere.start_as_current_span("foreign") as span:
            pass
        return [span]

    worked = await work_off(Answering(answer), tracer=DummyTracer())

    assert await worked.span_names() == ["foreign"]


@pytest.mark.parametrize("kind", ["otel", "agentops"])
async def test_returned_otel_spans_that_were_traced_are_stored_once(kind: str) -> None:
    def answer(_: Any) -> list[Any]:
        with trace.get_tracer("agent").start_as_current_span("mine") as span:
            pass
        return [span, core_span("core")]

    worked = await work_off(Answering(answer), tracer=KINDS[kind]())

    assert sorted(await worked.span_names()) == ["core", "mine"]


@pytest.mark.parametrize("other", [0.5, None], ids=repr)
async def test_a_list_of_spans_and_others_fails_the_attempt_in_words(other: Any) -> None:
    worked = await work_off(Answering(lambda _: [core_span("one"), other]))

    assert await worked.statuses() == ["failed"]
    assert "one" not in await worked.span_names()
    error = await worked.error()
    assert (error["type"], "such a list may hold spans only" in error["message"]) == ("ValueError", True)


async def test_a_tracer_that_fails_fails_the_attempt(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(OldTracer):
        def trace_context(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no trace today")

    with caplog.at_level(logging.ERROR):
        worked = await work_off(Answering(lambda _: 0.5), tracer=Failing())

    assert await worked.statuses() == ["failed"]
    assert (await worked.error())["message"] == "no trace today"


async def test_every_attempt_of_a_retried_rollout_has_its_own_spans() -> None:
    from agentlightning.types import RolloutConfig

    calls: list[int] = []

    def answer(_: Any) -> float:
        calls.append(1)
        emit_message(f"call {len(calls)}")
        if len(calls) == 1:
            raise ValueError("once")
        return 1.0

    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    worked = await work_off(Answering(answer), store=await stocked_store(), config=config, max_rollouts=2)

    first, second = await worked.store.query_attempts(worked.rollout_ids[0])
    assert (first.status, second.status) == ("failed", "succeeded")
    assert len(await worked.store.query_spans(worked.rollout_ids[0], first.attempt_id)) == 2  # the exception too
    assert await worked.rewards() == [1.0]
