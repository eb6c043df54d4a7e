"""What the store does with spans: keep them, number them, and take them as signs of life.

Spans that have begun and not ended are kept apart, in outline, while their attempt lives: no query, count or export
shows them, and a step of a process that was killed does not stay open for ever. Sequence ids that a call took and whose
answer was lost are left out: numbers need no order without holes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agentlightning.errors import InvalidValue
from agentlightning.semconv import AGL_LATE
from agentlightning.store.behaviour.attempts import (
    change_attempt,
    find_attempt,
    known_attempt,
    new_lease,
    status_changes,
)
from agentlightning.store.behaviour.records import show_worker_busy
from agentlightning.store.behaviour.rollouts import change_status, known_rollout, reschedule
from agentlightning.store.copies import detached, replaced
from agentlightning.store.lifecycle import (
    WORKING_STATUSES,
    attempt_status_after_span,
    is_finished,
    is_queuing,
    rollout_status_after_span,
)
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.selection import Selection
from agentlightning.store.transaction import OpenSpans, Transaction
from agentlightning.types import (
    Attempt,
    AttemptStatus,
    AttributeValue,
    PaginatedResult,
    Rollout,
    Span,
    TraceStatus,
    Worker,
)
from agentlightning.types.rewards import final_reward_of, reward_payload_of

SPAN_FIELDS = frozenset(
    ["rollout_id", "attempt_id", "sequence_id", "trace_id", "span_id", "parent_id", "name", "start_time", "end_time"]
)
"""Fields a query may filter and sort by."""


MOST_SKIPPED_NUMBERS: Final = 1_000_000
"""How far a given sequence id may lie above the last one of its rollout, whose other spans are numbered from there."""
MOST_OPEN_SPANS: Final = 200
"""Of one rollout; of more the first are kept."""
MOST_ATTRIBUTES: Final = 32
MOST_LETTERS: Final = 1000
"""Of a name or a text of an open span; what is longer is cut. Longer ids are refused."""


def _check(span: Span) -> None:
    if type(span) is not Span and not isinstance(span, Span):  # the second is a call of Python for models of pydantic
        raise InvalidValue(f"Expected a Span, not a {type(span).__name__}; convert it with Span.from_opentelemetry.")
    if span.attempt_id == "latest":
        raise InvalidValue(f"Span '{span.name}' belongs to attempt 'latest'; name the attempt itself.")


def _check_number(span: Span, last: int) -> None:
    if not -MOST_SKIPPED_NUMBERS <= span.sequence_id <= last + MOST_SKIPPED_NUMBERS:
        raise InvalidValue(
            f"Span '{span.name}' has the sequence id {span.sequence_id}; the last of its rollout is {last}, so "
            f"give one of at most {last + MOST_SKIPPED_NUMBERS}, or 0 for the store to number it."
        )


def _marked(span: Span, *, is_late: bool) -> Span:
    """The span as it is kept: marked if it brings a reward too late, and not marked because its writer says so."""
    if AGL_LATE in span.attributes:
        others = {name: value for name, value in span.attributes.items() if name != AGL_LATE}
        span = replaced(span, attributes=others)
    if is_late and reward_payload_of(span).get("type") == "reward":
        span = replaced(span, attributes={**span.attributes, AGL_LATE: True})
    return span


def add_span(tx: Transaction, now: float, span: Span) -> Span | None:
    _check(span)
    rollout = known_rollout(tx, span.rollout_id)
    span = _marked(span, is_late=is_finished(rollout))
    if not 0 <= span.sequence_id <= MOST_SKIPPED_NUMBERS:
        _check_number(span, tx.get_last_sequence(span.rollout_id))
    return span if _append(tx, now, rollout, (span,), may_be_known=True) else None


def add_many_spans(tx: Transaction, now: float, spans: Sequence[Span]) -> list[Span | None]:
    fresh: list[Span | None] = []
    seen: set[tuple[str, str, str]] = set()
    for span in spans:
        _check(span)
        key = (span.rollout_id, span.attempt_id, span.span_id)
        rollout = known_rollout(tx, span.rollout_id)
        is_repeated = key in seen or tx.has_span(known_attempt(tx, span.rollout_id, span.attempt_id), span.span_id)
        seen.add(key)
        fresh.append(None if is_repeated else _marked(span, is_late=is_finished(rollout)))
    by_attempt: dict[tuple[str, str], list[Span]] = {}
    for span in _with_numbers(tx, fresh):
        by_attempt.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    for (rollout_id, _), group in by_attempt.items():
        _append(tx, now, known_rollout(tx, rollout_id), group)
    return fresh


def _with_numbers(tx: Transaction, spans: list[Span | None]) -> list[Span]:
    """The spans to append; one with sequence id 0 is replaced, in the list too, by one with the rollout's next."""
    given = [span for span in spans if span is not None]
    odd = {span.rollout_id for span in given if not 0 < span.sequence_id <= MOST_SKIPPED_NUMBERS}
    last = {rollout_id: tx.get_last_sequence(rollout_id) for rollout_id in odd}
    for place, span in enumerate(spans):
        if span is not None and span.rollout_id in last:
            _check_number(span, last[span.rollout_id])
            number = span.sequence_id or last[span.rollout_id] + 1
            last[span.rollout_id] = max(last[span.rollout_id], number)
            spans[place] = span if span.sequence_id else replaced(span, sequence_id=number)
    return [span for span in spans if span is not None]


