"""Agents are chosen by regular expression, by wildcards, and by rules of which the highest priority decides."""

import pickle
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import ConfigurationError
from agentlightning.types import AgentMatcher, AgentRule
from agentlightning.types.agents import agent_name, name_test

DRAFTLESS = AgentMatcher([AgentRule("writer*"), AgentRule("draft", "regex", include=False, priority=10)])


@pytest.mark.parametrize(
    ("pattern", "name", "is_meant"),
    [
        ("solver", "my_solver_2", True),
        ("^solver$", "my_solver_2", False),
        ("Solver", "solver", False),
    ],
    ids=["within", "anchored", "case"],
)
def test_a_regular_expression_matches_anywhere(pattern: str, name: str, is_meant: bool) -> None:
    assert AgentMatcher.regex(pattern).matches(name) is is_meant


@pytest.mark.parametrize(
    ("pattern", "name", "is_meant"),
    [
        ("writer*", "writer_2", True),
        ("writer*", "ghostwriter", False),
        ("writer[12]", "writer3", False),
        ("writer.v1", "writerXv1", False),
        ("Writer", "writer", False),
        ("two\nlines*", "two\nlines\nhere", True),
    ],
    ids=["star", "whole-name", "set", "dot", "case", "lines"],
)
def test_wildcards_cover_the_whole_name(pattern: str, name: str, is_meant: bool) -> None:
    assert AgentMatcher.glob(pattern).matches(name) is is_meant


@pytest.mark.parametrize(
    ("name", "is_meant"), [("writer_1", True), ("writer_draft", False), ("critic", False)], ids=["in", "out", "neither"]
)
def test_the_highest_priority_that_matches_decides(name: str, is_meant: bool) -> None:
    assert DRAFTLESS.matches(name) is is_meant


def test_a_lower_rule_has_no_say_where_a_higher_one_matches() -> None:
    rules = [AgentRule("critic", include=False, priority=1), AgentRule("critic*", priority=2)]

    assert AgentMatcher(rules).matches("critic")
    assert AgentMatcher(rules[::-1]).matches("critic")


# ---------------------------------------------------------------------- matchers are values


def test_matchers_compare_hash_and_pickle() -> None:
    same = AgentMatcher(tuple(reversed(DRAFTLESS.rules)))

    assert same == DRAFTLESS
    assert len({same, DRAFTLESS, AgentMatcher.glob("writer*")}) == 2
    assert pickle.loads(pickle.dumps(DRAFTLESS)) == DRAFTLESS


def test_rules_read_from_json_are_put_in_order() -> None:
    text = '{"rules": [{"pattern": "*"}, {"pattern": "critic", "include": false, "priority": 1}]}'

    matcher = TypeAdapter(AgentMatcher).validate_json(text)

    assert matcher == AgentMatcher([AgentRule("critic", include=False, priority=1), AgentRule("*")])
    assert TypeAdapter(AgentMatcher).validate_json(TypeAdapter(AgentMatcher).dump_json(matcher)) == matcher
    assert not matcher.matches("critic")


def test_a_bad_pattern_in_json_is_named() -> None:
    with pytest.raises(ValidationError, match=r"The agent pattern '\(' is no regular expression"):
        TypeAdapter(AgentMatcher).validate_json('{"rules": [{"pattern": "(", "syntax": "regex"}]}')


# ---------------------------------------------------------------------- what cannot be meant


@pytest.mark.parametrize("pattern", ["(", "*", "writer**", "[a"])
def test_a_bad_regular_expression_is_named_and_wildcards_are_offered(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is no regular expression: .*; for wildcards .* use") as caught:
        AgentMatcher.regex(pattern)

    assert repr(pattern) in str(caught.value)


@pytest.mark.parametrize("rules", [[], [AgentRule("a", include=False)]], ids=["none", "only-excluding"])
def test_rules_that_mean_nobody_are_refused(rules: list[AgentRule]) -> None:
    with pytest.raises(ConfigurationError, match="match no agent at all; add one that includes"):
        AgentMatcher(rules)


# ---------------------------------------------------------------------- what users pass


@pytest.mark.parametrize("value", [5, ["solver"], AgentRule("solver")], ids=["number", "list", "rule"])
def test_anything_else_is_refused_with_the_accepted_forms(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"agent_match cannot be .*; it is a regular expression, an AgentM"):
        name_test(value)


def test_a_text_or_a_matcher_is_a_test_for_many_names() -> None:
    names = ("ghostwriter", "writer_draft", "critic")

    tests = [name_test(value) for value in ("writer", AgentMatcher.glob("writer*"), DRAFTLESS)]

    assert [[test is not None and test(name) for name in names] for test in tests] == [
        [True, True, False],
        [False, True, False],
        [False, False, False],
    ]
    assert name_test(None) is None


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"agent.name": "triage", "executor.id": "other"}, "triage"),
        ({"operation.name": "planner", "agentops.span.kind": "agent"}, "planner"),
        ({"operation.name": "planner", "agentops.span.kind": "task"}, None),
        ({"recipient_agent_type": "critic"}, "critic"),
        ({"langchain.chain.type": "write_query"}, "write_query"),
        ({"executor.id": "writer"}, "writer"),
        ({"text": "hello"}, None),
        (None, None),
    ],
    ids=["agents-sdk", "agentops", "agentops-task", "autogen", "langgraph", "agent-framework", "nobody", "nothing"],
)
def test_agent_is_named_by_the_rules_of_its_framework(attributes: Any, name: str | None) -> None:
    assert agent_name(attributes) == name
