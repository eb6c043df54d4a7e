"""ModelCall: a call of a model, read from all spans of a trace that recorded it, and why others are not learned from.

A call may have several spans: the agent's own tracer writes one, and the LLM proxy that passed the call on writes a
request and, in some stores, its raw form. The proxy knows the tokens; the tracer's span stands where the agent made the
call, beneath its name, and in stores written before often has no tokens. Such spans are one call: that of the tracer
where there is one, with the tokens of whichever has them. Two spans belong together if one names the other, as its
recording or its parent, or if they have the same response id.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from agentlightning.adapter.call_attributes import (
    UNREADABLE,
    Unreadable,
    finish_reason_of,
    has_tokens,
    is_excluded,
    prompt_ids_of,
    recorded_span_id,
    response_id_of,
    response_ids_of,
)
from agentlightning.adapter.sequences import DropReason, FinishReason
from agentlightning.dialects import SPAN_MATCH
from agentlightning.semconv import CALL_SPAN, PROMPT_IDS, RAW_SPAN, RESPONSE_IDS, TOKEN_FACTS
from agentlightning.types.agents import agent_name
from agentlightning.types.tracer import Span

if TYPE_CHECKING:
    from agentlightning.adapter.tree import TraceTree

ANY_AGENT: Final = "*"
"""Label of a call that stands under no named agent."""
PROXY_SPANS: Final = frozenset({CALL_SPAN, RAW_SPAN})
TRACED_CALL_MATCH: Final = SPAN_MATCH
"""Names of all model calls that a tracer records."""
ANY_CALL_MATCH: Final = f"{TRACED_CALL_MATCH}|{CALL_SPAN}|{RAW_SPAN}"
"""Names of model calls as tracers and the LLM proxy write them."""


def call_test(llm_call_match: str) -> Callable[[str], object]:
    """Whether a span of this name may be a model call, where calls are wanted by a pattern.

    A pattern that takes a tracer's chat calls means "the calls of the agent": what the proxy saw is among them.
    """
    is_match, is_known = re.compile(llm_call_match).search, re.compile(ANY_CALL_MATCH).search
    if not is_match("openai.chat.completion"):
        return is_match
    return lambda name: is_match(name) or is_known(name)


class ProxiedCalls:
    """The spans that the LLM proxy wrote in one trace, each with the call that it belongs to.

    Args:
        spans: All of the trace; their order decides only where two of a tracer have one response id.
        is_call: Whether a span counts as a call, if it is the only one.
        is_preferred: Which of a tracer's spans of one response is taken, if any is.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        is_call: Callable[[Span], object],
        is_preferred: Callable[[Span], object] = bool,
    ) -> None:
        self._call_of: dict[str, Span] = {}
        self._unused: set[str] = set()
        self._witnesses: dict[str, list[Span]] = {}
        """By call, the proxy's spans that saw it."""
        self._by_recording: dict[str, Span] = {}
        self._by_response: dict[str, Span] = {}
        self._by_id: dict[str, Span] = {}
        proxied = [span for span in spans if span.name in PROXY_SPANS]
        self.is_any = bool(proxied)
        """Whether the proxy recorded anything here."""
        if not proxied:
            return
        traced = [span for span in spans if span.name not in PROXY_SPANS and is_call(span)]
        for span in sorted(traced, key=lambda span: not is_preferred(span)):
            self._add_call(span)
        self._response_ids = {response_id_of(span.attributes) for span in proxied}
        for span in sorted(proxied, key=lambda span: span.name == RAW_SPAN):  # raw forms follow their requests
            self._place(span, counts=bool(is_call(span)))

    def _add_call(self, span: Span) -> None:
        self._by_id[span.span_id] = span
        self._by_recording[recorded_span_id(span)] = span
        response_id = response_id_of(span.attributes)
        if response_id is not None:
            self._by_response.setdefault(response_id, span)

    def _place(self, span: Span, *, counts: bool) -> None:
        call = self._by_recording.get(span.span_id) or self._by_response.get(response_id_of(span.attributes) or "")
        is_used = True
        above = span.parent_id or ""
        if call is None and above in self._call_of:  # the raw form of a request that has its place
            call, is_used = self._call_of[above], above not in self._unused
        elif call is None and above in self._by_id:
            call = self._by_id[above]
            is_used = self._is_response_of(call, span)
        if call is None:
            if counts:
                self._add_call(span)
            return
        self._call_of[span.span_id] = call
        if is_used:
            self._witnesses.setdefault(call.span_id, []).append(span)
        else:
            self._unused.add(span.span_id)

    def _is_response_of(self, call: Span, request: Span) -> bool:
        """Whether a request beneath a call gave it its response, though the two do not have the same response id.

        Not if another request has the call's id; and one that has none itself must not have failed. The raw form of a
        request is always the same call.
        """
        if call.name in PROXY_SPANS:
            return True
        call_id, request_id = response_id_of(call.attributes), response_id_of(request.attributes)
        if call_id is not None and request_id is not None and call_id in self._response_ids:
            return False
        without = [span for span, found in ((call, call_id), (request, request_id)) if found is None]
        return all(span.status.status_code != "ERROR" for span in without)

    def counts(self, span: Span) -> bool:
        """Whether a span is a call because of what the proxy recorded, whatever pattern calls are wanted by.

        A request that got neither a response nor tokens says too little for that.
        """
        if span.span_id not in self._by_id:
            return False
        if span.name in PROXY_SPANS:
            whole = _with_tokens(span, self.witnesses_of(span))
            return response_id_of(span.attributes) is not None or has_tokens(whole.attributes)
        return span.span_id in self._witnesses

    def call_of(self, span: Span) -> Span | None:
        """The call that a span of the proxy saw too; None if it is a call of its own."""
        return self._call_of.get(span.span_id)

    def is_unused(self, span: Span) -> bool:
        """Whether the agent never got the response: its client had given up, and perhaps asked again."""
        return span.span_id in self._unused

    def agent_of(self, span: Span) -> str | None:
        """The agent that the proxy says made the call; None if it does not say."""
        names = (agent_name(witness.attributes, witness.name) for witness in self.witnesses_of(span))
        return next((name for name in names if name is not None), None)

    def witnesses_of(self, span: Span) -> list[Span]:
        """The proxy's spans of a call, if its response was the one that the agent got."""
        if not self._witnesses:
            return []
        call = self._by_response.get(response_id_of(span.attributes) or "", span)
        return self._witnesses.get(call.span_id, [])


