"""`fit`, `dev` and `run` where an event loop runs already: in a notebook, or in `async def main()`."""

import asyncio
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl


def succeed(task: Any) -> float:
    return 1.0


@pytest.fixture(params=["cs", "shm"])
def strategy(request: pytest.FixtureRequest) -> Any:
    return request.param


async def rewards_of(store: agl.LightningStore) -> list[float | None]:
    rollouts = await store.query_rollouts()
    return [agl.find_final_reward(await store.query_spans(rollout.rollout_id)) for rollout in rollouts]


@pytest.mark.parametrize("method", ["fit", "dev"])
async def test_a_trainer_works_inside_an_event_loop(strategy: Any, method: str) -> None:
    trainer = agl.Trainer(algorithm=agl.Baseline(), strategy=strategy, port=0, progress="off")

    getattr(trainer, method)(succeed, [1, 2])

    assert await rewards_of(trainer.store) == [1.0, 1.0]


async def test_dev_runs_a_plain_agent_in_the_main_thread_of_a_notebook_too() -> None:
    seen: list[threading.Thread] = []

    agl.Trainer(progress="off").dev(lambda task: seen.append(threading.current_thread()), [1])

    assert seen == [threading.main_thread()]


async def test_dev_runs_a_coroutine_inside_an_event_loop() -> None:
    @agl.rollout
    async def agent(task: int) -> float:
        await asyncio.sleep(0)
        return 1.0

    trainer = agl.Trainer(progress="off")
    trainer.dev(agent, [1, 2])

    assert await rewards_of(trainer.store) == [1.0, 1.0]


async def test_run_works_inside_an_event_loop(strategy: Any) -> None:
    trainer = agl.Trainer(strategy=strategy, port=0, progress="off")
    trainer.add_agent(succeed)  # type: ignore[arg-type] # a function will do

    await trainer.run([1], [2])

    assert await rewards_of(trainer.store) == [1.0, 1.0]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A shell that starts tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_main_thread() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_stops_a_fit_inside_an_event_loop() -> None:
    @agl.algo
    async def endless(*, store: agl.LightningStore) -> None:
        interrupt_main_thread()
        await asyncio.sleep(1000)

    trainer = agl.Trainer(algorithm=endless, strategy="shm", progress="off")

    async def main() -> list[str]:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(succeed)
        return [run.status for run in await trainer.store.query_runs()]

    assert asyncio.run(main()) == ["stopped"]


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_in_the_agent_stops_a_dev() -> None:
    def agent(task: int) -> float:
        interrupt_main_thread()
        return threading.Event().wait(60)

    trainer = agl.Trainer(progress="off")
    with pytest.raises(KeyboardInterrupt):
        trainer.dev(agent, [1, 2, 3])

    (run,) = asyncio.run(trainer.store.query_runs())
    assert run.status == "stopped"
    assert len(asyncio.run(trainer.store.query_rollouts(status_in=["queuing"]))) == 0  # the next dev begins anew


# ---------------------------------------------------------------------- the page that shows how


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-an-agent.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


async def test_the_page_on_running_an_agent_can_be_pasted_into_a_notebook() -> None:
    namespace = {"__name__": "__main__"}

    for block in blocks():
        exec(compile(block, "cell", "exec"), namespace)

    assert len(blocks()) > 2


@pytest.mark.parametrize("strategy", ["shm", "cs"])
async def test_fit_works_in_a_thread_of_a_pool(strategy: str) -> None:
    trainer = agl.Trainer(algorithm=agl.Baseline(), strategy=strategy, progress=None)

    await asyncio.to_thread(trainer.fit, lambda task: 1.0, [1, 2])

    assert [one.status for one in await trainer.store.query_rollouts()] == ["succeeded"] * 2
