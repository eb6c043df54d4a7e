"""Signals that end a training: Ctrl-C raises at the end; SIGTERM lets `fit` return, however often it comes."""

import signal
import subprocess
import sys

import pytest

from tests import warm_python

SCRIPT = """
import asyncio, sys
import agentlightning as agl

@agl.algo
async def saving(*, store):
    try:
        print("ready", flush=True)
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        print("saving", flush=True)
        await asyncio.sleep(1)  # in which a second signal comes
        print("saved", flush=True)
        raise

def main():
    main_process = sys.argv[1].partition("-")[2]
    strategy = agl.SharedMemoryExecutionStrategy() if sys.argv[1] == "shm" else agl.ClientServerExecutionStrategy(
        server_port=0, main_process=main_process)
    trainer = agl.Trainer(algorithm=saving, strategy=strategy, progress="off")
    try:
        trainer.fit(agl.rollout(lambda task: 1.0))
    finally:
        (run,) = asyncio.run(trainer.store.query_runs()) if main_process != "runner" else [trainer]
        print(getattr(run, "status", "in the other process"), flush=True)
    print("deployed", flush=True)

if __name__ == "__main__":
    main()
"""
PLACES = ["shm", "cs-algorithm", "cs-runner"]


def lines_after(place: str, *signals: signal.Signals) -> tuple[int, list[str], str]:
    """The exit code, the lines and the errors of a program that gets the first signal when ready, others later."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, place]
    program = warm_python.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    lines = []
    try:
        for number in signals:
            lines.append(program.stdout.readline().strip())
            program.send_signal(number)
        rest, errors = program.communicate(timeout=60)
    finally:
        program.kill()
        program.communicate()
    return program.returncode, [*lines, *rest.split()], errors


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_is_raised_when_everything_has_ended(place: str) -> None:
    code, lines, errors = lines_after(place, signal.SIGINT)

    assert code == -signal.SIGINT, errors  # as Python ends, which a shell calls 130
    assert lines[:3] == ["ready", "saving", "saved"]
    assert "deployed" not in lines
    assert place == "cs-runner" or lines[-1] == "stopped"
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("count", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("place", PLACES)
def test_sigterm_lets_fit_return_and_does_not_break_off_what_saves(place: str, count: int) -> None:
    code, lines, errors = lines_after(place, *[signal.SIGTERM] * count)

    assert code == 0, errors
    assert lines[:3] == ["ready", "saving", "saved"]
    assert lines[-1] == "deployed"  # the program decides what it does after `fit`
    assert place == "cs-runner" or lines[-2] == "stopped"
    assert "Traceback" not in errors


def test_second_ctrl_c_does_not_wait() -> None:
    code, lines, errors = lines_after("cs-algorithm", signal.SIGINT, signal.SIGINT)

    assert code == -signal.SIGINT
    assert lines == ["ready", "saving", "stopped"]
    assert errors.count("press it again not to wait") == 1
