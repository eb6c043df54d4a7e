"""The order of tasks: shuffled, by difficulty, by a sampler of one's own; and what a run that goes on takes again."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.grpo.tasks import Curriculum, DifficultySampler, ShuffledTasks
from agentlightning.errors import ConfigurationError
from agentlightning.types import Rollout


def finished(group: str, reward: float | None) -> FinishedRollout:
    status = "failed" if reward is None else "succeeded"
    rollout = Rollout(rollout_id="ro", input=None, start_time=0.0, status=status)
    return FinishedRollout(rollout, group, [], reward)


def observe(
    curriculum: Curriculum, taken: Sequence[tuple[int, Any]], rewards: Mapping[int, Sequence[float | None]]
) -> None:
    """Every task that was taken ends with its rewards."""
    curriculum.observe(
        [finished(str(place), reward) for place, (number, _) in enumerate(taken) for reward in rewards[number]],
        {str(place): number for place, (number, _) in enumerate(taken)},
    )


def tasks_of(taken: Sequence[tuple[int, Any]]) -> list[Any]:
    return [task for _, task in taken]


def test_every_task_comes_once_before_any_comes_again() -> None:
    curriculum = Curriculum(list("abcdefghij"), seed=1)

    taken = tasks_of([*curriculum.take(7), *curriculum.take(23)])

    passes = taken[:10], taken[10:20], taken[20:]
    assert all(sorted(one) == list("abcdefghij") for one in passes)
    assert passes[0] != passes[1] != passes[2]


def test_seed_decides_the_order() -> None:
    tasks = list(range(50))
    assert Curriculum(tasks, 3).take(50) == Curriculum(tasks, 3).take(50)
    assert Curriculum(tasks, 3).take(50) != Curriculum(tasks, 4).take(50)


@pytest.mark.parametrize("sampler", [ShuffledTasks, DifficultySampler])
@pytest.mark.parametrize("taken", [0, 9, 10, 35])
def test_another_goes_on_where_one_left_off(taken: int, sampler: type[ShuffledTasks]) -> None:
    first, second = Curriculum(list(range(10)), 5, sampler()), Curriculum(list(range(10)), 6, sampler())
    rewards = {number: [0.0, 0.0 if number < 3 else 1.0] for number in range(10)}
    observe(first, first.take(taken), rewards)

    second.load_state(first.state())

    assert second.take(25) == first.take(25)


def test_tasks_that_were_not_learned_from_come_first_in_a_run_that_goes_on() -> None:
    first, second = Curriculum(list(range(10))), Curriculum(list(range(10)))
    learned, missed = first.take(3), first.take(4)
    observe(first, learned, {number: [1.0] for number in range(10)})
    state = first.state()
    rest = first.take(3)

    second.load_state(state)

    assert second.take(2) == missed[:2]
    assert second.state()["open"] == [number for number, _ in missed]
    assert second.take(5) == [*missed[2:], *rest]


def test_state_of_an_earlier_release_is_read() -> None:
    first, second = Curriculum(list(range(10)), 5), Curriculum(list(range(10)))
    first.take(4)

    second.load_state({"passes": 0, "position": 4, "size": 10, "seed": 5})

    assert second.take(20) == first.take(20)


def test_state_of_another_data_set_is_refused() -> None:
    state = Curriculum(list(range(10))).state()
    with pytest.raises(ConfigurationError, match="10 tasks; this one has 11"):
        Curriculum(list(range(11))).load_state(state)


def test_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        Curriculum([])


# ---------------------------------------------------------------------- difficulty


def visits(passes: int, rewards: Mapping[int, Sequence[float | None]], **options: int) -> dict[int, int]:
    """How often each task came while the one that always teaches came so many times."""
    curriculum = Curriculum(list(range(len(rewards))), 0, DifficultySampler(**options))
    found = dict.fromkeys(rewards, 0)
    while found[0] < passes:
        taken = curriculum.take(1)
        found[taken[0][0]] += 1
        observe(curriculum, taken, rewards)
    return found


def test_solved_tasks_rest_and_unsolvable_ones_come_seldom() -> None:
    rewards = {0: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 0.0], 3: [None, None], 4: [0.5, 0.5]}

    found = visits(100, rewards)

    # At first after 1, 2, 4 passes; then after 8 and after 4.
    assert found[1] == pytest.approx(4 + (100 - 11) / 9, abs=2)
    assert found[2] == found[3] == pytest.approx(3 + (100 - 6) / 5, abs=2)
    assert found[4] == pytest.approx(100, abs=1)


def test_a_task_whose_rewards_differ_again_comes_in_every_pass_again() -> None:
    curriculum = Curriculum([0, 1], 0, DifficultySampler())
    for _ in range(8):
        observe(curriculum, curriculum.take(2), {0: [0.0, 1.0], 1: [1.0, 1.0]})
    while (taken := curriculum.take(1))[0][0] == 0:
        observe(curriculum, taken, {0: [0.0, 1.0]})
    observe(curriculum, taken, {1: [0.0, 1.0]})

    numbers = [number for number, _ in curriculum.take(20)]

    assert numbers.count(1) in (9, 10, 11)


def test_a_step_is_filled_also_where_every_task_rests() -> None:
    curriculum = Curriculum([0, 1], 0, DifficultySampler())
    for _ in range(10):
        taken = curriculum.take(4)
        assert len(taken) == 4
        observe(curriculum, taken, {0: [1.0], 1: [1.0]})


def test_rests_below_one_pass_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="longest_rest is 0"):
        DifficultySampler(longest_rest=0)


# ---------------------------------------------------------------------- a sampler of one's own


class InOrder(ShuffledTasks):
    """Hardest last: the numbers as they are."""

    def take(self, count: int) -> Sequence[int]:
        return list(range(count))


def test_a_sampler_of_ones_own_decides() -> None:
    assert tasks_of(Curriculum("abc", 0, InOrder()).take(2)) == ["a", "b"]


def test_numbers_that_no_task_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"InOrder.take\(4\) returned \[0, 1, 2, 3\].*from 0 to 2"):
        Curriculum("abc", 0, InOrder()).take(4)
