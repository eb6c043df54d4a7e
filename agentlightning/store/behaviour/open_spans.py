"""What the store does with spans that have begun and not ended: keep the outlines of those whose attempt lives.

They are kept apart from finished spans: no query, count or export shows them. One is gone when its finished span comes
or its attempt is over, so a step of a process that was killed does not stay open for ever.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.errors import InvalidValue
from agentlightning.store.lifecycle import WORKING_STATUSES
from agentlightning.store.transaction import OpenSpans, Transaction
from agentlightning.types import AttributeValue, Span, TraceStatus

MOST_OPEN_SPANS: Final = 200
"""Of one rollout; of more the first are kept."""
MOST_ATTRIBUTES: Final = 32
MOST_LETTERS: Final = 1000
"""Of a name or a text; what is longer is cut. Longer ids are refused."""


def add_open_spans(tx: Transaction, now: float, spans: Sequence[Span]) -> None:
    """Spans of attempts that are unknown or over are passed over: the news of a beginning may come late."""
    by_rollout: dict[str, list[Span]] = {}
    for span in spans:
        if not isinstance(span, Span):
            raise InvalidValue(f"Expected a Span, not a {type(span).__name__}; give spans that have begun.")
        by_rollout.setdefault(span.rollout_id, []).append(span)
    kept_by_rollout = {
        rollout_id: {kept.span_id: kept for kept in query_open_spans(tx, now, rollout_id)} for rollout_id in by_rollout
    }
    for rollout_id, begun in by_rollout.items():
        kept = kept_by_rollout[rollout_id]
        fresh = {span.span_id: _outline(span) for span in begun if span.span_id not in kept and _may_be_open(tx, span)}
        added = list(fresh.values())[: max(MOST_OPEN_SPANS - len(kept), 0)]
        if added:
            tx.put(OpenSpans(rollout_id, [*kept.values(), *added]))
        for span in added:
            tx.note("span", rollout_id, span.attempt_id, "open", span.name)


def query_open_spans(tx: Transaction, now: float, rollout_id: str) -> list[Span]:
    """In the order they began."""
    kept = tx.get(OpenSpans, rollout_id)
    open_spans = [] if kept is None else [span for span in kept.spans if _may_be_open(tx, span)]
    return sorted(open_spans, key=lambda span: span.start_time or 0.0)


def _may_be_open(tx: Transaction, span: Span) -> bool:
    """Whether the attempt of a span is the latest and at work, and the span has not ended."""
    attempts = tx.get_attempts(span.rollout_id)
    if not attempts or attempts[-1].attempt_id != span.attempt_id or attempts[-1].status not in WORKING_STATUSES:
        return False
    return not tx.has_span(attempts[-1], span.span_id)


def _outline(span: Span) -> Span:
    ids = {"trace_id": span.trace_id, "span_id": span.span_id, "parent_id": span.parent_id}
    for name, value in ids.items():
        if value is not None and not 0 < len(value) <= MOST_LETTERS:
            raise InvalidValue(f"The {name} of a span has {len(value)} letters; use 1 to {MOST_LETTERS}.")
    return Span.from_attributes(
        attributes=outline_of(span.attributes),
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        name=span.name[:MOST_LETTERS],
        start_time=span.start_time,
        status=TraceStatus(status_code="UNSET"),
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_id,
    )


def outline_of(attributes: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """The first plain attributes, cut to a modest length: who works, and at what."""
    plain = [(name, value) for name, value in attributes.items() if isinstance(value, (str, bool, int, float))]
    return {
        name[:MOST_LETTERS]: value[:MOST_LETTERS] if isinstance(value, str) else value
        for name, value in plain[:MOST_ATTRIBUTES]
    }
