"""Whether a stop of the process is noticed, a real one in another process, and that all processes count from it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import SqliteLightningStore, local
from agentlightning.store.local import GAP_SECONDS, Watchdog
from tests.contract.conftest import known

PROGRAM = """
import sys, time
from agentlightning.store import local
local.GAP_SECONDS, local.TICK_SECONDS = 0.5, 0.05

class Owner:
    def is_wanted(self):
        return True

owner = Owner()
watchdog = local.Watchdog(0.0, 0.0, owner.is_wanted)
watchdog.look(0.0, 0.0)
for line in sys.stdin:
    print(watchdog.look(0.0, time.time()).args[1], flush=True)
"""


class Owner:
    wants = True

    def is_wanted(self) -> bool:
        return self.wants


def resumed_time(watchdog: Watchdog, now: float) -> float:
    look = watchdog.look(0.0, now)
    assert look is not None
    resumed: float = look.args[1]
    return resumed


def test_a_stopped_process_notices_it_when_it_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        before = float(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)  # this is the stop
        went_on = time.time()
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        after = float(process.stdout.readline())
        process.stdin.close()

    assert before < went_on - 1.0
    assert after > went_on - 0.1


def test_a_clock_that_was_set_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    watchdog = Watchdog(0.0, 0.0, owner.is_wanted)
    watchdog.look(5.0, 5.0)
    before = resumed_time(watchdog, 10.0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * GAP_SECONDS)

    assert before < 0.0
    assert resumed_time(watchdog, 100.0) == pytest.approx(100.0, abs=1.0)
    assert resumed_time(watchdog, 200.0) == pytest.approx(100.0, abs=1.0)
    owner.wants = False


def test_thread_ends_with_its_owner_or_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TICK_SECONDS", 0.01)
    bored, gone = Owner(), Owner()
    both = [Watchdog(0.0, 0.0, bored.is_wanted), Watchdog(0.0, 0.0, gone.is_wanted)]
    for watchdog in both:
        watchdog.look(1.0, 0.0)
    threads = [watchdog._thread for watchdog in both]

    bored.wants = False
    del gone

    for thread in threads:
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()


# ---------------------------------------------------------------------- the floor that all processes share


async def claimed(store: SqliteLightningStore) -> str:
    rollout = await store.enqueue_rollout("task")
    await store.dequeue_rollout("w", heartbeat_interval=1)
    return rollout.rollout_id


async def status_of(store: SqliteLightningStore, rollout_id: str) -> str:
    return known(await store.get_rollout_by_id(rollout_id)).status


async def test_a_suspension_of_one_process_renews_the_leases_in_all(tmp_path: Path, clock: Any) -> None:
    async with (
        SqliteLightningStore(tmp_path / "s.db", clock=clock) as stopped,
        SqliteLightningStore(tmp_path / "s.db", clock=clock) as other,
    ):
        rollout_id = await claimed(stopped)
        await stopped.get_rollout_by_id(rollout_id)
        clock.advance(1000)
        stopped._watch._last_tick = (0.0, 0.0)  # as after a stop: the last tick was long ago
        statuses = [await status_of(stopped, rollout_id)]
        for seconds in (299, 2):
            clock.advance(seconds)
            statuses.append(await status_of(other, rollout_id))

    assert statuses == ["preparing", "preparing", "requeuing"]


async def test_a_program_that_opens_the_store_again_and_again_keeps_no_lost_work(tmp_path: Path, clock: Any) -> None:
    async with SqliteLightningStore(tmp_path / "s.db", clock=clock) as server:
        rollout_id = await claimed(server)
        statuses = []
        for _ in range(9):
            clock.advance(100)
            async with SqliteLightningStore(tmp_path / "s.db", clock=clock) as reader:
                await status_of(reader, rollout_id)
            statuses.append(await status_of(server, rollout_id))

    assert statuses == ["preparing"] * 7 + ["requeuing"] * 2
