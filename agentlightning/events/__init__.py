"""Typed views of spans: what happened, which agent did it, and its reward; filtered, summed up, streamed."""

from agentlightning.events.advice import *
from agentlightning.events.event import *
from agentlightning.events.spans import *
from agentlightning.events.streaming import *
from agentlightning.events.views import *
