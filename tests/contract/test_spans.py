"""Spans and their numbers, over every back end."""

import asyncio
import math
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound, PayloadTooLarge
from agentlightning.store import LightningStore
from agentlightning.types import Event, Link, Span, SpanContext
from tests.contract.conftest import MAX_SPAN_BYTES, known


async def test_first_span_makes_attempt_and_rollout_running(store: LightningStore, clock: Any, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    clock.advance(2)

    assert await store.add_span(make_span(rollout)) is not None

    stored = known(await store.get_rollout_by_id(rollout.rollout_id))
    attempt = known(await store.get_latest_attempt(rollout.rollout_id))
    assert (stored.status, attempt.status, attempt.last_heartbeat_time) == ("running", "running", clock.now)


async def test_spans_come_back_as_they_were_in_sequence_order(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    spans = [make_span(rollout, sequence_id=n, attributes={"n": n, "x": [0.5], "s": ["ä", "b"]}) for n in (3, 1, 2)]
    for span in spans:
        await store.add_span(span)

    assert await store.query_spans(rollout.rollout_id) == sorted(spans, key=lambda span: span.sequence_id)


async def test_everything_a_span_holds_is_kept(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    context = SpanContext(trace_id="1" * 32, span_id="2" * 16, is_remote=False, trace_state={"k": "v"})
    span = make_span(
        rollout,
        events=[Event(name="e", attributes={"a": True}, timestamp=1.5)],
        links=[Link(context=context, attributes={"b": 1})],
        context=context,
        parent=context,
        parent_id="2" * 16,
        kind="CLIENT",
    )
    await store.add_span(span)

    (stored,) = await store.query_spans(rollout.rollout_id)

    assert stored == span
    assert stored.model_extra == {"kind": "CLIENT"}


async def test_spans_of_finished_attempts_refresh_only_the_heartbeat(
    store: LightningStore, clock: Any, make_span: Any
) -> None:
    rollout = await store.start_rollout("a")
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    clock.advance(9)

    await store.add_span(make_span(rollout))

    attempt = known(await store.get_latest_attempt(rollout.rollout_id))
    assert (attempt.status, attempt.last_heartbeat_time) == ("succeeded", clock.now)


async def test_spans_of_an_older_attempt_do_not_touch_the_rollout(store: LightningStore, make_span: Any) -> None:
    old = await store.start_rollout("a")
    await store.start_attempt(old.rollout_id)

    await store.add_span(make_span(old))

    attempts = await store.query_attempts(old.rollout_id)
    stored = known(await store.get_rollout_by_id(old.rollout_id))
    assert ([a.status for a in attempts], stored.status) == (["running", "preparing"], "preparing")


async def test_spans_are_asked_for_by_attempt(store: LightningStore, make_span: Any) -> None:
    first = await store.start_rollout("a")
    await store.add_span(make_span(first, sequence_id=9))
    second = await store.start_attempt(first.rollout_id)
    await store.add_span(make_span(second, sequence_id=2))

    async def numbers(attempt_id: str | None) -> list[int]:
        return [s.sequence_id for s in await store.query_spans(first.rollout_id, attempt_id)]

    assert await numbers(None) == [2, 9]
    assert await numbers("latest") == [2]
    assert await numbers(first.attempt.attempt_id) == [9]
    assert await numbers("at-nope") == []
    await store.start_attempt(first.rollout_id)
    assert await numbers("latest") == []


async def test_spans_are_filtered_sorted_and_paged(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    for n, name in enumerate(["llm.call", "tool.call", "llm.other", "reward"]):
        await store.add_span(make_span(rollout, sequence_id=n, name=name, parent_id="p1" if n % 2 else None))

    async def names(**query: Any) -> list[str]:
        return [s.name for s in await store.query_spans(rollout.rollout_id, **query)]

    assert await names(name="reward") == ["reward"]
    assert await names(name_contains="llm") == ["llm.call", "llm.other"]
    assert await names(name_contains="llm", parent_id="p1", filter_logic="or") == [
        "llm.call",
        "tool.call",
        "llm.other",
        "reward",
    ]
    assert await names(sort_by="name", sort_order="desc", limit=2) == ["tool.call", "reward"]
    page = await store.query_spans(rollout.rollout_id, limit=1, offset=2)
    assert ([s.name for s in page], page.total) == (["llm.other"], 4)
    with pytest.raises(InvalidQuery):
        await store.query_spans(rollout.rollout_id, sort_by="attributes")


async def test_unknown_rollout_or_attempt_is_refused(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    queued = await store.enqueue_rollout("b")

    with pytest.raises(NotFound, match="Rollout nope not found"):
        await store.add_span(make_span(rollout, rollout_id="nope"))
    with pytest.raises(NotFound, match="Attempt at-x not found"):
        await store.add_span(make_span(rollout, attempt_id="at-x"))
    with pytest.raises(NotFound, match="No attempts found"):
        await store.add_span(make_span(rollout, rollout_id=queued.rollout_id))


async def test_of_spans_with_one_id_the_first_is_kept(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    span, other = make_span(rollout), make_span(rollout, sequence_id=2)

    assert await store.add_span(span) is not None
    assert await store.add_span(span) is None
    answers = await store.add_many_spans([span, other, other])

    assert [answer is None for answer in answers] == [True, False, True]
    assert len(await store.query_spans(rollout.rollout_id)) == 2


async def test_add_many_spans_numbers_those_without_a_number(store: LightningStore, make_span: Any) -> None:
    rollout, other = await store.start_rollout("a"), await store.start_rollout("b")
    await store.add_span(make_span(rollout, sequence_id=3))
    spans = [
        make_span(rollout, sequence_id=2),
        make_span(rollout, sequence_id=0),
        make_span(other, sequence_id=0),
        make_span(rollout, sequence_id=7),
        make_span(rollout, sequence_id=0),
    ]

    answers = await store.add_many_spans([*spans, spans[1]])

    assert [answer and answer.sequence_id for answer in answers] == [2, 4, 1, 7, 8, None]
    assert [span.sequence_id for span in await store.query_spans(rollout.rollout_id)] == [2, 3, 4, 7, 8]
    assert {r.status for r in await store.query_rollouts()} == {"running"}
    assert await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id) == 9


async def test_add_many_spans_is_all_or_nothing(store: LightningStore, make_span: Any) -> None:
    rollout, other = await store.start_rollout("a"), await store.start_rollout("b")
    spans = [make_span(rollout), make_span(other), make_span(rollout, attributes={"reward": math.nan})]

    with pytest.raises(InvalidValue):
        await store.add_many_spans(spans)

    assert await store.query_spans(rollout.rollout_id) == []
    assert await store.query_spans(other.rollout_id) == []
    assert {r.status for r in await store.query_rollouts()} == {"preparing"}
    assert await store.add_many_spans(spans[:2]) == spans[:2]


async def test_sequence_ids_count_per_rollout_and_are_never_given_twice(store: LightningStore, make_span: Any) -> None:
    rollout, other = await store.start_rollout("a"), await store.start_rollout("b")

    assert await store.get_next_span_sequence_id(rollout.rollout_id, "anything") == 1
    await store.add_span(make_span(rollout, sequence_id=7))
    assert await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id) == 8
    await store.add_span(make_span(rollout, sequence_id=3))
    assert await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id) == 9
    assert await store.get_next_span_sequence_id(other.rollout_id, "x") == 1
    assert await store.get_next_span_sequence_id("unknown", "x") == 1
    pairs = [(rollout.rollout_id, "x"), ("unknown", "x"), (rollout.rollout_id, "y")]
    assert await store.get_many_span_sequence_ids(pairs) == [10, 2, 11]


async def test_otel_span_gets_the_next_number_unless_one_is_given(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("outer") as outer, tracer.start_as_current_span("inner") as inner:
        pass

    first = await store.add_otel_span(rollout.rollout_id, rollout.attempt.attempt_id, outer)  # type: ignore[arg-type]
    second = await store.add_otel_span(rollout.rollout_id, rollout.attempt.attempt_id, inner, 5)  # type: ignore[arg-type]

    assert (known(first).sequence_id, known(second).sequence_id, known(first).name) == (1, 5, "outer")
    assert [s.sequence_id for s in await store.query_spans(rollout.rollout_id)] == [1, 5]


BAD_ATTRIBUTES: list[dict[str, Any]] = [
    {"reward": math.nan},
    {"reward": -math.inf},
    {"logprobs": [0.1, math.nan]},
    {"text": "a\ud800b"},
    {"texts": ["ok", "\udfff"]},
    {"thing": object()},
]


async def test_values_that_would_not_come_back_are_refused_by_name(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")

    for attributes in BAD_ATTRIBUTES:
        span: Span = make_span(rollout).model_copy(update={"attributes": attributes})
        with pytest.raises(InvalidValue, match=next(iter(attributes))):
            await store.add_span(span)
    with pytest.raises(InvalidValue, match="Expected a Span, not a dict"):
        await store.add_span({"name": "x"})  # type: ignore[arg-type]

    assert await store.query_spans(rollout.rollout_id) == []
    attempt = known(await store.get_latest_attempt(rollout.rollout_id))
    assert (attempt.status, attempt.last_heartbeat_time) == ("preparing", None)


async def test_a_bad_span_in_a_crowd_takes_only_itself_down(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    spans = [make_span(rollout, sequence_id=n, attributes={"n": n}) for n in range(20)]
    spans[7] = spans[7].model_copy(update={"attributes": {"reward": math.nan}})

    answers = await asyncio.gather(*(store.add_span(span) for span in spans), return_exceptions=True)

    assert [n for n, answer in enumerate(answers) if isinstance(answer, Exception)] == [7]
    assert [s.sequence_id for s in await store.query_spans(rollout.rollout_id)] == [n for n in range(20) if n != 7]


async def test_a_span_above_the_size_limit_is_refused(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")

    with pytest.raises(PayloadTooLarge, match=f"max_span_bytes={MAX_SPAN_BYTES}"):
        await store.add_span(make_span(rollout, attributes={"blob": "x" * (MAX_SPAN_BYTES + 1)}))

    assert await store.query_spans(rollout.rollout_id) == []
    await store.add_span(make_span(rollout, attributes={"blob": "x" * (MAX_SPAN_BYTES // 2)}))
    assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_spans_with_impossible_places_are_refused(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")

    for changes in ({"sequence_id": 2**63 - 1}, {"attempt_id": "latest"}):
        span = make_span(rollout, **{"sequence_id": 1, **changes})
        with pytest.raises(InvalidValue, match="Span 'step'"):
            await store.add_many_spans([span])
        with pytest.raises(InvalidValue, match="Span 'step'"):
            await store.add_span(span)

    assert await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id) == 1


async def test_a_given_number_does_not_spoil_those_of_later_attempts(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    for way in (store.add_span, lambda span: store.add_many_spans([span])):
        for number in (2**53 - 1, 1_000_001, 2**63 - 1, -(2**63)):
            with pytest.raises(InvalidValue, match=f"sequence id {number}; .* at most 1000000"):
                await way(make_span(rollout, sequence_id=number))
    await store.add_many_spans([make_span(rollout, sequence_id=1_000_000), make_span(rollout, sequence_id=2_000_000)])

    retry = await store.start_attempt(rollout.rollout_id)

    stored = await store.add_many_spans([make_span(retry, sequence_id=0), make_span(retry, sequence_id=3_000_001)])
    assert [known(span).sequence_id for span in stored] == [2_000_001, 3_000_001]
    assert await store.get_next_span_sequence_id(retry.rollout_id, retry.attempt.attempt_id) == 3_000_002
