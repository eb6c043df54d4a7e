"""Translation between the dialects of agents and backends: functions of JSON and events, without any network.

The gateway decides which dialect a client and a backend speak, and asks `translation` for the pair.
"""

from agentlightning.llm_proxy.translation.table import translation
from agentlightning.llm_proxy.translation.terms import (
    InvalidAnswer,
    StreamTranslation,
    Translation,
    UntranslatableDialect,
    UntranslatableRequest,
)

__all__ = [
    "InvalidAnswer",
    "StreamTranslation",
    "Translation",
    "UntranslatableDialect",
    "UntranslatableRequest",
    "translation",
]
