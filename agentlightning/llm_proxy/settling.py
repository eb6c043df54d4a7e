"""Asking a proxy whether the calls of an attempt are stored, before the attempt is said to be over.

A proxy writes behind its answers. Whoever waits for a rollout to finish will look for its spans at once, so a runner
asks for them first. Of calls that were lost the attempt shall tell; `agl run` asks too, and tells its user.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.types import ProxyLLM, Rollout

__all__ = ["SettledCalls", "settle_calls"]

logger = logging.getLogger(__name__)

FLUSH_PATH: Final = "/agl/flush"
PATIENCE_SECONDS: Final = 15.0
_OK: Final = 200
_NOT_OURS: Final = (404, 405)


@dataclass
class SettledCalls:
    """What the proxies of an attempt say of its calls."""

    stored: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    """How many, by reason."""
    unanswered: int = 0
    """Calls that were still under way."""
    silent_proxies: int = 0
    """Gateways of another make, which say nothing of calls."""


async def settle_calls(llms: Iterable[ProxyLLM], rollout: Rollout, attempt_id: str) -> SettledCalls:
    """Wait until the proxies of an attempt have stored its calls; never raises."""
    settled = SettledCalls()
    asked: set[str] = set()
    for llm in llms:
        url = llm.get_base_url(rollout.rollout_id, attempt_id).removesuffix("/v1") + FLUSH_PATH
        if url in asked:
            continue
        asked.add(url)
        try:
            told = await _flush(url, _headers(llm, rollout.rollout_id, attempt_id))
            if told is None:
                settled.silent_proxies += 1
            else:
                _add(settled, told)
        except Exception as error:  # noqa: BLE001 # whatever it is: the attempt is over all the same, and says so
            logger.warning("The LLM proxy at %s cannot say whether its calls are stored: %s", url, error)
            words = ": ".join(filter(None, (type(error).__name__, str(error))))
            settled.lost[f"the proxy could not be asked: {words}"] = 0
    return settled


def _headers(llm: ProxyLLM, rollout_id: str, attempt_id: str) -> dict[str, str]:
    key = llm.get_api_key(rollout_id, attempt_id)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def _flush(url: str, headers: Mapping[str, str]) -> Mapping[str, Any] | None:
    """What a proxy says of the calls, once it has stored them; None if it is none of ours."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
        session.post(url, headers=headers) as answer,
    ):
        if answer.status in _NOT_OURS:
            return None
        if answer.status != _OK:
            raise OSError(f"it answered {answer.status}")
        told: Mapping[str, Any] = await answer.json()
        return told


def _add(settled: SettledCalls, told: Mapping[str, Any]) -> None:
    settled.stored += int(told.get("stored") or 0)
    settled.unanswered += int(told.get("in_flight") or 0)
    for reason, count in (told.get("lost") or {}).items():
        settled.lost[str(reason)] = settled.lost.get(str(reason), 0) + int(count)
    if told.get("waiting"):
        reason = "not stored yet"
        settled.lost[reason] = settled.lost.get(reason, 0) + int(told["waiting"])
