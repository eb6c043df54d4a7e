"""A second SIGTERM interrupts an algorithm that does not stop, whether it blocks its event loop or keeps it busy."""

import signal
import subprocess
import sys

import pytest

from tests import warm_python

SCRIPT = """
import asyncio, sys, time
from agentlightning.trainer.control import stopped_by_sigterm

async def block():
    print("ready", flush=True)
    while True:  # Python sees a signal that comes just before a sleep when the sleep is over
        time.sleep(0.05)

async def spin():
    print("ready", flush=True)
    while True:
        await asyncio.sleep(0)

async def main():
    await asyncio.create_task({"block": block, "spin": spin}[sys.argv[1]]())

with stopped_by_sigterm(stop=lambda: print("stopping", flush=True), is_running=lambda: True):
    asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["block", "spin"])
def test_second_sigterm_interrupts_and_is_not_reported_as_a_failure(way: str) -> None:
    program = warm_python.Popen(
        [sys.executable, "-c", SCRIPT, way], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    try:
        for line in ("ready\n", "stopping\n"):  # two signals that come at once are one
            assert program.stdout.readline() == line
            program.send_signal(signal.SIGTERM)
        _, written = program.communicate(timeout=30)
    finally:
        program.kill()
        program.communicate()

    assert program.returncode == 128 + signal.SIGTERM
    assert way == "block" or written == ""
