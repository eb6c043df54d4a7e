"""Programs whose output is captured, on the streams that come to us and on no other."""

import asyncio
import sys
from collections.abc import Sequence

import pytest

from agentlightning.utils.child_process import STDERR, STDOUT, CapturedProcess, OutputCapture, wait_for_event

SCRIPT = "import sys; print('spoken'); print('shouted', file=sys.stderr); sys.exit(3)"
PATIENCE_SECONDS = 30.0


async def ended(captured: Sequence[int]) -> tuple[CapturedProcess, OutputCapture]:
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    transport, protocol = await asyncio.get_running_loop().subprocess_exec(
        lambda: OutputCapture(captured),
        *(sys.executable, "-c", SCRIPT),
        stdin=nowhere,
        stdout=pipe if STDOUT in captured else nowhere,
        stderr=pipe if STDERR in captured else nowhere,
    )
    program = CapturedProcess(transport, protocol)
    try:
        await asyncio.wait_for(program.wait(), PATIENCE_SECONDS)
        await wait_for_event(protocol.streams_closed, PATIENCE_SECONDS)
    finally:
        transport.close()
    return program, protocol


@pytest.mark.parametrize("captured", [(), (STDOUT,), (STDERR,), (STDOUT, STDERR)], ids=["none", "out", "err", "both"])
async def test_what_is_captured_is_kept_and_the_end_is_noted(captured: Sequence[int]) -> None:
    program, protocol = await ended(captured)

    said = [None if text is None else text.text().strip() for text in (program.stdout, program.stderr)]
    assert said == ["spoken" if STDOUT in captured else None, "shouted" if STDERR in captured else None]
    assert program.exit_code == 3
    assert protocol.streams_closed.is_set()


async def test_the_duration_stands_still_after_the_end() -> None:
    program, _ = await ended(())

    assert 0 < program.duration_seconds == program.duration_seconds


async def test_what_does_not_happen_is_not_waited_for_for_ever() -> None:
    never = asyncio.Event()

    await asyncio.wait_for(wait_for_event(never, 0.01), PATIENCE_SECONDS)

    assert not never.is_set()
