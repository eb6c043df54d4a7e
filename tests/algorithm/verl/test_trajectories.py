"""What verl's TransferQueue gets of a rollout, exact on small cases; and the padding helpers."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from agentlightning.adapter.sequences import DroppedCall, DropReason, TokenSequence, Trajectory
from agentlightning.algorithm.verl import compose
from agentlightning.algorithm.verl.trajectories import (
    MISMATCH_FILE,
    Level,
    TrajectorySettings,
    fields_of,
    placeholder_row,
    session_rows,
    tag_of,
    write_mismatches,
)
from agentlightning.errors import ConfigurationError
from agentlightning.types import Triplet
from agentlightning.verl.daemon import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
)
from tests.algorithm.sequences import token_sequence


def triplet(prompt: list[int], response: list[int], **more: Any) -> Triplet:
    return Triplet(
        prompt={"token_ids": prompt}, response={"token_ids": response, "logprobs": [-0.5] * len(response), **more}
    )


def trajectory(*sequences: TokenSequence, dropped: int = 0) -> Trajectory:
    calls = [DroppedCall(span_id=f"d{n}", name="call", reason=DropReason.NO_RESPONSE_IDS) for n in range(dropped)]
    return Trajectory(rollout_id="ro", attempt_id="at", sequences=sequences, dropped=tuple(calls))


TWO_TURNS = token_sequence(([1, 2], [3, 4]), ([5], [6]), logprobs=[[-3.0, -4.0], [-6.0]])


def settings_of(level: Level = "transition", prompt: int = 5, response: int = 5) -> TrajectorySettings:
    return TrajectorySettings(max_prompt_length=prompt, max_response_length=response, level=level)


class TestPadding:
    @pytest.mark.parametrize(
        ("ids", "expected"),
        [([], ([9, 9, 9], [0, 0, 0])), ([1], ([9, 9, 1], [0, 0, 1])), ([1, 2, 3, 4], ([2, 3, 4], [1, 1, 1]))],
        ids=["empty", "short", "too long keeps the end"],
    )
    def test_left(self, ids: list[int], expected: Any) -> None:
        assert get_left_padded_ids_and_attention_mask(ids, 3, 9) == expected

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [([], ([9, 9, 9], [0, 0, 0])), ([1], ([1, 9, 9], [1, 0, 0])), ([1, 2, 3, 4], ([1, 2, 3], [1, 1, 1]))],
        ids=["empty", "short", "too long keeps the beginning"],
    )
    def test_right(self, ids: list[int], expected: Any) -> None:
        assert get_right_padded_ids_and_attention_mask(ids, 3, 9) == expected


class TestRows:
    @pytest.mark.parametrize(
        "trace",
        [[triplet([1, 2], [3, 4]), triplet([1, 2, 3, 4, 5], [6])], trajectory(TWO_TURNS)],
        ids=["triplets", "trajectory"],
    )
    def test_a_transition_is_one_model_call(self, trace: Any) -> None:
        found = session_rows(trace, settings_of())

        assert [(list(row.prompt_ids), list(row.response_ids)) for row in found.rows] == [
            ([1, 2], [3, 4]),
            ([1, 2, 3, 4, 5], [6]),
        ]
        assert found.calls == 2

    @pytest.mark.parametrize(
        "trace",
        [[triplet([1, 2], [3, 4]), triplet([1, 2, 3, 4, 5], [6])], trajectory(TWO_TURNS)],
        ids=["triplets", "trajectory"],
    )
    def test_a_trajectory_is_one_conversation_and_masks_what_was_given(self, trace: Any) -> None:
        (row,) = session_rows(trace, settings_of("trajectory")).rows
        assert (list(row.prompt_ids), list(row.response_ids)) == ([1, 2], [3, 4, 5, 6])
        assert list(row.response_mask) == [1, 1, 0, 1]

    def test_a_prompt_that_is_too_long_leaves_its_row_out(self) -> None:
        found = session_rows(trajectory(TWO_TURNS), settings_of(prompt=4))
        assert [list(row.response_ids) for row in found.rows] == [[3, 4]]
        assert found.too_long == 1

    def test_a_response_that_is_too_long_keeps_its_beginning(self) -> None:
        found = session_rows([triplet([1], [2, 3, 4])], settings_of(response=2))
        assert [list(row.response_ids) for row in found.rows] == [[2, 3]]
        assert found.truncated == 1

    def test_calls_of_other_models_have_no_tokens_or_log_probabilities_and_are_counted(self) -> None:
        trace = [triplet([1], [2]), triplet([1], []), triplet([1], [2], logprobs=None)]
        found = session_rows(trace, settings_of())
        assert (len(found.rows), found.without_tokens) == (1, 2)
        assert session_rows(trajectory(TWO_TURNS, dropped=3), settings_of()).without_tokens == 3


class TestFields:
    def test_every_tensor_of_a_trajectory_is_unpadded_and_the_reward_is_on_the_last_token(self) -> None:
        (row,) = session_rows(trajectory(TWO_TURNS), settings_of("trajectory")).rows

        fields = fields_of(row, 0.5, {"uid": "u"})

        assert {name: value.tolist() for name, value in fields.items() if isinstance(value, torch.Tensor)} == {
            "prompts": [1, 2],
            "responses": [3, 4, 5, 6],
            "response_mask": [1, 1, 0, 1],
            "loss_mask": [1, 1, 0, 1],
            "input_ids": [1, 2, 3, 4, 5, 6],
            "position_ids": [0, 1, 2, 3, 4, 5],
            "rollout_log_probs": [-3.0, -4.0, 0.0, -6.0],
            "rm_scores": [0.0, 0.0, 0.0, 0.5],
        }
        assert fields["multi_modal_inputs"] == {}
        assert fields["uid"] == "u"

    def test_the_tag_has_lengths_and_the_span_of_versions(self) -> None:
        (row,) = session_rows(trajectory(TWO_TURNS), settings_of("trajectory")).rows

        assert tag_of(row, global_steps=7, versions=[6, 4]) == {
            "status": "success",
            "prompt_len": 2,
            "response_len": 4,
            "seq_len": 6,
            "global_steps": 7,
            "min_global_steps": 4,
            "max_global_steps": 6,
        }

    def test_a_placeholder_teaches_nothing(self) -> None:
        fields = fields_of(placeholder_row(9), -1.0, {})
        assert fields["loss_mask"].tolist() == [0]
        assert fields["rm_scores"].tolist() == [-1.0]


class TestSettings:
    def test_transitions_take_the_lengths_of_the_data(self) -> None:
        config = compose({"data": {"max_prompt_length": 6, "max_response_length": 3}})
        assert TrajectorySettings.from_config(config) == TrajectorySettings(max_prompt_length=6, max_response_length=3)

    def test_trajectories_take_lengths_of_their_own(self) -> None:
        config = compose({"agentlightning": {"trace_aggregator": {"level": "trajectory", "debug": True}}})
        found = TrajectorySettings.from_config(config)
        assert (found.max_prompt_length, found.max_response_length) == (2048, 8192)
        assert found.mismatch_folder == Path("./mismatch_cases")

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ({"level": "turn"}, "'transition', 'trajectory'"),
            ({"max_prompt_length": 0}, "max_prompt_length is 0"),
            ({"failed": "zero"}, "failed"),
        ],
        ids=["level", "length", "failed"],
    )
    def test_what_cannot_be_is_refused(self, wrong: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigurationError, match=words):
            TrajectorySettings(**{"max_prompt_length": 1, "max_response_length": 1, **wrong})

    def test_a_configuration_without_lengths_says_which_is_missing(self) -> None:
        with pytest.raises(ConfigurationError, match="max_prompt_length"):
            TrajectorySettings.from_config({"agentlightning": compose()["agentlightning"], "data": {}})  # type: ignore[arg-type]


def test_it_is_written_down_why_turns_could_not_be_joined(tmp_path: Path) -> None:
    trace = [triplet([1, 2], [3, 4]), triplet([1, 2, 9, 4, 5], [6])]
    assert write_mismatches("ro-1", "data-1", trace, tmp_path / "new") == 1
    (line,) = (tmp_path / "new" / MISMATCH_FILE).read_bytes().splitlines()
    assert orjson.loads(line)["rollout_id"] == "ro-1"
