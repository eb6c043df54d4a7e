"""The model's door: a gateway through which every model call of a rollout goes, and is recorded.

`LLMProxy` serves OpenAI's chat completions, completions, responses and embeddings and Anthropic's messages to agents
in any language, from backends that speak any of these. `agl proxy` runs it alone.
"""

from agentlightning.llm_proxy.active import get_active_llm_proxy, set_active_llm_proxy
from agentlightning.llm_proxy.budgets import Budget
from agentlightning.llm_proxy.proxy import LLMProxy, ModelConfig

__all__ = ["Budget", "LLMProxy", "ModelConfig", "get_active_llm_proxy", "set_active_llm_proxy"]
