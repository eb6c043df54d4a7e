"""What becomes of a result that is no reward: JSON that every store keeps, whatever it was, of a bounded size."""

import dataclasses
import datetime as dt
import enum
import math
from pathlib import PurePosixPath
from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from agentlightning.runner.results import MAX_OUTPUT_BYTES, output_of
from agentlightning.types import LLM


class Answer(BaseModel):
    text: str = "4"
    sure: float = 0.5
    tags: set[str] = {"a"}


@dataclasses.dataclass
class Step:
    what: Any
    when: dt.date = dt.date(2026, 1, 2)


class Colour(enum.Enum):
    RED = "red"


class Response:
    """As those of an SDK that does not use pydantic."""

    def to_dict(self) -> dict[str, Any]:
        return {"text": "4"}


class Array:
    """As those of numpy and torch."""

    nbytes = 16

    def tolist(self) -> list[int]:
        return [1, 2]


class Hostile:
    """Raises whenever it is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")


@pytest.mark.parametrize(
    ("result", "output"),
    [
        ("text", "text"),
        (None, None),
        ([1, True, None, 1.5], [1, True, None, 1.5]),
        (Answer(), {"text": "4", "sure": 0.5, "tags": ["a"]}),
        (Step(Step("x")), {"what": {"what": "x", "when": "2026-01-02"}, "when": "2026-01-02"}),
        (Response(), {"text": "4"}),
        (Array(), [1, 2]),
        (Colour.RED, "red"),
        ({1: "a", None: Colour.RED}, {"1": "a", "None": "red"}),
        (PurePosixPath("a/b"), "a/b"),
        (b"\xff", "b'\\xff'"),
        (math.nan, "nan"),
        ([math.inf], ["inf"]),
        (2**70, str(2**70)),
        ("\ud800", "?"),
        (Answer, repr(Answer)),
        (Hostile(), "<Hostile>"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_a_result_becomes_json(result: object, output: object) -> None:
    assert output_of(result) == output


def test_the_key_of_a_model_s_resource_is_left_out() -> None:
    llm = LLM(endpoint="http://host/v1", model="tiny", api_key="secret")
    assert "secret" not in str(output_of({"llm": llm}))


def test_long_text_is_cut_with_a_mark() -> None:
    output = output_of("x" * 123_456)

    assert output.endswith("x… (123,456 characters in all)")
    assert MAX_OUTPUT_BYTES - 100 < len(output) < MAX_OUTPUT_BYTES + 100


def test_long_text_within_a_mapping_leaves_room_for_what_follows() -> None:
    output = output_of({"first": "x" * 100_000, "second": 2})

    assert output["first"].endswith("… (100,000 characters in all)")
    assert output["second"] == 2


def test_a_long_list_is_cut_with_a_mark() -> None:
    output = output_of([0.5] * 100_000)
    assert output[-1] == "… (100,000 items in all)"


def containing_itself() -> Any:
    value: dict[str, Any] = {}
    value.update(a=value, b=[value])
    return value


def nested(levels: int) -> Any:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "result",
    [
        "\x00" * 1_000_000,
        "ä" * 1_000_000,
        b"\xff" * 1_000_000,
        [""] * 1_000_000,
        [[]] * 100_000,
        containing_itself(),
        nested(10_000),
        {str(number): number for number in range(100_000)},
    ],
    ids=["escapes", "umlauts", "bytes", "texts", "lists", "itself", "deep", "mapping"],
)
def test_a_large_result_becomes_json_of_a_bounded_size(result: object) -> None:
    assert len(orjson.dumps(output_of(result))) < 2 * MAX_OUTPUT_BYTES
