"""Public path of the legacy runner, which lives in `agentlightning.legacy`; new code uses `LitAgentRunner`.

Importing is silent: the runner says that it is deprecated when it is constructed.
"""

from agentlightning.legacy.runner import LegacyAgentRunner

__all__ = ["LegacyAgentRunner"]
