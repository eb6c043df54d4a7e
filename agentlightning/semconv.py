"""Names of the spans and attributes Agent Lightning writes, so that writers and readers agree on the spelling.

Constants only: what a span means is decided where it is emitted and where it is read. Nested values are flattened with
dots and lists with indices, so the second reward of a span is found under `agentlightning.reward.1.name` and
`agentlightning.reward.1.value`.
"""

from enum import Enum
from typing import Final

from pydantic import BaseModel

__all__ = [
    "AGL_EVENT_KIND",
    "AGL_ANNOTATION",
    "AGL_MESSAGE",
    "AGL_OBJECT",
    "AGL_EXCEPTION",
    "AGL_OPERATION",
    "AGL_REWARD",
    "AGL_VIRTUAL",
    "LightningResourceAttributes",
    "LightningSpanAttributes",
    "RewardAttributes",
    "LinkAttributes",
    "RewardPydanticModel",
    "LinkPydanticModel",
]

AGL_ANNOTATION: Final = "agentlightning.annotation"
"""Span that carries attributes and nothing else; a reward of several dimensions is one."""

AGL_MESSAGE: Final = "agentlightning.message"
"""Span of `emit_message`."""

AGL_OBJECT: Final = "agentlightning.object"
"""Span of `emit_object`."""

AGL_EXCEPTION: Final = "agentlightning.exception"
"""Span of `emit_exception`."""

AGL_OPERATION: Final = "agentlightning.operation"
"""Span of a decorated function or `operation` block."""

AGL_REWARD: Final = "agentlightning.reward"
"""Span of `emit_reward`."""

AGL_VIRTUAL: Final = "agentlightning.virtual"
"""Span that nobody recorded, made up to hold others together."""

AGL_LATE: Final = "agentlightning.late"
"""Attribute that a store sets on a reward which came after its rollout had ended; no reader counts such a reward."""

AGL_EVENT_KIND: Final = "agentlightning.event.kind"
"""Attribute that holds the kind of event a span was written as, such as `reward.binary`."""

# ---------------------------------------------------------------------- model calls

CALL_SPAN: Final = "litellm_request"
"""Span that the LLM proxy writes for a call."""
RAW_SPAN: Final = "raw_gen_ai_request"
"""Span beneath it, which has the call as its provider saw it."""
PROXY: Final = "agentlightning.proxy"
"""Prefix of what the proxy knows of a call."""
RECORDED_AS: Final = f"{PROXY}.recorded_as"
"""Attribute of a tracer's call that the proxy recorded: the attempt, and the span of the proxy."""
PROMPT: Final = "gen_ai.prompt"
COMPLETION: Final = "gen_ai.completion"
PROMPT_IDS: Final = "prompt_token_ids"
RESPONSE_IDS: Final = "response_token_ids"
LOGPROBS: Final = "logprobs.content"
REFUSAL_LOGPROBS: Final = "logprobs.refusal"
VERSION_ATTRIBUTE: Final = "agentlightning.weights_version"
"""Which version of the weights answered, a number or a text."""
TOKEN_FACTS: Final = (PROMPT_IDS, RESPONSE_IDS, LOGPROBS, REFUSAL_LOGPROBS, VERSION_ATTRIBUTE)
"""All that is recorded of the tokens of a call."""
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
REQUEST_MODEL: Final = "gen_ai.request.model"
TOKENS_READ: Final = "gen_ai.usage.prompt_tokens"
TOKENS_WRITTEN: Final = "gen_ai.usage.completion_tokens"
TIME_TO_FIRST_TOKEN: Final = "gen_ai.streaming.time_to_first_token"
"""Seconds from the request to the first part of the answer."""
IS_CUT: Final = "agentlightning.response.is_cut"
"""Whether the caller stopped reading before the end."""
IS_EXCLUDED: Final = "agentlightning.redirect.is_excluded"
"""Whether the call was left alone where others go elsewhere: it is not of a model that is trained."""
AGENT_NAME: Final = "gen_ai.agent.name"
SPAN_AGENT: Final = "agent.name"
TOOL_NAME: Final = "tool.name"


class LightningResourceAttributes(str, Enum):
    """Attributes of the OpenTelemetry resource: to whom a span belongs."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
    TRACER_NAME = "agentlightning.tracer.name"


class LightningSpanAttributes(str, Enum):
    """Attributes of a span; those that hold several values are prefixes."""

    REWARD = "agentlightning.reward"
    """Prefix of a list of `RewardAttributes`, the primary reward first."""

    LINK = "agentlightning.link"
    """Prefix of a list of `LinkAttributes`."""

    TAG = "agentlightning.tag"
    """Prefix of a list of strings."""

    MESSAGE_BODY = "agentlightning.message.body"
    OBJECT_TYPE = "agentlightning.object.type"

    OBJECT_LITERAL = "agentlightning.object.literal"
    """A str, int, float or bool as it is, or bytes in base64."""

    OBJECT_JSON = "agentlightning.object.json"
    """Any other object, as JSON text."""

    OPERATION_NAME = "agentlightning.operation.name"

    OPERATION_INPUT = "agentlightning.operation.input"
    """Prefix of the operation's arguments."""

    OPERATION_OUTPUT = "agentlightning.operation.output"
    """The operation's result, or the prefix of its parts."""


class RewardAttributes(str, Enum):
    """What stands below `agentlightning.reward.{index}`."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class LinkAttributes(str, Enum):
    """What stands below `agentlightning.link.{index}`."""

    KEY_MATCH = "key_match"
    VALUE_MATCH = "value_match"


class RewardPydanticModel(BaseModel):
    """One reward, as read from a span."""

    name: str
    """What was judged; a lone reward is called `primary`."""

    value: float


class LinkPydanticModel(BaseModel):
    """A pointer to every span of which one attribute has one value."""

    key_match: str
    """Name of the attribute the linked span carries."""

    value_match: str
    """Value that attribute must have, as text."""
