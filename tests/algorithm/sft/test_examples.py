"""Which rollouts are looked at, which are accepted, and which are held out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.adapter.sequences import FinishReason, TokenSequence, Trajectory
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.sft import Acceptance, RecordedRollouts, Rejected
from agentlightning.algorithm.sft.examples import Examples, examples_of, find, split, task_key
from agentlightning.errors import ConfigurationError, NotFound
from agentlightning.store import InMemoryLightningStore
from tests.algorithm.finished import finished
from tests.algorithm.sequences import token_sequence
from tests.algorithm.sft.recording import record


def sequence(prompt: list[int], response: list[int], ended: FinishReason | None = "stop") -> TokenSequence:
    return token_sequence((prompt, response), ended=[ended])


def outcome(
    name: str, reward: float | None, *sequences: TokenSequence, group: str = "task", status: str = "succeeded"
) -> FinishedRollout:
    found = sequences or (sequence([1, 2], [3]),)
    trajectory = Trajectory(rollout_id=name, attempt_id="at", sequences=found)
    return finished(name, group, status, reward, trajectory)


def examples(outcomes: list[FinishedRollout], **accepted: Any) -> Examples:
    return examples_of(outcomes, Acceptance(**accepted), max_length=8, vocab_size=10)


class TestFinding:
    @pytest.fixture
    def store(self) -> InMemoryLightningStore:
        return InMemoryLightningStore()

    async def test_by_default_succeeded_ones_that_are_not_for_validation(self, store: InMemoryLightningStore) -> None:
        kept = [await record(store, "a", "1"), await record(store, "a", "2", mode=None)]
        await record(store, "a", "3", mode="val")
        await record(store, "a", "4", status="failed")
        await store.enqueue_rollout("a")

        found = await find(store, RecordedRollouts())

        assert found.group_of == dict.fromkeys(kept, task_key("a"))

    async def test_metadata_must_have_all_the_entries(self, store: InMemoryLightningStore) -> None:
        kept = await record(store, "a", "1", metadata={"team": "x", "step": 3})
        await record(store, "a", "1", metadata={"team": "y", "step": 3})
        await record(store, "a", "1")

        found = await find(store, RecordedRollouts(metadata={"team": "x"}))

        assert list(found.group_of) == [kept]

    async def test_of_a_run_those_that_began_while_it_was_open(self, store: InMemoryLightningStore) -> None:
        await record(store, "before", "1")
        run = await store.start_run("mine")
        during = await record(store, "during", "1")
        await store.finish_run(run.run_id)
        await record(store, "after", "1")

        found = await find(store, RecordedRollouts(run_id=run.run_id))

        assert list(found.group_of) == [during]

    async def test_named_ones_come_in_the_order_of_the_names(self, store: InMemoryLightningStore) -> None:
        first, _, third = [await record(store, task, "1") for task in "abc"]
        found = await find(store, RecordedRollouts(rollout_ids=[third, first]))
        assert list(found.group_of) == [third, first]

    @pytest.mark.parametrize("wanted", [{"run_id": "run-x"}, {"rollout_ids": ["ro-x"]}])
    async def test_what_is_not_there_is_told(self, store: InMemoryLightningStore, wanted: dict[str, Any]) -> None:
        with pytest.raises(NotFound, match="-x'"):
            await find(store, RecordedRollouts(**wanted))

    def test_equal_tasks_have_equal_keys(self) -> None:
        assert task_key({"a": 1, "b": [2]}) == task_key({"b": [2], "a": 1}) != task_key({"a": 1})


class TestAcceptance:
    def test_rewards_below_the_least_are_rejected_and_equal_ones_accepted(self) -> None:
        found = examples([outcome("a", 0.5), outcome("b", 0.4), outcome("c", None)], min_reward=0.5)
        assert found.rollout_ids == ["a"]
        assert found.rejected == {Rejected.LOW_REWARD: 1, Rejected.NO_REWARD: 1}

    def test_the_best_of_each_task_are_kept_of_equal_ones_the_first(self) -> None:
        outcomes = [
            outcome("a", 0.1),
            outcome("b", 0.9),
            outcome("c", 0.9),
            outcome("d", 0.0, group="other"),
            outcome("e", float("inf"), group="other"),
        ]

        found = examples(outcomes, keep_per_task=1)

        assert found.rollout_ids == ["b", "d"]
        assert found.rejected[Rejected.NOT_BEST] == 2
        assert found.rejected[Rejected.NO_REWARD] == 1

    def test_answers_that_were_cut_off_are_not_imitated(self) -> None:
        outcomes = [
            outcome("a", 1.0, sequence([1], [2], "length")),
            outcome("b", 1.0, sequence([1], [3], "length"), sequence([1], [4])),
            outcome("c", 1.0, sequence([1], [5], None)),
        ]

        found = examples(outcomes)

        assert [one.token_ids for one in found.samples] == [[1, 4], [1, 5]]
        assert found.metrics()["rejected/truncated"] == 2
        assert found.words() == "2 of 3 rollouts are used; left out: 2 truncated."

    def test_answers_that_the_server_broke_off_are_never_imitated(self) -> None:
        found = examples([outcome("a", 1.0, sequence([1], [2], "abort"))], skip_truncated=False)
        assert found.rollout_ids == []
        assert found.rejected[Rejected.TRUNCATED] == 1

    def test_failures_empty_traces_and_foreign_tokens_are_counted(self) -> None:
        empty = Trajectory(rollout_id="b", attempt_id="at", sequences=())
        outcomes = [
            outcome("a", 1.0, status="failed"),
            finished("b", "task", "succeeded", 1.0, empty),
            outcome("c", 1.0, sequence([1], [10])),
        ]

        found = examples(outcomes)

        assert found.samples == []
        assert found.words() == ("0 of 3 rollouts are used; left out: 1 failed, 1 no_tokens, 1 foreign_tokens.")
        assert found.metrics()["rejected/foreign_tokens"] == 1

    def test_every_sequence_of_a_rollout_is_an_example_that_counts_as_one(self) -> None:
        found = examples([outcome("a", 0.2, sequence([1, 2], [3, 4]), sequence([5], [6]))])

        assert [(one.token_ids, one.loss_mask, one.advantage) for one in found.samples] == [
            ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
            ([5, 6], [0, 1], 1.0),
        ]
        assert found.metrics()["examples/tokens"] == 3

    @pytest.mark.parametrize("wrong", [{"keep_per_task": 0}, {"min_reward": float("nan")}])
    def test_what_cannot_be_used_is_named(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            Acceptance(**wrong)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12), st.floats(0, 0.99), st.integers(0, 5))
def test_a_split_parts_whole_tasks_and_loses_nothing(groups: list[str], share: float, seed: int) -> None:
    samples = examples([outcome(str(number), 1.0, group=group) for number, group in enumerate(groups)]).samples

    found = split(samples, share, seed)

    assert sorted(one.rollout_id for one in found.train + found.held_out) == sorted(one.rollout_id for one in samples)
    assert not {one.group for one in found.train} & {one.group for one in found.held_out}
    assert found.train
    assert bool(found.held_out) == (share > 0 and len(set(groups)) > 1)
    assert split(samples, share, seed) == found
