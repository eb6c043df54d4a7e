"""Calls that are made again after a failure: one loop for every client of the package, and a policy for each.

A policy is data: which failures pass, how long to wait after each, and when to give up. A call that is made again must
be harmless if it arrived the first time; that is the caller's business.
"""

import asyncio
import contextlib
import email.utils
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeVar

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When a failed call is made again."""

    is_passing: Callable[[Exception], bool]
    """Whether the same call may succeed a little later."""
    delays: Sequence[float]
    """Seconds before the second call, the third, and so on; the last stands for all that follow."""
    tries: float | None = None
    """Calls at most; by default one more than there are delays."""
    is_outage: Callable[[Exception], bool] | None = None
    """Whether patience decides about a failure that passes, in the place of `tries`."""
    outage_seconds: float = math.inf
    """Patience: time from the first failure of a series within which an outage must end."""
    has_begun: Callable[[Exception, float], bool] | None = None
    """Whether a call that failed after so many seconds had begun to wait: its failure is the first of a new series."""
    requested_seconds: Callable[[Exception], float | None] | None = None
    """How long the other side wants to be left alone, which goes before `delays`."""
    jitter: float = 0.0
    """The share by which delays differ from what they are, at random."""

    def delay(self, error: Exception, failures: int, seconds: float) -> float | None:
        """Seconds until the next call; None if there shall be none.

        Args:
            failures: Of this series, this one included.
            seconds: Since the first of them.
        """
        if not self.is_passing(error) or not self.delays:
            return None
        delay = None if self.requested_seconds is None else self.requested_seconds(error)
        if delay is None:
            delay = self.delays[min(failures, len(self.delays)) - 1] * random.uniform(1 - self.jitter, 1 + self.jitter)
        tries = len(self.delays) + 1 if self.tries is None else self.tries
        may_last = self.is_outage is not None and self.is_outage(error) and seconds + delay < self.outage_seconds
        return delay if may_last or failures < tries else None


async def retry(
    call: Callable[[], Awaitable[ResultT]],
    policy: RetryPolicy,
    *,
    recovers: Callable[[float], Awaitable[bool]] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> ResultT:
    """Call until that succeeds; the last failure is raised.

    Args:
        recovers: Awaited before each further call, with the seconds of patience that are left; False gives up.
    """
    failures, first = 0, 0.0
    while True:
        began = time.monotonic()
        try:
            return await call()
        except Exception as error:
            now = time.monotonic()
            if failures == 0 or (policy.has_begun is not None and policy.has_begun(error, now - began)):
                failures, first = 0, now
            failures += 1
            delay = policy.delay(error, failures, now - first)
            if delay is None or not (recovers is None or await recovers(first + policy.outage_seconds - now)):
                raise
        if delay > 0:
            await sleep(delay)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """How long a server asks to wait, in seconds, milliseconds or by a date; None if it does not say."""
    text = headers.get("retry-after", "")
    for value, unit in ((headers.get("retry-after-ms", ""), 1e-3), (text, 1.0)):
        with contextlib.suppress(ValueError):
            return max(0.0, float(value) * unit)  # 0 for what is not a number
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    seconds = (moment.replace(tzinfo=moment.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    return max(0.0, seconds)