def finish_attempt(
    tx: Transaction,
    now: float,
    rollout_id: str,
    attempt_id: str,
    status: AttemptStatus,
    *,
    spans: Sequence[Span] = (),
    metadata: dict[str, Any] | None | Unset = UNSET,
    output: Any | Unset = UNSET,
) -> Attempt:
    return end_attempt(tx, now, (rollout_id, attempt_id), status, spans=spans, metadata=metadata, output=output)


def end_attempt(
    tx: Transaction,
    now: float,
    rollout_attempt_ids: tuple[str, str],
    status: AttemptStatus,
    *,
    spans: Sequence[Span],
    metadata: dict[str, Any] | None | Unset,
    output: Any | Unset,
    claiming_worker: str | None = None,
) -> Attempt:
    """Finish an attempt, of which `change_attempt` tells what a `claiming_worker` is."""
    rollout_id, attempt_id = rollout_attempt_ids
    for span in spans:
        _check(span)
        if (span.rollout_id, span.attempt_id) != (rollout_id, attempt_id):
            raise InvalidValue(
                f"Span '{span.name}' belongs to attempt '{span.attempt_id}' of rollout '{span.rollout_id}'; attempt "
                f"'{attempt_id}' of rollout '{rollout_id}' is finished with its own spans only."
            )
    rollout, attempt = known_rollout(tx, rollout_id), known_attempt(tx, rollout_id, attempt_id)
    changes = status_changes(status, now)
    if not isinstance(metadata, Unset):
        changes["metadata"] = detached(metadata)
    fresh: dict[str, Span] = {}
    is_latest = attempt.sequence_id == len(tx.get_attempts(rollout_id))
    is_revived = is_latest and rollout.status == "failed" and status == "succeeded"
    for span in spans:
        if not tx.has_span(attempt, span.span_id):
            fresh.setdefault(span.span_id, _marked(span, is_late=is_finished(rollout) and not is_revived))
    if fresh:
        _keep(tx, now, attempt, _numbered(list(fresh.values()), tx.get_last_sequence(rollout_id)))
        changes["last_heartbeat_time"] = now
    results = _results(rollout, fresh.values(), output) if is_latest else {}
    return change_attempt(tx, now, rollout, attempt, changes, results=results, claiming_worker=claiming_worker)


def _numbered(spans: Sequence[Span], last: int) -> list[Span]:
    """Spans with a number each: the one they have if it was given out already, else the next one."""
    numbered = []
    following = last
    for span in spans:
        if not 0 < span.sequence_id <= last:
            following += 1
            span = replaced(span, sequence_id=following)
        numbered.append(span)
    return numbered


def _keep(tx: Transaction, now: float, attempt: Attempt, spans: Sequence[Span]) -> None:
    """Append spans of an attempt, and tell of them."""
    tx.append_spans(attempt, spans, now)
    for span in spans:
        tx.note("span", attempt.rollout_id, attempt.attempt_id, None, span.name, span.sequence_id)


