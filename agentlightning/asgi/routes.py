"""A table of routes: path patterns such as `/rollouts/{rollout_id}`, each with an endpoint for every verb.

Segments are compared as they were sent, still escaped: `%73earch` is a value and never the word `search`, and a value
may be any text, also an empty one or one with a slash. A word is preferred to a value.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

from agentlightning.errors import InvalidValue

__all__ = ["RouteTable"]

EndpointT = TypeVar("EndpointT")


class _Pattern(Generic[EndpointT]):
    def __init__(self, path: str) -> None:
        segments = path.split("/")
        self.words = [(number, word.encode()) for number, word in enumerate(segments) if not word.startswith("{")]
        self.values = [(number, name[1:-1]) for number, name in enumerate(segments) if name.startswith("{")]
        self.order = [word.startswith("{") for word in segments]
        self.endpoints: dict[str, EndpointT] = {}


class RouteTable(Generic[EndpointT]):
    """Endpoints by verb and path."""

    def __init__(self) -> None:
        self._by_path: dict[str, _Pattern[EndpointT]] = {}
        self._by_length: dict[int, list[_Pattern[EndpointT]]] = {}

    def add(self, verb: str, path: str, endpoint: EndpointT) -> None:
        pattern = self._by_path.get(path)
        if pattern is None:
            pattern = self._by_path[path] = _Pattern(path)
            alike = self._by_length.setdefault(path.count("/"), [])
            alike.append(pattern)
            alike.sort(key=lambda known: known.order)
        pattern.endpoints[verb] = endpoint

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
        for pattern in self._by_length.get(len(segments) - 1, ()):
            if all(segments[number] == word for number, word in pattern.words):
                yield pattern, segments


def _text(segment: bytes) -> str:
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError as error:
        raise InvalidValue("The path holds bytes that are not UTF-8.") from error
