"""The framework is told from the trace, and every framework is read through one interface."""

import sys
from types import ModuleType
from typing import Any

import pytest

from agentlightning.adapter import (
    Framework,
    LlmProxyTraceToTriplet,
    TracerTraceToTriplet,
    TraceToTripletBase,
    auto_adapter,
    detect_framework,
)
from agentlightning.adapter.triplet import _MODULES
from tests.adapter.spans import CHAT, span


@pytest.mark.parametrize(
    ("attributes", "framework"),
    [
        pytest.param({"agent.name": "a"}, Framework.OPENAI_AGENTS, id="openai-agents"),
        pytest.param({"recipient_agent_type": "a"}, Framework.AUTOGEN, id="autogen"),
        pytest.param({"langchain.chain.type": "a"}, Framework.LANGCHAIN, id="langchain"),
        pytest.param({"crewai.agent.role": "a", "crewai.task.id": "t"}, Framework.CREWAI, id="crewai"),
        pytest.param({"ag2.chat.sender": "a", "ag2.chat.recipient": "b"}, Framework.AG2, id="ag2"),
        pytest.param({"agentlightning.event.kind": "reward.binary", "agent.name": "a"}, Framework.OTHER, id="event"),
        pytest.param({"gen_ai.system": "autogen"}, Framework.AUTOGEN, id="autogen-agent"),
        pytest.param({"gen_ai.system": "openai"}, Framework.OTHER, id="openai"),
        pytest.param({"pydantic_ai.agent.name": "a"}, Framework.PYDANTIC_AI, id="pydantic-ai"),
        pytest.param({"smolagents.agent.name": "a"}, Framework.SMOLAGENTS, id="smolagents"),
        pytest.param({"executor.id": "a"}, Framework.AGENT_FRAMEWORK, id="agent-framework"),
        pytest.param({"agentops.span.kind": "agent"}, Framework.AGENTOPS, id="agentops"),
        pytest.param({"agentops.span.kind": "agent", "executor.id": "a"}, Framework.AGENT_FRAMEWORK, id="both"),
        pytest.param({}, Framework.OTHER, id="other"),
    ],
)
def test_the_framework_of_a_trace(attributes: dict[str, Any], framework: Framework) -> None:
    spans = [span("root"), span("a", "root", attributes=attributes)]

    assert detect_framework(spans) is framework
    assert isinstance(auto_adapter(spans), TraceToTripletBase)


@pytest.mark.claim(296)
def test_proxy_spans_are_read_as_such_where_no_tracer_saw_the_calls() -> None:
    proxied = [span("p", name="litellm_request")]

    assert isinstance(auto_adapter(proxied), LlmProxyTraceToTriplet)
    assert isinstance(auto_adapter([*proxied, span("c", name=CHAT)]), TracerTraceToTriplet)
    assert isinstance(auto_adapter(proxied, agent_match="solver"), TracerTraceToTriplet), "only it looks for agents"


@pytest.mark.parametrize("module", ["crewai", "smolagents", "pydantic_ai"])
def test_without_a_trace_the_framework_is_told_from_what_is_imported(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in _MODULES:
        monkeypatch.delitem(sys.modules, known, raising=False)
    assert detect_framework() is Framework.OTHER

    monkeypatch.setitem(sys.modules, module, ModuleType(module))

    assert detect_framework() is Framework(module)


def test_calls_of_every_model_api_are_read() -> None:
    names = (CHAT, "openai.responses", "openai.completion", "anthropic.messages")
    spans = [span(f"c{number}", name=name) for number, name in enumerate(names)]

    assert len(auto_adapter(spans).adapt(spans)) == len(names)
