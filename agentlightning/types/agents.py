"""Agents by their names: whose work a span is, and which agents are meant.

Agents are chosen by regular expressions, wildcards, and rules with priorities. A plain string is a regular expression
that matches anywhere in the name; where more is needed, an `AgentMatcher` takes its place:

    AgentMatcher.regex(r"^(solver|critic)$")
    AgentMatcher.glob("writer*")
    AgentMatcher([AgentRule("writer_draft", include=False, priority=10), AgentRule("writer*")])

In a list of rules, the one of highest priority that matches decides, the earlier one among equals; an agent that no
rule matches is not meant. Matchers are values: they compare, hash and pickle, and pydantic reads and writes them as
JSON.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from typing_extensions import Self

from agentlightning.errors import ConfigurationError
from agentlightning.semconv import AGENT_NAME, SPAN_AGENT

__all__ = ["AgentMatcher", "AgentRule"]

_WRITTEN_PLAINLY = (
    "langchain.chain.type",  # LangGraph
    "executor.id",  # agent-framework
    "crewai.agent.role",  # CrewAI
    AGENT_NAME,  # OpenTelemetry's conventions for agents
)
_AUTOGEN_TEAM_ID = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""What a team appends to the names of its members where it registers them."""
_WEAVE_AGENT = "agentlightning.operation.input.name"


@dataclass(frozen=True)
class AgentRule:
    """Agents of these names are meant or, with `include=False`, are not."""

    pattern: str
    syntax: Literal["glob", "regex"] = "glob"
    """A wildcard pattern covers the whole name, in its case; a regular expression matches anywhere in it."""
    priority: int = 0
    """Of the rules that match a name, the highest decides."""
    include: bool = True

    def __post_init__(self) -> None:
        if self.syntax == "glob":
            return
        if self.syntax != "regex":
            raise ConfigurationError(
                f"The syntax of the agent pattern {self.pattern!r} cannot be {self.syntax!r}; it is 'glob' or 'regex'."
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigurationError(
                f"The agent pattern {self.pattern!r} is no regular expression: {error}; "
                "for wildcards such as 'writer*' use AgentMatcher.glob."
            ) from error

    def matches(self, name: str) -> bool:
        """Whether the rule has anything to say about the agent."""
        if self.syntax == "glob":
            return fnmatchcase(name, self.pattern)
        return re.search(self.pattern, name) is not None


@dataclass(frozen=True)
class AgentMatcher:
    """The agents that some rules mean."""

    rules: Sequence[AgentRule]
    """Kept in the order in which they are asked: highest priority first."""

    def __post_init__(self) -> None:
        for rule in self.rules:
            if not isinstance(rule, AgentRule):
                raise ConfigurationError(
                    f"An AgentMatcher is made of AgentRules, not of {rule!r} ({type(rule).__name__}); "
                    "for one pattern use AgentMatcher.glob or AgentMatcher.regex."
                )
        if not any(rule.include for rule in self.rules):
            raise ConfigurationError(
                f"The rules {self.rules!r} match no agent at all; add one that includes, such as AgentRule('*')."
            )
        in_order = tuple(sorted(self.rules, key=lambda rule: rule.priority, reverse=True))
        object.__setattr__(self, "rules", in_order)  # a frozen dataclass offers no other way

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Agents in whose name the regular expression matches somewhere."""
        return cls([AgentRule(pattern, "regex")])

    @classmethod
    def glob(cls, pattern: str) -> Self:
        """Agents whose whole name fits the wildcards: `*` any text, `?` one character, `[ab]` one of these."""
        return cls([AgentRule(pattern, "glob")])

    def matches(self, name: str) -> bool:
        """Whether the agent of this name is meant."""
        return next((rule.include for rule in self.rules if rule.matches(name)), False)


def name_test(agent_match: str | AgentMatcher | None) -> Callable[[str], bool] | None:
    """A test of names, true for agents that are meant. A string is a regular expression; None means all agents."""
    if agent_match is None:
        return None
    if isinstance(agent_match, str):
        return AgentMatcher.regex(agent_match).matches
    if isinstance(agent_match, AgentMatcher):
        return agent_match.matches
    raise ConfigurationError(
        f"agent_match cannot be {agent_match!r} ({type(agent_match).__name__}); "
        "it is a regular expression, an AgentMatcher, or None for all agents."
    )


def agent_name(attributes: Mapping[str, object] | None, span_name: str = "") -> str | None:
    """The agent a span names itself; None if it names none, whatever the spans around it say."""
    given = attributes or {}
    if SPAN_AGENT in given:  # OpenAI Agents SDK
        return str(given[SPAN_AGENT])
    if given.get("agentops.span.kind") == "agent" and "operation.name" in given:  # AgentOps
        return str(given["operation.name"])
    if "recipient_agent_type" in given:  # AutoGen
        return _AUTOGEN_TEAM_ID.sub("", str(given["recipient_agent_type"]))
    for key in _WRITTEN_PLAINLY:
        if key in given:
            return str(given[key])
    if given.get("type") == "agent" and _WEAVE_AGENT in given:
        return str(given[_WEAVE_AGENT])
    if span_name.startswith("langchain.Chain.") and "lc_name" in given:
        return str(given["lc_name"])
    return None
