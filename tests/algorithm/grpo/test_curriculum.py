"""The order of tasks: each once before any again, and the same after a restart."""

import pytest

from agentlightning.algorithm.grpo.curriculum import Curriculum
from agentlightning.errors import ConfigurationError


def test_every_task_comes_once_before_any_comes_again() -> None:
    curriculum = Curriculum(list(range(10)), seed=1)

    passes = [curriculum.take(10) for _ in range(3)]

    assert all(sorted(one) == list(range(10)) for one in passes)
    assert passes[0] != passes[1] != passes[2]


def test_batch_may_reach_into_the_next_pass() -> None:
    curriculum = Curriculum(["a", "b", "c"])

    taken = curriculum.take(7)

    assert sorted(taken[:3]) == sorted(taken[3:6]) == ["a", "b", "c"]
    assert len(taken) == 7


def test_seed_decides_the_order() -> None:
    tasks = list(range(50))

    assert Curriculum(tasks, 3).take(50) == Curriculum(tasks, 3).take(50)
    assert Curriculum(tasks, 3).take(50) != Curriculum(tasks, 4).take(50)


@pytest.mark.parametrize("taken", [0, 1, 9, 10, 11, 35])
def test_another_goes_on_where_one_left_off(taken: int) -> None:
    first, second = Curriculum(list(range(10)), 5), Curriculum(list(range(10)), 6)
    first.take(taken)

    second.load_state(first.state())

    assert second.take(25) == first.take(25)


def test_state_of_another_data_set_is_refused() -> None:
    state = Curriculum(list(range(10))).state()

    with pytest.raises(ConfigurationError, match="10 tasks; this one has 11"):
        Curriculum(list(range(11))).load_state(state)


def test_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        Curriculum([])
