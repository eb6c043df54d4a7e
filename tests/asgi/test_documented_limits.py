"""The table of limits in the documentation has the numbers that the servers keep."""

from pathlib import Path

import pytest

from agentlightning.asgi import answers, bodies, compression, protocol, request
from agentlightning.legacy.server import MAX_BODY_BYTES
from agentlightning.llm_proxy import answers as proxy_answers
from agentlightning.llm_proxy import attribution
from agentlightning.llm_proxy.gateway import GatewaySettings
from agentlightning.store.http import live, service
from agentlightning.store.http.rest import DEFAULT_QUERY_LIMIT

KILOBYTE, MEGABYTE = 1024, 1024**2
PAGE = Path(__file__).parents[2] / "docs/concepts/security.md"
LIMITS = {
    "head of a request": f"{protocol.MOST_HEAD_BYTES // KILOBYTE} kB, {protocol.HEADER_SECONDS:g} s",
    "connection without a request": f"{protocol.HEADER_SECONDS:g} s",
    "body": f"{GatewaySettings.max_request_bytes // MEGABYTE} MB",
    "body shown with another token": f"{bodies.LARGE_BYTES // MEGABYTE} MB",
    "time of a body": f"{service.BODY_TIMEOUT_SECONDS:g} s; {request.IDLE_SECONDS:g} s without a byte",
    "body above 64 kB": f"{bodies.SLOWEST_BYTES_PER_SECOND // KILOBYTE} kB a second after {bodies.GRACE_SECONDS:g} s",
    "values of JSON": f"{bodies.MOST_VALUES:,}",
    "rollouts or spans in one call": f"{service.MOST_ITEMS:,}",
    "levels of JSON": f"; {attribution.MOST_LEVELS - attribution.SPARE_LEVELS} of a proxy",
    "members of a gzip body": f"{compression.MOST_MEMBERS:,}",
    "bodies above 64 kB": f"{bodies.ROOM_BYTES // MEGABYTE} MB together",
    "id of a rollout": f"{service.MOST_ID_CHARACTERS:,} characters",
    "page of a query": f"{DEFAULT_QUERY_LIMIT:,} items",
    "time in which a client reads nothing of what": f"{answers.UNREAD_SECONDS:g} s",
    "queries of one server": f"{answers.MOST_MADE} at a time",
    "speed at which a client reads": (
        f"{answers.LEAST_BYTES_PER_SECOND // KILOBYTE} kB a second; "
        f"{bodies.SLOWEST_BYTES_PER_SECOND // KILOBYTE} kB for each "
        f"{bodies.ROOM_BYTES // MEGABYTE} MB that all clients together have unread"
    ),
    "calls that wait on one live connection": f"{live.MOST_WAITING:,}",
    "notices written for a subscriber": f"{live.MOST_BACKLOG_BYTES // KILOBYTE} kB, then {live.STALL_SECONDS:g} s",
    "answer of a backend": (
        f"{GatewaySettings.max_response_bytes // MEGABYTE} MB, {proxy_answers.MOST_ANSWER_VALUES:,} values"
    ),
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_limit_is_the_documented_one(what: str) -> None:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    found = [row[2] for row in rows if row[1].strip() == what] or [
        row[2] for row in rows if row[1].startswith(f" {what}")
    ]

    assert len(found) == 1
    assert LIMITS[what] in found[0]


def test_bodies_have_one_limit_everywhere() -> None:
    assert MAX_BODY_BYTES == service.DEFAULT_MAX_REQUEST_BYTES == GatewaySettings.max_request_bytes
