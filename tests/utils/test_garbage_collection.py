"""The garbage collector runs more rarely in processes of our own, and as before in those of users."""

import gc
from collections.abc import Iterator

import pytest

from agentlightning.execution import SharedMemoryExecutionStrategy
from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.utils.server_launcher import CALM_THRESHOLDS, tune_process

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(USUAL, CALM_THRESHOLDS), ((0, 10, 10), (0, 10, 10)), ((50_000, 5, 5), (50_000, 5, 5))],
    ids=["usual", "off", "rarer"],
)
def test_a_collector_that_is_rarer_or_off_is_left_alone(
    chosen: tuple[int, int, int], expected: tuple[int, int, int]
) -> None:
    gc.set_threshold(*chosen)

    tune_process()

    assert gc.get_threshold() == expected


def test_a_training_in_the_users_process_leaves_its_collector_alone() -> None:
    gc.set_threshold(*USUAL)
    seen: list[tuple[int, int, int]] = []

    async def algorithm(store: object, event: object) -> None:
        seen.append(gc.get_threshold())

    async def runner(store: object, worker_id: int, event: object) -> None:
        seen.append(gc.get_threshold())

    SharedMemoryExecutionStrategy().execute(algorithm, runner, InMemoryLightningStore())

    assert seen == [USUAL, USUAL]


async def test_a_server_in_the_users_process_leaves_its_collector_alone() -> None:
    gc.set_threshold(*USUAL)
    server = LightningStoreServer(InMemoryLightningStore(), host="127.0.0.1", port=0)

    await server.start()
    try:
        assert gc.get_threshold() == USUAL
    finally:
        await server.stop()
