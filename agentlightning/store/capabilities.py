"""What a store says of itself: whether it is open, what it is capable of, and how much it holds."""

from typing_extensions import TypedDict

from agentlightning.types.lifecycle import ComponentProperty

__all__ = ["LightningStoreCapabilities", "LightningStoreStatistics", "store_state"]


class LightningStoreCapabilities(TypedDict, total=False):
    """What a caller may rely on beyond the contract."""

    thread_safe: bool
    """May be used from several threads without a lock around it."""
    async_safe: bool
    """May be used from several event loops and tasks at once."""
    zero_copy: bool
    """May be handed to another process as it is; the other process then sees the same state."""
    otlp_traces: bool
    """Takes OpenTelemetry traces over OTLP/HTTP."""


class LightningStoreStatistics(TypedDict, total=False):
    """Counts and sizes of what a store holds."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    total_runs: int
    queue_length: int
    uptime: float
    total_span_bytes: int
    total_rollout_bytes: int
    eviction_threshold_bytes: int
    safe_threshold_bytes: int
    memory_capacity_bytes: int


@ComponentProperty
def store_state(store: object) -> str:
    """`open`; `closed` after `close`; or `failed: ` and why, of a store that has found its data damaged."""
    damage = getattr(store, "_damage", None)
    if damage is not None:
        return f"failed: {damage}"
    return "closed" if getattr(store, "_is_closed", False) else "open"
