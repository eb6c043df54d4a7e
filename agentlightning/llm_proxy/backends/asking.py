"""What the gateway asks of a fleet: the call, and what is sent for it once a backend has been chosen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentlightning.dialects import DialectName
from agentlightning.llm_proxy.backends.backend import Backend

__all__ = ["Ask", "Outgoing"]


@dataclass(slots=True)
class Outgoing:
    """A request as it goes to one backend."""

    dialect: DialectName
    """What is spoken to the backend."""
    body: bytes
    stream: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    """On top of the backend's own, which win."""
    url: str = ""
    """Where it goes; if empty, where calls in the dialect go."""


@dataclass(slots=True)
class Ask:
    """One call of an agent."""

    model: str
    who: str
    """The rollout, for fair queueing and stickiness; empty for calls of nobody."""
    prepare: Callable[[Backend], Outgoing]
    """Called once per try, for the backend that was chosen; may raise DialectNotServed to be given another one."""
    resources_id: str | None = None
    """Version of the resources the call is pinned to; None takes the latest."""
    deadline: float | None = None
    """Moment on the fleet's clock (`time.monotonic`) by which the answer must have begun; None: the fleet decides."""
