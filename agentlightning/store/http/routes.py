"""The REST routes: every operation under `/v1/agl`.

They follow from the declarations. What does not is written here: GET twins of searches, and an answer that is wrapped.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin
from urllib.parse import quote

import orjson

from agentlightning.asgi.response import LargeResponse, Response, response_of
from agentlightning.asgi.routes import RouteTable
from agentlightning.errors import InvalidValue
from agentlightning.store.base import LightningStore
from agentlightning.store.http.codec import OperationCodec, codec_of, encode_items, encode_page
from agentlightning.store.operations import operations_of
from agentlightning.store.values import check_json
from agentlightning.types import PaginatedResult

PREFIX = "/v1/agl"
LIVE_PATH = PREFIX + "/live"
NOTICES_PATH = PREFIX + "/notices"
DEFAULT_QUERY_LIMIT = 10_000
"""Items of a page whose length the caller does not say."""
_WRAPPED = "get_next_span_sequence_id"
"""The operation whose answer under `/v1/agl` is an object with one field."""
_JSON_TYPES = {list: "an array", str: "a string", bool: "a boolean"}


@dataclass(frozen=True)
class RestRoute:
    """One verb and path, and how it becomes a call."""

    verb: str
    path: str
    operation: str
    status: int = 200
    body: str | None = None
    """The argument that is the whole request body; None takes the arguments as one object."""
    is_wrapped: bool = False
    """Whether the answer is an object around the number."""

    @functools.cached_property
    def codec(self) -> OperationCodec:
        return codec_of(self.operation)

    @functools.cached_property
    def path_names(self) -> tuple[str, ...]:
        return tuple(segment[1:-1] for segment in self.path.split("/") if segment.startswith("{"))

    @functools.cached_property
    def query_names(self) -> tuple[str, ...]:
        """Arguments that may stand in the query string."""
        if self.verb == "POST" and self.body is None:
            return ()
        return tuple(name for name in self.codec.op.hints if name not in (*self.path_names, self.body))

    @functools.cached_property
    def is_query(self) -> bool:
        """Whether the answer is a page, of a length that the caller may choose."""
        return self.codec.op.is_query

    def arguments(self, in_path: Mapping[str, str], query: Iterable[tuple[str, str]], body: object) -> dict[str, Any]:
        """The arguments of a request as plain values, not validated yet; `body` is parsed, None if there was none."""
        given: dict[str, Any] = {}
        if self.body is not None:
            given[self.body] = body
        elif self.verb == "POST" and body is not None:
            if not isinstance(body, dict):
                kind = _JSON_TYPES.get(type(body), "a number")
                raise InvalidValue(f"The body of {self.verb} {self.path} is {kind}; send a JSON object.")
            given = dict(body)
        for name, value in query:
            if name in self.query_names:
                if _takes_many(self.codec.op.hints[name]):
                    given.setdefault(name, []).append(value)
                else:
                    given[name] = value
        given.update(in_path)
        return given

    def respond(self, result: Any, *, briefly: bool) -> Response | LargeResponse:
        """The answer with a result."""
        if self.is_wrapped:
            return Response(self.status, orjson.dumps({"sequence_id": result}))
        if isinstance(result, PaginatedResult):
            return response_of(self.status, encode_page(result))
        if isinstance(result, list) and result and not briefly:
            return response_of(self.status, encode_items(result))
        return Response(self.status, self.codec.encode_brief(result) if briefly else self.codec.encode_result(result))


@functools.cache
def _takes_many(hint: object) -> bool:
    """Whether a query string may repeat the argument."""
    members = (hint, *get_args(hint))
    return any(isinstance(origin := get_origin(member), type) and issubclass(origin, Sequence) for member in members)


_GET_TWINS = {
    "/rollouts": "query_rollouts",
    "/rollouts/{rollout_id}/attempts": "query_attempts",
    "/spans": "query_spans",
    "/workers": "query_workers",
    "/runs": "query_runs",
    "/runs/{run_id}/metrics": "query_metrics",
}

GONE_PATHS = frozenset(
    {
        *("start_rollout", "enqueue_rollout", "dequeue_rollout", "start_attempt", "query_rollouts", "query_attempts"),
        *("get_latest_attempt", "get_rollout_by_id", "add_resources", "update_resources", "get_resources_by_id"),
        *("get_latest_resources", "add_span", "get_next_span_sequence_id", "wait_for_rollouts", "query_spans"),
        *("update_rollout", "update_attempt"),
    }
)
"""First parts of the paths of the store server of 0.2, whose clients are told what to do."""


@functools.cache
def routes() -> tuple[RestRoute, ...]:
    """Every route."""
    declared = [
        RestRoute(
            op.route.verb,
            PREFIX + op.route.path,
            op.name,
            op.route.status,
            op.route.body,
            is_wrapped=op.name == _WRAPPED,
        )
        for op in operations_of(LightningStore).values()
    ]
    twins = [RestRoute("GET", PREFIX + path, name) for path, name in _GET_TWINS.items()]
    return (*declared, *twins)


@functools.cache
def route_table() -> RouteTable[RestRoute]:
    table: RouteTable[RestRoute] = RouteTable()
    for route in routes():
        table.add(route.verb, route.path, route)
    return table


# ---------------------------------------------------------------------- the client's side


@functools.cache
def _reserved() -> frozenset[str]:
    words = (segment for route in routes() for segment in route.path.split("/") if not segment.startswith("{"))
    return frozenset((*words, ".", ".."))


def path_of(path: str, arguments: dict[str, object]) -> str:
    """The path of a declared route with its values; they are taken out of the arguments."""
    segments = path.split("/")
    for index, segment in enumerate(segments):
        if segment.startswith("{"):
            name = segment[1:-1]
            check_json(arguments[name], f"Argument '{name}'")
            value = str(arguments.pop(name))
            escaped = quote(value, safe="", errors="strict")
            if value and value in _reserved():  # escape a letter, so that it is not taken for a word of a path
                escaped = f"%{ord(value[0]):02X}{value[1:]}"
            segments[index] = escaped
    return PREFIX + "/".join(segments)


def result_of(operation: str, parsed: Any) -> Any:
    """The result in the body of a `/v1/agl` answer."""
    return parsed["sequence_id"] if operation == _WRAPPED else parsed
