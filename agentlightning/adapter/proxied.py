"""Calls that were recorded more than once: by the agent's own tracer, and by the LLM proxy that passed them on.

The proxy writes a request for each call, and in some stores its raw form, and knows the tokens; the tracer's span
stands where the agent made the call, beneath its name, and in stores written before often has no tokens. Such
spans are one call: that of the tracer where there is one, with the tokens of whichever has them. Two spans belong
together if one names the other, as its recording or its parent, or if they have the same response id.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final

from agentlightning.adapter.calls import (
    LOGPROBS,
    PROMPT_IDS,
    PROXY_REQUEST,
    RAW_REQUEST,
    RESPONSE_IDS,
    WEIGHTS_VERSION,
    prompt_ids_of,
    response_id_of,
    response_ids_of,
)
from agentlightning.instrumentation.model_calls import recorded_span_id
from agentlightning.types.agents import agent_name
from agentlightning.types.tracer import Span

__all__ = ["ANY_CALL_MATCH", "PROXY_SPANS", "TRACED_CALL_MATCH", "ProxiedCalls", "call_test", "has_tokens"]

PROXY_SPANS: Final = frozenset({PROXY_REQUEST, RAW_REQUEST})
TRACED_CALL_MATCH = r"openai\.(chat\.completion|completion|responses)|anthropic\.messages(?!\.(batches|count_tokens))"
"""Names of all model calls that a tracer records; Anthropic's SDK writes spans of other requests by itself."""
ANY_CALL_MATCH = TRACED_CALL_MATCH + f"|{PROXY_REQUEST}|{RAW_REQUEST}"
"""Names of model calls as tracers and the LLM proxy write them."""
_CHAT_CALL: Final = "openai.chat.completion"


def call_test(llm_call_match: str) -> Callable[[str], object]:
    """Whether a span of this name may be a model call, where calls are asked for by a pattern.

    A pattern that takes a tracer's chat calls means "the calls of the agent": what the proxy saw is among them.
    """
    is_match = re.compile(llm_call_match).search
    if not is_match(_CHAT_CALL):
        return is_match
    is_known = re.compile(ANY_CALL_MATCH).search
    return lambda name: is_match(name) or is_known(name)


def has_tokens(span: Span) -> bool:
    """Whether it says what was read and what was written."""
    prompt_ids, response_ids = prompt_ids_of(span.attributes), response_ids_of(span.attributes)
    return isinstance(prompt_ids, list) and isinstance(response_ids, list) and bool(prompt_ids and response_ids)


class ProxiedCalls:
    """The spans that the LLM proxy wrote in one trace, each with the call that it belongs to."""

    def __init__(
        self,
        spans: Sequence[Span],
        is_call: Callable[[Span], object],
        is_preferred: Callable[[Span], object] | None = None,
    ) -> None:
        """Find them all; the order of the spans decides only where two of a tracer have one response id.

        Args:
            is_call: Whether a span counts as a call, if it is the only one.
            is_preferred: Which of a tracer's spans of one response is taken, if any is.
        """
        self._call_of: dict[str, Span] = {}
        self._unused: set[str] = set()
        self._witnesses: dict[str, list[Span]] = {}
        self._by_recording: dict[str, Span] = {}
        self._by_response: dict[str, Span] = {}
        self._by_id: dict[str, Span] = {}
        self._answers: set[str | None] = set()
        proxied = [span for span in spans if span.name in PROXY_SPANS]
        self.is_any = bool(proxied)
        """Whether the proxy recorded anything here."""
        if not proxied:
            return
        traced = [span for span in spans if span.name not in PROXY_SPANS and is_call(span)]
        if is_preferred is not None:
            traced.sort(key=lambda span: not is_preferred(span))
        for span in traced:
            self._add_call(span)
        self._answers = {response_id_of(span.attributes) for span in proxied}
        for span in sorted(proxied, key=lambda span: span.name == RAW_REQUEST):  # raw forms follow their requests
            self._place(span, counts=bool(is_call(span)))

    def _add_call(self, span: Span) -> None:
        self._by_id[span.span_id] = span
        self._by_recording[recorded_span_id(span)] = span
        response_id = response_id_of(span.attributes)
        if response_id is not None:
            self._by_response.setdefault(response_id, span)

    def _place(self, span: Span, *, counts: bool) -> None:
        call = self._by_recording.get(span.span_id)
        call = call or self._by_response.get(response_id_of(span.attributes) or "")
        is_used = True
        above = span.parent_id or ""
        if call is None and above in self._call_of:  # the raw form of a request that has its place
            call, is_used = self._call_of[above], above not in self._unused
        elif call is None and above in self._by_id:
            call = self._by_id[above]
            is_used = self._may_have_taken(call, span)
        if call is None:
            if counts:
                self._add_call(span)
            return
        self._call_of[span.span_id] = call
        if is_used:
            self._witnesses.setdefault(call.span_id, []).append(span)
        else:
            self._unused.add(span.span_id)

    def _may_have_taken(self, call: Span, request: Span) -> bool:
        """Whether a request beneath a call gave it its answer, though the two do not have the same response id.

        Not if another request has the call's id; and one that has none itself must not have failed. The raw form of a
        request is always the same call.
        """
        if call.name in PROXY_SPANS:
            return True
        response_id = response_id_of(call.attributes)
        if response_id is not None and response_id in self._answers and response_id_of(request.attributes) is not None:
            return False
        without = [span for span in (call, request) if response_id_of(span.attributes) is None]
        return all(span.status.status_code != "ERROR" for span in without)

    # ------------------------------------------------------------------ questions

    def counts(self, span: Span) -> bool:
        """Whether a span is a call because of what the proxy recorded, whatever pattern calls are asked for with.

        A request that got neither an answer nor tokens says too little for that.
        """
        if span.span_id not in self._by_id:
            return False
        if span.name in PROXY_SPANS:
            return response_id_of(span.attributes) is not None or has_tokens(self.with_tokens(span))
        return span.span_id in self._witnesses

    def call_of(self, span: Span) -> Span | None:
        """The call that a span of the proxy saw too; None if it is a call of its own."""
        return self._call_of.get(span.span_id)

    def is_unused(self, span: Span) -> bool:
        """Whether the agent never got the answer: its client had given up, and perhaps asked again."""
        return span.span_id in self._unused

    def agent_of(self, span: Span) -> str | None:
        """The agent that the proxy says made the call; None if it does not say."""
        names = (agent_name(witness.attributes, witness.name) for witness in self._witnesses_of(span))
        return next((name for name in names if name is not None), None)

    def with_tokens(self, span: Span) -> Span:
        """The span of a call or, if it lacks tokens that the proxy recorded, a copy that has them."""
        witnesses = self._witnesses_of(span)
        if not witnesses or has_tokens(span):
            return span
        lender = next((witness for witness in witnesses if has_tokens(witness)), None)
        if lender is None:
            return span
        facts = {
            name: witness.attributes[name]
            for witness in (*witnesses, lender)
            for name in (LOGPROBS, WEIGHTS_VERSION)
            if name in witness.attributes
        }
        ids = {PROMPT_IDS[0]: prompt_ids_of(lender.attributes), RESPONSE_IDS[0]: response_ids_of(lender.attributes)}
        return span.model_copy(update={"attributes": {**span.attributes, **facts, **ids}})

    def _witnesses_of(self, span: Span) -> list[Span]:
        if not self._witnesses:
            return []
        call = self._by_response.get(response_id_of(span.attributes) or "", span)
        return self._witnesses.get(call.span_id, [])
