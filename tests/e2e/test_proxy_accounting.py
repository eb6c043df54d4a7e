"""All calls through the LLM proxy are accounted for while it, or its store, is killed.

The work is done by the workload of the benchmark, which can be asked for more: `bench/workloads/proxy_accounting.py`.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import LightningStoreClient
from tests import warm_python
from tests.e2e.server_process import ServerProcess, left_behind
from tests.llm_proxy.accounts import ask, calls, endpoint, serving
from tests.stub_model.server import running

WORKLOAD = Path(__file__).parents[2] / "bench" / "workloads" / "proxy_accounting.py"
ANSWERED_SECONDS = 10.0
CONCURRENCY, KILLS, TERMS = 64, 2, 1


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


def accounted(folder: Path, calls: int) -> dict[str, Any]:
    amounts = {"calls": calls, "concurrency": CONCURRENCY, "kills": KILLS, "terms": TERMS}
    options = [f"--{name}={amount}" for name, amount in amounts.items()]
    run = warm_python.run([sys.executable, str(WORKLOAD), *options, f"--folder={folder}"], timeout=100)
    assert run.returncode == 0, run.stderr
    figures: dict[str, Any] = json.loads(run.stdout)
    return figures


@pytest.mark.slow
def test_every_answered_call_is_stored_once_though_the_proxy_is_killed(tmp_path: Path) -> None:
    figures = accounted(tmp_path, calls=300)

    assert figures["answered"] >= 300
    assert (figures["missing"], figures["doubled"], figures["misplaced"]) == (0, 0, 0)
    assert figures["beyond"] + figures["other_outcomes"] <= CONCURRENCY * (KILLS + TERMS + 1)
    assert figures["broken"] > 0  # the proxy was killed under load, not between calls


def test_calls_that_are_answered_while_the_store_is_down_are_stored_when_it_is_back(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "store.db") as server, running() as model:
        store = LightningStoreClient(server.url)
        rollout = asyncio.run(store.start_rollout("task"))
        with serving(model, store) as proxy:
            url = endpoint(proxy, rollout)
            assert [ask(url, f"before {number}").status_code for number in range(5)] == [200] * 5
            server.kill()
            began = time.monotonic()
            assert [ask(url, f"without {number}").status_code for number in range(40)] == [200] * 40
            assert time.monotonic() - began < ANSWERED_SECONDS  # no answer waits for the store
            assert proxy.status()["calls"]["waiting_for_store"] >= 40
            server.start()

            assert proxy.flush(timeout=60)

            assert proxy.status()["calls"]["lost"] == {}
        spans = asyncio.run(calls(store, rollout))
        asyncio.run(store.close())
    assert len({span.attributes["gen_ai.prompt.0.content"] for span in spans}) == len(spans) == 45
