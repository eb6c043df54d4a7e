"""Which rollouts become samples, and what is told of those that do not."""

import math

import pytest

from agentlightning.adapter.trajectory import (
    DroppedCall,
    DropReason,
    FinishReason,
    TokenSequence,
    Trajectory,
)
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.comparison import FailedReward
from agentlightning.algorithm.grpo.samples import Batch, batch_of
from agentlightning.algorithm.grpo.settings import SampleSettings
from agentlightning.algorithm.grpo.skipped import Skipped
from agentlightning.errors import ConfigurationError
from tests.algorithm.finished import finished
from tests.algorithm.sequences import token_sequence

END = 9


def sequence(
    sampled: tuple[int, ...] = (4, 5, END),
    *,
    version: str | None = "3",
    logprob: float | None = -0.5,
    ended: FinishReason | None = "stop",
) -> TokenSequence:
    """A prompt of two tokens and one answer."""
    return token_sequence(((1, 2), sampled), logprobs=[[logprob] * len(sampled)], version=version, ended=[ended])


def conversation(*ends: FinishReason | None) -> TokenSequence:
    """A sequence in which given and sampled tokens take turns; each answer is one token, none of them an end token."""
    return token_sequence(*[((1,), (4,))] * len(ends), logprobs=[[-0.5]] * len(ends), version="3", ended=ends)


def trajectory(*sequences: TokenSequence, dropped: tuple[DroppedCall, ...] = ()) -> Trajectory:
    return Trajectory(rollout_id="ro", attempt_id="at", sequences=sequences, dropped=dropped)


def outcome(
    reward: float | None,
    *sequences: TokenSequence,
    group: str = "g",
    status: str = "succeeded",
    rollout_id: str = "ro",
) -> FinishedRollout:
    found = trajectory(*(sequences or (sequence(),)))
    return finished(rollout_id, group, status, reward, found)


def batch(*outcomes: FinishedRollout, version: int | None = 3, **settings: object) -> Batch:
    return batch_of(outcomes, SampleSettings(**settings), current_version=version, end_ids={END})  # type: ignore[arg-type]


def test_a_sample_holds_the_sequence_with_the_advantage_of_its_rollout() -> None:
    found = batch(outcome(0.0, rollout_id="bad"), outcome(1.0, rollout_id="good"), temperature=0.7)

    bad, good = found.samples
    assert (bad.rollout_id, good.rollout_id) == ("bad", "good")
    assert bad.advantage == pytest.approx(-good.advantage)
    assert good.advantage == pytest.approx(math.sqrt(0.5), rel=1e-5)
    assert (good.token_ids, good.loss_mask) == ([1, 2, 4, 5, END], [0, 0, 1, 1, 1])
    assert good.logprobs == [None, None, -0.5, -0.5, -0.5]
    assert (good.version, good.group, good.temperature, good.weight) == (3, "g", 0.7, 1.0)


@pytest.mark.parametrize(("weighting", "weight"), [("sequence", 1.0), ("rollout", 0.5)])
def test_all_sequences_of_a_rollout_get_its_advantage_and_may_share_its_weight(weighting: str, weight: float) -> None:
    found = batch(outcome(0.0), outcome(1.0, sequence(), sequence((6, END))), rollout_weighting=weighting)
    assert [sample.advantage > 0 for sample in found.samples] == [False, True, True]
    assert found.samples[1].advantage == found.samples[2].advantage
    assert [sample.weight for sample in found.samples] == [1.0, weight, weight]


def test_a_failed_rollout_is_no_lesson_and_no_zero() -> None:
    failed = finished("ro", "g", "failed", 9.0, None, error="ConnectionError: refused")

    with_failed, without = batch(outcome(0.0), outcome(1.0), failed), batch(outcome(0.0), outcome(1.0))

    assert [s.advantage for s in with_failed.samples] == [s.advantage for s in without.samples]
    assert with_failed.report.metrics()["skipped/failed"] == 1
    assert "1 rollouts failed (most often: ConnectionError: refused)" in with_failed.report.words()


