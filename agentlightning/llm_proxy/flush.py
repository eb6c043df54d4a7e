"""Waiting until the proxies of an attempt have stored its calls, before the attempt is finished.

A proxy stores a call before the end of its answer, and says so in the answer. Only calls of which nobody here knows
that, such as those of a program in another language or those made while the store was away, need a request to the
proxy. Calls that were lost are noted on the attempt; `agl run` shows them to its user.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agentlightning.dialects import DIALECTS
from agentlightning.instrumentation.otel_internals import attributes_of
from agentlightning.semconv import RECORDED_AS
from agentlightning.types import ProxyLLM, Rollout
from agentlightning.types.tracer import SpanLike

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 15.0
_OK: Final = 200
_MODEL_CALLS: Final = frozenset(dialect.span_name for dialect in DIALECTS.values())


@dataclass
class FlushedCalls:
    """What the proxies of an attempt report of its calls."""

    stored: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    """How many, by reason."""
    unanswered: int = 0
    """Calls that were still under way."""
    unknown_proxies: int = 0
    """Gateways of another make, which report nothing."""


def are_recorded(spans: Iterable[SpanLike]) -> bool:
    """Whether a trace has model calls, and the answer of each says that the proxy has recorded it."""
    calls = [attributes_of(span) for span in spans if span.name in _MODEL_CALLS]
    return bool(calls) and all(RECORDED_AS in attributes for attributes in calls)


async def flush_calls(llms: Iterable[ProxyLLM], rollout: Rollout, attempt_id: str) -> FlushedCalls:
    """Wait until the proxies of an attempt have stored its calls; never raises."""
    flushed = FlushedCalls()
    keys_by_url: dict[str, str | None] = {}
    for llm in llms:
        url = llm.get_base_url(rollout.rollout_id, attempt_id).removesuffix("/v1") + "/agl/flush"
        keys_by_url.setdefault(url, llm.get_api_key(rollout.rollout_id, attempt_id))
    import aiohttp

    for url, key in keys_by_url.items():
        try:
            await _flush(url, {} if key is None else {"Authorization": f"Bearer {key}"}, flushed)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError, TypeError, AttributeError) as error:
            logger.warning("The LLM proxy at %s cannot say whether its calls are stored: %s", url, error)
            reason = ": ".join(filter(None, (type(error).__name__, str(error))))
            flushed.lost[f"the proxy could not be asked: {reason}"] = 0
    return flushed


async def _flush(url: str, headers: Mapping[str, str], flushed: FlushedCalls) -> None:
    """Add a proxy's report of the calls, once it has stored them."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
        session.post(url, headers=headers) as response,
    ):
        if response.status in (404, 405):
            flushed.unknown_proxies += 1
            return
        if response.status != _OK:
            raise OSError(f"it answered {response.status}")
        report = await response.json()
    flushed.stored += int(report.get("stored") or 0)
    flushed.unanswered += int(report.get("in_flight") or 0)
    lost = dict(report.get("lost") or {})
    if report.get("waiting"):
        lost["not stored yet"] = report["waiting"]
    for reason, count in lost.items():
        flushed.lost[str(reason)] = flushed.lost.get(str(reason), 0) + int(count)
