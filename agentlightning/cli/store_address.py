"""The store that a command is told to use: the address of a server, or a file."""

import asyncio

from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, SqliteLightningStore

__all__ = ["is_remote", "path_of", "store_at", "why_silent"]

_FILE_PREFIX = "sqlite:///"


def is_remote(address: str) -> bool:
    """Whether it is the address of a server."""
    return address.startswith(("http://", "https://"))


def store_at(address: str | None, token: str | None = None) -> LightningStore:
    """The store at an address of a server, `sqlite:///path`, or a path; None is one in memory.

    Args:
        token: What the server asks for.
    """
    if address is None:
        return InMemoryLightningStore()
    if is_remote(address):
        return LightningStoreClient(address, token=token)
    return SqliteLightningStore(path_of(address))


def path_of(address: str) -> str:
    """The file that an address names."""
    path = address.removeprefix(_FILE_PREFIX)
    if not path or "://" in path:
        raise ConfigurationError(
            f"'{address}' is no store; write http://host:4747 for a server, or the path of a file, or sqlite:///path."
        )
    return path


def why_silent(address: str, token: str | None) -> str | None:
    """Why the server at this address does not answer; None if it does. An error if it answers and keeps us out."""

    async def ask() -> None:
        async with LightningStoreClient(address, token=token, outage_seconds=0.0) as client:
            await client.statistics()

    try:
        asyncio.run(ask())
    except StoreUnavailable as error:
        return str(error)
    return None
