"""The store that a command uses: the address of a server or of a database, or a file."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError, IncompatibleStore, StoreUnavailable
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, SqliteLightningStore
from agentlightning.store.http.reader_file import ReaderAccess, reader_access

FIRST_RESPONSE_SECONDS = 8.0
"""How long a server may take for its first response; those that follow may take longer, for a store may be busy."""
_HEALTH_PATH = "/health"


def is_remote(address: str) -> bool:
    """Whether it is the address of a server."""
    return address.startswith(("http://", "https://"))


def is_database(address: str) -> bool:
    """Whether it is the address of a PostgreSQL database."""
    return address.startswith(("postgresql://", "postgres://"))


def for_reading(address: str, token: str | None) -> ReaderAccess:
    """Address and token of a command that only reads, which a training of this user lets in without being given one."""
    return reader_access(address, resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, token))


def open_store(address: str | None, token: str | None = None, *, must_exist: bool = False) -> LightningStore:
    """The store at an address of a server or a database, `sqlite:///path`, or a path; None is one in memory.

    Args:
        token: Which the server requires; by default the environment's.
        must_exist: Refuse a file that is not there, which to open would create.
    """
    if address is None:
        return InMemoryLightningStore()
    if is_remote(address):
        return LightningStoreClient(address, token=token)
    if is_database(address):
        return postgres_store(address)
    return SqliteLightningStore(existing_file(address) if must_exist else path_of(address))


@contextmanager
def opened_store(address: str, token: str | None, *, must_exist: bool = False) -> Iterator[LightningStore]:
    """The same until the end of the block; StoreUnavailable if its server does not respond."""
    outage = outage_of(address, token)
    if outage is not None:
        raise outage
    store = open_store(address, token, must_exist=must_exist)
    try:
        yield store
    finally:
        asyncio.run(store.close())


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


def path_of(address: str) -> str:
    """The file that an address names."""
    path = address.removeprefix("sqlite:///")
    if not path or "://" in path:
        raise ConfigurationError(
            f"'{address}' is no store; write http://host:4747 for a server, the path of a file, or postgresql://…."
        )
    return path


def existing_file(address: str) -> Path:
    """The file that an address names, which must be there and hold something."""
    file = Path(path_of(address))
    if not file.exists():
        raise ConfigurationError(f"There is no store '{file}'; give the path of a store file, or http://host:4747.")
    if not file.is_file():
        raise IncompatibleStore(f"'{file}' is not a store, but a folder or a device; give the path of a store file.")
    if file.stat().st_size == 0:
        raise IncompatibleStore(f"'{file}' is not a store: it is empty.")
    return file


# ---------------------------------------------------------------------- servers


@dataclass(frozen=True)
class FirstResponse:
    """How a server responded to a first request."""

    status: int
    media_type: str


async def first_response(server: str, path: str) -> FirstResponse:
    """Get a page of a server; StoreUnavailable if nothing comes in the time that a first response may take."""
    try:
        parts = urlsplit(server)
        reason = None if parts.hostname and parts.port != 0 else "it names no host, or port 0"
    except ValueError as error:  # of what cannot be an IPv6 address, or a port
        reason = str(error)
    if reason is not None:
        raise ConfigurationError(f"'{server}' is no address of a server ({reason}); write it as http://host:4747.")
    try:
        limit = aiohttp.ClientTimeout(FIRST_RESPONSE_SECONDS)
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(server.rstrip("/") + path) as response:
            return FirstResponse(response.status, response.content_type)
    except asyncio.TimeoutError as error:
        raise _unavailable(server, f"nothing came within {FIRST_RESPONSE_SECONDS:g} s") from error
    except aiohttp.ClientError as error:
        raise _unavailable(server, str(error) or type(error).__name__) from error


async def statistics_of(server: str, token: str | None = None) -> dict[str, Any]:
    """What the store of a server holds; IncompatibleStore if another server responds there."""
    response = await first_response(server, _HEALTH_PATH)
    if response.status == 404 or (response.status == 200 and response.media_type != "application/json"):
        raise _incompatible(server, f"{_HEALTH_PATH} answers {response.status} {response.media_type}")
    async with LightningStoreClient(server, token=token, outage_seconds=0.0) as client:
        try:
            return dict(await client.statistics())
        except aiohttp.ClientResponseError as error:
            if error.status >= 500:
                raise _unavailable(server, f"status {error.status}") from error
            raise _incompatible(server, f"it refuses with {error.status}") from error


def outage_of(address: str | None, token: str | None) -> StoreUnavailable | None:
    """Why the server at this address does not respond; None if it does, or there is none.

    Raises what is wrong with a server that responds: it refuses the token, or is no store server.
    """
    if address is None or not is_remote(address):
        return None
    try:
        asyncio.run(statistics_of(address, token))
    except IncompatibleStore:
        raise
    except StoreUnavailable as error:
        return error
    return None


def _unavailable(server: str, reason: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"The store server at '{server}' does not answer ({reason}); start it, or check the address."
    )


def _incompatible(server: str, reason: str) -> IncompatibleStore:
    return IncompatibleStore(f"The server at '{server}' is no store server ({reason}); check the address.")