@pytest.mark.parametrize(("failed", "counted"), [("worst", -1.0), (-5.0, -5.0)], ids=["worst", "number"])
def test_a_failed_rollout_can_be_made_to_count(failed: FailedReward, counted: float) -> None:
    found = batch(outcome(1.0), outcome(-1.0), outcome(None, status="failed"), failed=failed)
    assert found.report.rewards == [1.0, -1.0, counted]
    assert found.samples[-1].advantage < 0
    assert (len(found.samples), found.report.skipped[Skipped.FAILED]) == (3, 0)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (outcome(None), Skipped.NO_REWARD),
        (outcome(math.nan), Skipped.BAD_REWARD),
        (outcome(math.inf), Skipped.BAD_REWARD),
        (outcome(1.0, group="alone"), Skipped.GROUP_TOO_SMALL),
        (finished("ro", "g", "succeeded", 1.0, None), Skipped.EMPTY_TRACE),
        (finished("ro", "g", "succeeded", 1.0, trajectory()), Skipped.EMPTY_TRACE),
        (
            finished(
                "ro",
                "g",
                "succeeded",
                1.0,
                trajectory(dropped=(DroppedCall(span_id="s", name="chat", reason=DropReason.NO_RESPONSE_IDS),)),
            ),
            Skipped.NO_TOKENS,
        ),
        (outcome(1.0, sequence(ended="length")), Skipped.TRUNCATED),
        (outcome(1.0, sequence((4,) * 10 + (END,))), Skipped.TOO_LONG),
        (outcome(1.0, sequence(version="0")), Skipped.TOO_STALE),
    ],
    ids=lambda value: value.value if isinstance(value, Skipped) else "",
)
def test_what_cannot_be_learned_from_is_left_out_with_its_reason(odd: FinishedRollout, reason: Skipped) -> None:
    others = outcome(0.0, rollout_id="bad"), outcome(1.0, rollout_id="good")

    found = batch(*others, odd, max_tokens=10, max_staleness=2)

    assert len(found.samples) == 2
    assert {key: use.reason for key, use in found.uses.items()} == {"bad": None, "good": None, "ro": reason.value}
    assert {skipped: count for skipped, count in found.report.skipped.items() if count} == {reason: 1}
    assert found.report.metrics()[f"skipped/{reason.value}"] == 1
    assert reason.value in found.report.words()


def test_single_calls_that_are_left_out_are_named_with_their_reason() -> None:
    cut = sequence(ended="length")
    judge = DroppedCall(span_id="judge", name="chat", reason=DropReason.IN_REWARD)
    both = finished("both", "g", "succeeded", 1.0, trajectory(sequence(), cut, dropped=(judge,)))

    found = batch(outcome(0.0, rollout_id="bad"), both)

    assert found.uses["both"].reason is None
    assert found.uses["both"].advantage == found.samples[-1].advantage > 0
    assert found.uses["both"].calls == {"judge": "in_reward", cut.calls[0].span_id: "truncated"}


def test_groups_without_variance_are_left_out_and_the_words_say_so() -> None:
    found = batch(*[outcome(1.0, group=group) for group in ("a", "a", "b", "b")])

    assert found.samples == []
    assert found.report.metrics()["skipped/no_variance"] == 4
    assert found.report.metrics()["groups/used"] == 0
    assert found.report.words() == (
        "0 of 4 rollouts in 0 of 2 groups were used; left out: 4 rollouts no_variance. Groups without variance: 2 all "
        "right (reward 1); 2 collapsed to one answer."
    )


@pytest.mark.parametrize(
    ("rewards", "seen", "kinds"),
    [
        ([1.0, 0.0], [], ["all_right", "all_wrong"]),
        ([0.5], [], ["same"]),
        ([0.5], [0.1, 0.5], ["all_right"]),
        ([-1.0, 3.0], [-1.0, 3.0], ["all_wrong", "all_right"]),
        ([0.5], [0.0, 1.0], ["same"]),
    ],
    ids=["of-0-and-1", "never-differed", "best-so-far", "other-range", "between"],
)
def test_a_step_without_variance_says_whether_all_was_right_or_wrong(
    rewards: list[float], seen: list[float], kinds: list[str]
) -> None:
    answers = sequence(), sequence((6, END))
    outcomes = [outcome(reward, answer, group=str(reward)) for reward in rewards for answer in answers]

    report = batch_of(outcomes, SampleSettings(), seen_rewards=seen).report

    metrics = report.metrics()
    assert [one.kind for one in report.same] == kinds
    assert metrics["groups/same"] == len(rewards)
    assert (metrics["groups/all_right"], metrics["groups/all_wrong"]) == tuple(
        kinds.count(kind) for kind in ("all_right", "all_wrong")
    )
    assert metrics["groups/one_answer"] == 0
    assert "collapsed" not in report.words()


def test_a_rollout_whose_tokens_are_left_out_still_takes_part_in_the_comparison() -> None:
    found = batch(outcome(0.0), outcome(0.0), outcome(1.0, sequence(ended="length")))
    assert [sample.advantage < 0 for sample in found.samples] == [True, True]


def test_the_version_is_that_of_the_oldest_token() -> None:
    mixed = sequence().model_copy(update={"weights_versions": (None, None, "10", "9", "10")})
    found = batch(outcome(0.0, mixed), outcome(1.0, sequence(version="10")), version=11)
    assert found.samples[0].version == 9
    metrics = found.report.metrics()
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (2, 1.5)


def test_samples_without_logprobs_or_version_are_kept_and_counted() -> None:
    found = batch(outcome(0.0), outcome(1.0, sequence(version=None, logprob=None)), max_staleness=0)

    metrics = found.report.metrics()
    assert len(found.samples) == 2
    assert not found.samples[1].has_logprobs
    assert (metrics["samples/without_logprobs"], metrics["samples/without_version"]) == (1, 1)


# ---------------------------------------------------------------------- answers that were cut off


def test_truncated_sequences_are_learned_from_where_that_is_wanted_and_counted_all_the_same() -> None:
    cut = sequence(ended="length"), sequence(ended="cancelled"), sequence(ended="abort")

    found = batch(outcome(0.0), outcome(1.0, *cut), skip_truncated=False)

    metrics = found.report.metrics()
    assert len(found.samples) == 3, "what the server broke off is never learned from"
    assert (metrics["samples/truncated_calls"], metrics["skipped/truncated"]) == (3, 1)


