"""The reader's token of a training, in a file that only its user can read.

The store server of a training demands a token that its own runners have. So that `agl dashboard`, `agl why` and other
commands that only read work for the same user without being given one, a training leaves a reader's token in the user's
runtime folder, under the port that it serves on 127.0.0.1, for as long as it serves. A file that another account could
have written or read is not used. One that a killed training left behind is replaced by the next on that port.
"""

import getpass
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from agentlightning.errors import ConfigurationError
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.utils.private_files import check_own_folder, replaced_file

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_SERVED_ON_LOOPBACK: Final = (LOOPBACK, "localhost", "0.0.0.0")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class ReaderAccess:
    """Where a command reads a store, and the token that it shows there."""

    address: str
    token: str | None


def reader_access(address: str, token: str | None = None) -> ReaderAccess:
    """The address and the token as given or, without a token, those of a training of this user at the address.

    The name localhost becomes 127.0.0.1 then: it may also lead to ::1, where another account could be listening.
    """
    with suppress(OSError, ValueError):  # of what is no address, or a folder that is not the user's alone
        parts = urlsplit(address)
        if not token and parts.hostname in (LOOPBACK, "localhost"):
            token = _read(runtime_folder() / f"{parts.port}.token")
            address = address if token is None else parts._replace(netloc=f"{LOOPBACK}:{parts.port}").geturl()
    return ReaderAccess(address, token)


@contextmanager
def reader_token_file(host: str, port: int, secret: str) -> Iterator[None]:
    """A file with a reader's token for the server on this port, until the end of the block.

    Args:
        secret: The server's master token.
    """
    token = sign_token(secret, Scope("reader"), expires_at=None)
    path: Path | None = None
    try:
        if host in _SERVED_ON_LOOPBACK:
            path = runtime_folder() / f"{port}.token"
            with replaced_file(path) as file:
                os.chmod(file.name, stat.S_IRUSR | stat.S_IWUSR)  # whatever AGL_FILE_MODE says
                file.write(token.encode())
    except (OSError, ConfigurationError) as error:
        path = None
        logger.warning("Commands that read this training's store need AGL_STORE_TOKEN: %s", error)
    try:
        yield
    finally:
        if path is not None and _read(path) == token:
            path.unlink(missing_ok=True)


def runtime_folder() -> Path:
    """The user's folder for files that last as long as a process; an error if another account could write to it."""
    user = getattr(os, "geteuid", getpass.getuser)()
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"agentlightning-{user}")
    folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    if folder.is_symlink():
        raise ConfigurationError(f"Folder '{folder}' is a link, and may lead anywhere; remove it.")
    check_own_folder(folder)
    return folder


def _read(path: Path) -> str | None:
    """The token in a file that is this user's alone; None if it is not, or there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with open(descriptor, encoding="ascii", errors="replace") as file:
        found = os.fstat(descriptor)
        is_own = found.st_uid == getattr(os, "geteuid", lambda: found.st_uid)()
        return file.read() if is_own and stat.S_ISREG(found.st_mode) and not found.st_mode & _OTHERS else None
