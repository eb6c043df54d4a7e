"""The routes: every operation under `/v1/agl`, and older paths beside them.

The first family follows from the declarations. What does not is written here as one table: shapes that differ from the
signature, GET twins of searches, and all older paths.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin
from urllib.parse import quote, unquote_to_bytes

import orjson
from pydantic_core import to_json

from agentlightning.errors import InvalidValue
from agentlightning.store.base import LightningStore
from agentlightning.store.http.codec import OperationCodec, codec_of, encode_many
from agentlightning.store.operations import operations_of
from agentlightning.store.values import check_json
from agentlightning.types import Span

__all__ = [
    "LIVE_PATH",
    "NOTICES_PATH",
    "PREFIX",
    "WireRoute",
    "find_route",
    "path_of",
    "result_of",
    "routes",
    "verbs_of",
]

PREFIX = "/v1/agl"
LIVE_PATH = PREFIX + "/live"
NOTICES_PATH = PREFIX + "/notices"

Body = Any
"""A request body as plain JSON values; None if there was none."""


def _as_object(route: "WireRoute", body: Body) -> dict[str, Any]:
    """The body is one object with the arguments, or is left out."""
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise InvalidValue(f"The body of {route.verb} {route.path} is {_kind(body)}; send a JSON object.")
    return body


def _as_argument(route: "WireRoute", body: Body) -> dict[str, Any]:
    """The body is one argument."""
    return {route.codec.op.route.body or "": body}


def _resources_update(route: "WireRoute", body: Body) -> dict[str, Any]:
    """The body is a whole `ResourcesUpdate`, of which the id and the resources count."""
    given = _as_object(route, body)
    return {name: given[name] for name in ("resources_id", "resources") if name in given}


def _sequence_id(codec: OperationCodec, result: Any) -> bytes:
    return orjson.dumps({"sequence_id": result})


def _items(codec: OperationCodec, page: Any) -> bytes:
    """A page as the bare list of its items."""
    items = list(page)
    if items and isinstance(items[0], Span):
        return encode_many([codec.encode_result(span) for span in items])
    return to_json(items)


@dataclass(frozen=True)
class WireRoute:
    """One verb and path, and how it becomes a call."""

    verb: str
    path: str
    operation: str
    status: int = 200
    read_body: Callable[["WireRoute", Body], dict[str, Any]] = _as_object
    write_result: Callable[[OperationCodec, Any], bytes] | None = None
    is_old: bool = False
    """Whether it is one of the older paths, outside `/v1/agl`."""

    @functools.cached_property
    def codec(self) -> OperationCodec:
        return codec_of(self.operation)

    @functools.cached_property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path.split("/"))

    @functools.cached_property
    def path_names(self) -> tuple[str, ...]:
        return tuple(segment[1:-1] for segment in self.segments if segment.startswith("{"))

    @functools.cached_property
    def query_names(self) -> tuple[str, ...]:
        """Arguments that may stand in the query string."""
        body = self.codec.op.route.body if self.read_body is _as_argument else None
        if self.verb == "POST" and body is None:
            return ()
        return tuple(name for name in self.codec.op.hints if name not in (*self.path_names, body))

    def read(self, in_path: Mapping[str, str], query: Iterable[tuple[str, str]], body: Body) -> dict[str, Any]:
        """The arguments as plain values, not validated yet."""
        given = {} if self.verb == "GET" else dict(self.read_body(self, body))
        for name, value in query:
            if name in self.query_names:
                if _takes_many(self.codec.op.hints[name]):
                    given.setdefault(name, []).append(value)
                else:
                    given[name] = value
        given.update(in_path)
        return given

    def write(self, result: Any, *, briefly: bool) -> bytes:
        if self.write_result is not None:
            return self.write_result(self.codec, result)
        return self.codec.encode_brief(result) if briefly else self.codec.encode_result(result)


@functools.cache
def _takes_many(hint: Any) -> bool:
    """Whether a query string may repeat the argument."""
    members = (hint, *get_args(hint))
    return any(isinstance(origin := get_origin(member), type) and issubclass(origin, Sequence) for member in members)


_SHAPES: dict[str, dict[str, Any]] = {"get_next_span_sequence_id": {"write_result": _sequence_id}}
"""What of the `/v1/agl` family does not follow from the declaration."""

_GET_TWINS = {
    "/rollouts": "query_rollouts",
    "/rollouts/{rollout_id}/attempts": "query_attempts",
    "/spans": "query_spans",
    "/workers": "query_workers",
    "/runs": "query_runs",
    "/runs/{run_id}/metrics": "query_metrics",
}

_OLD_ROUTES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("POST", "/start_rollout", {}),
    ("POST", "/enqueue_rollout", {}),
    ("GET", "/dequeue_rollout", {}),
    ("POST", "/start_attempt", {}),
    ("POST", "/query_rollouts", {"write_result": _items}),
    ("GET", "/query_attempts/{rollout_id}", {"write_result": _items}),
    ("GET", "/get_latest_attempt/{rollout_id}", {}),
    ("GET", "/get_rollout_by_id/{rollout_id}", {}),
    ("POST", "/add_resources", {}),
    ("POST", "/update_resources", {"read_body": _resources_update}),
    ("GET", "/get_resources_by_id/{resources_id}", {}),
    ("GET", "/get_latest_resources", {}),
    ("POST", "/add_span", {"read_body": _as_argument}),
    ("GET", "/get_next_span_sequence_id/{rollout_id}/{attempt_id}", {}),
    ("POST", "/wait_for_rollouts", {}),
    ("GET", "/query_spans/{rollout_id}", {"write_result": _items}),
    ("POST", "/update_rollout", {}),
    ("POST", "/update_attempt", {}),
)


@functools.cache
def routes() -> tuple[WireRoute, ...]:
    """Every route, the `/v1/agl` family first."""
    declared = []
    for op in operations_of(LightningStore).values():
        route = op.route
        reading = {"read_body": _as_argument} if route.body is not None else {}
        shape = reading | _SHAPES.get(op.name, {})
        declared.append(WireRoute(route.verb, PREFIX + route.path, op.name, route.status, **shape))
    twins = [WireRoute("GET", PREFIX + path, name) for path, name in _GET_TWINS.items()]
    old = [WireRoute(verb, path, path.split("/")[1], is_old=True, **shape) for verb, path, shape in _OLD_ROUTES]
    return (*declared, *twins, *old)


_Values = tuple[bytes, ...]


class _Branch:
    """A node of the tree of routes: the next literal segments, the next parameter, and the routes that end here."""

    def __init__(self) -> None:
        self.literals: dict[bytes, _Branch] = {}
        self.parameter: _Branch | None = None
        self.ends: dict[str, WireRoute] = {}


@functools.cache
def _tree() -> _Branch:
    root = _Branch()
    for route in routes():
        branch = root
        for segment in route.segments:
            if segment.startswith("{"):
                branch.parameter = branch.parameter or _Branch()
                branch = branch.parameter
            else:
                branch = branch.literals.setdefault(segment.encode(), _Branch())
        branch.ends[route.verb] = route
    return root


def _walk(
    branch: _Branch, segments: list[bytes], values: tuple[bytes, ...] = ()
) -> Iterator[tuple[_Branch, tuple[bytes, ...]]]:
    """The ends of the paths that these segments may be, words before values."""
    if not segments:
        yield branch, values
        return
    first, *rest = segments
    if (following := branch.literals.get(first)) is not None:
        yield from _walk(following, rest, values)
    if branch.parameter is not None:
        yield from _walk(branch.parameter, rest, (*values, first))


def find_route(verb: str, raw_path: bytes) -> tuple[WireRoute, dict[str, str]] | None:
    """The route of a request and the values in its path; None if there is none.

    Segments are compared as they were sent, so an escaped one (`%73earch`) is a value and never a word of the path.
    """
    for branch, values in _walk(_tree(), raw_path.split(b"/")):
        route = branch.ends.get(verb)
        if route is not None:
            return route, dict(zip(route.path_names, _texts(route, values), strict=True))
    return None


def _texts(route: WireRoute, values: _Values) -> list[str]:
    try:
        return [unquote_to_bytes(value).decode() for value in values]
    except UnicodeDecodeError as error:
        raise InvalidValue(f"The path of {route.verb} {route.path} holds bytes that are not UTF-8.") from error


def verbs_of(raw_path: bytes) -> tuple[str, ...]:
    """The verbs under which a path is known."""
    return tuple(sorted({verb for branch, _ in _walk(_tree(), raw_path.split(b"/")) for verb in branch.ends}))


@functools.cache
def _reserved() -> frozenset[str]:
    return frozenset(segment for route in routes() for segment in route.segments if not segment.startswith("{"))


def _quoted(value: str) -> str:
    """A value as a path segment that no word of a path can be mistaken for."""
    if value in _reserved() or value in (".", ".."):
        return f"%{ord(value[0]):02X}{value[1:]}" if value else ""
    return quote(value, safe="", errors="strict")


def path_of(path: str, arguments: dict[str, Any]) -> str:
    """The path of a declared route with its values; they are taken out of the arguments."""
    segments = path.split("/")
    for index, segment in enumerate(segments):
        if segment.startswith("{"):
            name = segment[1:-1]
            check_json(arguments[name], f"Argument '{name}'")
            segments[index] = _quoted(str(arguments.pop(name)))
    return PREFIX + "/".join(segments)


def result_of(operation: str, parsed: Any) -> Any:
    """The result in the body of a `/v1/agl` answer."""
    return parsed["sequence_id"] if _SHAPES.get(operation, {}).get("write_result") is _sequence_id else parsed


def _kind(value: Any) -> str:
    return {"list": "an array", "str": "a string", "bool": "a boolean"}.get(type(value).__name__, "a number")
