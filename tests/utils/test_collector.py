"""The collector is calmer inside the block, and as before outside."""

import gc
from collections.abc import Iterator

import pytest

from agentlightning.utils.collector import CALM_THRESHOLDS, calm_collector


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_raised_and_put_back() -> None:
    gc.set_threshold(700, 10, 10)

    with calm_collector():
        inside = gc.get_threshold()

    assert inside == CALM_THRESHOLDS
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("chosen", [(0, 10, 10), (50_000, 5, 5)], ids=["off", "rarer"])
def test_what_the_user_chose_is_left_alone(chosen: tuple[int, int, int]) -> None:
    gc.set_threshold(*chosen)

    with calm_collector():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_what_the_user_changes_meanwhile_stays() -> None:
    gc.set_threshold(700, 10, 10)

    with calm_collector():
        gc.set_threshold(1, 2, 3)

    assert gc.get_threshold() == (1, 2, 3)
