"""Reading: the spans of an attempt become what an algorithm wants."""

from agentlightning.adapter.base import Adapter, OtelTraceAdapter, TraceAdapter
from agentlightning.adapter.messages import OpenAIMessages, TraceToMessages
from agentlightning.adapter.trajectory import (
    Break,
    BreakReason,
    DroppedCall,
    DropReason,
    SampledCall,
    TokenSequence,
    TraceReport,
    TraceToTrajectory,
    Trajectory,
    read_jsonl,
    write_jsonl,
)
from agentlightning.adapter.triplet import (
    Framework,
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TraceToTriplet,
    TraceToTripletBase,
    TraceTree,
    Transition,
    auto_adapter,
    detect_framework,
)

__all__ = [
    "TraceAdapter",
    "OtelTraceAdapter",
    "Adapter",
    "TraceToTripletBase",
    "TracerTraceToTriplet",
    "LlmProxyTraceToTriplet",
    "TraceToMessages",
    "TraceToTriplet",
    "TraceToTrajectory",
    "TraceTree",
    "Transition",
    "RewardMatchPolicy",
    "Framework",
    "auto_adapter",
    "detect_framework",
    "OpenAIMessages",
    "Trajectory",
    "TokenSequence",
    "SampledCall",
    "Break",
    "BreakReason",
    "DroppedCall",
    "DropReason",
    "TraceReport",
    "read_jsonl",
    "write_jsonl",
]
