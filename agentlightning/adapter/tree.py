"""A trace as a tree: whose children spans are, which of them are model calls, and what reward each call got.

`TraceTree.from_spans` builds the tree, `repair_hierarchy` puts stray spans where they belong, and `to_trajectory` reads
the model calls off it. No method recurses, so the depth of a trace does not matter, and none compares all spans with
all others, so that its length does not matter either.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

from typing_extensions import Self

from agentlightning.adapter.call_filter import CallCandidate, CallFilter, CallScope, RejectedBecause
from agentlightning.adapter.calls import (
    LOGPROBS,
    genai_sections,
    has_failed,
    image_urls_in,
    parsed,
    prompt_ids_of,
    response_id_of,
    response_ids_of,
    token_ids_or_empty,
)
from agentlightning.adapter.graphviz import draw
from agentlightning.adapter.matching import RewardMatchPolicy, match_in_order
from agentlightning.adapter.proxied import ANY_CALL_MATCH, PROXY_SPANS, TRACED_CALL_MATCH, ProxiedCalls, call_test
from agentlightning.adapter.repair import closest_enclosing
from agentlightning.semconv import AGL_VIRTUAL
from agentlightning.types.agents import AgentMatcher, agent_name, name_test
from agentlightning.types.core import Triplet
from agentlightning.types.rewards import is_reward_scope, reward_payload_of
from agentlightning.types.tracer import Span

__all__ = [
    "ANY_AGENT",
    "ANY_CALL_MATCH",
    "CallCandidate",
    "CallScope",
    "LLM_CALL_MATCH",
    "RejectedBecause",
    "TRACED_CALL_MATCH",
    "TraceTree",
]

logger = logging.getLogger(__name__)

LLM_CALL_MATCH = r"openai\.chat\.completion"
ANY_CHAT_MATCH = "|".join([LLM_CALL_MATCH, *sorted(PROXY_SPANS)])
"""Names of calls of which the default pattern finds triplets."""
ANY_AGENT = "*"
"""Label of a call that stands under no named agent."""
VIRTUAL_ROOT = "virtual-root"


class TraceTree:
    """A span and the spans beneath it."""

    __slots__ = ("_children", "id", "span")

    def __init__(self, id: str, span: Span, children: "list[TraceTree] | None" = None) -> None:
        self.id = id
        self.span = span
        self._children = children or None  # most spans have none, and many empty lists are work for the collector

    @property
    def children(self) -> "list[TraceTree]":
        if self._children is None:
            self._children = []
        return self._children

    @children.setter
    def children(self, children: "list[TraceTree]") -> None:
        self._children = children

    def __repr__(self) -> str:
        return f"TraceTree(id={self.id!r}, name={self.span.name!r}, children={len(self.children)})"

    @property
    def start_time(self) -> float | None:
        return self.span.start_time

    @property
    def end_time(self) -> float | None:
        return self.span.end_time

    # ------------------------------------------------------------------ shape

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> Self:
        """The tree of one attempt; children stand in the order of the spans.

        A parent that is referred to but missing is made up, and so is a root above several roots. Of spans with one
        id, the last counts.

        Raises:
            ValueError: there are no spans, or some are their own ancestors.
        """
        if not spans:
            raise ValueError("A trace tree needs at least one span; none were given.")
        nodes = {span.span_id: cls(span.span_id, span) for span in spans}
        roots: list[Self] = []
        parents: list[TraceTree] = []
        orphans_by_parent: dict[str, list[TraceTree]] = {}
        for node in nodes.values():
            parent_id = node.span.parent_id
            parent = None if parent_id is None else nodes.get(parent_id)
            if parent is not None:
                if parent._children is None:
                    parents.append(parent)
                parent.children.append(node)
            elif parent_id is None:
                roots.append(node)
            else:
                orphans_by_parent.setdefault(parent_id, []).append(node)
        _refuse_circles(nodes, parents)
        roots += [cls(name, _missing_parent(name, orphans), orphans) for name, orphans in orphans_by_parent.items()]
        return roots[0] if len(roots) == 1 else cls(VIRTUAL_ROOT, _virtual_root(roots), [*roots])

    def find_id(self, id: str) -> "TraceTree | None":
        """The node of this id, or None."""
        return next((node for node in self._walk() if node.id == id), None)

    def add_child(self, child: "TraceTree") -> None:
        self.children.append(child)

    def traverse(self) -> "list[TraceTree]":
        """Every node, parents before their children, siblings in order."""
        return list(self._walk())

    def _walk(self) -> "Iterator[TraceTree]":
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            if node._children:
                stack += reversed(node._children)

    def names_tuple(self) -> tuple[str, list[Any]]:
        """The name, with the agent's in brackets, and the same of each child."""
        below: dict[int, list[Any]] = {}
        for node in self._walk():
            agent = node.agent_name()
            children: list[Any] = []
            below[id(node)] = [node.span.name if agent is None else f"{node.span.name} [{agent}]", children]
        for node in self._walk():
            below[id(node)][1] += [tuple(below[id(child)]) for child in node.children]
        name, children = below[id(self)]
        return name, children

    def to_json(self) -> dict[str, Any]:
        """`{"id": ..., "span": ..., "children": [...]}`, nested."""
        nodes = self.traverse()
        written: dict[int, dict[str, Any]] = {
            id(node): {"id": node.id, "span": node.span.model_dump(), "children": []} for node in nodes
        }
        for node in nodes:
            written[id(node)]["children"] = [written[id(child)] for child in node.children]
        return written[id(self)]

    def visualize(self, filename: str, interested_span_match: str | None = None) -> None:
        """Draw the tree into `filename`.png; with a pattern, only spans whose name matches, and those above them."""
        draw(self, filename, interested_span_match)

    # ------------------------------------------------------------------ what a node says

    def agent_name(self) -> str | None:
        """The agent this span is, by the conventions of the frameworks we know; None if it is none."""
        return agent_name(self.span.attributes, self.span.name)

    def maybe_reward_dict(self) -> dict[str, Any]:
        """`{"type": "reward", "value": ...}` if the span carries a reward; `{}` or an unrelated output otherwise."""
        return reward_payload_of(self.span)

    def is_reward_span(self) -> bool:
        """Whether the span is a reward, even one without value, or the operation that makes it."""
        return is_reward_scope(self.span)

    # ------------------------------------------------------------------ repair

    def repair_hierarchy(self) -> None:
        """Move each child of the root under the shortest span that encloses it in time.

        A root with one child is a wrapper: the repair begins at the first node with several. One child always stays.
        A child whose closest enclosing span lies beneath the child itself stays too: a move would cut it off.
        """
        root = self
        while len(root.children) == 1:
            root = root.children[0]
        if not root.children:
            return
        nodes: list[TraceTree] = []
        branch_of: list[int] = []
        branch_starts: list[int] = []
        for branch, child in enumerate(root.children):
            branch_starts.append(len(nodes))
            nodes += child._walk() if child._children else (child,)
            branch_of += [branch] * (len(nodes) - len(branch_of))
        spans = [node.span for node in nodes]
        starts, ends = [span.start_time for span in spans], [span.end_time for span in spans]
        closest = closest_enclosing(branch_starts, starts, ends)
        branches = _Branches(len(root.children))
        for branch, position in enumerate(branch_starts):
            if branches.left == 1:
                break
            parent = closest.get(position)
            if parent is not None and branches.join(branch, branch_of[parent]):
                nodes[parent].children.append(nodes[position])
        if branches.left < len(root.children):
            root.children = [child for branch, child in enumerate(root.children) if branches.is_root(branch)]

    # ------------------------------------------------------------------ model calls

    def find_llm_calls(
        self,
        *,
        llm_call_match: str,
        agent_match: str | AgentMatcher | None,
        within_matching_subtree: str | None = None,
        within_reward: bool | None = None,
        within_llm_call: bool | None = None,
        existing_llm_call_response_ids: set[str] | None = None,
    ) -> "list[tuple[TraceTree, str]]":
        """The model calls of the tree, each with the label of its agent, parents before their children.

        Args:
            llm_call_match: pattern that the name of a call matches somewhere.
            agent_match: the agents whose calls are wanted, by a pattern or a matcher; None wants all.
            within_matching_subtree: label at the root; None until a wanted agent begins.
            within_reward: whether the root lies within a reward; None takes calls within rewards as well.
            within_llm_call: whether the root lies within a call; None takes duplicates as well.
            existing_llm_call_response_ids: responses that are known already; the set grows.
        """
        candidates = self.call_candidates(
            llm_call_match=llm_call_match,
            agent_match=agent_match,
            scope=CallScope(
                within_matching_subtree,
                within_reward,
                self if within_llm_call else None,
                has_agent=within_matching_subtree not in (None, ANY_AGENT),
            ),
            dedup=within_llm_call is not None or existing_llm_call_response_ids is not None,
            seen=existing_llm_call_response_ids,
        )
        return [
            (call.node, call.agent_name) for call in candidates if not call.rejected and call.agent_name is not None
        ]

    def call_candidates(
        self,
        *,
        llm_call_match: str,
        agent_match: str | AgentMatcher | None,
        scope: CallScope,
        dedup: bool,
        seen: set[str] | None = None,
    ) -> Iterator[CallCandidate]:
        """Every span that is a model call by its name, taken or rejected, parents before their children.

        Calls that the LLM proxy passed on count as well, where the pattern takes chat calls of a tracer. Its spans of
        a call that the tracer saw too come last.
        """
        is_call = re.compile(llm_call_match).search
        is_wanted = name_test(agent_match)
        proxied = self.proxied_calls(llm_call_match)
        call_filter = CallFilter(proxied, (set() if seen is None else seen) if dedup else None, is_wanted)
        stack = [(iter([self]), scope)]
        while stack:
            siblings, scope = stack[-1]
            node = next(siblings, None)
            if node is None:
                stack.pop()
                continue
            in_call = scope.in_call
            if is_call(node.span.name) or (proxied.is_any and proxied.counts(node.span)):
                candidate = call_filter.judged(node, scope)
                if candidate is not None:
                    yield candidate
                    in_call = node if candidate.rejected is None else in_call
            if not node._children:
                continue
            agent = node.agent_name()
            label = scope.agent_name if agent is None else agent
            if agent is not None and is_wanted is not None and not is_wanted(agent):
                label = None
            in_reward = scope.in_reward if scope.in_reward is not False else node.is_reward_span()
            has_agent = scope.has_agent or agent is not None
            stack.append((iter(node._children), CallScope(label, in_reward, in_call, has_agent)))
        yield from call_filter.set_aside()

    def proxied_calls(self, llm_call_match: str) -> ProxiedCalls:
        """What the LLM proxy recorded in this trace, where calls are asked for by a pattern."""
        is_match, may_be_call = re.compile(llm_call_match).search, call_test(llm_call_match)
        return ProxiedCalls(
            [node.span for node in self._walk()],
            is_call=lambda span: may_be_call(span.name),
            is_preferred=lambda span: is_match(span.name),
        )

    def _has_any(self, name_match: str) -> bool:
        is_match = re.compile(name_match).search
        return any(is_match(node.span.name) for node in self._walk())

    # ------------------------------------------------------------------ rewards and triplets

    def match_rewards(self, reward_match: str, llm_calls: "Sequence[TraceTree]") -> dict[str, float | None]:
        """The rewards of calls by node id; calls without one are left out."""
        policy = RewardMatchPolicy(reward_match)
        call_ids = {call.id for call in llm_calls}
        if policy is RewardMatchPolicy.FIRST_OCCURRENCE:
            by_start: list[TraceTree] = sorted(self._walk(), key=_start_or_before_all)
            return match_in_order(by_start, call_ids)
        rewards: dict[str, float | None] = {}
        for node in self._walk():
            rewards |= match_in_order(node._children, call_ids) if node._children else {}
        return rewards

    def span_to_triplet(self, span: Span, agent_name: str) -> Triplet:
        """One call as a triplet without reward; override it to put more into the triplet."""
        attributes = span.attributes
        prompt: dict[str, Any] = {"token_ids": token_ids_or_empty(prompt_ids_of(attributes), span.span_id)}
        response: dict[str, Any] = {"token_ids": token_ids_or_empty(response_ids_of(attributes), span.span_id)}
        metadata: dict[str, Any] = {"response_id": response_id_of(attributes), "agent_name": agent_name}
        if isinstance(attributes.get(LOGPROBS), str):
            response["logprobs"] = parsed(attributes[LOGPROBS])
        recorded = genai_sections(attributes)
        if messages := recorded.get("prompt"):
            prompt |= {"raw_content": messages, "image_urls": image_urls_in(messages)}
        if completion := recorded.get("completion"):
            response["raw_content"] = completion
        if request := recorded.get("request"):
            metadata["request"] = request
        if len(recorded.get("response", ())) > 1:  # its id stands in the metadata anyway
            metadata["response"] = recorded["response"]
        return Triplet(prompt=prompt, response=response, reward=None, metadata=metadata)

    def to_trajectory(
        self,
        llm_call_match: str = LLM_CALL_MATCH,
        agent_match: str | AgentMatcher | None = None,
        exclude_llm_call_in_reward: bool = True,
        dedup_llm_call: bool = True,
        reward_match: str = RewardMatchPolicy.FIRST_OCCURRENCE,
        final_reward: float | None = None,
        _skip_empty_token_spans: bool = False,
    ) -> list[Triplet]:
        """The model calls of the tree as triplets with their rewards; `final_reward` replaces that of the last.

        Where the default pattern for calls finds no chat at all, calls in every dialect count.
        """
        if llm_call_match == LLM_CALL_MATCH and not self._has_any(ANY_CHAT_MATCH):
            llm_call_match = TRACED_CALL_MATCH
        calls = self.find_llm_calls(
            llm_call_match=llm_call_match,
            agent_match=agent_match,
            within_matching_subtree=ANY_AGENT if agent_match is None else None,
            within_reward=False if exclude_llm_call_in_reward else None,
            within_llm_call=False if dedup_llm_call else None,
        )
        calls = [(node, agent) for node, agent in calls if not has_failed(node.span)]
        proxied = self.proxied_calls(llm_call_match)
        triplets = [self.span_to_triplet(proxied.with_tokens(node.span), agent) for node, agent in calls]
        nodes = [node for node, _ in calls]
        if _skip_empty_token_spans:
            kept = [_has_tokens(node, triplet) for node, triplet in zip(nodes, triplets, strict=True)]
            nodes, triplets = list(compress(nodes, kept)), list(compress(triplets, kept))
        rewards = self.match_rewards(reward_match, nodes)
        for node, triplet in zip(nodes, triplets, strict=True):
            triplet.reward = rewards.get(node.id, triplet.reward)
        if final_reward is not None and triplets:
            triplets[-1].reward = final_reward
        return triplets


