"""Which model of an attempt takes the calls of an agent that does not use its resources.

That every client and every call goes where a router says is tested in `tests/instrumentation/test_redirect.py`, whole
trainings in `tests/e2e/test_redirected_rollouts.py`.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from agentlightning.instrumentation.patch import agent_step, tool_step
from agentlightning.instrumentation.redirect import ModelRequest, Target, current_router
from agentlightning.litagent import AgentRouter, FunctionalLitAgent, LitAgent
from agentlightning.litagent.command_environment import warn_once
from agentlightning.litagent.invocation import call_agent, method_of
from agentlightning.litagent.redirection import redirecting, router_for
from agentlightning.tracer import OtelTracer
from agentlightning.types import LLM, Attempt, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Rollout
from agentlightning.types.resources import derive_attempt_key
from agentlightning.utils.daemon_threads import DaemonThreads
from tests.instrumentation.sdk_calls import CHAT
from tests.stub_model.server import StubModel, running

SECRET = "agl-proxy-0123456789"
OWN_KEY = "sk-very-secret"


def rollout_of(number: int = 1) -> AttemptedRollout:
    ids = {"rollout_id": f"ro-{number}", "start_time": 0.0}
    return AttemptedRollout(**ids, input="task", attempt=Attempt(**ids, attempt_id=f"at-{number}", sequence_id=1))


def asked(model: str | None = "gpt", **fields: Any) -> ModelRequest:
    request = {
        "sdk": "openai",
        "client": None,
        "path": "/chat/completions",
        "url": "http://original/v1/chat/completions",
    }
    return ModelRequest(**{**request, "model": model, **fields})


def target(resources: NamedResources, request: ModelRequest | None = None, **options: Any) -> Target | None:
    router = router_for(rollout_of(), resources, **options)
    assert router is not None
    return router(request or asked())


def proxied(model: str = "mine", **fields: Any) -> ProxyLLM:
    return ProxyLLM(**{"endpoint": "http://proxy", "model": model, **fields})


def plain(model: str = "mine", **fields: Any) -> LLM:
    return LLM(**{"endpoint": "http://plain/v1", "model": model, **fields})


# ---------------------------------------------------------------------- which resources take calls


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        (proxied(), True),
        (proxied(redirect=True), True),
        (proxied(redirect=False), False),
        (plain(), False),
        (plain(redirect=False), False),
        (plain(redirect=True), True),
        (PromptTemplate(template="t", engine="f-string"), False),
    ],
    ids=["proxy", "proxy-yes", "proxy-no", "plain", "plain-no", "plain-yes", "prompt"],
)
def test_a_proxy_takes_calls_unless_told_and_a_plain_model_if_told(resource: Any, expected: bool) -> None:
    assert (router_for(rollout_of(), {"llm": resource}) is not None) is expected


def test_a_proxy_takes_no_calls_without_an_attempt() -> None:
    rollout = Rollout(rollout_id="ro-1", input=None, start_time=0.0)
    assert router_for(rollout, {"llm": proxied()}) is None
    assert router_for(rollout, {"llm": plain(redirect=True)}) is not None


@pytest.mark.parametrize("endpoint", ["http://proxy", "http://proxy/", "http://proxy/v1", "http://proxy/v1/"])
@pytest.mark.parametrize(
    ("sdk", "expected"),
    [("openai", "http://proxy/rollout/ro-1/attempt/at-1/v1"), ("anthropic", "http://proxy/rollout/ro-1/attempt/at-1")],
)
def test_the_url_of_a_proxy_names_the_attempt(endpoint: str, sdk: Any, expected: str) -> None:
    found = target({"llm": proxied(endpoint=endpoint)}, asked(sdk=sdk))
    assert found is not None
    assert (found.base_url, found.model) == (expected, "mine")


@pytest.mark.parametrize(("sdk", "expected"), [("openai", "http://plain/api/v1"), ("anthropic", "http://plain/api")])
def test_the_url_of_a_plain_model_is_its_endpoint(sdk: Any, expected: str) -> None:
    found = target({"llm": plain(endpoint="http://plain/api/v1/", redirect=True)}, asked(sdk=sdk))
    assert found is not None
    assert found.base_url == expected


def test_the_key_is_the_resources_or_made_for_the_attempt_and_never_missing() -> None:
    keys = [target({"llm": proxied(api_key=key)}) for key in (None, "theirs", SECRET)]

    assert [found and found.api_key for found in keys] == [
        "agentlightning",
        "theirs",
        derive_attempt_key(SECRET, "ro-1", "at-1"),
    ]


# ---------------------------------------------------------------------- several of them

SEVERAL: NamedResources = {"small": proxied("s"), "large": proxied("l"), "judge": plain("j")}


@pytest.mark.parametrize(
    ("resources", "model", "expected"),
    [
        ({"only": proxied("s")}, "gpt", "s"),
        ({"only": proxied("s")}, None, "s"),
        (SEVERAL, "l", "l"),
        (SEVERAL, "s", "s"),
        (SEVERAL, "gpt", None),
        ({**SEVERAL, "main_llm": proxied("m")}, "gpt", "m"),
        ({**SEVERAL, "main_llm": proxied("m")}, "l", "l"),
        ({**SEVERAL, "main_llm": plain("m")}, "gpt", None),
    ],
    ids=["only", "only-unnamed", "same-model", "other-model", "none", "main", "same-before-main", "main-that-does-not"],
)
def test_a_call_goes_to_its_model_or_the_only_one_or_the_main_one(
    resources: NamedResources, model: str | None, expected: str | None
) -> None:
    found = target(resources, asked(model))
    assert (found and found.model) == expected


def test_of_two_with_one_model_the_main_one_takes_its_calls() -> None:
    resources: NamedResources = {
        "warm": proxied("m", sampling_parameters={"temperature": 1}),
        "main_llm": proxied("m", sampling_parameters={"temperature": 0}),
    }

    found = target(resources, asked("m"))

    assert found is not None
    assert found.parameters == {"temperature": 0}


def test_a_call_that_several_could_take_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()

    for _ in range(3):
        assert target(SEVERAL) is None

    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "'gpt'" in message
    assert "small, large" in message
    assert "judge" not in message


# ---------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize(
    ("url", "model", "is_taken"),
    [
        ("http://proxy/rollout/ro-1/attempt/at-1/v1/chat/completions", "any", False),
        ("http://proxy/rollout/ro-1/attempt/at-1/chat/completions", "any", False),
        ("http://proxy/rollout/ro-1/attempt/at-10/v1/chat/completions", "any", True),
        ("http://proxy/v1/chat/completions", "any", True),
        ("http://plain/v1/chat/completions", "judge", False),
        ("http://plain/v1/chat/completions", "other", True),
    ],
    ids=["attempt", "attempt-without-version", "another-attempt", "bare-proxy", "named-model", "other-model-there"],
)
def test_a_call_that_goes_where_the_resources_say_is_left_alone(url: str, model: str, is_taken: bool) -> None:
    resources: NamedResources = {"llm": proxied(), "judge": plain("judge")}
    assert (target(resources, asked(model, url=url)) is not None) is is_taken


def test_a_count_of_tokens_has_no_sampling_parameters() -> None:
    resources: NamedResources = {"llm": proxied(sampling_parameters={"temperature": 0.5, "max_tokens": 9})}
    found = target(resources, asked("claude", sdk="anthropic", path="/v1/messages/count_tokens"))
    assert found is not None
    assert (found.model, found.parameters) == ("mine", {})


@pytest.mark.parametrize(
    ("exclude", "is_excluded"),
    [(["gemini/*"], True), (["gemini-2.0-flash"], True), (["gemini/gemini-2.0-flash"], True), (["openai/*"], False)],
    ids=lambda value: str(value),
)
def test_a_model_is_excluded_by_its_name_alone_or_behind_its_provider(exclude: list[str], is_excluded: bool) -> None:
    found = target({"llm": proxied(redirect_exclude=exclude)}, asked("gemini-2.0-flash", provider="gemini"))
    assert (found is None) is is_excluded


@pytest.mark.parametrize(("exclude", "count"), [([], 1), (["text-*"], 0)], ids=["told", "excluded"])
def test_an_embedding_that_is_left_alone_is_told_once_unless_excluded(
    caplog: pytest.LogCaptureFixture, exclude: list[str], count: int
) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            target({"llm": proxied(redirect_exclude=exclude)}, asked("text-embedding", path="/embeddings"))

    assert caplog.text.count("redirect_exclude=['text-embedding']") == count


@pytest.mark.parametrize(("model", "expected"), [("text-embedding", None), ("mine", "mine")])
def test_an_embedding_goes_to_the_model_of_its_name_alone(model: str, expected: str | None) -> None:
    resources: NamedResources = {"llm": proxied(sampling_parameters={"temperature": 0})}
    found = target(resources, asked(model, path="/embeddings"))
    assert (found and (found.model, found.parameters)) == (expected and (expected, {}))


# ---------------------------------------------------------------------- sampling parameters


@pytest.mark.parametrize(
    ("path", "sampling", "expected"),
    [
        ("/chat/completions", {"temperature": 0.5}, {"temperature": 0.5}),
        ("/chat/completions", {"max_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": None}),
        ("/chat/completions?x=1", {"max_completion_tokens": 5}, {"max_tokens": None, "max_completion_tokens": 5}),
        ("/responses", {"max_tokens": 5, "top_p": 1}, {"max_output_tokens": 5, "top_p": 1}),
        ("/v1/messages", {"max_completion_tokens": 5, "stop": "x"}, {"max_tokens": 5, "stop_sequences": ["x"]}),
        ("/v1/messages", {"stop": ["x", "y"]}, {"stop_sequences": ["x", "y"]}),
    ],
)
def test_sampling_parameters_are_named_as_the_api_does(path: str, sampling: Any, expected: Any) -> None:
    found = target({"llm": proxied(sampling_parameters=sampling)}, asked(path=path))
    assert found is not None
    assert found.parameters == expected


# ---------------------------------------------------------------------- agents


@pytest.fixture
def proxy() -> Iterator[StubModel]:
    with running(is_proxy=True, models=("mine", "stub-model", "other"), token_ids="none") as served:
        yield served


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    threads = DaemonThreads("agents")
    yield threads
    threads.close()


def original_client(model: StubModel, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=model.openai_url, api_key=OWN_KEY, max_retries=0, **options)


async def run(agent: Any, resources: NamedResources, threads: DaemonThreads, *, number: int = 1) -> Any:
    """Call an agent under a tracer that instruments."""
    agent = agent if isinstance(agent, LitAgent) else FunctionalLitAgent(agent)
    with OtelTracer().lifespan() as tracer:
        async with tracer.trace_context():
            rollout = rollout_of(number)
            method = method_of(agent, "rollout")
            return await call_agent(method, task="task", resources=resources, rollout=rollout, threads=threads)


async def test_an_agent_that_uses_its_resource_is_left_alone(
    proxy: StubModel, stub_model: StubModel, threads: DaemonThreads
) -> None:
    def agent(task: str, llm: LLM) -> None:
        with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            client.chat.completions.create(**{**CHAT, "model": "other"}, temperature=1)

    llm = proxied(endpoint=f"{proxy.url}/v1", api_key=SECRET, sampling_parameters={"temperature": 0.25})
    await run(agent, {"llm": llm}, threads)

    [request] = proxy.requests
    assert (request.body["model"], request.body["temperature"]) == ("other", 1)
    assert request.headers["authorization"] == f"Bearer {derive_attempt_key(SECRET, 'ro-1', 'at-1')}"
    assert "traceparent" not in request.headers


async def test_calls_are_redirected_also_where_no_tracer_instruments(
    proxy: StubModel, stub_model: StubModel, threads: DaemonThreads
) -> None:
    def agent(task: str) -> None:
        with original_client(stub_model) as client, ThreadPoolExecutor(1) as pool:
            pool.submit(client.chat.completions.create, **CHAT).result()
            client.chat.completions.create(**CHAT)

    before = openai.OpenAI.request
    await call_agent(
        method_of(FunctionalLitAgent(agent), "rollout"),
        task="task",
        resources={"llm": proxied(endpoint=proxy.url)},
        rollout=rollout_of(),
        threads=threads,
    )

    assert (len(stub_model.requests), len(proxy.requests)) == (0, 2)
    assert openai.OpenAI.request is before


# ---------------------------------------------------------------------- agents among several


def speaker(model: StubModel) -> Any:
    def speak(task: str) -> None:
        with original_client(model) as client:
            client.chat.completions.create(**CHAT)

    return speak


async def test_each_agent_of_a_router_has_the_model_of_its_scope(
    proxy: StubModel, stub_model: StubModel, threads: DaemonThreads
) -> None:
    agent = FunctionalLitAgent[str](speaker(stub_model))
    router = AgentRouter[str]({"writer": (lambda task: task == "task", agent)}, default=agent)
    resources: NamedResources = {
        "llm": proxied(endpoint=proxy.url),
        "writer/llm": proxied("other", endpoint=proxy.url),
    }

    await run(router, resources, threads)

    assert stub_model.requests == []
    assert [request.body["model"] for request in proxy.requests] == ["other"]


# ---------------------------------------------------------------------- the members of a team

TEAM: NamedResources = {"llm": proxied("large"), "critic/llm": proxied("small"), "critic/judge/llm": proxied("tiny")}


def model_for(agent: str | None, resources: NamedResources = TEAM) -> str | None:
    """The model that takes a call which is made inside a step of that agent, and inside a tool that it calls."""
    step = agent_step(agent) if agent is not None else tool_step("outer")
    with step, tool_step("search"):
        found = target(resources)
    return None if found is None else found.model


@pytest.mark.parametrize(
    ("agent", "model"), [("critic", "small"), ("writer", "large"), (None, "large"), ("judge", "large")]
)
def test_a_call_of_a_member_goes_to_the_model_of_its_scope(agent: str | None, model: str) -> None:
    assert model_for(agent) == model


def test_a_member_may_be_known_by_the_span_that_is_current() -> None:
    tracer = OtelTracer()
    critic = {"gen_ai.agent.name": "critic"}
    with tracer.lifespan(), tracer._trace_context_sync("t"), tracer.operation_context("invoke", critic):
        found = target(TEAM)

    assert found is not None
    assert found.model == "small"


def test_a_team_may_have_models_for_some_of_its_members_alone() -> None:
    only: NamedResources = {"critic/llm": proxied("small")}
    assert (model_for("critic", only), model_for("writer", only)) == ("small", None)


def test_a_call_that_goes_to_the_model_of_a_member_by_itself_is_left_alone() -> None:
    resources: NamedResources = {"llm": proxied(), "critic/llm": plain("judge")}
    assert target(resources, asked("judge", url="http://plain/v1/chat/completions")) is None
    assert target(resources, asked("judge")) is not None


# ---------------------------------------------------------------------- many at once


def test_nothing_is_changed_where_there_is_nothing_to_redirect() -> None:
    before = openai.OpenAI.request
    with redirecting(None):
        assert openai.OpenAI.request is before
        assert current_router() is None
