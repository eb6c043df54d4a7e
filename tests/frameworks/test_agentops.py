"""AgentOps itself: its decorators under our tracer, and programs that start it on their own.

Every connection of these tests is to this machine, or fails.
"""

import asyncio
import builtins
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import agentops
import openai
import pytest
from agentops.sdk.core import tracer as core
from agentops.sdk.decorators import agent, operation, session, tool, workflow

from agentlightning.emitter.reward import find_final_reward, reward
from agentlightning.instrumentation.agentops import (
    AgentOpsServerManager,
    instrument_agentops,
    uninstrument_agentops,
)
from agentlightning.tracer import AgentOpsTracer
from tests.frameworks.fresh_process import told_by
from tests.instrumentation.traces import Trace, spans_of
from tests.stub_model.server import StubModel

RUNS_IN = ("agentops",)

pytestmark = pytest.mark.usefixtures("this_machine_only")

IDS = {"return_token_ids": True}


@pytest.fixture
def client(stub_model: StubModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stub_model.openai_url, max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, text: str = "Hello", **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="stub-model", messages=messages, extra_body=IDS, **options)


def observed(function: Callable[[], Any], **options: Any) -> Trace:
    with AgentOpsTracer(**options).lifespan() as tracer:
        with tracer._trace_context_sync():
            result = function()
        return Trace(spans_of(tracer), result)


@pytest.mark.claim(291)
def test_decorators_give_spans_and_a_chat_is_one_with_token_ids(client: openai.OpenAI) -> None:
    @tool(name="lookup")
    def look_up(word: str) -> str:
        return word.upper()

    @operation
    def think(text: str) -> Any:
        return chat(client, look_up(text))

    @agent(name="thinker")
    class Thinker:
        def run(self) -> Any:
            return think("hello")

    @session
    def work() -> Any:
        thinker = Thinker()
        answer = thinker.run()
        del thinker
        return answer

    trace = observed(work)

    assert trace.shape == [
        "work.session",
        [
            "thinker.agent [thinker]",
            ["think.task", ["lookup.tool"], ["openai.chat.completion"]],
        ],
    ]
    (triplet,) = trace.triplets()
    assert triplet.metadata["agent_name"] == "thinker"
    assert triplet.prompt["token_ids"] == trace.result.prompt_token_ids
    assert triplet.response["token_ids"] == trace.result.choices[0].token_ids != []


async def test_async_decorators_keep_two_runs_apart(stub_model: StubModel) -> None:
    @workflow
    async def run(name: str) -> None:
        async with openai.AsyncOpenAI(base_url=stub_model.openai_url) as client:
            messages: Any = [{"role": "user", "content": name}]
            await client.chat.completions.create(model="stub-model", messages=messages, extra_body=IDS)

    async def traced(tracer: AgentOpsTracer, name: str) -> Any:
        async with tracer.trace_context():
            await run(name)
        return Trace(spans_of(tracer)).shape, Trace(spans_of(tracer)).model_calls[0].attributes[
            "gen_ai.prompt.0.content"
        ]

    with AgentOpsTracer().lifespan() as tracer:
        seen = await asyncio.gather(*(traced(tracer, name) for name in ("one", "two")))

    shape = ["run.workflow", ["openai.chat.completion"]]
    assert seen == [(shape, "one"), (shape, "two")]


@pytest.mark.filterwarnings("ignore:The @reward decorator is deprecated:DeprecationWarning")
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_the_reward_decorator_gives_a_task_that_reads_as_reward(is_async: bool) -> None:
    @reward
    def judge() -> float:
        return 0.5

    @reward
    async def judge_async() -> float:
        return 0.5

    trace = observed(lambda: asyncio.run(judge_async()) if is_async else judge())

    assert (trace.result, trace.shape) == (0.5, ["agentops_reward_operation.task"])
    assert find_final_reward(trace.spans) == 0.5


def test_an_agent_that_starts_agentops_again_changes_nothing(client: openai.OpenAI) -> None:
    def work() -> None:
        agentops.init(api_key="a-key", auto_start_session=True)
        agentops.end_trace(agentops.start_trace("mine"))
        chat(client)

    trace = observed(work)

    assert sorted(span.name for span in trace.spans) == ["mine.session", "openai.chat.completion"]
    assert not core.initialized


def test_undoing_leaves_agentops_as_it_was() -> None:
    def state() -> list[Any]:
        known = [core.provider, core.initialized, agentops.get_client().initialized]
        return [*known, builtins.__import__, openai.resources.chat.Completions.create]

    @operation
    def work() -> int:
        return 1

    before = state()
    with AgentOpsTracer().lifespan() as first, AgentOpsTracer().lifespan():
        with first._trace_context_sync():
            work()
        assert core.initialized
    assert all(now is then for now, then in zip(state(), before, strict=True))

    with AgentOpsTracer(agentops_managed=False).lifespan() as tracer:
        with tracer._trace_context_sync():
            assert work() == 1
        assert tracer.get_last_trace() == []


