"""The dashboard: a web page that shows what a store holds, as files and as what a server must say about them.

The page is plain HTML, CSS and JavaScript and needs no build. It asks the store server's own routes, so nothing here
knows the store; the server only hands these files out.
"""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote

__all__ = ["DASHBOARD_PATH", "Asset", "address_with_token", "asset_at"]

DASHBOARD_PATH: Final = "/dashboard"
"""Where the page is; its files are below."""

_MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""The page loads nothing from elsewhere, and no text out of a store can become a script; pictures are data."""


@dataclass(frozen=True)
class Asset:
    """A file of the page."""

    body: bytes
    headers: Mapping[str, str]

    @property
    def etag(self) -> str:
        return self.headers["etag"]


def address_with_token(page: str, token: str) -> str:
    """The address of the page with a token behind the `#`, which no browser sends; the page takes it out of there."""
    return f"{page}#token={quote(token, safe='')}"


def asset_at(path: str) -> Asset | None:
    """The file under a path below `DASHBOARD_PATH`, the page itself under an empty one; None if there is none."""
    return _assets().get(path or "index.html")


@functools.cache
def _assets() -> Mapping[str, Asset]:
    """Every file by its name; they are few and small, and do not change while the package is in use."""
    files = {file.name: file.read_bytes() for file in resources.files(__name__).iterdir() if file.is_file()}
    media_types = {name: _MEDIA_TYPES.get(PurePosixPath(name).suffix) for name in files}
    return {name: _asset(media_type, files[name]) for name, media_type in media_types.items() if media_type is not None}


def _asset(media_type: str, body: bytes) -> Asset:
    headers = {
        "content-type": media_type,
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "cache-control": "no-cache",
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Asset(body, headers)