class _Branches:
    """Which child of the root each branch hangs under after some were moved; knows when a move would close a circle."""

    def __init__(self, count: int) -> None:
        self._under = list(range(count))
        self.left = count
        """Branches that still hang on the root."""

    def is_root(self, branch: int) -> bool:
        return self._under[branch] == branch

    def join(self, branch: int, other: int) -> bool:
        """Put a branch under another one; False, and nothing done, if the other hangs under the first."""
        top = other
        while self._under[top] != top:
            self._under[top] = self._under[self._under[top]]
            top = self._under[top]
        if top == branch:
            return False
        self._under[branch] = top
        self.left -= 1
        return True


def _has_tokens(node: TraceTree, triplet: Triplet) -> bool:
    if triplet.prompt.get("token_ids") and triplet.response.get("token_ids"):
        return True
    logger.warning("model call %s is skipped because its token ids were not recorded", node.id)
    return False


def _start_or_before_all(node: TraceTree) -> float:
    return float("-inf") if node.span.start_time is None else node.span.start_time


def _refuse_circles(nodes: "Mapping[str, TraceTree]", parents: "Iterable[TraceTree]") -> None:
    """Raise if a span is above itself; only spans with children can be."""
    rooted: set[str] = set()
    for parent in parents:
        above: TraceTree | None = parent
        path: dict[str, None] = {}
        while above is not None and above.id not in rooted:
            if above.id in path:
                raise ValueError(
                    f"Span '{above.id}' hangs on a circle of parents and belongs under no root; leave such spans out."
                )
            path[above.id] = None
            above = nodes.get(above.span.parent_id or "")
        rooted.update(path)


def _missing_parent(span_id: str, children: Sequence[TraceTree]) -> Span:
    """The span of a parent nobody recorded: as long as its children."""
    starts = [child.start_time for child in children if child.start_time is not None]
    ends = [child.end_time for child in children if child.end_time is not None]
    made_up: dict[str, Any] = {"span_id": span_id, "name": AGL_VIRTUAL, "attributes": {}, "parent_id": None}
    times = {"start_time": min(starts, default=None), "end_time": max(ends, default=None)}
    return _like(children[0].span, {**made_up, **times})


def _virtual_root(roots: Sequence[TraceTree]) -> Span:
    made_up: dict[str, Any] = {"span_id": None, "name": VIRTUAL_ROOT, "attributes": {}, "parent_id": None}
    return _like(roots[0].span, {**made_up, "start_time": roots[0].start_time, "end_time": roots[-1].end_time})


def _like(span: Span, fields: dict[str, Any]) -> Span:
    """A span that nobody recorded, of the same attempt as another."""
    owner = {name: getattr(span, name) for name in ("rollout_id", "attempt_id", "sequence_id", "trace_id")}
    return Span.from_attributes(**owner, **fields)
