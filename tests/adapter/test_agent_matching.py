"""Every adapter that takes `agent_match` takes a pattern or a matcher, to the same effect."""

from collections.abc import Callable
from typing import TypeAlias

import pytest

from agentlightning.adapter import TracerTraceToTriplet, TraceToTrajectory, auto_adapter
from agentlightning.errors import ConfigurationError
from agentlightning.types import AgentMatcher, AgentRule, Span
from tests.adapter.spans import Conversation

AgentMatch: TypeAlias = str | AgentMatcher | None

NO_DRAFTS = AgentMatcher([AgentRule("writer_draft", include=False, priority=1), AgentRule("writer*")])


@pytest.fixture(name="spans")
def _spans() -> list[Span]:
    """Calls of `writer_1`, of `writer_draft` within it, of `critic`, and of nobody."""
    talk = Conversation()
    writer = talk.agent("writer_1", calls=4)
    talk.call([1], [11], under=writer)
    talk.call([2], [12], under=talk.agent("writer_draft", under=writer, calls=1))
    talk.call([3], [13], under=talk.agent("critic", calls=1))
    talk.call([4], [14])
    return talk.spans


def by_triplets(spans: list[Span], agent_match: AgentMatch) -> list[int]:
    triplets = TracerTraceToTriplet(agent_match=agent_match).adapt(spans)
    return [triplet.response["token_ids"][0] for triplet in triplets]


def by_detection(spans: list[Span], agent_match: AgentMatch) -> list[int]:
    triplets = auto_adapter(spans, agent_match=agent_match).adapt(spans)
    return [triplet.response["token_ids"][0] for triplet in triplets]


def by_trajectory(spans: list[Span], agent_match: AgentMatch) -> list[int]:
    trajectory = TraceToTrajectory(agent_match=agent_match).adapt(spans)
    return sorted(sequence.token_ids[-1] for sequence in trajectory.sequences)


every_way = pytest.mark.parametrize(
    "responses_of", [by_triplets, by_detection, by_trajectory], ids=["triplets", "detection", "trajectory"]
)
Way: TypeAlias = Callable[[list[Span], AgentMatch], list[int]]


@every_way
@pytest.mark.parametrize(
    ("agent_match", "expected"),
    [
        (None, [11, 12, 13, 14]),
        ("writer", [11, 12]),
        (AgentMatcher.glob("writer_?"), [11]),
        (AgentMatcher.glob("*"), [11, 12, 13]),
        (NO_DRAFTS, [11]),
    ],
    ids=["none", "text", "glob", "all-agents", "rules"],
)
def test_calls_of_the_agents_that_are_meant(
    spans: list[Span], responses_of: Way, agent_match: AgentMatch, expected: list[int]
) -> None:
    assert responses_of(spans, agent_match) == expected


@every_way
def test_a_bad_pattern_is_named(spans: list[Span], responses_of: Way) -> None:
    with pytest.raises(ConfigurationError, match=r"The agent pattern '\*writer' is no regular expression"):
        responses_of(spans, "*writer")


def test_the_label_is_the_agents_name(spans: list[Span]) -> None:
    triplets = TracerTraceToTriplet(agent_match=AgentMatcher.glob("writer*")).adapt(spans)

    assert [triplet.metadata["agent_name"] for triplet in triplets] == ["writer_1", "writer_draft"]