# ---------------------------------------------------------------------- model calls


@dataclass(eq=False, slots=True)
class ModelCall:
    """A model call, as one span recorded it; what the LLM proxy recorded besides is read where that has nothing."""

    span: Span
    agent_name: str | None
    """Label of the agent it stands under; None outside of every agent that is wanted."""
    dropped: DropReason | None = None
    """Why it is not learned from."""
    same_call: "ModelCall | None" = None
    """The call that was taken instead, for spans that saw the same call."""
    is_judging: bool = False
    """Whether it was made to judge, or kept from the models of the rollout: no reward is for such a call."""
    seen_by: Sequence[Span] = ()
    """The proxy's spans of the call."""
    node: "TraceTree | None" = None
    """Where the agent made it; None outside of a trace."""
    reward: float | None = None

    _whole: Span | None = None
    _read_ids: tuple[list[int] | Unreadable | None, list[int] | Unreadable | None] | None = None

    @property
    def whole(self) -> Span:
        """The span or, if it lacks tokens that the proxy recorded, a copy that has them."""
        # Not cached_property, which takes a lock each time.
        if self._whole is None:
            self._whole = _with_tokens(self.span, self.seen_by) if self.seen_by else self.span
        return self._whole

    @property
    def _ids(self) -> tuple[list[int] | Unreadable | None, list[int] | Unreadable | None]:
        if self._read_ids is None:
            attributes = self.whole.attributes
            self._read_ids = prompt_ids_of(attributes), response_ids_of(attributes)
        return self._read_ids

    @property
    def prompt_ids(self) -> list[int]:
        return self._ids[0] if isinstance(self._ids[0], list) else []

    @property
    def response_ids(self) -> list[int]:
        return self._ids[1] if isinstance(self._ids[1], list) else []

    @property
    def response_id(self) -> str | None:
        """The id the model's server gave to its response."""
        return response_id_of(self.span.attributes)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the response ended, as the first says that knows."""
        return next(filter(None, (finish_reason_of(span.attributes) for span in (*self.seen_by, self.span))), None)

    @property
    def flaw(self) -> DropReason | None:
        """Why it cannot be trained, for want of tokens; None if it can."""
        if any(ids is UNREADABLE for ids in self._ids):
            return DropReason.UNREADABLE_IDS
        if not self.response_ids:
            return DropReason.FAILED if self.span.status.status_code == "ERROR" else DropReason.NO_RESPONSE_IDS
        return None if self.prompt_ids else DropReason.NO_PROMPT_IDS


def _with_tokens(span: Span, witnesses: Sequence[Span]) -> Span:
    lender = next((witness for witness in witnesses if has_tokens(witness.attributes)), None)
    if lender is None or has_tokens(span.attributes):
        return span
    attributes = dict(span.attributes)
    for witness in (*witnesses, lender):
        attributes |= {name: witness.attributes[name] for name in TOKEN_FACTS if name in witness.attributes}
    ids = {PROMPT_IDS: prompt_ids_of(lender.attributes), RESPONSE_IDS: response_ids_of(lender.attributes)}
    return span.model_copy(update={"attributes": {**attributes, **ids}})


@dataclass
class CallScope:
    """What a node inherits from those above it."""

    agent_name: str | None
    """Label of the agent; None outside of every agent that is wanted."""
    in_reward: bool | None
    """None takes calls within rewards as well."""
    in_call: ModelCall | None = None
    has_agent: bool = False
    """Whether any agent is named above."""


class CallFilter:
    """Takes or drops the calls of one trace, parents before their children, and remembers those it has seen.

    Args:
        known: Responses that are known already; the set grows. None takes duplicates too.
        is_wanted: Tells the agents that are wanted; None wants all.
    """

    def __init__(
        self, proxied: ProxiedCalls, known: set[str] | None, is_wanted: Callable[[str], object] | None
    ) -> None:
        self._proxied = proxied
        self._known = known
        self._is_wanted = is_wanted
        self._taken_by_response: dict[str, ModelCall] = {}
        self._calls: dict[str, ModelCall] = {}
        self._later: list[TraceTree] = []

    def call_at(self, node: "TraceTree", scope: CallScope) -> ModelCall | None:
        """The call that a span recorded; None if that can only be said when all were seen."""
        if self._known is not None and self._proxied.call_of(node.span) is not None:
            self._later.append(node)
            return None
        # The proxy names the agent on its own span; it knows no other place for it.
        name = node.agent_name() if self._proxied.is_any and node.span.name in PROXY_SPANS else None
        if name is None and not scope.has_agent:
            name = self._proxied.agent_of(node.span)
        if name is not None:
            is_wanted = self._is_wanted is None or self._is_wanted(name)
            scope = replace(scope, agent_name=name if is_wanted else None)
        call = ModelCall(node.span, scope.agent_name, node=node, seen_by=self._proxied.witnesses_of(node.span))
        self._judge(call, scope)
        self._calls[node.id] = call
        return call

    def _judge(self, call: ModelCall, scope: CallScope) -> None:
        response_id, is_helper = call.response_id, is_excluded(call.span.attributes)
        call.is_judging = bool(scope.in_reward) or is_helper
        if scope.agent_name is None:
            call.dropped = DropReason.OTHER_AGENT
        elif scope.in_reward:
            call.dropped = DropReason.IN_REWARD
        elif is_helper:
            call.dropped = DropReason.EXCLUDED
        elif self._known is not None and response_id is None and scope.in_call is not None:
            call.dropped, call.same_call = DropReason.NESTED, scope.in_call
        elif self._known is not None and response_id in self._known:
            call.dropped, call.same_call = DropReason.DUPLICATE, self._taken_by_response.get(response_id)
        elif self._known is not None and response_id is not None:
            self._known.add(response_id)
            self._taken_by_response[response_id] = call

    def remaining(self) -> Iterator[ModelCall]:
        """The proxy's spans of calls that have another span, which decides whether and whose calls they are."""
        for node in self._later:
            response_id = response_id_of(node.span.attributes)
            above = self._proxied.call_of(node.span)
            first = self._taken_by_response.get(response_id or "")
            if first is None and above is not None:
                first = self._calls.get(above.span_id)
            dropped = DropReason.NESTED
            if self._proxied.is_unused(node.span):
                dropped = DropReason.UNUSED
            elif first is not None and response_id is not None and response_id == first.response_id:
                dropped = DropReason.DUPLICATE
            agent, is_judging = (None, False) if first is None else (first.agent_name, first.is_judging)
            yield ModelCall(node.span, agent, dropped, first, is_judging, node=node)
