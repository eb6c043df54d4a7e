"""The store that a command is told to use: the address of a server or of a database, or a file."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentlightning.errors import ConfigurationError, IncompatibleStore, StoreUnavailable
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, SqliteLightningStore

__all__ = [
    "FirstAnswer",
    "existing_file",
    "first_answer",
    "is_database",
    "is_remote",
    "path_of",
    "postgres_store",
    "statistics_of",
    "store_at",
    "why_silent",
]

FIRST_ANSWER_SECONDS = 8.0
"""How long a server may take for its first answer; those that follow may take longer, for a store may be busy."""

_FILE_PREFIX = "sqlite:///"
_HEALTH_PATH = "/health"
_NOT_FOUND = 404
_SERVER_ERRORS_FROM = 500


def is_remote(address: str) -> bool:
    """Whether it is the address of a server."""
    return address.startswith(("http://", "https://"))


def is_database(address: str) -> bool:
    """Whether it is the address of a PostgreSQL database."""
    return address.startswith(("postgresql://", "postgres://"))


def store_at(address: str | None, token: str | None = None) -> LightningStore:
    """The store at an address of a server or a database, `sqlite:///path`, or a path; None is one in memory.

    Args:
        token: What the server asks for.
    """
    if address is None:
        return InMemoryLightningStore()
    if is_remote(address):
        return LightningStoreClient(address, token=token)
    return postgres_store(address) if is_database(address) else SqliteLightningStore(path_of(address))


def postgres_store(dsn: str, **options: Any) -> LightningStore:
    """The store in a database, whose address a user wrote on a command line."""
    try:
        from agentlightning.store.postgres import PostgresLightningStore
        from agentlightning.store.postgres.database import parsed
    except ImportError as error:
        raise ConfigurationError(str(error)) from error
    if "password" in parsed(dsn):
        raise ConfigurationError(
            "The address of the database holds a password, which `ps` shows to everybody on this machine; leave it "
            "out, and give it as PGPASSWORD or in the file that PGPASSFILE names."
        )
    return PostgresLightningStore(dsn, **options)


# ---------------------------------------------------------------------- files


def path_of(address: str) -> str:
    """The file that an address names."""
    path = address.removeprefix(_FILE_PREFIX)
    if not path or "://" in path:
        raise ConfigurationError(
            f"'{address}' is no store; write http://host:4747 for a server, the path of a file, or postgresql://…."
        )
    return path


def existing_file(address: str) -> Path:
    """The file that an address names, which must be there and hold something: to open a store would create it."""
    path = path_of(address)
    file = Path(path)
    if not file.exists():
        raise ConfigurationError(f"There is no store '{path}'; give the path of a store file, or http://host:4747.")
    if not file.is_file():
        raise IncompatibleStore(f"'{path}' is not a store, but a folder or a device; give the path of a store file.")
    if file.stat().st_size == 0:
        raise IncompatibleStore(f"'{path}' is not a store: it is empty.")
    return file


# ---------------------------------------------------------------------- servers


@dataclass(frozen=True)
class FirstAnswer:
    """How a server answered a first question."""

    status: int
    media_type: str


async def first_answer(server: str, path: str) -> FirstAnswer:
    """Ask a server for a page; StoreUnavailable if nothing comes in the time that a first answer may take."""
    _check_address(server)
    try:
        limit = aiohttp.ClientTimeout(FIRST_ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(server.rstrip("/") + path) as response:
            return FirstAnswer(response.status, response.content_type)
    except asyncio.TimeoutError as error:
        reason = f"nothing came within {FIRST_ANSWER_SECONDS:g} s"
        raise _silent(server, reason) from error
    except aiohttp.ClientError as error:
        raise _silent(server, str(error) or type(error).__name__) from error


def _check_address(server: str) -> None:
    """ConfigurationError if there can be no server at an address, however long one waits."""
    try:
        parts = urlsplit(server)
        reason = None if parts.hostname and parts.port != 0 else "it names no host, or port 0"
    except ValueError as error:  # of what cannot be an IPv6 address, or a port
        reason = str(error)
    if reason is not None:
        raise ConfigurationError(f"'{server}' is no address of a server ({reason}); write it as http://host:4747.")


async def statistics_of(server: str, token: str | None = None) -> dict[str, Any]:
    """What the store of a server holds; IncompatibleStore if another server answers there."""
    answer = await first_answer(server, _HEALTH_PATH)
    if answer.status == _NOT_FOUND or (answer.status == 200 and answer.media_type != "application/json"):
        raise _another(server, f"{_HEALTH_PATH} answers {answer.status} {answer.media_type}")
    async with LightningStoreClient(server, token=token, outage_seconds=0.0) as client:
        try:
            return dict(await client.statistics())
        except aiohttp.ClientResponseError as error:
            if error.status >= _SERVER_ERRORS_FROM:
                raise _silent(server, f"status {error.status}") from error
            raise _another(server, f"it refuses with {error.status}") from error


def why_silent(address: str, token: str | None) -> str | None:
    """Why the server at this address does not answer; None if it does.

    An error if it answers and keeps us out, or is no store server.
    """
    try:
        asyncio.run(statistics_of(address, token))
    except IncompatibleStore:
        raise
    except StoreUnavailable as error:
        return str(error)
    return None


def _silent(server: str, reason: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"The store server at '{server}' does not answer ({reason}); start it, or check the address."
    )


def _another(server: str, reason: str) -> IncompatibleStore:
    return IncompatibleStore(f"The server at '{server}' is no store server ({reason}); check the address.")
