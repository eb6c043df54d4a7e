"""Attribute names by which an event that was written as a span is read back as the same event."""

from typing import Final

from agentlightning.semconv import AGL_EVENT_KIND

EVENT_KIND: Final = AGL_EVENT_KIND
"""The event's `kind`; readers that do not know it see an ordinary message, object or reward."""
MESSAGE_ROLE: Final = "agentlightning.message.role"
MESSAGE_SENDER: Final = "agentlightning.message.sender"
TOOL_NAME: Final = "agentlightning.message.tool"
TOOL_CALL_ID: Final = "agentlightning.message.tool_call_id"
TOOL_RESULT: Final = "agentlightning.message.tool_result"
AGENT_NAME: Final = "agent.name"
OLD_MESSAGE: Final = "message"
OLD_OBJECT: Final = "object"
