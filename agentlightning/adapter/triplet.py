"""Spans become triplets: one model call each, with its prompt, response and reward.

`TracerTraceToTriplet` reads the trace of a tracer, ordered by time and nesting. `LlmProxyTraceToTriplet` reads what the
LLM proxy recorded; its spans may come from machines whose clocks disagree, so it trusts their sequence ids only.

Which framework an agent was written in is told from its trace, or from what is imported; so is the adapter that reads
it. All adapters made here give triplets, so that an algorithm need not know the framework. What a framework writes
differs in two things only: how it names its agents, which the tree of the trace knows for all of them, and whether its
model calls were recorded by a tracer or by the LLM proxy.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel

from agentlightning.adapter.base import TraceAdapter, as_spans
from agentlightning.adapter.call_attributes import (
    as_token_ids,
    has_tokens,
    prompt_ids_of,
    response_id_of,
    response_ids_of,
)
from agentlightning.adapter.calls import ANY_AGENT, PROXY_SPANS, TRACED_CALL_MATCH, ProxiedCalls
from agentlightning.adapter.matching import RewardMatchPolicy
from agentlightning.adapter.tree import LLM_CALL_MATCH, TraceTree
from agentlightning.semconv import AGL_EVENT_KIND, SPAN_AGENT
from agentlightning.types.agents import AgentMatcher, agent_name
from agentlightning.types.core import Triplet
from agentlightning.types.rewards import reward_value_of
from agentlightning.types.tracer import Span, SpanLike
from agentlightning.utils.json_values import JsonObject

__all__ = [
    "LlmProxyTraceToTriplet",
    "RewardMatchPolicy",
    "TraceToTriplet",
    "TraceToTripletBase",
    "TraceTree",
    "TracerTraceToTriplet",
    "Transition",
    "Framework",
    "auto_adapter",
    "detect_framework",
]


class Transition(BaseModel):
    """One model call as a step of reinforcement learning."""

    state: list[int]
    """Token ids of the prompt."""
    action: list[int]
    """Token ids of the response."""
    response_id: str | None
    agent_name: str
    reward: float | None

    @classmethod
    def from_triplet(cls, triplet: Triplet) -> "Transition":
        """A triplet whose prompt and response hold `token_ids`; without an agent's name it is of any agent."""
        return cls(
            state=_ids_of(triplet.prompt, "prompt"),
            action=_ids_of(triplet.response, "response"),
            response_id=triplet.metadata.get("response_id"),
            agent_name=triplet.metadata.get("agent_name") or ANY_AGENT,
            reward=triplet.reward,
        )


def _ids_of(side: object, name: str) -> list[int]:
    ids = as_token_ids(side["token_ids"]) if isinstance(side, dict) and "token_ids" in side else None
    if not isinstance(ids, list):
        raise ValueError(
            f"The {name} of the triplet holds no token ids ({side!r:.80}); a transition needs {{'token_ids': [...]}}."
        )
    return ids


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Any adapter that makes triplets."""


@dataclass(eq=False, repr=False)
class TracerTraceToTriplet(TraceToTripletBase):
    """Triplets from the spans of a tracer.

    Args:
        repair_hierarchy: move spans that hang directly on the root under the shortest span that encloses them.
        llm_call_match: pattern that the name of a model call matches somewhere.
        agent_match: the agents to learn from: a regular expression that matches somewhere in their names, or an
            `AgentMatcher`; None takes every call.
        exclude_llm_call_in_reward: leave out calls that were made to judge.
        reward_match: where the reward of a call is looked for.
    """

    repair_hierarchy: bool = True
    llm_call_match: str = LLM_CALL_MATCH
    agent_match: str | AgentMatcher | None = None
    exclude_llm_call_in_reward: bool = True
    reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE
    _skip_empty_token_spans: bool = False

    def adapt(self, source: Sequence[SpanLike], /) -> list[Triplet]:
        """The model calls of one attempt; no spans at all are a ValueError."""
        return self._tree(source).to_trajectory(
            llm_call_match=self.llm_call_match,
            agent_match=self.agent_match,
            exclude_llm_call_in_reward=self.exclude_llm_call_in_reward,
            reward_match=self.reward_match,
            _skip_empty_token_spans=self._skip_empty_token_spans,
        )

    def to_transitions(self, source: Sequence[SpanLike], /) -> list[Transition]:
        """The same calls as transitions."""
        return [Transition.from_triplet(triplet) for triplet in self.adapt(source)]

    def visualize(
        self,
        source: Sequence[SpanLike],
        /,
        filename: str = "trace_tree",
        interested_span_match: str | None = None,
    ) -> TraceTree:
        """Draw the repaired tree into `filename`.png, and return it."""
        tree = self._tree(source)
        tree.visualize(filename, interested_span_match=interested_span_match)
        return tree

    def _tree(self, source: Sequence[SpanLike]) -> TraceTree:
        tree = TraceTree.from_spans(as_spans(source))
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        return tree


TraceToTriplet = TracerTraceToTriplet


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Triplets from the spans of the LLM proxy, ordered by sequence id alone."""

    def adapt(self, source: Sequence[SpanLike], /) -> list[Triplet]:
        """The calls that recorded their tokens; a reward goes to the last call before it that has none."""
        spans = sorted(as_spans(source), key=lambda span: (span.sequence_id, span.start_time or float("-inf")))
        proxied = ProxiedCalls(
            [span for span in spans if span.name in PROXY_SPANS], lambda span: has_tokens(span.attributes)
        )
        calls = [
            span
            for span in spans
            if span.name in PROXY_SPANS and has_tokens(span.attributes) and proxied.call_of(span) is None
        ]
        rewards = _rewards_by_sequence(spans, calls)
        triplets: list[Triplet] = []
        for number, span in enumerate(calls):
            metadata: JsonObject = {"response_id": response_id_of(span.attributes)}
            agent = agent_name(span.attributes, span.name) or proxied.agent_of(span)
            if agent is not None:
                metadata["agent_name"] = agent
            triplets.append(
                Triplet(
                    prompt={"token_ids": prompt_ids_of(span.attributes)},
                    response={"token_ids": response_ids_of(span.attributes)},
                    reward=rewards.get(number),
                    metadata=metadata,
                )
            )
        return triplets


def _rewards_by_sequence(spans: Sequence[Span], calls: Sequence[Span]) -> dict[int, float]:
    """Rewards by the number of their call; both lists are sorted by sequence id."""
    rewards: dict[int, float] = {}
    without: list[int] = []
    upcoming = 0
    for span in spans:
        value = reward_value_of(span)
        if value is None:
            continue
        while upcoming < len(calls) and calls[upcoming].sequence_id < span.sequence_id:
            without.append(upcoming)
            upcoming += 1
        if without:
            rewards[without.pop()] = value
    return rewards


# ---------------------------------------------------------------------- calls of frameworks


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
    SPAN_AGENT: Framework.OPENAI_AGENTS,
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
