"""The tree of a trace: its shape, its agents, its repair, its model calls."""

import sys
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.adapter.tree import TraceTree
from agentlightning.types import Span
from tests.adapter.spans import CHAT, reward, span

# ---------------------------------------------------------------------- shape


def test_a_missing_parent_becomes_a_root_as_long_as_its_children() -> None:
    tree = TraceTree.from_spans([span("b", "lost", start=2.0, end=3.0), span("c", "lost", start=1.0, end=2.0)])

    assert (tree.id, tree.span.name) == ("lost", "agentlightning.virtual")
    assert (tree.start_time, tree.end_time) == (1.0, 3.0)
    assert (tree.span.rollout_id, tree.span.attempt_id) == ("ro-1", "at-1")


def test_several_roots_get_a_virtual_one() -> None:
    tree = TraceTree.from_spans([span("a", start=1.0), span("b", end=7.0), span("c", "lost", start=3.0, end=4.0)])

    assert (tree.id, tree.span.name) == ("virtual-root", "virtual-root")
    assert [child.id for child in tree.children] == ["a", "b", "lost"]
    assert (tree.start_time, tree.end_time) == (1.0, 4.0)


def test_a_span_that_came_twice_is_one_node() -> None:
    tree = TraceTree.from_spans([span("a"), span("b", "a", name="old"), span("b", "a", name="new")])

    assert [node.span.name for node in tree.traverse()] == ["step", "new"]


def test_nodes_are_found_and_added() -> None:
    tree = TraceTree.from_spans([span("a"), span("b", "a")])
    child = TraceTree("c", span("c", "a"))

    tree.add_child(child)

    assert tree.find_id("c") is child
    assert tree.find_id("nobody") is None
    assert repr(tree) == "TraceTree(id='a', name='step', children=2)"


def test_names_and_json_are_nested() -> None:
    spans = [span("a", name="run"), span("b", "a", name="work", attributes={"agent.name": "solver"}), span("c", "b")]
    tree = TraceTree.from_spans(spans)

    assert tree.names_tuple() == ("run", [("work [solver]", [("step", [])])])
    written = tree.to_json()
    assert written["children"][0]["children"][0] == {"id": "c", "span": spans[2].model_dump(), "children": []}


def test_a_deep_trace_is_read_without_recursion() -> None:
    depth = sys.getrecursionlimit() + 50
    spans = [span("0")] + [span(str(i), str(i - 1), name=CHAT) for i in range(1, depth)]
    tree = TraceTree.from_spans(spans)

    tree.repair_hierarchy()
    tree.names_tuple()
    tree.to_json()

    assert tree.find_id(str(depth - 1)) is not None
    assert len(tree.to_trajectory()) == 1  # the others are the same call, seen again


def test_a_picture_shows_matching_spans_and_their_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    graphviz = MagicMock()
    monkeypatch.setitem(sys.modules, "graphviz", graphviz)
    agent = span("b0123456789", "a", attributes={"agent.name": "solver"})
    spans = [span("a"), agent, span("c", agent.span_id, name=CHAT), span("d", "a")]

    TraceTree.from_spans(spans).visualize("trace", "openai")

    assert graphviz.Digraph.return_value.mock_calls == [
        mock.call.node("a", "a (step)"),
        mock.call.edge("a", "b0123456789"),
        mock.call.node("b0123456789", "b0123456 (step) [solver]"),
        mock.call.edge("b0123456789", "c"),
        mock.call.node("c", f"c ({CHAT})"),
        mock.call.render("trace", format="png", cleanup=True),
    ]


# ---------------------------------------------------------------------- agents


@pytest.mark.parametrize(
    "attributes",
    [
        {"crewai.agent.role": "a"},
        {"gen_ai.agent.name": "a"},
        {"type": "agent", "agentlightning.operation.input.name": "a"},
        {"lc_name": "a"},
    ],
    ids=["crewai", "opentelemetry", "weave", "weave-chain"],
)
def test_the_agent_of_a_span(attributes: dict[str, Any]) -> None:
    name = "langchain.Chain.invoke" if "lc_name" in attributes else "step"

    assert TraceTree("a", span("a", name=name, attributes=attributes)).agent_name() == "a"


# ---------------------------------------------------------------------- repair


def moved(spans: list[Span]) -> dict[str, str]:
    """The parent of every node after the repair."""
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    return {child.id: node.id for node in tree.traverse() for child in node.children}


def test_a_stray_moves_under_the_shortest_span_around_it() -> None:
    spans = [span("root", end=10.0), span("agent", "root", end=9.0), span("inner", "agent", start=1.0, end=4.0)]

    assert moved([*spans, span("stray", "root", start=2.0, end=3.0)])["stray"] == "inner"
    assert moved([*spans, span("stray", "root", start=3.0, end=5.0)])["stray"] == "agent"
    assert moved([*spans, span("stray", "root", start=8.0, end=9.5)])["stray"] == "root"


