"""Agent Lightning makes any AI agent learn: `import agentlightning as agl`.

The public names are loaded on first touch from one table, so that importing the package is quick and pulls in nothing
that is not used.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from agentlightning.utils.deprecation import missing_name

if TYPE_CHECKING:
    from agentlightning.adapter import *
    from agentlightning.client import AgentLightningClient as AgentLightningClient
    from agentlightning.client import DevTaskLoader as DevTaskLoader
    from agentlightning.emitter import *
    from agentlightning.env_var import *
    from agentlightning.logging import configure_logger as configure_logger
    from agentlightning.logging import setup as setup_logging  # noqa: F401 # a public name
    from agentlightning.logging import setup_module as setup_module_logging  # noqa: F401 # a public name
    from agentlightning.server import AgentLightningServer as AgentLightningServer
    from agentlightning.store import *
    from agentlightning.tracer import *
    from agentlightning.types import *

__version__ = "0.4.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "agentlightning.adapter": (
        *("TraceAdapter", "OtelTraceAdapter", "Adapter", "TraceToTripletBase", "TracerTraceToTriplet"),
        *("LlmProxyTraceToTriplet", "TraceToMessages", "TraceToTriplet", "TraceToTrajectory", "Trajectory"),
        "TraceReport",
    ),
    "agentlightning.algorithm": (
        *("Algorithm", "algo", "FastAlgorithm", "Baseline"),
        *("APO", "Distil", "GEPA", "GRPO", "SFT", "VERL", "OptimisationBudget"),
    ),
    "agentlightning.client": ("AgentLightningClient", "DevTaskLoader"),
    "agentlightning.config": ("lightning_cli",),
    "agentlightning.execution": (
        *("ExecutionStrategy", "ClientServerExecutionStrategy", "ExecutionEvent", "ThreadingEvent"),
        *("MultiprocessingEvent", "SharedMemoryExecutionStrategy", "RayExecutionStrategy"),
    ),
    "agentlightning.litagent": (
        *("LitAgent", "llm_rollout", "prompt_rollout", "rollout", "CommandAgent", "AgentRouter", "Route"),
        *("resources_for", "exclude_from_redirect", "not_redirected"),
    ),
    "agentlightning.llm_proxy": ("LLMProxy", "Budget"),
    "agentlightning.runner": ("Runner", "LitAgentRunner"),
    "agentlightning.runner.legacy": ("LegacyAgentRunner",),
    "agentlightning.trainer": ("Trainer", "build_component"),
    "agentlightning.server": ("AgentLightningServer",),
    "agentlightning.emitter": (
        *("reward", "emit_reward", "get_reward_value", "get_rewards_from_span", "is_reward_span", "find_reward_spans"),
        *("find_final_reward", "emit_message", "emit_conversation", "get_message_value", "emit_object"),
        *("encode_object", "get_object_value", "emit_exception", "emit_annotation", "operation", "OperationContext"),
        *("EmittedSpan",),
    ),
    "agentlightning.env_var": (
        "LightningEnvVar",
        "resolve_bool_env_var",
        "resolve_int_env_var",
        "resolve_str_env_var",
    ),
    "agentlightning.logging": ("configure_logger",),
    "agentlightning.store": (
        "UNSET",
        "Unset",
        "LightningStore",
        "LightningStoreCapabilities",
        "LightningStoreStatistics",
        "LightningStoreThreaded",
        "LightningStoreClient",
        "LightningStoreServer",
        "InMemoryLightningStore",
        "SqliteLightningStore",
        "SQLiteLightningStore",
        "BlockingStore",
        "export_store",
        "import_store",
    ),
    "agentlightning.tracer": (
        *("AgentOpsTracer", "Tracer", "OtelTracer", "DummyTracer"),
        *("get_active_tracer", "set_active_tracer", "clear_active_tracer"),
    ),
    "agentlightning.types": (
        *("Triplet", "RolloutLegacy", "Task", "TaskInput", "TaskIfAny", "RolloutRawResultLegacy", "RolloutRawResult"),
        *("RolloutMode", "GenericResponse", "ParallelWorkerBase", "Dataset", "AttemptStatus", "RolloutStatus"),
        *("RolloutConfig", "Rollout", "Attempt", "AttemptedRollout", "EnqueueRolloutRequest"),
        *("RenewedWorker", "Worker", "WorkerStatus"),
        *("Hook", "Resource", "LLM", "ProxyLLM", "PromptTemplate", "ResourceUnion", "NamedResources"),
        *("ResourcesUpdate", "AttributeValue", "Attributes", "TraceState", "SpanContext", "StatusCode", "TraceStatus"),
        *("Event", "Link", "OtelResource", "Span", "SpanCoreFields", "SpanRecordingContext", "SpanNames"),
        *("SpanAttributeNames", "SpanLike", "PaginatedResult", "FilterOptions", "FilterField", "SortOptions"),
        *("FilterLogic", "SortOrder", "Run", "RunStatus", "MetricPoint", "Notice", "NoticeKind", "NOTICE_KINDS"),
        *("AgentMatcher", "AgentRule"),
    ),
}
_RENAMED = {
    "setup_logging": ("agentlightning.logging", "setup"),
    "setup_module_logging": ("agentlightning.logging", "setup_module"),
}
_HOME_OF = {name: (home, name) for home, names in _HOMES.items() for name in names} | _RENAMED

# `import *` loads everything: without torch, all but what cannot be loaded then.
_HAS_TORCH = importlib.util.find_spec("torch") is not None

__all__ = ["__version__", *(name for name in _HOME_OF if _HAS_TORCH or name not in ("Distil", "GRPO", "SFT"))]


_PACKAGES = frozenset(
    [
        *("adapter", "algorithm", "emitter", "errors", "events", "execution", "instrumentation", "litagent", "runner"),
        *("engine", "llm_proxy", "verl", "semconv", "store", "tracer", "trainer", "types"),
    ]
)


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"agentlightning.{name}")
    if name not in _HOME_OF:
        raise missing_name(__name__, name)
    home, original = _HOME_OF[name]
    value = getattr(importlib.import_module(home), original)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
