"""Suggestions for a team of agents: what its tasks, guardrails, tools and rewards show to be worth improving.

    for suggestion in suggestions(spans):
        print(suggestion)

The spans may be those of one attempt or of many; the more there are, the more the shares mean.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from agentlightning.events.spans import AgentNames
from agentlightning.events.views import upwards
from agentlightning.semconv import TOOL_NAME
from agentlightning.types.rewards import reward_value_of
from agentlightning.types.tracer import Span

__all__ = ["Suggestion", "suggestions"]

NOTABLE: Final = 0.1
"""Share of failures, or of the range of rewards, from which on there is something to suggest."""
_TASK: Final = "crewai.task."
_REFUSED: Final = (("crewai.guardrail.success", False), ("guardrail.triggered", True))
_TASK_FAILS: Final = (
    "Task '{}' failed in {} of {} runs, most often with: {}.",
    "Fix the error first, or give the task to an agent with the tools that it needs.",
)
_ANSWER_REFUSED: Final = (
    "A guardrail refused the answers of '{}' in {} of {} cases, most often with: {}.",
    "Write what it checks into the expected output of the task, or train the agent on it.",
)
_TOOL_FAILS: Final = (
    "Tool '{}' failed in {} of {} calls, most often with: {}.",
    "Describe its arguments in its docstring, and return errors as text that the model can act on.",
)


@dataclass(frozen=True)
class Suggestion:
    """Something worth improving: what shows it, and what to try."""

    about: str
    """The task, tool or agent."""
    sentence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}"


def suggestions(spans: Sequence[Span]) -> list[Suggestion]:
    """What to improve first: tasks that fail, answers that guardrails refuse, tools that fail, the weakest agent."""
    by_id = {span.span_id: span for span in spans}
    tasks = ((_task_of(span, by_id), _failure(span)) for span in spans if f"{_TASK}description" in span.attributes)
    guarded = (
        (_task_of(span, by_id), _refusal(span))
        for span in spans
        if any(name in span.attributes for name, _ in _REFUSED)
    )
    tools = ((str(span.attributes[TOOL_NAME]), _failure(span)) for span in spans if TOOL_NAME in span.attributes)
    found = [*_shares(tasks, *_TASK_FAILS), *_shares(guarded, *_ANSWER_REFUSED), *_shares(tools, *_TOOL_FAILS)]
    weakest = weakest_agent(rewards_by_agent(spans))
    return found if weakest is None else [*found, weakest]


def rewards_by_agent(spans: Sequence[Span]) -> dict[str, list[float]]:
    """The finite rewards of each agent that has some: of the agent around the reward, else of its task."""
    by_id = {span.span_id: span for span in spans}
    names = AgentNames()
    for span in spans:
        names.add(span)
    rewards: dict[str, list[float]] = {}
    for span in spans:
        value = reward_value_of(span)
        if value is None or not math.isfinite(value):
            continue
        roles = (above.attributes.get(f"{_TASK}agent_role") for above in upwards(span, by_id))
        agent = names.of(span) or next((str(role) for role in roles if role is not None), None)
        if agent is not None:
            rewards.setdefault(agent, []).append(value)
    return rewards


def weakest_agent(rewards: Mapping[str, Sequence[float]]) -> Suggestion | None:
    """The agent whose rewards are notably lower than those of the others; None if there is no such one."""
    if len(rewards) < 2:
        return None
    weakest = min(rewards, key=lambda agent: fmean(rewards[agent]))
    own, others = rewards[weakest], [value for agent in rewards if agent != weakest for value in rewards[agent]]
    if fmean(others) - fmean(own) <= NOTABLE * (max(*own, *others) - min(*own, *others)):
        return None
    return Suggestion(
        weakest,
        f"Agent '{weakest}' has the lowest reward: {fmean(own):.2f} in the mean of {len(own)}, where the others have "
        f"{fmean(others):.2f}.",
        f"Optimise it first: train its calls alone (agent_match=AgentMatcher.glob('{weakest}')), or its prompt, the "
        f"resource '{weakest}/prompt'.",
    )


def _shares(cases: Iterable[tuple[str, str | None]], sentence: str, advice: str) -> Iterator[Suggestion]:
    """One suggestion for each thing that notably often has a failure."""
    found: dict[str, list[str | None]] = {}
    for about, failure in cases:
        found.setdefault(about, []).append(failure)
    for about, failures in found.items():
        reasons = Counter(failure for failure in failures if failure is not None)
        if reasons.total() > NOTABLE * len(failures):
            reason = reasons.most_common(1)[0][0].rstrip(".")
            yield Suggestion(about, sentence.format(about, reasons.total(), len(failures), reason), advice)


def _failure(span: Span) -> str | None:
    """Why the work of a span failed; None if it did not."""
    return span.status.description or "no reason was recorded" if span.status.status_code == "ERROR" else None


def _refusal(span: Span) -> str | None:
    """Why a guardrail refused an answer; None if it did not."""
    if not any(span.attributes.get(name) is refused for name, refused in _REFUSED):
        return None
    return str(span.attributes.get("crewai.guardrail.error") or "no reason was recorded")


def _task_of(span: Span, by_id: Mapping[str, Span]) -> str:
    """The task in which a span lies, by its name or else its description; the span's own name without a task."""
    texts = (
        above.attributes.get(f"{_TASK}{field}") for above in upwards(span, by_id) for field in ("name", "description")
    )
    return next((str(text) for text in texts if text), span.name)
