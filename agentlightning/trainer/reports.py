"""Reports: while a training runs, its run in the store is told so, from a thread that the algorithm cannot hold up.

A run whose training was killed cannot be closed by it. It promised to report when it was opened, so whoever reads it
after five minutes without a report sees it as lost.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import RUN_REPORTS
from agentlightning.utils.loop_thread import LoopThread

__all__ = ["PROMISE", "reporting"]

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 30.0
PROMISE: Final[dict[str, Any]] = {RUN_REPORTS: {"interval_seconds": REPORT_SECONDS}}
"""In the metadata of a run that will report."""


@contextmanager
def reporting(store: LightningStore, name: str, run_id: str | None) -> Iterator[None]:
    """Report on a run while the context lasts; on none, if there is none."""
    if run_id is None:
        yield
        return
    thread = LoopThread("run-reports")
    reports = thread.start_soon(_report(store, name, run_id))
    try:
        yield
    finally:
        reports.cancel()
        thread.stop()


async def _report(store: LightningStore, name: str, run_id: str) -> None:
    has_failed = False
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        try:
            await store.start_run(name, run_id=run_id)
            has_failed = False
        except Exception as error:  # noqa: BLE001 # the next report may succeed
            if not has_failed:
                logger.warning("Run %s could not report to the store: %s", run_id, error)
            has_failed = True
