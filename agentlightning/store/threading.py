"""Door: the thread-safe wrapper lives in `agentlightning.store.forwarding`."""

from agentlightning.store.forwarding import LightningStoreThreaded

__all__ = ["LightningStoreThreaded"]
