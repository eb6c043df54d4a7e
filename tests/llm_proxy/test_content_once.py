"""The content of a call through the proxy is stored once, and everybody who reads the store finds it."""

from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet, TraceToMessages, TraceToTrajectory
from agentlightning.adapter.call_attributes import recorded_span_id
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.grpo.progress import with_trajectories
from agentlightning.algorithm.grpo.samples import batch_of
from agentlightning.algorithm.grpo.settings import SampleSettings
from agentlightning.events import AgentReply, UserMessage, events_of_spans
from agentlightning.instrumentation import model_calls
from agentlightning.instrumentation.model_calls import recording_of
from agentlightning.instrumentation.patch import Step
from agentlightning.llm_proxy import LLMProxy
from agentlightning.semconv import RECORDED_AS
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Rollout, Span
from tests.llm_proxy.accounts import CALL, MODEL, entry, serving
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running

QUESTION = "How-does-a-bicycle-stay-upright?"
ANSWER = "By-steering-into-the-fall."
SDK_CALL = "openai.chat.completion"


@pytest.fixture
def model() -> Iterator[StubModel]:
    with running(Script([ANSWER])) as model:
        yield model


class Paths:
    """Middleware that notes which paths are asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, app: Any) -> Any:
        async def noted(scope: Any, receive: Any, send: Any) -> None:
            self.asked.append(scope.get("path", ""))
            await app(scope, receive, send)

        return noted


def asking(stream: bool) -> Any:
    """An agent that makes a client of its own, which is redirected."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": task}], stream=stream
            )
            if stream:
                list(answer)
        return 1.0

    return agent


async def run(proxy: LLMProxy, agent: Any, tracer: OtelTracer) -> list[Span]:
    """The spans that the store has after one rollout."""
    assert proxy.store is not None
    runner: Any = agl.LitAgentRunner(tracer)
    with runner.run_context(agent=agent, store=proxy.store):
        rollout = await runner.step(QUESTION, resources={"main_llm": proxy.as_resource()})
        return list(await proxy.store.query_spans(rollout.rollout_id))


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
async def stored(request: Any, model: StubModel) -> tuple[list[Span], list[str], OtelTracer]:
    paths, tracer = Paths(), OtelTracer()
    with serving(model, middlewares=[paths]) as proxy:
        spans = await run(proxy, asking(request.param), tracer)
    return spans, paths.asked, tracer


async def test_the_content_of_a_call_is_on_the_span_of_the_proxy_alone(
    stored: tuple[list[Span], list[str], OtelTracer],
) -> None:
    spans, _, tracer = stored
    text = orjson.dumps([span.model_dump(mode="json") for span in spans]).decode()

    assert (text.count(QUESTION), text.count(ANSWER)) == (1, 1)
    by_name = {span.name: span for span in spans}
    traced, proxied = by_name[SDK_CALL], by_name[CALL]
    assert proxied.attributes["gen_ai.prompt.0.content"] == QUESTION
    assert proxied.parent_id == traced.span_id
    assert recorded_span_id(traced) == proxied.span_id
    assert traced.attributes["gen_ai.response.id"] == proxied.attributes["gen_ai.response.id"]
    (in_process,) = [span for span in tracer.get_last_trace() if span.name == SDK_CALL]
    assert (in_process.attributes or {})["gen_ai.prompt.0.content"] == QUESTION


async def test_every_reader_finds_the_content(stored: tuple[list[Span], list[str], OtelTracer]) -> None:
    spans, _, _ = stored

    (triplet,) = TracerTraceToTriplet().adapt(spans)
    (talk,) = TraceToMessages().adapt(spans)
    (sequence,) = TraceToTrajectory().adapt(spans).sequences
    said = [event.text for event in events_of_spans(spans) if isinstance(event, (UserMessage, AgentReply))]

    assert triplet.prompt["raw_content"][0]["content"] == QUESTION
    assert triplet.prompt["token_ids"]
    assert triplet.response["token_ids"]
    assert triplet.reward == 1.0
    assert [message["content"] for message in talk["messages"]] == [QUESTION, ANSWER]
    assert sequence.calls[0].reward == 1.0
    assert said == [QUESTION, ANSWER]


async def test_the_runner_asks_nothing_more_of_a_proxy_that_confirmed_all_calls(
    stored: tuple[list[Span], list[str], OtelTracer],
) -> None:
    spans, paths, _ = stored

    assert [path.rpartition("/v1")[2] for path in paths if path] == ["/chat/completions"]
    numbers = {span.name: span.sequence_id for span in spans}
    assert numbers[CALL] < numbers["agentlightning.reward"]


