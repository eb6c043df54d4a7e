"""Whether a stop of the process is noticed: a real one, in a process of its own."""

import os
import signal
import subprocess
import sys
import time

import pytest

from agentlightning.utils import suspension
from agentlightning.utils.suspension import GAP_SECONDS, Suspensions

PROGRAM = """
import sys
from agentlightning.utils import suspension
suspension.GAP_SECONDS, suspension.TICK_SECONDS = 0.5, 0.05

class Owner:
    def is_wanted(self):
        return True

owner = Owner()
suspensions = suspension.Suspensions(owner.is_wanted)
suspensions.start()
for line in sys.stdin:
    print(suspensions.count(), flush=True)
"""


class Owner:
    wants = True

    def is_wanted(self) -> bool:
        return self.wants


def test_a_stopped_process_notices_it_when_it_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        before = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)  # this is the stop
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        after = int(process.stdout.readline())
        process.stdin.close()

    assert after > before


def test_a_clock_that_was_set_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    suspensions = Suspensions(owner.is_wanted)
    suspensions.start()
    before = suspensions.count()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * GAP_SECONDS)

    assert suspensions.count() == before + 1
    owner.wants = False


def test_thread_ends_with_its_owner_or_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspension, "TICK_SECONDS", 0.01)
    bored, gone = Owner(), Owner()
    both = [Suspensions(bored.is_wanted), Suspensions(gone.is_wanted)]
    for suspensions in both:
        suspensions.start()
    threads = [suspensions._thread for suspensions in both]

    bored.wants = False
    del gone

    for thread in threads:
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()
