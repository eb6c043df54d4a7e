"""A store over the network, in one object: a client, and the server and store behind it."""

import asyncio
from typing import Any

from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreServer


class RemoteStore(LightningStoreClient):
    """Closing it closes everything; `store` leads to the store behind the server, as with the wrappers."""

    def __init__(self, server: LightningStoreServer, transport: Any) -> None:
        super().__init__(server.endpoint, transport=transport)
        self.server = server
        self.store = server.store

    async def close(self) -> None:
        await super().close()
        await self.server.stop()
        await self.store.close()


async def start_remote(store: LightningStore, transport: str = "auto") -> RemoteStore:
    """Serve a store on a free port, in a thread."""
    server = LightningStoreServer(store, "127.0.0.1", 0)
    await server.start()
    return RemoteStore(server, transport)


def remote(store: LightningStore, transport: str = "auto") -> RemoteStore:
    """The same, for callers without a loop."""
    return asyncio.run(start_remote(store, transport))
