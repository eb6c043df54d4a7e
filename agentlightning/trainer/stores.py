"""A store from the way a user writes one down: `memory`, `sqlite:///path`, or the URL of a database or a server."""

import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.forwarding import innermost
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SqliteLightningStore
from agentlightning.trainer.init_utils import build_component

__all__ = ["built_store", "move_log", "served_address", "store_address"]

logger = logging.getLogger(__name__)


def built_store(spec: Any) -> LightningStore:
    """The store a user asks for; one in memory, if for none.

    A text is `memory`, `sqlite` (a file in the working directory), `sqlite:///relative/path`, `sqlite:////absolute/path`,
    `postgresql://user@host/database`, the URL of a server, or the import path of a class.
    """
    if isinstance(spec, (str, Path)):
        named = _named_store(str(spec))
        if named is not None:
            return named
    return build_component(
        spec,
        expected_type=LightningStore,
        spec_name="store",
        default_factory=InMemoryLightningStore,
    )


def _named_store(text: str) -> LightningStore | None:
    if text == "memory":
        return InMemoryLightningStore()
    if text == "sqlite":
        return SqliteLightningStore("agentlightning.db")
    scheme = urlsplit(text).scheme
    if scheme == "sqlite":
        path = text.removeprefix("sqlite:///")
        if path == text or not path:
            raise ConfigurationError(f"store {text!r} names no file; write it as sqlite:///path/to/file.db.")
        return SqliteLightningStore(path)
    if scheme in ("postgresql", "postgres"):
        from agentlightning.store.postgres import PostgresLightningStore

        return PostgresLightningStore(text)
    if scheme in ("http", "https"):
        return LightningStoreClient(text)
    if text.endswith((".db", ".sqlite")):
        return SqliteLightningStore(text)
    return None


def store_address(store: LightningStore) -> str | None:
    """Where a store can be found again after the program has ended; None, if nowhere."""
    inner = innermost(store)
    if isinstance(inner, SqliteLightningStore):
        return str(inner.path)
    if isinstance(inner, LightningStoreClient):
        return inner.server_address
    address: str | None = getattr(inner, "address", None)  # of a database
    return address


def served_address(store: LightningStore) -> str | None:
    """Where a store is served while the program runs; None, if nowhere."""
    return store.endpoint if isinstance(store, LightningStoreServer) else None


def move_log(store: LightningStore) -> None:
    """At the end of a training, make the file of a SQLite store the whole store; it stays open, and may be used on."""
    inner = innermost(store)
    if isinstance(inner, SqliteLightningStore):
        try:
            inner.checkpoint()
        except StoreUnavailable as error:
            logger.warning("The log of the store stays beside its file, and must be copied with it: %s", error)
