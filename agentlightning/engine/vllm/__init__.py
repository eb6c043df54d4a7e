"""vLLM as the engine of a training: started by it, or joined by its address."""

from agentlightning.engine.vllm.options import VllmOptions

__all__ = ["VllmOptions"]