def naive_repair(root: TraceTree) -> None:
    """The rule of `repair_hierarchy`, by comparing every child with every node."""
    while len(root.children) == 1:
        root = root.children[0]
    order = [node for node in root.traverse() if node is not root]
    for child in list(root.children):
        if len(root.children) == 1:
            break
        best: tuple[float, TraceTree] | None = None
        for node in order:
            times = (node.start_time, node.end_time, child.start_time, child.end_time)
            if node is child or any(time is None for time in times):
                continue
            if node.start_time <= child.start_time and node.end_time >= child.end_time:  # type: ignore[operator] # seen
                slack = node.end_time - child.end_time + child.start_time - node.start_time  # type: ignore[operator] # seen
                if slack > 0 and (best is None or slack < best[0]):
                    best = (slack, node)
        if best is not None and best[1] not in child.traverse():
            root.children.remove(child)
            best[1].children.append(child)


@st.composite
def traces(draw: st.DrawFn, most: int = 14) -> list[Span]:
    """Any tree of spans with few different times, so that clocks tie and spans cross; parents may be missing."""
    count = draw(st.integers(1, most))
    moment = st.one_of(st.none(), st.integers(0, 6)) if draw(st.booleans()) else st.integers(0, 6)
    names = st.sampled_from(["step", CHAT, "agentlightning.reward"])
    spans: list[Span] = []
    for number in range(count):
        parents = [None, "gone", *(str(i) for i in range(number))] if number else [None, "gone"]
        favoured = st.just("0") if number else st.none()
        parent = draw(st.one_of(favoured, st.sampled_from(parents)))
        times = sorted([draw(st.integers(0, 6)), draw(st.integers(0, 6))])
        start, end = (float(times[0]), float(times[1])) if draw(moment) is not None else (None, float(times[1]))
        name = draw(names)
        attributes: dict[str, Any] = {"reward": float(number)} if name != "step" else {}
        response_id = draw(st.sampled_from([None, "r1", "r2", f"own-{number}"]))
        if name == CHAT and response_id is not None:
            attributes["gen_ai.response.id"] = response_id
        agent = draw(st.sampled_from([None, None, "solver", "critic"]))
        if agent is not None:
            attributes["agent.name"] = agent
        spans.append(span(str(number), parent, name=name, start=start, end=end, attributes=attributes))
    return spans


def shape(tree: TraceTree) -> dict[str, list[str]]:
    return {node.id: [child.id for child in node.children] for node in tree.traverse()}


@given(traces())
def test_repair_does_what_comparing_all_pairs_does(spans: list[Span]) -> None:
    fast, naive = TraceTree.from_spans(spans), TraceTree.from_spans(spans)

    fast.repair_hierarchy()
    naive_repair(naive)

    assert shape(fast) == shape(naive)


@given(traces(), st.data())
def test_of_any_circle_of_parents_one_span_becomes_a_root(spans: list[Span], data: st.DataObject) -> None:
    start = data.draw(st.sampled_from(spans))
    by_id = {one.span_id: one for one in spans}
    path = [start]
    while path[-1].parent_id in by_id:
        path.append(by_id[str(path[-1].parent_id)])
    closed = [one.model_copy(update={"parent_id": start.span_id}) if one is path[-1] else one for one in spans]

    tree = TraceTree.from_spans(closed)

    assert sorted(node.id for node in tree.traverse() if node.id in by_id) == sorted(by_id)


# ---------------------------------------------------------------------- model calls


def calls_of(spans: list[Span], agent_match: str | None = None, **options: Any) -> list[tuple[str, str]]:
    scope = {"within_matching_subtree": "*" if agent_match is None else None, "within_reward": False}
    found = TraceTree.from_spans(spans).find_llm_calls(
        **{"llm_call_match": r"openai\.chat", "agent_match": agent_match, **scope, "within_llm_call": False, **options}
    )
    return [(node.id, label) for node, label in found]


def test_calls_carry_the_label_of_the_agent_above_them() -> None:
    agents = [
        span("a", "root", attributes={"agent.name": "solver"}),
        span("b", "a", attributes={"agent.name": "judge"}),
    ]
    calls = [span("c1", "root", name=CHAT), span("c2", "a", name=CHAT), span("c3", "b", name=CHAT)]
    spans = [span("root"), *agents, *calls]

    assert calls_of(spans) == [("c3", "judge"), ("c2", "solver"), ("c1", "*")]
    assert calls_of(spans, "solv") == [("c2", "solver")]
    assert calls_of(spans, "judge") == [("c3", "judge")]


