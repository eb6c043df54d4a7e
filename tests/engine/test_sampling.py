"""Wishes for a generation are checked before they reach the engine."""

import math

import pytest

from agentlightning.engine.sampling import Sampling
from agentlightning.errors import EngineError, InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("min_new_tokens", 257),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-40),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_logprobs", -1),
    ],
)
def test_impossible_wish_is_named_to_the_caller(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is {value}") as caught:
        Sampling(**{field: value})  # type: ignore[arg-type] # wrong values are the point

    assert isinstance(caught.value, EngineError)
    assert caught.value.http_status == 400
