"""A trace as a tree: whose children spans are, which of them are model calls, and what reward each call got.

`TraceTree.from_spans` builds the tree, `repair_hierarchy` puts stray spans where they belong, and `to_trajectory` reads
the model calls off it. No method recurses, so the depth of a trace does not matter, and none compares all spans with
all others, so that its length does not matter either.
"""

import importlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from typing_extensions import Self

from agentlightning.adapter.call_attributes import (
    UNREADABLE,
    Unreadable,
    genai_sections,
    has_failed,
    prompt_ids_of,
    response_id_of,
    response_ids_of,
)
from agentlightning.adapter.calls import (
    ANY_AGENT,
    PROXY_SPANS,
    TRACED_CALL_MATCH,
    CallFilter,
    CallScope,
    ModelCall,
    ProxiedCalls,
    call_test,
)
from agentlightning.adapter.matching import RewardMatchPolicy, closest_enclosing, match_in_order, movable
from agentlightning.semconv import AGL_VIRTUAL, LOGPROBS
from agentlightning.store.copies import field_names
from agentlightning.types.agents import AgentMatcher, agent_name, name_test
from agentlightning.types.core import Triplet
from agentlightning.types.rewards import is_reward_scope, reward_payload_of
from agentlightning.types.tracer import Span
from agentlightning.utils.json_values import JsonObject, parsed

logger = logging.getLogger(__name__)

LLM_CALL_MATCH: Final = r"openai\.chat\.completion"
_ANY_CHAT_MATCH: Final = "|".join([LLM_CALL_MATCH, *sorted(PROXY_SPANS)])
"""Names of calls of which the default pattern finds triplets."""
VIRTUAL_ROOT: Final = "virtual-root"


