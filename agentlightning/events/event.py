"""What can happen in a rollout, as types.

    AgentEvent
    ├── ObjectEvent       a recorded value: DataEvent, ConfigEvent
    ├── MessageEvent      UserMessage, AgentReply, ToolCall
    ├── RewardEvent       NumericReward, BinaryReward, SequenceReward
    └── StateEvent        StartEvent, CompleteEvent, ErrorEvent

Events are values: they compare by content and never change. The fields of `AgentEvent` say where an event comes from.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class AgentEvent:
    """Something that happened in an attempt."""

    kind: ClassVar[str] = "event"
    """Its place in the tree, such as `reward.binary`."""
    rollout_id: str = ""
    attempt_id: str = ""
    sequence_id: int = 0
    """Of the span it was read from; the events of one span share it."""
    span_id: str = ""
    span_name: str = ""
    time: float | None = None
    """Seconds since the epoch."""
    agent: str | None = None
    """The agent its span names, or the nearest one around it that is known."""


@dataclass(frozen=True, kw_only=True)
class ObjectEvent(AgentEvent):
    """A value was recorded."""

    kind: ClassVar[str] = "object"
    value: Any = field(default=None, hash=False)
    type_name: str | None = None
    """Qualified name of its Python type, where that was recorded."""


@dataclass(frozen=True, kw_only=True)
class DataEvent(ObjectEvent):
    """A value of the task."""

    kind: ClassVar[str] = "object.data"


@dataclass(frozen=True, kw_only=True)
class ConfigEvent(ObjectEvent):
    """A setting."""

    kind: ClassVar[str] = "object.config"


@dataclass(frozen=True, kw_only=True)
class MessageEvent(AgentEvent):
    """A message to or from an agent."""

    kind: ClassVar[str] = "message"
    text: str = ""
    role: str = "user"
    """As the model's API names it: system, user, assistant, tool."""
    sender: str | None = None
    """Of an agent's message, the agent's name."""


@dataclass(frozen=True, kw_only=True)
class UserMessage(MessageEvent):
    """A message to an agent: from its user, its system prompt, or a tool that answers."""

    kind: ClassVar[str] = "message.user"


@dataclass(frozen=True, kw_only=True)
class AgentReply(MessageEvent):
    """A message from an agent."""

    kind: ClassVar[str] = "message.reply"
    role: str = "assistant"


@dataclass(frozen=True, kw_only=True)
class ToolCall(MessageEvent):
    """An agent called a tool; `text` holds the arguments as they were written, usually JSON."""

    kind: ClassVar[str] = "message.tool_call"
    role: str = "assistant"
    tool: str = ""
    call_id: str | None = None
    """The same in the model's answer and in the span of the tool's work."""
    result: str | None = None
    """What the tool returned, where the span says so."""


@dataclass(frozen=True, kw_only=True)
class RewardEvent(AgentEvent):
    """A reward."""

    kind: ClassVar[str] = "reward"
    value: float = 0.0
    """The reward; of several, the primary one."""


@dataclass(frozen=True, kw_only=True)
class NumericReward(RewardEvent):
    """A reward on a scale."""

    kind: ClassVar[str] = "reward.numeric"


@dataclass(frozen=True, kw_only=True)
class BinaryReward(RewardEvent):
    """A reward of yes (1.0) or no (0.0)."""

    kind: ClassVar[str] = "reward.binary"

    @property
    def is_success(self) -> bool:
        return bool(self.value)


@dataclass(frozen=True)
class NamedReward:
    """One reward of several."""

    name: str
    value: float


@dataclass(frozen=True, kw_only=True)
class SequenceReward(RewardEvent):
    """Several rewards, the primary one first."""

    kind: ClassVar[str] = "reward.sequence"
    rewards: tuple[NamedReward, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StateEvent(AgentEvent):
    """The work that `span_name` names has changed its state."""

    kind: ClassVar[str] = "state"


@dataclass(frozen=True, kw_only=True)
class StartEvent(StateEvent):
    """Work began."""

    kind: ClassVar[str] = "state.start"


@dataclass(frozen=True, kw_only=True)
class CompleteEvent(StateEvent):
    """Work ended well."""

    kind: ClassVar[str] = "state.complete"


@dataclass(frozen=True, kw_only=True)
class ErrorEvent(StateEvent):
    """Work failed, or an exception was reported."""

    kind: ClassVar[str] = "state.error"
    error_type: str | None = None
    message: str = ""