def test_agentops_does_not_shut_our_provider_down() -> None:
    with AgentOpsTracer().lifespan() as tracer:
        core.shutdown()
        with tracer._trace_context_sync():
            tracer.create_span("one")

    assert [span.name for span in tracer.get_last_trace()] == ["one"]


def test_agentops_may_be_imported_after_the_tracer_was_made() -> None:
    program = """
        from agentlightning.tracer import AgentOpsTracer
        import json, sys
        with AgentOpsTracer().lifespan() as tracer:
            assert "agentops" not in sys.modules
            from agentops.sdk.decorators import operation
            with tracer._trace_context_sync():
                operation(lambda: 1, name="late")()
        print(json.dumps([span.name for span in tracer.get_last_trace()]))
    """

    assert told_by(program) == ["late.task"]


def test_it_is_instrumented_once_and_says_so() -> None:
    assert instrument_agentops()
    with pytest.warns(UserWarning, match="AgentOps is instrumented already"):
        assert instrument_agentops()
    uninstrument_agentops()


# ---------------------------------------------------------------------- programs that start AgentOps themselves

STARTED = """
    import json, os, socket, sys, asyncio
    from opentelemetry.sdk.trace.export import SpanExportResult
    from agentlightning.instrumentation.agentops import enable_agentops_service
    from agentlightning.tracer import AgentOpsTracer
    from tests.instrumentation.traces import Trace, spans_of
    connect = socket.socket.connect
    def guarded(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            os._exit(7)
        connect(self, address)
    socket.socket.connect = guarded
    os.environ.update(AGENTOPS_API_KEY="dummy", AGENTOPS_API_ENDPOINT=SERVICE,
                      AGENTOPS_EXPORTER_ENDPOINT=f"{SERVICE}/traces")
    exported = []

    def main(work, managed, service):
        enable_agentops_service(service)
        import agentops, openai
        def export(self, spans):  # that of 0.4.21 fails with the OpenTelemetry of today
            exported.extend(spans)
            return SpanExportResult.SUCCESS
        agentops.sdk.core.AuthenticatedOTLPExporter.export = export
        agentops.init(auto_start_session=False, log_level="ERROR")
        with AgentOpsTracer(agentops_managed=managed).lifespan() as tracer:
            with tracer._trace_context_sync():
                work(openai)
            trace = Trace(spans_of(tracer))
            scopes = [span.instrumentation_scope.name for span in tracer.get_last_trace()]
            agentops.sdk.core.tracer.provider.force_flush()
        tokens = [triplet.response["token_ids"] for triplet in trace.triplets()]
        print(json.dumps({"shape": trace.shape, "scopes": scopes, "tokens": tokens, "exported": len(exported)}))
        sys.stdout.flush()
        os._exit(0)  # the metrics of AgentOps are exported at exit, to an address that cannot be set
"""


CALLS = {
    "plain": "openai.OpenAI(base_url=MODEL).chat.completions.create(**ASKED)",
    "raw": "openai.OpenAI(base_url=MODEL).chat.completions.with_raw_response.create(**ASKED)",
    "stream": "list(openai.OpenAI(base_url=MODEL).chat.completions.create(**ASKED, stream=True))",
    "async": "asyncio.run(openai.AsyncOpenAI(base_url=MODEL).chat.completions.create(**ASKED))",
    "response": "openai.OpenAI(base_url=MODEL).responses.create(model='stub-model', input='Hello')",
}


def started(stub_model: StubModel, work: str, service_url: str, **options: bool) -> Any:
    asked = {
        "model": "stub-model",
        "messages": [{"role": "user", "content": "Hello"}],
        "extra_body": IDS,
        "logprobs": True,
    }
    given = f"MODEL, ASKED, SERVICE = {stub_model.openai_url!r}, {asked!r}, {service_url!r}\n"
    return told_by(f"{given}{textwrap.dedent(STARTED)}\nmain(lambda openai: {work}, **{options})")


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    manager = AgentOpsServerManager()
    manager.start()
    yield f"http://127.0.0.1:{manager.get_port()}"
    manager.stop()


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_one_span_with_tokens_where_agentops_has_its_own(
    stub_model: StubModel, service: str, call: str
) -> None:
    told = started(stub_model, CALLS[call], service, managed=call != "plain", service=False)

    assert told["shape"] == ["openai.responses" if call == "response" else "openai.chat.completion"]
    assert told["scopes"] == ["agentlightning" if call == "response" else "openai"]
    assert [bool(tokens) for tokens in told["tokens"]] == [call != "response"]


@pytest.mark.parametrize(
    ("managed", "enabled", "is_asked"),
    [(True, False, False), (True, True, True), (False, False, True)],
    ids=["managed", "enabled", "left to the program"],
)
def test_what_would_reach_the_service_is_withheld(
    stub_model: StubModel, service: str, managed: bool, enabled: bool, is_asked: bool
) -> None:
    told = started(stub_model, CALLS["plain"], service, managed=managed, service=enabled)

    assert told["shape"] == ["openai.chat.completion"]
    assert (told["exported"] > 0) == is_asked