ANSWERED = {"name": CHAT, "attributes": {"gen_ai.response.id": "r1"}}
JUDGING = [reward("judging", None, 1.0, at=0.0), span("c1", "judging", name=CHAT)]
SIBLINGS = [span("root"), span("c1", "root", **ANSWERED), span("c2", "root", **ANSWERED)]
NESTED = [span("c1", name=CHAT), span("c2", "c1", name=CHAT)]


@pytest.mark.parametrize(
    ("spans", "options", "found"),
    [
        pytest.param(JUDGING, {}, [], id="within a reward"),
        pytest.param(JUDGING, {"within_reward": None}, ["c1"], id="wanted within a reward"),
        pytest.param(SIBLINGS, {}, ["c1"], id="one response"),
        pytest.param(SIBLINGS, {"existing_llm_call_response_ids": {"r1"}}, [], id="known response"),
        pytest.param(SIBLINGS, {"within_llm_call": None}, ["c1", "c2"], id="wanted twice"),
        pytest.param(NESTED, {}, ["c1"], id="nested without an id"),
        pytest.param([NESTED[0], span("c2", "c1", **ANSWERED)], {}, ["c1", "c2"], id="nested with an id"),
        pytest.param(NESTED, {"within_llm_call": None}, ["c1", "c2"], id="nested and wanted"),
    ],
)
def test_a_call_counts_once_and_outside_of_rewards_unless_more_is_wanted(
    spans: list[Span], options: dict[str, Any], found: list[str]
) -> None:
    assert calls_of(spans, **options) == [(span_id, "*") for span_id in found]


def naive_calls(
    node: TraceTree, label: str | None, seen: set[str], *, in_reward: bool = False, in_call: bool = False
) -> list[str]:
    """The rule of `find_llm_calls`, as a recursion."""
    response_id = node.span.attributes.get("gen_ai.response.id")
    is_call = label is not None and not in_reward and node.span.name == CHAT
    is_call = is_call and (response_id not in seen if response_id is not None else not in_call)
    found = [node.id] if is_call else []
    if is_call and isinstance(response_id, str):
        seen.add(response_id)
    agent = node.agent_name()
    if agent is not None:
        label = agent if agent == "solver" else None
    for child in node.children:
        found += naive_calls(
            child, label, seen, in_reward=in_reward or node.is_reward_span(), in_call=in_call or is_call
        )
    return found


@given(traces())
def test_calls_are_found_as_the_rule_says(spans: list[Span]) -> None:
    expected = naive_calls(TraceTree.from_spans(spans), None, set())

    assert [node_id for node_id, _ in calls_of(spans, "solver")] == expected


# ---------------------------------------------------------------------- rewards


def matched(policy: str, spans: list[Span]) -> dict[str, float | None]:
    tree = TraceTree.from_spans(spans)
    return tree.match_rewards(policy, [node for node in tree.traverse() if node.span.name == CHAT])


def call(span_id: str, parent_id: str, start: float, end: float) -> Span:
    return span(span_id, parent_id, name=CHAT, start=start, end=end)


def test_a_reward_goes_to_the_latest_call_that_was_over_and_has_none() -> None:
    spans = [span("root"), call("c1", "root", 0.0, 1.0), call("c2", "root", 1.0, 2.0), call("c3", "root", 2.0, 9.0)]
    rewards = [reward("w1", "root", 0.5, at=3.0), reward("w2", "root", 0.7, at=4.0), reward("w3", "root", 1.0, at=5.0)]

    assert matched("first_occurrence", [*spans, *rewards]) == {"c2": 0.5, "c1": 0.7}


def naive_match(nodes: list[TraceTree]) -> dict[str, float | None]:
    """The rule of `match_rewards`, by looking back at every call for every reward."""
    rewards: dict[str, float | None] = {}
    calls: list[TraceTree] = []
    for node in nodes:
        calls += [node] if node.span.name == CHAT else []
        payload = node.maybe_reward_dict()
        if payload.get("type") != "reward" or node.start_time is None:
            continue
        over = (c for c in reversed(calls) if c.end_time is not None and c.end_time <= node.start_time)
        latest = next((c for c in over if c.id not in rewards), None)
        if latest is not None:
            rewards[latest.id] = payload["value"]
    return rewards


@given(traces(most=20))
def test_rewards_are_matched_as_looking_back_would(spans: list[Span]) -> None:
    tree = TraceTree.from_spans(spans)
    by_start = sorted(tree.traverse(), key=lambda node: -1.0 if node.start_time is None else node.start_time)
    by_parent: dict[str, float | None] = {}
    for node in tree.traverse():
        by_parent |= naive_match(node.children)

    assert matched("first_occurrence", spans) == naive_match(by_start)
    assert matched("first_sibling", spans) == by_parent
