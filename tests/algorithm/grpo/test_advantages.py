"""Advantages against NumPy, and where there is nothing to compare."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithm.grpo.advantages import AdvantageKind, Degenerate, advantages

KINDS: list[AdvantageKind] = ["grpo", "grpo_no_std", "grpo_batch_std", "rloo", "reinforce_plus_plus"]
REWARDS = np.array([0.0, 1.0, 1.0, 0.25])


def expected(rewards: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    if kind == "rloo":
        return np.array([reward - np.delete(rewards, place).mean() for place, reward in enumerate(rewards)])
    centred = rewards - rewards.mean()
    return centred if kind == "grpo_no_std" else centred / (rewards.std(ddof=1) + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_group_is_compared_as_the_formula_says(kind: AdvantageKind) -> None:
    found = advantages(list(REWARDS), kind)
    np.testing.assert_allclose(found.values, expected(REWARDS, kind), rtol=1e-12)
    assert not found.degenerate


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_groups_are_compared_each_within_itself(kind: AdvantageKind) -> None:
    rewards, groups = [0.0, 5.0, 1.0, 7.0, 0.5, 6.5], ["a", "b", "a", "b", "a", "b"]

    found = advantages(rewards, kind, groups=groups)

    for name in "ab":
        places = [place for place, group in enumerate(groups) if group == name]
        wanted = expected(np.array([rewards[place] for place in places]), kind)
        np.testing.assert_allclose([found.values[place] for place in places], wanted, rtol=1e-12)


def test_reinforce_plus_plus_compares_the_whole_batch() -> None:
    rewards = [0.0, 0.0, 1.0, 1.0]  # every group by itself says nothing
    found = advantages(rewards, "reinforce_plus_plus", groups=["a", "a", "b", "b"])
    np.testing.assert_allclose(found.values, expected(np.array(rewards), "reinforce_plus_plus"))
    assert not found.degenerate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([], None),
        ([1.0], Degenerate.TOO_SMALL),
        ([0.3, 0.3, 0.3], Degenerate.NO_VARIANCE),
        ([0.1 + 0.2, 0.3], Degenerate.NO_VARIANCE),
        ([1.0, math.nan], Degenerate.TOO_SMALL),
        ([1.0, math.inf, 1.0], Degenerate.NO_VARIANCE),
        ([math.nan, math.nan], Degenerate.TOO_SMALL),
    ],
    ids=["none", "one", "same", "same but for rounding", "one finite", "finite are the same", "none finite"],
)
def test_rewards_that_say_nothing_give_zeros_and_a_reason(
    kind: AdvantageKind, rewards: list[float], reason: Degenerate | None
) -> None:
    found = advantages(rewards, kind)
    assert found.values == [0.0] * len(rewards)
    assert found.degenerate == ({} if reason is None else {"": reason})


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_that_are_not_finite_leave_the_others_as_they_would_be(kind: AdvantageKind) -> None:
    found = advantages([math.nan, *REWARDS, -math.inf], kind)
    assert found.not_finite == [0, 5]
    assert found.values == [0.0, *advantages(list(REWARDS), kind).values, 0.0]


def test_a_group_can_be_asked_to_be_larger() -> None:
    found = advantages([0.0, 1.0, 0.0, 1.0, 0.5], groups=["a", "a", "b", "b", "b"], min_group_size=3)
    assert found.degenerate == {"a": Degenerate.TOO_SMALL}
    assert found.values[:2] == [0.0, 0.0]
    assert found.values[3] > 0


def test_names_of_groups_must_be_as_many_as_rewards() -> None:
    with pytest.raises(ValueError, match="2 rewards and 1 names"):
        advantages([0.0, 1.0], groups=["a"])


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.floats(), max_size=12))
def test_advantages_are_finite_and_sum_to_nothing(kind: AdvantageKind, rewards: list[float]) -> None:
    values = advantages(rewards, kind).values
    assert all(map(math.isfinite, values))
    assert abs(sum(values)) <= 1e-6 * max(map(abs, values), default=0)
