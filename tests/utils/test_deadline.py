"""Awaiting within a limit."""

import asyncio

import pytest

from agentlightning.utils.deadline import within


async def test_what_comes_in_time_is_given() -> None:
    assert await within(10, asyncio.sleep(0, "here")) == "here"


async def test_what_is_late_is_cancelled() -> None:
    work = asyncio.ensure_future(asyncio.Event().wait())

    with pytest.raises(TimeoutError):
        await within(0.01, work)

    assert work.cancelled()
