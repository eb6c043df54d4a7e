"""The LLM proxy: a gateway through which every model call of a rollout goes, and is recorded.

`LLMProxy` serves OpenAI's chat completions, completions, responses and embeddings and Anthropic's messages to agents
in any language, from backends that speak any of these. `agl proxy` runs it alone.
"""

import pkgutil
from typing import TYPE_CHECKING

from agentlightning.utils.deprecation import missing_name

if TYPE_CHECKING:
    from agentlightning.llm_proxy.budgets import Budget
    from agentlightning.llm_proxy.proxy import LLMProxy, ModelConfig, get_active_llm_proxy, set_active_llm_proxy

__all__ = [
    "Budget",
    "LLMProxy",
    "ModelConfig",
    "get_active_llm_proxy",
    "set_active_llm_proxy",
]

# Opened on first touch: a runner asks a proxy whether its calls are stored, and needs no gateway for that.
_HOME_OF = {
    "Budget": "llm_proxy.budgets",
    "LLMProxy": "llm_proxy.proxy",
    "ModelConfig": "llm_proxy.proxy",
    "get_active_llm_proxy": "llm_proxy.proxy",
    "set_active_llm_proxy": "llm_proxy.proxy",
}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return pkgutil.resolve_name(f"agentlightning.{_HOME_OF[name]}:{name}")
    raise missing_name(__name__, name)
