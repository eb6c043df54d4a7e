"""DATA — what flows through Agent Lightning: rollouts, attempts, spans, resources, runs, pages and notices."""

from agentlightning.types import core as _core
from agentlightning.types import notice as _notice
from agentlightning.types import paging as _paging
from agentlightning.types import resources as _resources
from agentlightning.types import run as _run
from agentlightning.types import tracer as _tracer
from agentlightning.types.core import *
from agentlightning.types.notice import *
from agentlightning.types.paging import *
from agentlightning.types.resources import *
from agentlightning.types.run import *
from agentlightning.types.tracer import *

__all__ = [
    *_core.__all__,
    *_resources.__all__,
    *_tracer.__all__,
    *_paging.__all__,
    *_run.__all__,
    *_notice.__all__,
]
