"""Emitters write the attributes of both releases, under every tracer, and readers find them again."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel

from agentlightning.emitter import (
    emit_annotation,
    emit_conversation,
    emit_exception,
    emit_message,
    emit_object,
    encode_object,
    get_message_value,
    get_object_value,
)
from agentlightning.tracer.binding import Recorder
from agentlightning.types import Span
from tests import warm_python


def only(trace: Recorder) -> dict[str, Any]:
    (span,) = trace.spans()
    return dict(span.attributes or {})


def test_a_message_is_written_for_both_releases(trace: Recorder) -> None:
    span = emit_message("hello", sender="planner", role="assistant", attributes={"turn": {"number": 3}})

    assert only(trace) == {
        "message": "hello",
        "agentlightning.message.body": "hello",
        "agentlightning.message.sender": "planner",
        "agentlightning.message.role": "assistant",
        "turn.number": 3,
    }
    assert span is not None
    assert get_message_value(span) == "hello"


def test_a_conversation_is_a_message_for_each_turn(trace: Recorder) -> None:
    emit_conversation([{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2", "name": "math"}])
    assert [get_message_value(span) for span in trace.spans()] == ["1 + 1?", "2"]


@pytest.mark.parametrize(
    ("value", "own"),
    [
        ("text", {"agentlightning.object.type": "str", "agentlightning.object.literal": "text"}),
        (3, {"agentlightning.object.type": "int", "agentlightning.object.literal": "3"}),
        (0.5, {"agentlightning.object.type": "float", "agentlightning.object.literal": "0.5"}),
        (True, {"agentlightning.object.type": "bool", "agentlightning.object.literal": "True"}),
        (b"\x00\xff", {"agentlightning.object.type": "bytes", "agentlightning.object.literal": "AP8="}),
        ({"a": [1, None]}, {"agentlightning.object.type": "dict", "agentlightning.object.json": '{"a": [1, null]}'}),
        (None, {"agentlightning.object.type": "NoneType", "agentlightning.object.json": "null"}),
    ],
    ids=["str", "int", "float", "bool", "bytes", "dict", "none"],
)
def test_an_object_comes_back_as_it_was(trace: Recorder, value: Any, own: dict[str, Any]) -> None:
    span = emit_object(value)

    attributes = only(trace)
    old = attributes.pop("object", None)
    assert attributes == own
    assert old == (None if isinstance(value, bytes) else json.dumps(value))
    assert span is not None
    assert get_object_value(span) == value


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    at: datetime


class Visit(BaseModel):
    place: Path
    note: str | None = None


NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (Visit(place=Path("a/b")), {"place": "a/b", "note": None}),
        (Point(1, NOON), {"x": 1, "at": "2026-01-02T12:00:00+00:00"}),
        ([NOON, NOON.date(), NOON.time()], ["2026-01-02T12:00:00+00:00", "2026-01-02", "12:00:00"]),
        ({3, 1, 2}, [1, 2, 3]),
        ({"colour": Colour.RED}, {"colour": "red"}),
        (timedelta(minutes=1), 60.0),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ([np.float32(0.5), np.int64(3), np.bool_(1), np.array([1, 2])], [0.5, 3, True, [1, 2]]),
        ({"deep": [Point(1, NOON)]}, {"deep": [{"x": 1, "at": "2026-01-02T12:00:00+00:00"}]}),
    ],
    ids=["model", "dataclass", "times", "set", "enum", "duration", "uuid", "numpy", "nested"],
)
def test_an_object_of_a_common_type_is_written_as_json_has_it(trace: Recorder, value: Any, read: Any) -> None:
    span = emit_object(value)
    assert span is not None
    assert get_object_value(span) == read


def test_an_annotation_is_flattened_and_holds_values_of_common_types(trace: Recorder) -> None:
    emit_annotation({"visit": Visit(place=Path("a/b")), "seen": {"colour": Colour.RED}, "at": NOON, "tags": {"b", "a"}})
    attributes = only(trace)
    assert list(attributes.pop("tags")) == ["a", "b"]
    assert attributes == {"visit.place": "a/b", "seen.colour": "red", "at": "2026-01-02T12:00:00+00:00"}


def test_an_object_json_cannot_hold_is_an_error_when_encoded_directly() -> None:
    with pytest.raises(RuntimeError, match="object cannot be recorded: objects of type object"):
        encode_object(object())


def test_an_exception_is_written_with_its_stack(trace: Recorder) -> None:
    try:
        raise KeyError("lost")
    except KeyError as error:
        emit_exception(error)

    attributes = only(trace)
    assert attributes["exception.type"] == "KeyError"
    assert attributes["exception.message"] == "'lost'"
    assert attributes["exception.escaped"] is True
    assert "raise KeyError" in attributes["exception.stacktrace"]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_without_a_text_is_written_all_the_same(trace: Recorder) -> None:
    emit_exception(Unspeakable())

    attributes = only(trace)
    assert attributes["exception.type"] == "Unspeakable"
    assert attributes["exception.message"] == "<its text cannot be shown: RuntimeError>"


@pytest.mark.parametrize(
    ("emit", "value", "told"),
    [
        (emit_message, 3, "Message must be a string"),
        (emit_object, object(), "Object must be JSON serializable"),
        (emit_object, float("nan"), "Object must be JSON serializable"),
        (emit_exception, "no", "Expected an BaseException instance"),
    ],
    ids=["message", "object", "nan", "exception"],
)
def test_what_cannot_be_emitted_is_logged_and_not_raised(
    trace: Recorder, caplog: pytest.LogCaptureFixture, emit: Any, value: Any, told: str
) -> None:
    assert emit(value) is None
    assert trace.spans() == []
    assert told in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("value", [{"a": object()}, {"a": None}, {"a": float("inf")}, {1.5: "a"}, "text"])
def test_an_annotation_that_a_span_cannot_hold_is_refused(trace: Recorder, value: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 # the messages are tested with the attributes
        emit_annotation(value)


def test_what_is_not_propagated_is_made_and_sent_nowhere(trace: Recorder) -> None:
    span = emit_message("aside", propagate=False)
    assert span is not None
    assert get_message_value(span) == "aside"
    assert trace.spans() == []


def test_an_emitted_span_is_of_opentelemetry_and_of_ours(trace: Recorder) -> None:
    span = emit_message("hello")

    assert isinstance(span, ReadableSpan)
    assert span.core_fields.name == "agentlightning.message"
    assert span.core_fields.status.status_code == "UNSET"
    assert span.core_fields.end_time is not None
    assert span.core_fields.end_time < 1e11
    assert Span.from_opentelemetry(span, "ro", "at", 1).attributes["message"] == "hello"


def test_spans_of_the_earlier_release_can_be_read() -> None:
    message = Span.from_attributes(name="agentlightning.message", attributes={"message": "hello"})
    value = Span.from_attributes(name="agentlightning.object", attributes={"object": '{"a": 1}'})
    other = Span.from_attributes(name="other", attributes={"message": "no", "object": "no"})

    assert get_message_value(message) == "hello"
    assert get_object_value(value) == {"a": 1}
    assert (get_message_value(other), get_object_value(other)) == (None, None)


def test_every_emitted_span_can_be_logged(
    trace: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGL_EMITTER_DEBUG", "1")
    caplog.set_level(logging.INFO, "agentlightning.emitter")
    emit_message("hello")
    assert "emitted agentlightning.message" in caplog.text


@pytest.mark.parametrize("module", ["message", "object", "exception", "reward"])
def test_a_program_may_put_its_own_tracer_in_place(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    import importlib

    emitter = importlib.import_module(f"agentlightning.emitter.{module}")
    started: list[str] = []

    class FakeSpan:
        def record_exception(self, exception: BaseException) -> None:
            started.append(repr(exception))

    class FakeTracer:
        @contextmanager
        def start_span(self, name: str, attributes: dict[str, Any]) -> Iterator[FakeSpan]:
            started.append(name)
            yield FakeSpan()

    monkeypatch.setattr(emitter, "get_tracer", FakeTracer)
    calls = {
        "message": lambda: emitter.emit_message("hello"),
        "object": lambda: emitter.emit_object(1),
        "exception": lambda: emitter.emit_exception(ValueError("x")),
        "reward": lambda: emitter.emit_reward(1.0),
    }
    with pytest.raises(ValueError, match="not recorded") if module == "reward" else nullcontext():
        calls[module]()

    assert started[0] == f"agentlightning.{module}"


def test_without_a_listener_emitting_says_what_to_do() -> None:
    code = (
        "from agentlightning.emitter import emit_message\n"
        "try:\n    emit_message('hello')\n"
        "except RuntimeError as error:\n    print(type(error).__name__, error)"
    )

    done = warm_python.run([sys.executable, "-W", "error", "-c", code], check=True)

    assert done.stdout.startswith("NoActiveTracer No tracer is listening: run this inside a rollout")
