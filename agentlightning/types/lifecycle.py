"""Where a part that works for a while stands, and the steps it may take from there.

created ─▶ ready ─▶ running ⇄ paused
                       │  ╲
             failed ◀──┤   ▶ stopping ─▶ stopped
               └─ retry ┘
"""

import threading
from enum import Enum

from agentlightning.errors import InvalidTransition

__all__ = ["Lifecycle", "LifecycleState"]


class LifecycleState(str, Enum):
    """States of a part."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


_STEPS: dict[str, tuple[set[str], LifecycleState]] = {
    "become ready": ({"created", "stopped", "failed", "ready"}, LifecycleState.READY),
    "finish": ({"running", "paused"}, LifecycleState.READY),
    "start": ({"created", "ready", "stopped"}, LifecycleState.RUNNING),
    "pause": ({"running", "paused"}, LifecycleState.PAUSED),
    "resume": ({"paused", "running"}, LifecycleState.RUNNING),
    "stop": ({"ready", "running", "paused", "stopping", "failed"}, LifecycleState.STOPPING),
    "end": ({state.value for state in LifecycleState}, LifecycleState.STOPPED),
    "fail": ({"ready", "running", "paused", "stopping"}, LifecycleState.FAILED),
    "be retried": ({"failed"}, LifecycleState.RUNNING),
}
"""From where each step may be taken, and where it leads."""


class Lifecycle:
    """The state of one part; steps may be taken from any thread."""

    def __init__(self, owner: str) -> None:
        """Begin as `created`.

        Args:
            owner: What the part is called in messages.
        """
        self._owner = owner
        self._changing = threading.Lock()  # protects the state and the error
        self._state = LifecycleState.CREATED
        self.error: BaseException | None = None
        """Why it failed; kept until it is retried."""

    @property
    def state(self) -> LifecycleState:
        return self._state

    def step(self, name: str, *, error: BaseException | None = None) -> LifecycleState:
        """Take a step; InvalidTransition if it cannot be taken from here."""
        sources, target = _STEPS[name]
        with self._changing:
            if self._state.value not in sources:
                raise InvalidTransition(
                    f"{self._owner} is {self._state.value} and cannot {name}; it could if it were "
                    f"{' or '.join(sorted(sources))}."
                )
            self._state = target
            self.error = error if name == "fail" else None
            return target