@pytest.mark.parametrize(
    ("ends", "cut"),
    [
        (("length", "stop"), 1),
        (("tool_calls", "length"), 1),
        (("length", "stop", "length"), 2),
        (("stop", "cancelled"), 1),
        (("abort", "stop"), 1),
    ],
    ids=["before", "at-the-end", "twice", "reader-left", "broken-off"],
)
def test_one_answer_that_was_cut_off_makes_the_whole_sequence_truncated(
    ends: tuple[FinishReason, ...], cut: int
) -> None:
    found = batch(outcome(0.0), outcome(1.0, conversation(*ends), sequence((6, END))))
    metrics = found.report.metrics()
    assert [sample.token_ids for sample in found.samples] == [[1, 2, 4, 5, END], [1, 2, 6, END]]
    assert (metrics["skipped/truncated"], metrics["samples/truncated_calls"]) == (1, cut)


@pytest.mark.parametrize("ended", ["stop", "tool_calls", "content_filter"])
def test_a_sequence_of_answers_that_ended_otherwise_is_whole_whatever_its_last_token(ended: FinishReason) -> None:
    found = batch(outcome(0.0), outcome(1.0, sequence((4, 5), ended=ended)), guess_truncated=True)
    assert len(found.samples) == 2
    assert found.report.metrics()["samples/without_finish_reason"] == 0


def test_an_answer_whose_end_was_not_recorded_is_kept_and_counted() -> None:
    found = batch(outcome(0.0), outcome(1.0, sequence((4, 5), ended=None)))
    metrics = found.report.metrics()
    assert len(found.samples) == 2
    assert (metrics["samples/without_finish_reason"], metrics["samples/truncated_calls"]) == (1, 0)


def test_where_the_end_was_not_recorded_it_can_be_guessed_from_the_last_token() -> None:
    unknown = outcome(0.0, sequence(ended=None)), outcome(1.0, sequence((4, 5), ended=None))
    found = batch(*unknown, guess_truncated=True)
    assert [sample.token_ids for sample in found.samples] == [[1, 2, 4, 5, END]]
    assert found.report.metrics()["skipped/truncated"] == 1


# ---------------------------------------------------------------------- figures and settings


def test_the_metrics_say_what_was_used() -> None:
    metrics = batch(outcome(0.0), outcome(1.0), outcome(1.0, group="b"), outcome(1.0, group="b")).report.metrics()

    assert (metrics["groups/all"], metrics["groups/used"]) == (2, 1)
    assert (metrics["rollouts/all"], metrics["rollouts/used"]) == (4, 2)
    assert (metrics["samples/used"], metrics["samples/tokens"]) == (2, 6)
    assert metrics["reward/mean"] == 0.75


def test_no_rollouts_are_an_empty_batch() -> None:
    found = batch()
    assert found.samples == []
    assert found.report.words() == "0 of 0 rollouts in 0 of 0 groups were used."


@pytest.mark.parametrize(
    "wrong",
    [
        {"advantage": "gae"},
        {"rollout_weighting": "token"},
        {"min_group_size": 1},
        {"max_tokens": 0},
        {"max_staleness": -1},
        {"temperature": math.nan},
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        SampleSettings(**wrong)  # type: ignore[arg-type]


def test_settings_that_need_something_known_say_what() -> None:
    with pytest.raises(ConfigurationError, match="end_ids"):
        batch_of([], SampleSettings(guess_truncated=True))
    with pytest.raises(ConfigurationError, match="current_version"):
        batch_of([], SampleSettings(max_staleness=1))


@pytest.mark.parametrize("turn", [math.nan, math.inf, None])
def test_the_reward_of_a_turn_that_is_not_finite_counts_as_none(turn: float | None) -> None:
    def with_turn(value: float | None, reward: float) -> FinishedRollout:
        name = f"ro-{reward}"
        sequences = (token_sequence(([1], [2, 3]), rewards=[value]),)
        trajectory = Trajectory(rollout_id=name, attempt_id="at", sequences=sequences)
        return finished(name, "g", "succeeded", reward, trajectory)

    made = batch_of([with_turn(turn, 1.0), with_turn(0.0, 0.0)], SampleSettings(credit="turn"))

    assert [sample.advantage for sample in made.samples] == pytest.approx([1.0, -1.0], abs=0.3)


@pytest.mark.parametrize(
    ("rewards", "mean"), [([0.0, 0.0], 0.0), ([1.0, None], 0.5), ([None, None], None)], ids=["zeros", "some", "none"]
)
def test_rewards_of_calls_are_shown_where_there_are_any(rewards: list[float | None], mean: float | None) -> None:
    outcomes = [
        outcome(float(number), token_sequence(([1], [2]), rewards=[reward])) for number, reward in enumerate(rewards)
    ]
    assert batch_of(outcomes, SampleSettings()).report.metrics().get("reward/of_calls") == mean
