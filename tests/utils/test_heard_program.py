"""Programs that are listened to, on the streams that come to us and on no other."""

import asyncio
import sys
from collections.abc import Sequence

import pytest

from agentlightning.utils.heard_program import STDERR, STDOUT, HeardProgram, Listening, happens

SCRIPT = "import sys; print('spoken'); print('shouted', file=sys.stderr); sys.exit(3)"
PATIENCE_SECONDS = 30.0


async def ended(heard: Sequence[int]) -> tuple[HeardProgram, Listening]:
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    transport, protocol = await asyncio.get_running_loop().subprocess_exec(
        lambda: Listening(heard),
        *(sys.executable, "-c", SCRIPT),
        stdin=nowhere,
        stdout=pipe if STDOUT in heard else nowhere,
        stderr=pipe if STDERR in heard else nowhere,
    )
    program = HeardProgram(transport, protocol)
    try:
        await asyncio.wait_for(program.wait(), PATIENCE_SECONDS)
        await happens(protocol.silent, PATIENCE_SECONDS)
    finally:
        transport.close()
    return program, protocol


@pytest.mark.parametrize("heard", [(), (STDOUT,), (STDERR,), (STDOUT, STDERR)], ids=["none", "out", "err", "both"])
async def test_what_is_heard_is_kept_and_the_end_is_noted(heard: Sequence[int]) -> None:
    program, protocol = await ended(heard)

    said = [None if text is None else text.text().strip() for text in (program.stdout, program.stderr)]
    assert said == ["spoken" if STDOUT in heard else None, "shouted" if STDERR in heard else None]
    assert program.exit_code == 3
    assert protocol.silent.is_set()


async def test_the_duration_stands_still_after_the_end() -> None:
    program, _ = await ended(())

    assert 0 < program.duration_seconds == program.duration_seconds


async def test_what_does_not_happen_is_not_waited_for_for_ever() -> None:
    never = asyncio.Event()

    await asyncio.wait_for(happens(never, 0.01), PATIENCE_SECONDS)

    assert not never.is_set()