class TraceTree:
    """A span and the spans beneath it."""

    __slots__ = ("children", "end_time", "id", "span", "start_time")

    def __init__(self, id: str, span: Span, children: "list[TraceTree] | None" = None) -> None:
        self.id = id
        self.span = span
        self.start_time = span.start_time  # here: in a long trace, to look into each span again takes longest
        self.end_time = span.end_time
        self.children: list[TraceTree] = [] if children is None else children

    def __repr__(self) -> str:
        return f"TraceTree(id={self.id!r}, name={self.span.name!r}, children={len(self.children)})"

    # ------------------------------------------------------------------ shape

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> Self:
        """The tree of one attempt; children stand in the order of the spans.

        A parent that is referred to but missing is made up, and so is a root above several roots. Of spans with one
        id, the last counts; of spans that are their own ancestors, one becomes a root. No spans at all are a
        ValueError.
        """
        if not spans:
            raise ValueError("A trace tree needs at least one span; none were given.")
        nodes = {span.span_id: cls(span.span_id, span) for span in spans}
        roots: list[Self] = []
        orphans_by_parent: dict[str, list[TraceTree]] = {}
        for node in nodes.values():
            parent_id = node.span.parent_id
            if parent_id is None:
                roots.append(node)
            elif parent_id in nodes:
                nodes[parent_id].children.append(node)
            else:
                orphans_by_parent.setdefault(parent_id, []).append(node)
        for parent_id, orphans in orphans_by_parent.items():
            starts = [node.start_time for node in orphans if node.start_time is not None]
            ends = [node.end_time for node in orphans if node.end_time is not None]
            times = (min(starts, default=None), max(ends, default=None))
            roots.append(cls(parent_id, _made_up(orphans[0].span, parent_id, AGL_VIRTUAL, times), orphans))
        n_reached = sum(1 for root in roots for _ in root._walk())
        if n_reached < len(nodes) + len(orphans_by_parent):
            roots += cls._roots_of_circles(nodes, {node.id for root in roots for node in root._walk()})
        if len(roots) == 1:
            return roots[0]
        times = (roots[0].start_time, roots[-1].end_time)
        return cls(VIRTUAL_ROOT, _made_up(roots[0].span, None, VIRTUAL_ROOT, times), [*roots])

    @classmethod
    def _roots_of_circles(cls, nodes: "Mapping[str, Self]", reached: set[str]) -> "Iterator[Self]":
        """Take one node out of each circle of parents, so that everything hangs beneath a root."""
        for node in nodes.values():
            passed: set[str] = set()
            while node.id not in reached:
                parent = nodes[node.span.parent_id or ""]
                if parent.id in passed:
                    parent.children.remove(node)
                    reached.update(below.id for below in node._walk())
                    yield node
                passed.add(node.id)
                node = parent

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
            if node.children:
                stack += reversed(node.children)

    def names_tuple(self) -> tuple[str, list[Any]]:
        """The name, with the agent's in brackets, and the same of each child."""
        written: dict[int, tuple[str, list[object]]] = {}
        for node in reversed(self.traverse()):  # children before their parents
            agent = node.agent_name()
            name = node.span.name if agent is None else f"{node.span.name} [{agent}]"
            written[id(node)] = (name, [written[id(child)] for child in node.children])
        return written[id(self)]

    def to_json(self) -> JsonObject:
        """`{"id": ..., "span": ..., "children": [...]}`, nested."""
        written: dict[int, JsonObject] = {}
        for node in reversed(self.traverse()):
            children = [written[id(child)] for child in node.children]
            written[id(node)] = {"id": node.id, "span": node.span.model_dump(), "children": children}
        return written[id(self)]

    def visualize(self, filename: str, interested_span_match: str | None = None) -> None:
        """Draw the tree into `filename`.png; with a pattern, only spans whose name matches, and those above them."""
        try:
            picture = importlib.import_module("graphviz").Digraph(comment="Trace tree")
        except ImportError as error:
            raise ImportError(
                "Drawing a trace needs the package graphviz (pip install graphviz) and Graphviz's program `dot`."
            ) from error
        nodes = self.traverse()
        shown: set[int] = set()
        for node in reversed(nodes):  # children before their parents
            is_match = interested_span_match is None or re.search(interested_span_match, node.span.name)
            if is_match or any(id(child) in shown for child in node.children):
                shown.add(id(node))
        for node in nodes:
            if id(node) not in shown:
                continue
            agent = node.agent_name()
            label = f"{node.id[:8]} ({node.span.name})"
            picture.node(node.id, label if agent is None else f"{label} [{agent}]")
            for child in node.children:
                if id(child) in shown:
                    picture.edge(node.id, child.id)
        picture.render(filename, format="png", cleanup=True)

    # ------------------------------------------------------------------ what a node says

    def agent_name(self) -> str | None:
        """The agent this span is, by the conventions of the frameworks we know; None if it is none."""
        return agent_name(self.span.attributes, self.span.name)

    def maybe_reward_dict(self) -> JsonObject:
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
        nodes: list[TraceTree] = []
        branch_of: list[int] = []
        places: list[int] = []
        """Of the children of the root among the nodes."""
        for branch, child in enumerate(root.children):
            places.append(len(nodes))
            nodes += child._walk() if child.children else (child,)
            branch_of += [branch] * (len(nodes) - len(branch_of))
        closest = closest_enclosing(places, nodes)
        targets = [branch_of[closest[place]] if place in closest else None for place in places]
        moved = movable(targets)
        for branch in sorted(moved):
            nodes[closest[places[branch]]].children.append(nodes[places[branch]])
        root.children = [child for branch, child in enumerate(root.children) if branch not in moved]

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
        known = existing_llm_call_response_ids
        if known is None and within_llm_call is not None:
            known = set()
        has_agent = within_matching_subtree not in (None, ANY_AGENT)
        above = ModelCall(self.span, None, node=self) if within_llm_call else None
        scope = CallScope(within_matching_subtree, within_reward, above, has_agent)
        calls = self.model_calls(llm_call_match, agent_match, scope, known)
        taken = [call for call in calls if call.dropped is None]
        return [(call.node, call.agent_name) for call in taken if call.node is not None and call.agent_name is not None]

    def model_calls(
        self,
        llm_call_match: str,
        agent_match: str | AgentMatcher | None,
        scope: CallScope,
        known: set[str] | None,
    ) -> Iterator[ModelCall]:
        """Every span that is a model call by its name, taken or dropped, parents before their children.

        Calls that the LLM proxy passed on count as well, where the pattern takes chat calls of a tracer. Its spans of
        a call that the tracer saw too come last.

        Args:
            scope: What the root stands in.
            known: Responses that are known already; the set grows. None takes duplicates too.
        """
        is_call = re.compile(llm_call_match).search
        is_wanted = name_test(agent_match)
        may_be_call = call_test(llm_call_match)
        # A tracer's span that the pattern takes is preferred to another of the same response.
        proxied = ProxiedCalls(
            [node.span for node in self._walk()],
            is_call=lambda span: may_be_call(span.name),
            is_preferred=lambda span: is_call(span.name),
        )
        call_filter = CallFilter(proxied, known, is_wanted)
        stack = [(iter([self]), scope)]
        while stack:
            siblings, scope = stack[-1]
            node = next(siblings, None)
            if node is None:
                stack.pop()
                continue
            in_call = scope.in_call
            if is_call(node.span.name) or (proxied.is_any and proxied.counts(node.span)):
                call = call_filter.call_at(node, scope)
                if call is not None:
                    yield call
                    in_call = call if call.dropped is None else in_call
            if not node.children:
                continue
            agent = node.agent_name()
            label = scope.agent_name if agent is None else agent
            if agent is not None and is_wanted is not None and not is_wanted(agent):
                label = None
            in_reward = scope.in_reward if scope.in_reward is not False else node.is_reward_span()
            below = CallScope(label, in_reward, in_call, scope.has_agent or agent is not None)
            stack.append((iter(node.children), below))
        yield from call_filter.remaining()

    # ------------------------------------------------------------------ rewards and triplets

    def match_rewards(self, reward_match: str, llm_calls: "Sequence[TraceTree]") -> dict[str, float | None]:
        """The rewards of calls by node id; calls without one are left out."""
        policy = RewardMatchPolicy(reward_match)
        call_ids = {call.id for call in llm_calls}
        if policy is RewardMatchPolicy.FIRST_OCCURRENCE:
            by_start: list[TraceTree] = sorted(
                self._walk(), key=lambda node: -math.inf if node.start_time is None else node.start_time
            )
            return match_in_order(by_start, call_ids)
        rewards: dict[str, float | None] = {}
        for node in self._walk():
            rewards |= match_in_order(node.children or (), call_ids)
        return rewards

    def span_to_triplet(self, span: Span, agent_name: str) -> Triplet:
        """One call as a triplet without reward; override it to put more into the triplet."""
        attributes = span.attributes
        prompt: JsonObject = {"token_ids": _ids_or_none(prompt_ids_of(attributes), span)}
        response: JsonObject = {"token_ids": _ids_or_none(response_ids_of(attributes), span)}
        metadata: JsonObject = {"response_id": response_id_of(attributes), "agent_name": agent_name}
        if isinstance(attributes.get(LOGPROBS), str):
            response["logprobs"] = parsed(attributes[LOGPROBS])
        recorded = genai_sections(attributes)
        if messages := recorded.get("prompt"):
            prompt |= {"raw_content": messages, "image_urls": self.extract_prompt_image_urls(messages)}
        if completion := recorded.get("completion"):
            response["raw_content"] = completion
        if request := recorded.get("request"):
            metadata["request"] = request
        if answered := recorded.get("response"):
            metadata["response"] = answered
        return Triplet.model_construct(
            field_names(Triplet), prompt=prompt, response=response, reward=None, metadata=metadata
        )

    def extract_prompt_image_urls(self, prompt_raw_content: object) -> list[str]:
        """Addresses of the images in the messages of a prompt, in order."""
        urls: list[str] = []
        for message in prompt_raw_content if isinstance(prompt_raw_content, list) else [prompt_raw_content]:
            content = message.get("content") if isinstance(message, Mapping) else None
            parts = parsed(content) if isinstance(content, str) and content.startswith("[") else content
            for part in parts if isinstance(parts, list) else []:
                image = part.get("image_url") if isinstance(part, Mapping) else None
                if isinstance(image, Mapping) and "url" in image:
                    urls.append(image["url"])
        return urls

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
        is_chat = re.compile(_ANY_CHAT_MATCH).search
        if llm_call_match == LLM_CALL_MATCH and not any(is_chat(node.span.name) for node in self._walk()):
            llm_call_match = TRACED_CALL_MATCH
        scope = CallScope(ANY_AGENT if agent_match is None else None, False if exclude_llm_call_in_reward else None)
        nodes: list[TraceTree] = []
        triplets: list[Triplet] = []
        for call in self.model_calls(llm_call_match, agent_match, scope, set() if dedup_llm_call else None):
            if call.dropped is not None or call.node is None or has_failed(call.span):
                continue
            triplet = self.span_to_triplet(call.whole, call.agent_name or ANY_AGENT)
            if _skip_empty_token_spans and not (triplet.prompt.get("token_ids") and triplet.response.get("token_ids")):
                logger.warning("model call %s is skipped because its token ids were not recorded", call.node.id)
                continue
            nodes.append(call.node)
            triplets.append(triplet)
        rewards = self.match_rewards(reward_match, nodes)
        for node, triplet in zip(nodes, triplets, strict=True):
            triplet.reward = rewards.get(node.id, triplet.reward)
        if final_reward is not None and triplets:
            triplets[-1].reward = final_reward
        return triplets


def _made_up(like: Span, span_id: str | None, name: str, times: tuple[float | None, float | None]) -> Span:
    """A span that nobody recorded, of the same attempt as another."""
    owner = {field: getattr(like, field) for field in ("rollout_id", "attempt_id", "sequence_id", "trace_id")}
    fields: JsonObject = {"span_id": span_id, "name": name, "attributes": {}, "parent_id": None}
    return Span.from_attributes(**owner, **fields, start_time=times[0], end_time=times[1])


def _ids_or_none(ids: list[int] | Unreadable | None, span: Span) -> list[int]:
    """A triplet has no place for a reason: unreadable ids are logged and count as none."""
    if ids is UNREADABLE:
        logger.warning("token ids of span %s are not a list of integers and are left out", span.span_id)
    return ids if isinstance(ids, list) else []