async def test_a_call_that_the_proxy_did_not_record_is_stored_by_the_tracer(model: StubModel) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            agl.exclude_from_redirect(client)
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": task}])
        return 1.0

    paths = Paths()
    with serving(model, middlewares=[paths]) as proxy:
        address = f"http://127.0.0.1:{proxy.port}"  # which names no rollout
        spans = await run(proxy, agent, OtelTracer())

    assert CALL not in {span.name for span in spans}
    (traced,) = [span for span in spans if span.name == SDK_CALL]
    assert traced.attributes["gen_ai.prompt.0.content"] == QUESTION
    assert paths.asked[-1].endswith("/agl/flush")  # what the proxy knows of other calls is asked for


async def test_only_a_recording_for_the_same_attempt_takes_the_content_from_the_tracer() -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    recordings = [recording_of(rollout.rollout_id, one, "0123456789abcdef") for one in (ids["attempt_id"], "other/é")]

    with OtelTracer(instrument=False).lifespan() as tracer:
        async with tracer.trace_context(store=store, **ids):
            for header in (*recordings, "", "a/b", "a/b/c/d", "%%%", "//"):
                step = Step(SDK_CALL, {RECORDED_AS: header})
                step.defer(lambda: {"gen_ai.prompt.0.content": QUESTION})
                step.end()

    spans = await store.query_spans(rollout.rollout_id)
    assert ["gen_ai.prompt.0.content" in span.attributes for span in spans] == [False, *[True] * 6]


async def test_the_content_is_read_from_what_was_sent_and_received_when_somebody_looks(
    model: StubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[bytes] = []

    def content(dialect: Any, sent: bytes, received: object) -> dict[str, Any]:
        reads.append(sent)
        return read(dialect, sent, received)

    read = model_calls._content
    monkeypatch.setattr(model_calls, "_content", content)

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        messages: Any = [{"role": "user", "content": task}]
        with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="any", messages=messages)
            answer.choices[0].message.content = messages[0]["content"] = "changed by the agent"
        return 1.0

    tracer = OtelTracer()
    with serving(model) as proxy:
        await run(proxy, agent, tracer)

    assert reads == []
    (span,) = [span for span in tracer.get_last_trace() if span.name == SDK_CALL]
    attributes = span.attributes or {}
    assert (attributes["gen_ai.prompt.0.content"], attributes["gen_ai.completion.0.content"]) == (QUESTION, ANSWER)
    assert {"gen_ai.completion.0.finish_reason", "gen_ai.response.id"} <= dict(attributes).keys()
    assert len(reads) == 1


@pytest.mark.claim(370)
async def test_a_listener_of_the_tracer_gets_the_content(model: StubModel) -> None:
    tracer = OtelTracer()
    heard: list[Any] = []

    class Listener(agl.Hook):
        async def on_trace_end(self, **context: Any) -> None:
            heard.extend(context["tracer"].get_last_trace())

    with serving(model) as proxy:
        runner: Any = agl.LitAgentRunner(tracer)
        with runner.run_context(agent=asking(stream=True), store=proxy.store, hooks=[Listener()]):
            await runner.step(QUESTION, resources={"main_llm": proxy.as_resource()})

    (span,) = [span for span in heard if span.name == SDK_CALL]
    assert span.attributes["gen_ai.completion.0.content"] == ANSWER


@pytest.mark.parametrize(("current", "skipped", "staleness"), [(4, 0, 1.0), (5, 0, 2.0), (6, 2, None)])
async def test_the_version_of_the_model_list_bounds_the_staleness_of_an_sdk_agent(
    model: StubModel, current: int, skipped: int, staleness: float | None
) -> None:
    described = entry(model)
    described["model_info"] = {**described.get("model_info", {}), "version": "3"}
    with serving(model, model_list=[described]) as proxy:
        spans = await run(proxy, asking(stream=False), OtelTracer())
    rollouts = [Rollout(rollout_id=f"ro-{number}", input=1, start_time=0.0, status="succeeded") for number in (0, 1)]
    finished = [FinishedRollout(rollout, "group", spans, float(n)) for n, rollout in enumerate(rollouts)]

    outcomes = await with_trajectories(finished, TraceToTrajectory())
    metrics = batch_of(outcomes, SampleSettings(max_staleness=2), current_version=current).report.metrics()

    assert metrics["skipped/too_stale"] == skipped
    assert metrics["samples/without_version"] == 0
    assert metrics.get("staleness/max") == staleness
