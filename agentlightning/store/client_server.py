"""Door to `store/http`: the server and the client of a store."""

from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.http.server import LightningStoreServer
from agentlightning.types import Span

__all__ = ["LightningStoreClient", "LightningStoreServer", "Span"]