def _results(rollout: Rollout, spans: Iterable[Span], output: Any | Unset = UNSET) -> dict[str, Any]:
    """How the last reward of these spans, which are of the latest attempt, and the output change the rollout."""
    changes = {} if output is UNSET else {"output": detached(output)}
    reward = final_reward_of(spans)
    if reward is not None and reward != rollout.reward and math.isfinite(reward):
        changes["reward"] = reward
    return changes


def _append(
    tx: Transaction, now: float, rollout: Rollout, spans: Sequence[Span], *, may_be_known: bool = False
) -> bool:
    """Append spans of one attempt; it and its rollout are running now, unless they are over. False if it is known."""
    rollout_id, attempt_id = rollout.rollout_id, spans[0].attempt_id
    attempts = tx.get_attempts(rollout_id)
    attempt = attempts[-1] if attempts else None
    is_latest = attempt is not None and attempt.attempt_id == attempt_id
    if attempt is None or not is_latest:
        attempt = known_attempt(tx, rollout_id, attempt_id)
    if may_be_known and tx.has_span(attempt, spans[0].span_id):
        return False
    _keep(tx, now, attempt, spans)
    results = _results(rollout, spans) if is_latest else {}
    if attempt.status != "running" or (is_latest and rollout.status != "running"):
        _show_running(tx, now, rollout, attempt, results if is_latest else None)
    elif results:
        tx.put(replaced(rollout, **results))
    return True


def _show_running(
    tx: Transaction, now: float, rollout: Rollout, attempt: Attempt, results: dict[str, Any] | None
) -> None:
    """An attempt works; with `results`, which the rollout gets, it is the latest, and the rollout works too."""
    before = rollout, attempt
    status = attempt_status_after_span(attempt, rollout)
    if status != attempt.status:
        lease_until = attempt.lease_until
        if lease_until is not None and attempt.status == "unresponsive":
            lease_until = new_lease(tx, now, tx.get(Worker, attempt.worker_id or ""))
        changes = {"status": status, "end_time": None, "lease_until": lease_until, "last_heartbeat_time": now}
        attempt = replaced(attempt, **changes)
        tx.put(attempt)
    if results is not None:
        was_queued = is_queuing(rollout)
        rollout = change_status(tx, now, rollout, rollout_status_after_span(rollout, status), **results)
        reschedule(tx, before, (rollout, attempt))
        if was_queued and attempt.worker_id is not None:
            show_worker_busy(tx, now, attempt.worker_id, attempt)


def get_next_span_sequence_id(
    tx: Transaction, now: float, rollout_id: str, attempt_id: str, *, request_id: str | None = None
) -> int:
    return get_many_span_sequence_ids(tx, now, [(rollout_id, attempt_id)])[0]


def get_many_span_sequence_ids(
    tx: Transaction, now: float, rollout_attempt_ids: Sequence[tuple[str, str]], *, request_id: str | None = None
) -> list[int]:
    numbers = []
    for rollout_id, _ in rollout_attempt_ids:
        numbers.append(tx.get_last_sequence(rollout_id) + 1)
        tx.put_last_sequence(rollout_id, numbers[-1])
    return numbers


def query_spans(
    tx: Transaction, now: float, rollout_id: str, attempt_id: str | None = None, **asked: object
) -> PaginatedResult[Span]:
    selection = Selection.of({"sort_by": "sequence_id", **asked}, SPAN_FIELDS)
    if attempt_id is None:
        return tx.select(Span, selection, of=rollout_id)
    attempt = find_attempt(tx.get_attempts(rollout_id), attempt_id)
    if attempt is None:
        return selection.page([], 0)
    return tx.select(Span, selection, of=attempt)


# ---------------------------------------------------------------------- open spans


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


def outline_of(attributes: Mapping[str, object]) -> dict[str, AttributeValue]:
    """The first plain attributes, cut to a modest length: who works, and at what."""
    plain = [(name, value) for name, value in attributes.items() if isinstance(value, (str, bool, int, float))]
    return {
        name[:MOST_LETTERS]: value[:MOST_LETTERS] if isinstance(value, str) else value
        for name, value in plain[:MOST_ATTRIBUTES]
    }
