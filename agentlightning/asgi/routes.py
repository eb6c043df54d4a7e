"""A table of routes: path patterns such as `/rollouts/{rollout_id}`, each with an endpoint for every verb.

Segments are compared as they were sent, still escaped: `%73earch` is a value and never the word `search`, and a value
may be any text, also an empty one or one with a slash. A word is preferred to a value.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

from agentlightning.errors import InvalidValue

EndpointT = TypeVar("EndpointT")


class _Pattern(Generic[EndpointT]):
    def __init__(self, path: str) -> None:
        self.values = [(number, name[1:-1]) for number, name in enumerate(path.split("/")) if name.startswith("{")]
        self.endpoints: dict[str, EndpointT] = {}


class RouteTable(Generic[EndpointT]):
    """Endpoints by verb and path."""

    def __init__(self) -> None:
        self._patterns: dict[tuple[bytes | None, ...], _Pattern[EndpointT]] = {}
        """By their segments, with None for a value."""
        self._shapes: dict[int, list[tuple[bool, ...]]] = {}
        """Which segments are values, by the number of segments; more words first."""

    def add(self, verb: str, path: str, endpoint: EndpointT) -> None:
        segments = tuple(None if word.startswith("{") else word.encode() for word in path.split("/"))
        shape, shapes = tuple(word is None for word in segments), self._shapes.setdefault(len(segments), [])
        if shape not in shapes:
            shapes.append(shape)
            shapes.sort()
        self._patterns.setdefault(segments, _Pattern(path)).endpoints[verb] = endpoint

    def find(self, verb: str, raw_path: bytes) -> tuple[EndpointT, dict[str, str]] | None:
        """The endpoint of a request and the values in its path; None if there is none."""
        for pattern, segments in self._matches(raw_path):
            endpoint = pattern.endpoints.get(verb)
            if endpoint is not None:
                return endpoint, {name: _text(segments[number]) for number, name in pattern.values}
        return None

    def verbs(self, raw_path: bytes) -> list[str]:
        """The verbs under which a path is known, for the header `Allow`."""
        return sorted({verb for pattern, _ in self._matches(raw_path) for verb in pattern.endpoints})

    def _matches(self, raw_path: bytes) -> Iterator[tuple[_Pattern[EndpointT], list[bytes]]]:
        segments = raw_path.split(b"/")
        for shape in self._shapes.get(len(segments), ()):
            words = [None if is_value else word for word, is_value in zip(segments, shape, strict=True)]
            pattern = self._patterns.get(tuple(words))
            if pattern is not None:
                yield pattern, segments


def _text(segment: bytes) -> str:
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError as error:
        raise InvalidValue("The path holds bytes that are not UTF-8.") from error
