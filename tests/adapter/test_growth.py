"""What adapters take grows with the length of a trace, and not with its square."""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages, TraceToTrajectory
from agentlightning.events import events_of_spans
from agentlightning.types import Span
from tests.adapter.spans import CHAT, reward, span

MOST = 12.0
"""Times the calls of functions, for ten times the spans."""
MOST_SECONDS = 30.0
"""Times the seconds, of which a shared processor's caches take their part; comparing all pairs takes a hundred."""


def trace(n_calls: int) -> list[Span]:
    """Calls that the tracer and the proxy recorded, each with a reward; half of the contents are the proxy's alone."""
    spans = [span("root", start=0.0, end=10.0 * n_calls)]
    for number in range(n_calls):
        start = 10.0 * number
        content = {
            "gen_ai.prompt.0.content": f"q{number}",
            "gen_ai.prompt.0.role": "user",
            "gen_ai.completion.0.content": f"a{number}",
            "gen_ai.completion.0.role": "assistant",
            "prompt_token_ids": f"[1,{number}]",
            "response_token_ids": "[2,3]",
        }
        named = {"gen_ai.response.id": f"r{number}"}
        pointer = {"agentlightning.proxy.recorded_as": f"ro/at/proxy-{number}"} if number % 2 else {}
        place = {"start": start, "sequence_id": 3 * number + 1}
        spans.append(span(f"sdk-{number}", "root", name=CHAT, attributes=named | pointer, end=start + 5, **place))
        spans.append(
            span(f"proxy-{number}", f"sdk-{number}", name="litellm_request", attributes=named | content, **place)
        )
        spans.append(reward(f"reward-{number}", "root", 0.5, at=start + 6, sequence_id=3 * number + 2))
    return spans


def calls_of(read: Callable[[Sequence[Span]], object], spans: Sequence[Span]) -> int:
    """How many functions are called, those written in C included."""
    counted = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        read(spans)
    finally:
        sys.setprofile(before)
    return counted


def seconds_of(read: Callable[[Sequence[Span]], object], spans: Sequence[Span]) -> float:
    """The least of three, of this thread alone; a collection would look through what other tests left."""
    seconds: list[float] = []
    gc.disable()
    try:
        for _ in range(3):
            began = time.thread_time()
            read(spans)
            seconds.append(time.thread_time() - began)
    finally:
        gc.enable()
    return min(seconds)


@pytest.mark.parametrize(
    "read",
    [
        TraceToTrajectory().adapt,
        TracerTraceToTriplet().adapt,
        LlmProxyTraceToTriplet().adapt,
        TraceToMessages().adapt,
        events_of_spans,
    ],
    ids=["trajectory", "tracer", "proxy", "messages", "events"],
)
def test_ten_times_the_spans_are_at_most_twelve_times_the_work(read: Callable[[Any], object]) -> None:
    short, long = trace(200), trace(2000)

    assert calls_of(read, long) <= MOST * calls_of(read, short)
    assert seconds_of(read, long) < MOST_SECONDS * seconds_of(read, short)
