"""Door to the rewards of `agentlightning.emitter`, from before they had a room; importing it warns.

`agentlightning.reward` is also the name of a decorator, so the module itself can be called like it.
"""

import sys
from types import ModuleType
from typing import Any

from agentlightning.emitter.reward import (
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward,
)
from agentlightning.utils.deprecation import deprecated

__all__ = [
    "reward",
    "emit_reward",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "find_reward_spans",
    "find_final_reward",
]


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return reward(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
deprecated("agentlightning.reward has moved; import from agentlightning.emitter.")
