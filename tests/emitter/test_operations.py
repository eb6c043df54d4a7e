"""Operations: spans around functions and blocks, with what went in and what came out."""

from typing import Any

import pytest

from agentlightning.emitter import operation
from agentlightning.errors import TracingError
from agentlightning.tracer.binding import Recorder

NAME, INPUT, OUTPUT = (f"agentlightning.operation.{part}" for part in ("name", "input", "output"))


def only(trace: Recorder) -> dict[str, Any]:
    (span,) = trace.spans()
    assert span.name == "agentlightning.operation"
    return dict(span.attributes or {})


def test_a_function_is_recorded_with_its_arguments_and_result(trace: Recorder) -> None:
    @operation
    def search(query: str, *, limit: int = 3) -> dict[str, Any]:
        return {"hits": limit, "first": {"id": query}}

    assert search("cats", limit=2)["hits"] == 2

    assert only(trace) == {
        NAME: "search",
        f"{INPUT}.query": "cats",
        f"{INPUT}.limit": 2,
        f"{OUTPUT}.hits": 2,
        f"{OUTPUT}.first.id": "cats",
    }


async def test_a_coroutine_function_is_recorded(trace: Recorder) -> None:
    @operation(name="think", category="slow")
    async def work() -> object:
        return object

    await work()

    attributes = only(trace)
    assert (attributes[NAME], attributes["category"]) == ("think", "slow")
    assert "object" in attributes[OUTPUT]


def test_a_block_is_recorded(trace: Recorder) -> None:
    with operation(name="step") as step:
        step.set_input(1, text="a")
        step.set_output("b")

    assert only(trace) == {NAME: "step", f"{INPUT}.args.0": 1, f"{INPUT}.text": "a", OUTPUT: "b"}
    assert step.span().attributes[OUTPUT] == "b"


def test_an_exception_passes_through_and_is_noted(trace: Recorder) -> None:
    @operation
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()

    (span,) = trace.spans()
    assert span.status.status_code.name == "ERROR"


def test_an_exception_without_a_text_leaves_an_operation_as_it_came(trace: Recorder) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    with pytest.raises(Unspeakable), operation(name="speak"):
        raise Unspeakable

    (span,) = trace.spans()
    assert span.status.description == "Unspeakable: <its text cannot be shown: RuntimeError>"


def test_an_operation_that_is_not_propagated_is_sent_nowhere(trace: Recorder) -> None:
    with operation(name="aside", propagate=False) as aside:
        aside.set_output(1)
    assert aside.span().attributes[OUTPUT] == 1
    assert trace.spans() == []


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="use one of them"):
        operation(name="a", **{NAME: "b"})  # type: ignore[call-overload] # mypy takes the mapping for any keyword


def test_something_that_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a function"):
        operation("search")  # type: ignore[call-overload] # what is tested


def test_an_operation_must_have_begun() -> None:
    with pytest.raises(TracingError, match="has not begun"):
        operation(name="a").set_output(1)


def test_defaults_of_a_function_are_recorded_like_other_arguments(trace: Recorder) -> None:
    class Index:
        @operation
        def search(self, query: str, max_results: int = 10, **options: Any) -> None:
            """Finds nothing."""

    Index().search("cats")

    attributes = only(trace)
    assert {name: value for name, value in attributes.items() if name.startswith(INPUT)} == {
        f"{INPUT}.query": "cats",
        f"{INPUT}.max_results": 10,
    }
