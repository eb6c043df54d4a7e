"""Which framework an agent was written in, told from its trace or from what is imported, and the adapter that reads it.

All adapters made here give triplets, so that an algorithm need not know the framework. What a framework writes differs
in two things only: how it names its agents, which the tree of the trace knows for all of them, and whether its model
calls were recorded by a tracer or by the LLM proxy.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from agentlightning.adapter.call_filter import PROXY_SPANS, TRACED_CALL_MATCH
from agentlightning.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToTripletBase
from agentlightning.semconv import AGL_EVENT_KIND
from agentlightning.types.agents import AgentMatcher
from agentlightning.types.tracer import SpanLike

__all__ = ["Framework", "auto_adapter", "detect_framework"]


class Framework(str, Enum):
    """Frameworks whose agents we know."""

    OPENAI_AGENTS = "openai_agents"
    AUTOGEN = "autogen"
    LANGCHAIN = "langchain"
    CREWAI = "crewai"
    AG2 = "ag2"
    PYDANTIC_AI = "pydantic_ai"
    SMOLAGENTS = "smolagents"
    AGENT_FRAMEWORK = "agent_framework"
    AGENTOPS = "agentops"
    """No framework, but AgentOps' decorators."""
    OTHER = "other"
    """Nothing we know; model calls are read all the same."""


_MARKS = {
    "crewai.": Framework.CREWAI,
    "ag2.": Framework.AG2,
    "recipient_agent_type": Framework.AUTOGEN,
    "autogen.": Framework.AUTOGEN,
    "langchain.": Framework.LANGCHAIN,
    "lc_name": Framework.LANGCHAIN,
    "pydantic_ai.": Framework.PYDANTIC_AI,
    "smolagents.": Framework.SMOLAGENTS,
    "executor.id": Framework.AGENT_FRAMEWORK,
    "agent.name": Framework.OPENAI_AGENTS,
}
"""How the names of attributes begin that only one framework writes."""
_MARK = re.compile("|".join(re.escape(mark) for mark in _MARKS))


_MODULES = {
    "crewai": Framework.CREWAI,
    "autogen_agentchat": Framework.AUTOGEN,
    "autogen_core": Framework.AUTOGEN,
    "autogen.agentchat": Framework.AG2,
    "agents.tool_context": Framework.OPENAI_AGENTS,
    "pydantic_ai": Framework.PYDANTIC_AI,
    "smolagents": Framework.SMOLAGENTS,
    "agent_framework": Framework.AGENT_FRAMEWORK,
    "langgraph": Framework.LANGCHAIN,
    "langchain_core": Framework.LANGCHAIN,
    "agentops": Framework.AGENTOPS,
}
"""What is imported where a framework is used; those first that use others."""


def detect_framework(spans: Sequence[SpanLike] | None = None) -> Framework:
    """The framework that left the most marks in a trace; AgentOps only if there is no other.

    Without a trace, the framework that this process has imported.
    """
    if spans is None:
        return next((found for module, found in _MODULES.items() if module in sys.modules), Framework.OTHER)
    marks: Counter[Framework] = Counter()
    has_agentops = False
    for span in spans:
        attributes = span.attributes or {}
        if AGL_EVENT_KIND in attributes:
            continue  # an event that was written by hand: its agent's name says nothing about a framework
        found = {_MARKS[mark.group()] for name in attributes if (mark := _MARK.match(name))}
        if attributes.get("gen_ai.system") == Framework.AUTOGEN.value:  # as its spans of a single agent have it
            found.add(Framework.AUTOGEN)
        marks.update(found)
        has_agentops = has_agentops or "agentops.span.kind" in attributes
    if marks:
        return marks.most_common(1)[0][0]
    return Framework.AGENTOPS if has_agentops else Framework.OTHER


def auto_adapter(
    spans: Sequence[SpanLike] = (), *, agent_match: str | AgentMatcher | None = None
) -> TraceToTripletBase:
    """An adapter that finds the model calls of a trace like this one or, without one, of any that a tracer records.

    Where a tracer recorded no calls, those of the LLM proxy are read by their sequence ids alone. Agents may be named
    by other spans too, so a pattern of agents asks for the whole tree.
    """
    names = {span.name for span in spans}
    is_traced = any(re.search(TRACED_CALL_MATCH, name) for name in names)
    if names & PROXY_SPANS and not is_traced and agent_match is None:
        return LlmProxyTraceToTriplet()
    return TracerTraceToTriplet(llm_call_match=TRACED_CALL_MATCH, agent_match=agent_match)
