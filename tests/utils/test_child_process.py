"""Programs whose output is captured, on the streams that come to us and on no other."""

import asyncio
import sys
from collections.abc import Sequence

import pytest

from agentlightning.utils.child_process import STDERR, STDOUT, CapturedProcess, wait_for_event

SCRIPT = "import sys; print('spoken'); print('shouted', file=sys.stderr); sys.exit(3)"
PATIENCE_SECONDS = 30.0


@pytest.mark.parametrize("captured", [(), (STDOUT,), (STDOUT, STDERR)], ids=["none", "out", "both"])
async def test_what_is_captured_is_kept_and_the_end_is_noted(captured: Sequence[int]) -> None:
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    transport, program = await asyncio.get_running_loop().subprocess_exec(
        lambda: CapturedProcess(captured),
        *(sys.executable, "-c", SCRIPT),
        stdin=nowhere,
        stdout=pipe if STDOUT in captured else nowhere,
        stderr=pipe if STDERR in captured else nowhere,
    )
    await asyncio.wait_for(program.wait(), PATIENCE_SECONDS)
    await asyncio.wait_for(program.streams_closed.wait(), PATIENCE_SECONDS)
    transport.close()

    kept = [None if text is None else text.text().strip() for text in (program.stdout, program.stderr)]
    assert kept == ["spoken" if STDOUT in captured else None, "shouted" if STDERR in captured else None]
    assert program.exit_code == 3
    assert 0 < program.duration_seconds == program.duration_seconds  # it stands still after the end


async def test_what_does_not_happen_is_not_waited_for_for_ever() -> None:
    never = asyncio.Event()

    await asyncio.wait_for(wait_for_event(never, 0.01), PATIENCE_SECONDS)

    assert not never.is_set()
