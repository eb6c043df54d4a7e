"""DATA — what flows through Agent Lightning: rollouts, attempts, spans, resources, runs, pages and notices."""

from agentlightning.types import agents, core, paging, records, resources, tracer
from agentlightning.types.agents import *
from agentlightning.types.core import *
from agentlightning.types.paging import *
from agentlightning.types.records import *
from agentlightning.types.resources import *
from agentlightning.types.tracer import *

__all__ = [name for module in (agents, core, paging, records, resources, tracer) for name in module.__all__]
