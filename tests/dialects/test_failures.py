"""Errors: read in any shape, and told in the client's."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.dialects import DIALECTS
from agentlightning.dialects.failures import Failure, failure_in_stream, failure_of

OPENAI_ERROR = {"error": {"message": "No.", "type": "invalid_request_error", "param": "model", "code": "bad_model"}}
VLLM_ERROR = {"object": "error", "message": "Too long.", "type": "BadRequestError", "param": None, "code": 400}
ANTHROPIC_ERROR = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
FASTAPI_ERROR = {"detail": [{"loc": ["body", "model"], "msg": "Field required", "type": "missing"}]}


@pytest.mark.parametrize(
    ("body", "message", "kind", "code"),
    [
        (json.dumps(OPENAI_ERROR), "No.", "invalid_request_error", "bad_model"),
        (json.dumps(VLLM_ERROR), "Too long.", "BadRequestError", None),
        (json.dumps({"error": VLLM_ERROR}), "Too long.", "BadRequestError", None),
        (json.dumps(ANTHROPIC_ERROR), "Overloaded", "overloaded_error", None),
        (json.dumps(FASTAPI_ERROR), "body.model: Field required", None, None),
        (json.dumps({"detail": "Not Found"}), "Not Found", None, None),
        (json.dumps({"error": "out of memory", "error_type": "generation"}), "out of memory", "generation", None),
        (json.dumps([OPENAI_ERROR]), "No.", "invalid_request_error", "bad_model"),
        ("<html><title>502 Bad &amp; Gateway</title></html>", "502 Bad & Gateway", None, None),
        ("upstream went away", "upstream went away", None, None),
    ],
)
def test_error_is_read_in_every_shape(body: str, message: str, kind: str | None, code: str | None) -> None:
    failure = failure_of(400, body.encode(), api="chat")

    assert (failure.message, failure.kind, failure.code) == (message, kind, code)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"<p>", b'{"error": {"message": null}}'])
def test_error_that_says_nothing_is_told_by_its_status(body: bytes) -> None:
    assert "503 Service Unavailable" in failure_of(503, body, api="chat").message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 999) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "message", "type", "code", "param", "detail", "msg", "loc", "response"]), inner
        )
    ),
    max_leaves=8,
)


@given(json_values.map(json.dumps).map(str.encode) | st.binary(max_size=30), st.integers(100, 999))
def test_reading_and_telling_never_raise(body: bytes, status: int) -> None:
    failure = failure_of(status, body, api="messages")

    assert failure.message
    assert failure_in_stream(body).message
    assert json.loads(DIALECTS["chat"].error_body(failure))["error"]["type"]
    assert json.loads(DIALECTS["messages"].error_body(failure))["error"]["message"]


def test_half_a_surrogate_pair_is_told_as_text() -> None:
    assert b"bad ?" in DIALECTS["messages"].error_body(Failure(500, "bad \ud800", None))


@pytest.mark.parametrize(
    ("failure", "openai_type", "anthropic_type"),
    [
        (Failure(400, "m", None), "invalid_request_error", "invalid_request_error"),
        (Failure(401, "m", None), "invalid_request_error", "authentication_error"),
        (Failure(403, "m", None), "permission_error", "permission_error"),
        (Failure(404, "m", "NotFoundError"), "NotFoundError", "not_found_error"),
        (Failure(413, "m", None), "invalid_request_error", "request_too_large"),
        (Failure(429, "m", "rate_limit_error"), "rate_limit_error", "rate_limit_error"),
        (Failure(500, "m", "api_error"), "server_error", "api_error"),
        (Failure(503, "m", None), "server_error", "overloaded_error"),
        (Failure(504, "m", None), "server_error", "timeout_error"),
        (Failure(529, "m", "overloaded_error"), "server_error", "overloaded_error"),
        (Failure(418, "m", None), "invalid_request_error", "invalid_request_error"),
    ],
)
def test_error_has_the_dialects_own_type(failure: Failure, openai_type: str, anthropic_type: str) -> None:
    assert json.loads(DIALECTS["responses"].error_body(failure))["error"]["type"] == openai_type
    assert json.loads(DIALECTS["messages"].error_body(failure)) == {
        "type": "error",
        "error": {"type": anthropic_type, "message": "m"},
    }


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (ANTHROPIC_ERROR, 529),
        ({"error": {"message": "m", "type": "server_error", "code": "rate_limit_exceeded"}}, 429),
        ({"error": {"message": "m", "type": "BadRequestError", "code": 400}}, 400),
        ({"error": "m"}, 500),
        ({"type": "error", "message": "m", "code": "invalid_prompt", "param": None}, 400),
        (
            {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "m"}}},
            500,
        ),
    ],
)
def test_error_within_a_stream_gets_the_status_it_would_have_had(told: dict[str, Any], status: int) -> None:
    failure = failure_in_stream(json.dumps(told).encode())

    assert failure.status == status
    assert failure.message in ("m", "Overloaded")
    assert failure.kind != "error"


def test_error_event_of_responses_has_the_number_that_is_next() -> None:
    event = DIALECTS["responses"].error_event(Failure(429, "gone", None), sequence_number=4)

    assert event.startswith(b"event: error\n")
    assert json.loads(event.partition(b"data: ")[2])["sequence_number"] == 4
