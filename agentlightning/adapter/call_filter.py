"""Which spans of a trace are model calls to learn from, and why the others are not.

The tree walks over its spans and asks here about each that may be a call: what it stands under decides, and whether
another span is the same call.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from agentlightning.adapter.calls import is_excluded, response_id_of
from agentlightning.adapter.proxied import PROXY_SPANS, ProxiedCalls

if TYPE_CHECKING:
    from agentlightning.adapter.tree import TraceTree

__all__ = ["CallCandidate", "CallFilter", "CallScope", "RejectedBecause"]


class RejectedBecause(str, Enum):
    """Why a span that looks like a model call is not one to learn from."""

    OTHER_AGENT = "other_agent"
    IN_REWARD = "in_reward"
    EXCLUDED = "excluded"
    """It was excluded from the redirect, so no model that is trained answered."""
    DUPLICATE = "duplicate"
    """Another span has the same response id."""
    NESTED = "nested"
    """It has no response id and lies within another call: the same call, seen by a second tracer."""
    UNUSED = "unused"
    """The proxy was asked, but the agent's client did not take the answer: it had given up, or asked again."""


@dataclass(frozen=True)
class CallCandidate:
    """A span that may be a model call, and what became of it."""

    node: "TraceTree"
    agent_name: str | None
    """Label of the agent it stands under; None outside of every agent that was asked for."""
    rejected: RejectedBecause | None = None
    stands_for: "TraceTree | None" = None
    """The call that was taken instead, for spans that saw the same call."""


@dataclass
class CallScope:
    """What a node inherits from those above it."""

    agent_name: str | None
    """Label of the agent; None outside of every agent that is wanted."""
    in_reward: bool | None
    """None takes calls within rewards as well."""
    in_call: "TraceTree | None" = None
    has_agent: bool = False
    """Whether any agent is named above."""


class CallFilter:
    """Judges the calls of one trace, parents before their children, and remembers those it has seen."""

    def __init__(
        self, proxied: ProxiedCalls, known: set[str] | None, is_wanted: Callable[[str], object] | None
    ) -> None:
        """Nothing has been seen yet.

        Args:
            known: Responses that are known already; the set grows. None takes duplicates too.
            is_wanted: Tells the agents that are asked for; None asks for all.
        """
        self._proxied = proxied
        self._known = known
        self._is_wanted = is_wanted
        self._taken_by_response: dict[str, TraceTree] = {}
        self._judged: dict[str, CallCandidate] = {}
        self._aside: list[TraceTree] = []

    def judged(self, node: "TraceTree", scope: CallScope) -> CallCandidate | None:
        """A span as a candidate; None if that can only be said when all were seen."""
        if not self._proxied.is_any:
            return self._judged_in(node, scope)
        if self._known is not None and self._proxied.call_of(node.span) is not None:
            self._aside.append(node)
            return None
        name = self._name_besides(node, scope)
        if name is not None:
            is_wanted = self._is_wanted is None or self._is_wanted(name)
            scope = replace(scope, agent_name=name if is_wanted else None)
        candidate = self._judged[node.span.span_id] = self._judged_in(node, scope)
        return candidate

    def _name_besides(self, node: "TraceTree", scope: CallScope) -> str | None:
        """The agent that the proxy names on its span; it knows no other place for it."""
        own = node.agent_name() if node.span.name in PROXY_SPANS else None
        return self._proxied.agent_of(node.span) if own is None and not scope.has_agent else own

    def _judged_in(self, node: "TraceTree", scope: CallScope) -> CallCandidate:
        response_id = response_id_of(node.span.attributes)
        rejected: RejectedBecause | None = None
        stands_for: TraceTree | None = None
        if scope.agent_name is None:
            rejected = RejectedBecause.OTHER_AGENT
        elif scope.in_reward:
            rejected = RejectedBecause.IN_REWARD
        elif is_excluded(node.span.attributes):
            rejected = RejectedBecause.EXCLUDED
        elif self._known is not None and response_id is None and scope.in_call is not None:
            rejected, stands_for = RejectedBecause.NESTED, scope.in_call
        elif self._known is not None and response_id in self._known:
            rejected, stands_for = RejectedBecause.DUPLICATE, self._taken_by_response.get(response_id)
        if rejected is None and self._known is not None and response_id is not None:
            self._known.add(response_id)
            self._taken_by_response[response_id] = node
        return CallCandidate(node, scope.agent_name, rejected, stands_for)

    def set_aside(self) -> Iterator[CallCandidate]:
        """The proxy's spans of calls that have another span, which decides whether and whose calls they are."""
        for node in self._aside:
            call = self._proxied.call_of(node.span)
            response_id = response_id_of(node.span.attributes)
            taken = self._taken_by_response.get(response_id or "")
            first = None if taken is None else self._judged.get(taken.span.span_id)
            if first is None and call is not None:
                first = self._judged.get(call.span_id)
            is_same = first is not None and response_id == response_id_of(first.node.span.attributes)
            rejected = RejectedBecause.DUPLICATE if is_same and response_id is not None else RejectedBecause.NESTED
            if self._proxied.is_unused(node.span):
                rejected = RejectedBecause.UNUSED
            yield CallCandidate(
                node,
                None if first is None else first.agent_name,
                rejected,
                None if first is None else first.node,
            )
