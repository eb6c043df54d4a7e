"""The caller check: refuse requests that a browser sends for a web page of somebody else.

A browser lets any page send requests to a server on the machine of its reader. Three headers, which no page can forge,
show such a request. `Origin` names the page, but images, links and scripts come without it. `Sec-Fetch-Site` says
whether the page belongs to the server; all current browsers send it. `Host` shows a page that has a name of its own
lead to 127.0.0.1, so that the browser takes the server for the page's own (DNS rebinding). Programs send a `Host` that
names this machine and neither of the other two, and are not affected.

The check reads the head of a request alone, so a server makes it before it reads the body.
"""

import functools
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from agentlightning.asgi.request import ConnectionScope
from agentlightning.errors import NotAllowed
from agentlightning.utils.server_launcher import is_loopback

_HEADERS: Final = frozenset(
    (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"user-agent")
)
_UNSPECIFIED: Final = ("0.0.0.0", "[::]")


@dataclass(frozen=True)
class CallerCheck:
    """Which web pages may call one server."""

    has_key: bool
    """Whether callers must show a key, so that a page that passes for the server's own still reads nothing."""
    allowed_origins: frozenset[str] = frozenset()
    """Origins whose pages may call; "*" stands for all."""
    origin_option: str | None = None
    """The option that allows an origin, for messages; None if the server has none."""
    is_page: Callable[[str], bool] = lambda path: False
    """Whether a path is a static page, which links on other sites may open."""

    def check(self, scope: ConnectionScope) -> None:
        """Raise `NotAllowed` for a request or a WebSocket handshake of somebody else's page."""
        shown = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        origin, host = shown.get(b"origin", ""), shown.get(b"host", "")
        if not self._is_allowed(origin):
            self._check_origin(origin, host)
            # `same-site` is foreign too: all ports of one machine are one site.
            if shown.get(b"sec-fetch-site") in ("cross-site", "same-site") and not self._is_link(scope, shown):
                raise self._refusal("Web pages of other sites", "and the origin of the page")
        reached_at = scope.get("server") or ("", None)
        if not self.has_key and host and is_loopback(reached_at[0]):
            self._check_name(host, is_marked=b"sec-fetch-site" in shown, agent=shown.get(b"user-agent", ""))

    def _is_allowed(self, origin: str) -> bool:
        return "*" in self.allowed_origins or (bool(origin) and origin in self.allowed_origins)

    def _check_origin(self, origin: str, host: str) -> None:
        if not origin:
            return
        try:
            page = urlsplit(origin)
            is_own = page.netloc == host and (self.has_key or is_loopback(page.hostname or ""))
        except ValueError:
            is_own = False
        if not is_own:
            raise self._refusal(f"Web pages of {origin}", origin)

    def _is_link(self, scope: ConnectionScope, shown: dict[bytes, str]) -> bool:
        """Whether a request opens a static page in a tab of its own."""
        return (
            scope.get("method") in ("GET", "HEAD")
            and shown.get(b"sec-fetch-mode") == "navigate"
            and shown.get(b"sec-fetch-dest", "document") == "document"
            and self.is_page(scope["path"])
        )

    def _check_name(self, host: str, *, is_marked: bool, agent: str) -> None:
        """Refuse a name that is not this machine's: its owner can have it lead here, and read with his pages."""
        if self._is_allowed("*"):
            return
        # 0.0.0.0 and :: lead here too, and browsers send no `Sec-Fetch-Site` to them.
        is_unspecified = host.rpartition(":")[0] in _UNSPECIFIED or host in _UNSPECIFIED
        # How every browser begins its `User-Agent`.
        if is_unspecified and agent.startswith("Mozilla/") and not is_marked:
            raise NotAllowed(
                f"This server does not know which page called it as '{host}', since browsers do not say so there; "
                "open it as 127.0.0.1."
            )
        if not _names_this_machine(host) and host not in {urlsplit(origin).netloc for origin in self.allowed_origins}:
            ways = ["call 127.0.0.1", "start it with a key"]
            if self.origin_option is not None:
                ways.append(f"with {self.origin_option} http://{host}")
            raise NotAllowed(
                f"This server has no key and was called as '{host}', which is not a name of this machine; "
                f"{', or '.join(ways)}."
            )

    def _refusal(self, pages: str, value: str) -> NotAllowed:
        option = self.origin_option
        way_out = "call it from a program" if option is None else f"start it with {option} {value}"
        return NotAllowed(f"{pages} may not call this server; {way_out}.")


@functools.lru_cache(maxsize=16)
def _names_this_machine(host: str) -> bool:
    """Whether a Host header is an address, which nobody can have lead elsewhere, or a name of this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    # Names that containers have for the machine they run on; nobody can register them.
    own_names = ("localhost", socket.gethostname().lower(), "host.docker.internal", "host.containers.internal")
    if name in own_names or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
