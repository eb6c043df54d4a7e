"""W&B Weave's ops, recorded without a login, a service or a network."""

import asyncio
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import weave
from pydantic import BaseModel
from weave.trace.weave_client import WeaveClient

from agentlightning.errors import TracingError
from agentlightning.instrumentation.weave import WeavePatch
from agentlightning.tracer import OtelTracer
from agentlightning.tracer.weave import WeaveTracer
from tests.frameworks.fresh_process import told_by
from tests.instrumentation.traces import Trace, spans_of
from tests.stub_model.server import StubModel

RUNS_IN = ("agentops",)

pytestmark = pytest.mark.usefixtures("this_machine_only")

CONTEXT = importlib.import_module("weave.trace.context.weave_client_context")


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def observed(function: Callable[[], Any], **options: Any) -> Trace:
    with WeaveTracer(**options).lifespan() as tracer:
        error = result = None
        try:
            with tracer._trace_context_sync():
                result = function()
        except Exception as caught:
            error = caught
        return Trace(spans_of(tracer), result, error)


class Verdict(BaseModel):
    score: float
    words: list[str]


@weave.op
def shout(word: str) -> str:
    return word.upper()


@weave.op(name="judge")
def judged(word: str, strict: bool = True) -> Verdict:
    return Verdict(score=0.5, words=[shout(word)])


@weave.op
def fail() -> None:
    raise ValueError("no")


@weave.op
def count(to: int) -> Iterator[str]:
    for number in range(to):
        yield shout(str(number))


def test_calls_of_ops_are_spans_with_inputs_and_outputs() -> None:
    trace = observed(lambda: judged("hello"))

    assert trace.result == Verdict(score=0.5, words=["HELLO"])
    assert trace.shape == ["judge", ["shout"]]
    assert trace.named("shout").attributes == {
        "agentlightning.operation.name": "shout",
        "agentlightning.operation.input.word": "hello",
        "agentlightning.operation.output": "HELLO",
    }
    assert trace.named("judge").attributes == {
        "agentlightning.operation.name": "judge",
        "agentlightning.operation.input.word": "hello",
        "agentlightning.operation.input.strict": True,
        "agentlightning.operation.output.score": 0.5,
        "agentlightning.operation.output.words": ["HELLO"],
    }


def test_a_model_call_in_an_op_is_one_span_beneath_it(stub_model: StubModel) -> None:
    @weave.op
    def ask() -> Any:
        with openai.OpenAI(base_url=stub_model.openai_url) as client:
            messages: Any = [{"role": "user", "content": "Hello"}]
            extra = {"return_token_ids": True}
            return client.chat.completions.create(model="stub-model", messages=messages, extra_body=extra)

    def work() -> None:
        weave.init("anyone/anything")
        ask()

    trace = observed(work)

    assert trace.shape == ["ask", ["openai.chat.completion"]]
    (triplet,) = trace.triplets()
    assert len(triplet.prompt["token_ids"]) > 0


def test_an_op_that_raises_is_an_error_and_its_error_passes() -> None:
    trace = observed(fail)
    assert isinstance(trace.error, ValueError)
    status = trace.named("fail").status
    assert (status.status_code, status.description) == ("ERROR", "ValueError: no")


def test_what_a_generator_calls_is_beneath_it_and_nothing_else() -> None:
    def work() -> list[str]:
        return [shout(f"outside {item}") for item in count(2)]

    trace = observed(work)

    assert trace.result == ["OUTSIDE 0", "OUTSIDE 1"]
    assert trace.shape == ["virtual-root", ["count", ["shout"], ["shout"]], ["shout"], ["shout"]]


def test_attributes_of_the_program_name_an_agent() -> None:
    @weave.op
    def act(name: str) -> None:
        shout("x")

    def work() -> None:
        with weave.attributes({"type": "agent", "tags": {"team": "blue"}}):
            act(name="planner")

    trace = observed(work)

    assert trace.shape == ["act [planner]", ["shout"]]
    assert trace.named("act").attributes["tags.team"] == "blue"


async def test_ops_of_runs_at_the_same_time_keep_apart() -> None:
    @weave.op
    async def act(name: str) -> str:
        await asyncio.sleep(0)
        return shout(name)

    async def run(tracer: WeaveTracer, name: str) -> Any:
        async with tracer.trace_context():
            await act(name)
        trace = Trace(spans_of(tracer))
        return trace.shape, trace.named("shout").attributes["agentlightning.operation.output"]

    with WeaveTracer().lifespan() as tracer:
        seen = await asyncio.gather(*(run(tracer, name) for name in ("a", "b")))

    assert seen == [(["act", ["shout"]], "A"), (["act", ["shout"]], "B")]


def test_the_service_is_missed_in_words() -> None:
    def work() -> None:
        client = weave.init("anyone/anything")
        client.get_call("a-call")

    trace = observed(work)

    assert isinstance(trace.error, TracingError)
    assert "call weave.init before" in str(trace.error)


def test_nobody_is_asked_for_also_when_the_process_ends() -> None:
    program = """
        import json, os, socket
        socket.getaddrinfo = lambda *args, **kwargs: os._exit(7)
        from agentlightning.tracer.weave import WeaveTracer
        with WeaveTracer().lifespan() as tracer:
            import weave
            weave.init("anyone/anything")
            with tracer._trace_context_sync():
                weave.op(lambda x: x + 1, name="add")(1)
        print(json.dumps([span.name for span in tracer.get_last_trace()]))
    """

    assert told_by(program) == ["add"]


class Service:
    """Weave's service, as far as a client needs it to send calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("call_", "obj_", "file_")) or name.endswith("processor"):
            raise AttributeError(name)
        self.asked.append(name)
        return lambda request: SimpleNamespace(digest="digest")


@pytest.mark.parametrize("kind", [OtelTracer, WeaveTracer])
def test_a_program_that_has_started_weave_keeps_its_service_and_is_recorded(kind: type[OtelTracer]) -> None:
    service = Service()
    client = WeaveClient("anyone", "anything", service, ensure_project_exists=False)  # type: ignore[arg-type] # enough
    CONTEXT.set_weave_client_global(client)
    try:
        with WeavePatch(), kind(instrument=False).lifespan() as tracer, tracer._trace_context_sync():
            assert judged("hello").words == ["HELLO"]
            assert list(count(1)) == ["0"]
            integration = client.create_call("openai.chat.completions.create", {})
            client.finish_call(integration)
        client.finish()
    finally:
        CONTEXT.set_weave_client_global(None)

    shape = ["virtual-root", ["judge", ["shout"]], ["count", ["shout"]]]
    assert Trace(spans_of(tracer)).shape == shape
    assert {"call_start", "call_end"} <= set(service.asked)


def test_undoing_leaves_weave_as_it_was() -> None:
    stack = importlib.import_module("weave.trace.context.call_context")
    start = importlib.import_module("weave.trace.weave_init")
    before = [stack.push_call, stack.pop_call, start.init_weave]

    with WeaveTracer().lifespan(), WeaveTracer().lifespan():
        assert CONTEXT.get_weave_client() is not None

    assert [stack.push_call, stack.pop_call, start.init_weave] == before
    assert CONTEXT.get_weave_client() is None
    with OtelTracer().lifespan() as tracer:
        with tracer._trace_context_sync():
            assert shout("x") == "X"
        assert tracer.get_last_trace() == []
