"""Server-sent events: whatever the network cuts, the same events come out."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.dialects.sse import InvalidStream, ServerSentEvent, SseParser

SCRAPS = [
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
    b"data: a",
    b"data:",
    b"data",
    b"data:  b",
    b": comment",
    b"event: x",
    b"event:",
    b"id: 1",
    b"data: \xc3\xa9",
]


def parsed(*chunks: bytes) -> list[ServerSentEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [ServerSentEvent(b"a"), ServerSentEvent(b"b")]),
        (b"event: x\ndata: a\n\n", [ServerSentEvent(b"a", "x")]),
        (b"event: x\r\ndata: a\r\n\r\n", [ServerSentEvent(b"a", "x")]),
        (b"event: x\rdata: a\r\r", [ServerSentEvent(b"a", "x")]),
        (b"data: a\ndata:b\ndata\n\n", [ServerSentEvent(b"a\nb\n")]),
        (b": ping\n\n: ping\ndata: a\nid: 7\nretry: 3\n\n", [ServerSentEvent(b"a")]),
        (b"event: lonely\n\ndata: a\n\n", [ServerSentEvent(b"a")]),
        (b"\n\n\ndata: a\n\n\n\n", [ServerSentEvent(b"a")]),
        (b"data:\n\n", [ServerSentEvent(b"")]),
        (b"data: cut", []),
    ],
)
def test_stream_is_read_as_the_standard_says(stream: bytes, events: list[ServerSentEvent]) -> None:
    assert parsed(stream) == events
    assert parsed(*(bytes([byte]) for byte in stream)) == events


@given(st.lists(st.sampled_from(SCRAPS), max_size=20).map(b"".join), st.data())
def test_any_split_gives_the_events_of_the_unsplit_stream(stream: bytes, data: st.DataObject) -> None:
    whole, split = SseParser(), SseParser()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=6)))
    places = [0, *cuts, len(stream)]

    events = [event for start, end in pairwise(places) for event in split.feed(stream[start:end])]

    assert events == whole.feed(stream)
    assert split.close() == whole.close()


def test_close_gives_what_was_left_and_begins_anew() -> None:
    parser = SseParser()
    parser.feed(b"data: a\n\ndata: [DONE]")

    rest = parser.close()

    assert rest == b"data: [DONE]"
    assert parser.close() == b""
    assert parser.feed(rest + b"\n\n") == [ServerSentEvent(b"[DONE]")]


@given(st.binary(max_size=40).filter(lambda data: b"\r" not in data), st.none() | st.just("delta"))
def test_encoded_event_is_read_as_it_was(data: bytes, name: str | None) -> None:
    event = ServerSentEvent(data, name)

    assert parsed(event.encoded()) == [event]


@pytest.mark.parametrize(
    "chunks", [[b"data: " + b"x" * 100], [b"data: xxxxxxx\n"] * 8, [b"data: " + b"x" * 99 + b"\n\n"]]
)
def test_event_beyond_the_limit_is_refused(chunks: list[bytes]) -> None:
    parser = SseParser(max_event_bytes=64)

    with pytest.raises(InvalidStream, match="64 bytes"):
        [parser.feed(chunk) for chunk in chunks]


def test_many_small_events_in_one_chunk_are_below_the_limit() -> None:
    parser = SseParser(max_event_bytes=64)

    assert len(parser.feed(b"data: x\n\n" * 100)) == 100
