"""A backend in use: the value, and everything the fleet remembers of it from call to call."""

import logging
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import yarl
from multidict import CIMultiDict

from agentlightning.dialects import DialectName
from agentlightning.llm_proxy.backends.admission import Gate
from agentlightning.llm_proxy.backends.backend import Backend
from agentlightning.llm_proxy.backends.breaker import Breaker
from agentlightning.llm_proxy.backends.clock import Clock

__all__ = ["Lane"]

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 10.0
FAILURE_WEIGHS_SECONDS: Final = 5.0
LONGEST_ERROR: Final = 300
MOST_NAMES: Final = 256
"""Names kept of a backend that serves a pattern."""


class Lane:
    """The way to one backend."""

    def __init__(self, backend: Backend, clock: Clock, *, on_open: Callable[["Lane"], None], nth: int = 0) -> None:
        self.backend = backend
        self.nth = nth
        """Among backends of the same address and model."""
        self.key = f"{backend.base_url} {backend.model} {nth}"
        """The same in every process and after every change of the list, so that rollouts stay where they are."""
        self.breaker = Breaker()
        self.gate = Gate(clock, cap=backend.max_parallel_requests, rpm=backend.rpm, tpm=backend.tpm)
        self.turn = 0.0
        """Calls given to it, divided by its weight: the lowest is next among equals."""
        self.failures = 0
        self.last_error = ""
        self.timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=backend.timeout)
        self.headers: CIMultiDict[str] = CIMultiDict({"Accept-Encoding": "identity"})
        self.headers.update(backend.headers)
        self._clock = clock
        self._on_open = on_open
        self._urls: dict[DialectName, yarl.URL] = {}
        self._called: dict[str, Backend] = {}

    def update(self, backend: Backend) -> None:
        """Serve under another version, name of the model or position in the list; all that is known of it stays."""
        self.backend = backend
        self._urls.clear()
        self._called.clear()

    def load(self, now: float) -> float:
        """How busy it is for its weight; late failures count as calls, since one that fails fast seems idle."""
        calls = self.gate.in_flight + self.gate.waiting
        if now - self.breaker.touched_at < FAILURE_WEIGHS_SECONDS:
            calls += self.breaker.failures
        return calls / self.backend.weight

    def is_free(self, now: float) -> bool:
        """Whether a call may be sent at once, but for the cap."""
        return self.breaker.allows(now) and self.gate.closed_for(now) == 0

    def called(self, asked: str) -> Backend:
        """The backend for the name that was asked for."""
        if not self.backend.is_wildcard:
            return self.backend
        called = self._called.get(asked)
        if called is None:
            if len(self._called) >= MOST_NAMES:
                self._called.clear()
            called = self._called[asked] = self.backend.called(asked)
        return called

    def url_of(self, backend: Backend, dialect: DialectName) -> yarl.URL:
        """Where a call is sent; `backend` is the lane's own, under the name that was asked for."""
        if backend is not self.backend:
            return yarl.URL(backend.url_of(dialect))
        url = self._urls.get(dialect)
        if url is None:
            url = self._urls[dialect] = yarl.URL(backend.url_of(dialect))
        return url

    def failed(self, words: str, *, curable: bool) -> None:
        """Note a failure of the backend."""
        self.note(words)
        if self.breaker.failed(self._clock.now(), curable=curable):
            logger.warning("Backend %s is out of use; its last failure: %s", self, self.last_error)
            self.gate.send_away()
            self._on_open(self)

    def note(self, words: str) -> None:
        """Keep the words of what went wrong, for whoever looks at the state."""
        self.failures += 1
        self.last_error = first_line(self.backend.redacted(words))

    def describe(self) -> dict[str, Any]:
        """Its state in plain values, without secrets."""
        backend = self.backend
        return {
            "name": backend.name,
            "model": backend.model_name,
            "provider": backend.provider,
            "upstream_model": backend.model,
            "version": backend.version,
            "resources_id": backend.resources_id,
            "weight": backend.weight,
            "max_parallel_requests": backend.max_parallel_requests,
            "breaker": self.breaker.state,
            "on_hold_seconds": round(self.gate.closed_for(self._clock.now()), 3),
            "in_flight": self.gate.in_flight,
            "waiting": self.gate.waiting,
            "failures": self.failures,
            "last_error": self.last_error,
        }

    def __str__(self) -> str:
        return self.backend.name


def first_line(words: str) -> str:
    """The first line of a text, cut where it is long."""
    line = words.strip().partition("\n")[0]
    return line if len(line) <= LONGEST_ERROR else line[:LONGEST_ERROR] + "..."
