"""verl's training batch, exact on small cases and for any rollouts."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.adapter.sequences import DroppedCall, DropReason, SampledCall, TokenSequence, Trajectory
from agentlightning.algorithm.intervals import FailedReward
from agentlightning.algorithm.verl import BatchSettings, Level, TracedRollout, VerlBatch, batch_of, compose
from agentlightning.algorithm.verl.mismatches import MISMATCH_FILE
from agentlightning.errors import ConfigurationError
from agentlightning.types import Triplet
from agentlightning.verl.daemon import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
)

PAD = 0


def triplet(prompt: list[int], response: list[int], reward: float | None = None, **more: Any) -> Triplet:
    return Triplet(prompt={"token_ids": prompt}, response={"token_ids": response, **more}, reward=reward)


def sequence(*parts: tuple[str, list[int]]) -> TokenSequence:
    """Of parts that were "given" or "sampled"; the log-probability of token t is -t."""
    ids: list[int] = []
    mask: list[int] = []
    calls: list[SampledCall] = []
    for kind, tokens in parts:
        is_sampled = kind == "sampled"
        if is_sampled:
            start = len(ids)
            calls.append(SampledCall(span_id=f"s{len(calls)}", start=start, end=start + len(tokens)))
        ids += tokens
        mask += [int(is_sampled)] * len(tokens)
    return TokenSequence(
        agent_name="*",
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(-float(token) if chosen else None for token, chosen in zip(ids, mask, strict=True)),
        weights_versions=(None,) * len(ids),
        calls=tuple(calls),
    )


def trajectory(*sequences: TokenSequence, reward: float | None = None, dropped: int = 0) -> Trajectory:
    calls = [DroppedCall(span_id=f"d{n}", name="call", reason=DropReason.NO_RESPONSE_IDS) for n in range(dropped)]
    return Trajectory(rollout_id="ro", attempt_id="at", sequences=sequences, final_reward=reward, dropped=tuple(calls))


TWO_TURNS = sequence(("given", [1, 2]), ("sampled", [3, 4]), ("given", [5]), ("sampled", [6]))


def settings_of(level: Level = "transition", prompt: int = 4, response: int = 5) -> BatchSettings:
    return BatchSettings(max_prompt_length=prompt, max_response_length=response, pad_token_id=PAD, level=level)


def batch(trace: Any, chosen: BatchSettings, reward: float | None = None) -> VerlBatch:
    return batch_of([TracedRollout("ro-1", "data-1", trace, reward)], chosen)


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


class TestTransitions:
    def test_every_column_of_one_call(self) -> None:
        found = batch([triplet([1, 2, 3], [4, 5], 0.5, logprobs=[-0.1, {"logprob": -0.2}])], settings_of())

        assert found.prompts.tolist() == [[0, 1, 2, 3]]
        assert found.responses.tolist() == [[4, 5, 0, 0, 0]]
        assert found.input_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 0]]
        assert found.attention_mask.tolist() == [[0, 1, 1, 1, 1, 1, 0, 0, 0]]
        assert found.position_ids.tolist() == [[0, 0, 1, 2, 3, 4, 4, 4, 4]]
        assert found.response_mask.tolist() == [[1, 1, 0, 0, 0]]
        assert found.is_drop_mask.tolist() == [False]
        assert found.token_level_scores.tolist() == [[0, 0.5, 0, 0, 0]]
        assert found.rollout_log_probs is not None
        assert torch.allclose(found.rollout_log_probs, torch.tensor([[-0.1, -0.2, 0, 0, 0]]))

    def test_dtypes_are_those_verl_computes_with(self) -> None:
        found = batch([triplet([1], [2], 1.0)], settings_of())

        assert {name: tensor.dtype for name, tensor in found.tensors().items()} == {
            **dict.fromkeys(["prompts", "responses", "input_ids", "attention_mask", "position_ids"], torch.long),
            "response_mask": torch.long,
            "is_drop_mask": torch.bool,
            "token_level_scores": torch.float32,
        }

    def test_each_call_of_a_rollout_is_a_row_with_the_final_reward(self) -> None:
        trace = [triplet([1], [2], 0.25), triplet([1, 2, 3], [4], 0.75), triplet([1], [2, 3])]

        found = batch(trace, settings_of())

        assert found.turn_index_list == [0, 1, 2]
        assert found.token_level_scores.sum(dim=1).tolist() == [0.75, 0.75, 0.75]

    def test_the_calls_of_a_trajectory_have_all_before_them_as_prompt(self) -> None:
        found = batch(trajectory(TWO_TURNS, reward=1.0), settings_of(prompt=6))

        assert found.prompts.tolist() == [[0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
        assert found.responses.tolist() == [[3, 4, 0, 0, 0], [6, 0, 0, 0, 0]]
        assert found.rollout_log_probs is not None
        assert found.rollout_log_probs.tolist() == [[-3, -4, 0, 0, 0], [-6, 0, 0, 0, 0]]

    def test_a_prompt_that_is_too_long_keeps_its_end_and_is_marked(self) -> None:
        found = batch([triplet([1, 2, 3, 4, 5], [6], 1.0), triplet([1, 2, 3, 4], [5], 1.0)], settings_of())

        assert found.prompts.tolist() == [[2, 3, 4, 5], [1, 2, 3, 4]]
        assert found.is_drop_mask.tolist() == [True, False]

    def test_a_response_that_is_too_long_keeps_its_beginning_and_the_reward(self) -> None:
        found = batch([triplet([1], [2, 3, 4, 5], 1.0, logprobs=[-1, -2, -3, -4])], settings_of(response=3))

        assert found.responses.tolist() == [[2, 3, 4]]
        assert found.token_level_scores.tolist() == [[0, 0, 1]]
        assert found.rollout_log_probs is not None
        assert found.rollout_log_probs.tolist() == [[-1, -2, -3]]
        assert found.metrics["training/n_truncated_triplets"] == 1

    def test_without_all_log_probabilities_there_are_none(self) -> None:
        found = batch([triplet([1], [2], logprobs=[-1]), triplet([1], [2], 1.0)], settings_of())

        assert found.rollout_log_probs is None
        assert "rollout_log_probs" not in found.tensors()


class TestTrajectories:
    def test_a_conversation_is_a_row_whose_mask_leaves_out_what_was_given(self) -> None:
        found = batch(trajectory(TWO_TURNS, reward=1.0), settings_of("trajectory"))

        assert found.prompts.tolist() == [[0, 0, 1, 2]]
        assert found.responses.tolist() == [[3, 4, 5, 6, 0]]
        assert found.response_mask.tolist() == [[1, 1, 0, 1, 0]]
        assert found.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1, 1, 1, 0]]
        assert found.token_level_scores.tolist() == [[0, 0, 0, 1, 0]]

    def test_triplets_that_continue_each_other_become_one_row(self) -> None:
        turns = [triplet([1, 2], [3, 4]), triplet([1, 2, 3, 4, 5], [6], 1.0)]

        joined = batch(turns, settings_of("trajectory"))
        woven = batch(trajectory(TWO_TURNS, reward=1.0), settings_of("trajectory"))

        for name in ("input_ids", "attention_mask", "response_mask", "token_level_scores"):
            assert torch.equal(joined.tensors()[name], woven.tensors()[name])

    def test_triplets_that_do_not_are_rows_of_their_own(self) -> None:
        found = batch([triplet([1, 2], [3]), triplet([1, 2, 9], [4], 1.0)], settings_of("trajectory"))

        assert found.responses.tolist() == [[3, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
        assert found.turn_index_list == [0, 1]

    def test_where_the_cut_falls_on_given_tokens_the_reward_is_on_the_last_chosen_one(self) -> None:
        found = batch(trajectory(TWO_TURNS, reward=1.0), settings_of("trajectory", response=3))

        assert found.responses.tolist() == [[3, 4, 5]]
        assert found.token_level_scores.tolist() == [[0, 1, 0]]

    def test_with_debug_it_is_written_down_why_turns_could_not_be_joined(self, tmp_path: Path) -> None:
        config = compose(
            {
                "agentlightning": {
                    "trace_aggregator": {"debug": True, "level": "trajectory", "mismatch_log_dir": str(tmp_path)}
                }
            }
        )

        batch(
            [triplet([1, 2], [3, 4]), triplet([1, 2, 3, 7, 5], [6])],
            BatchSettings.from_config(config, pad_token_id=PAD),
        )

        lines = [orjson.loads(line) for line in (tmp_path / MISMATCH_FILE).read_bytes().splitlines()]
        assert [(line["rollout_id"], line["position"], line["found_token"]) for line in lines] == [("ro-1", 3, 7)]


class TestRewardsAndMetrics:
    def test_metrics_of_a_step(self) -> None:
        rollouts = [
            TracedRollout("a", "x", [triplet([1], [2], 1.0), triplet([], [2]), triplet([1], [])]),
            TracedRollout("b", "x", trajectory(TWO_TURNS, reward=0.5, dropped=2)),
            TracedRollout("c", "y", [], reward=0.25),
            TracedRollout("d", "y", []),
        ]

        found = batch_of(rollouts, settings_of(prompt=6))

        assert found.metrics == {
            "training/reward": pytest.approx(1.75 / 3),
            "training/n_rollouts": 4,
            "training/n_rollouts_failed": 1,
            "training/n_rollouts_w_trace": 2,
            "training/n_rollouts_w_reward": 3,
            "training/n_calls_without_tokens": 4,
            "training/n_truncated_triplets": 0,
            "training/n_triplets": 3,
        }
        assert found.data_id_list == ["x", "x", "x"]
        assert found.rollout_id_list == ["a", "b", "b"]

    def test_the_rollouts_own_reward_wins_over_the_traces(self) -> None:
        assert batch([triplet([1], [2], 1.0)], settings_of(), reward=0.5).token_level_scores.sum() == 0.5

    @pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
    def test_a_rollout_without_a_usable_reward_is_left_out(self, reward: float | None) -> None:
        found = batch([triplet([1], [2], reward)], settings_of())

        assert len(found) == 0
        assert (found.metrics["training/n_rollouts_w_reward"], found.metrics["training/n_rollouts_failed"]) == (0, 1)

    @pytest.mark.parametrize(("failed", "counted"), [("worst", 0.0), (-1.0, -1.0)], ids=["worst", "number"])
    def test_a_rollout_that_failed_can_be_made_to_count(self, failed: FailedReward, counted: float) -> None:
        chosen = BatchSettings(max_prompt_length=2, max_response_length=2, failed=failed)
        good = TracedRollout("a", "x", [triplet([1], [2], 1.0)])
        crashed = TracedRollout("b", "x", [triplet([1], [2], 1.0)], has_failed=True)

        found = batch_of([good, crashed], chosen)

        assert found.token_level_scores.sum(dim=1).tolist() == [1.0, counted]

    def test_the_configuration_says_what_a_failed_rollout_counts(self) -> None:
        data = {"max_prompt_length": 7, "max_response_length": 8}
        chosen, default = {"agentlightning": {"failed": "worst"}, "data": data}, {"data": data}

        found = [BatchSettings.from_config(compose(one), pad_token_id=PAD).failed for one in (chosen, default)]

        assert found == ["worst", "skip"]

    @pytest.mark.parametrize("level", get_args(Level))
    def test_without_any_tokens_the_batch_has_no_rows(self, level: Level) -> None:
        found = batch_of([], settings_of(level))

        assert len(found) == 0
        assert found.input_ids.shape == (0, 9)
        assert found.is_drop_mask.shape == (0,)
        assert found.for_update(2, seed=0).prompts.shape == (0, 4)


class TestForUpdate:
    def test_dropped_rows_and_the_remainder_are_left_out_and_counted(self) -> None:
        trace = [triplet([1] * (9 if n == 2 else 1), [n + 10], 1.0) for n in range(8)]

        found = batch(trace, settings_of()).for_update(3, seed=1)

        assert len(found) == 6
        assert found.metrics["training/n_triplets_prompt_too_long"] == 1
        assert found.metrics["training/n_triplets_dropped_remainder"] == 1
        assert [turn + 10 for turn in found.turn_index_list] == found.responses[:, 0].tolist()
        assert 2 not in found.turn_index_list

    def test_the_seed_decides_the_order(self) -> None:
        whole = batch([triplet([1], [n], 1.0) for n in range(8)], settings_of())

        orders = [whole.for_update(8, seed=seed).turn_index_list for seed in (1, 1, 2)]

        assert orders[0] == orders[1] != orders[2]

    def test_a_mini_batch_of_nothing_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="mini_batch_size is 0"):
            batch([triplet([1], [2])], settings_of()).for_update(0, seed=0)


class TestSettings:
    def test_lengths_come_from_the_configuration_by_level(self) -> None:
        data = {"max_prompt_length": 7, "max_response_length": 8}

        by_call = BatchSettings.from_config(compose({"data": data}), pad_token_id=3)
        by_conversation = BatchSettings.from_config(
            compose({"agentlightning": {"trace_aggregator": {"level": "trajectory"}}}), pad_token_id=3
        )

        assert (by_call.max_prompt_length, by_call.max_response_length, by_call.pad_token_id) == (7, 8, 3)
        assert (by_conversation.max_prompt_length, by_conversation.max_response_length) == (2048, 8192)

    def test_a_configuration_without_lengths_says_which_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for package in ("omegaconf", "hydra", "verl"):
            monkeypatch.setitem(sys.modules, package, None)

        with pytest.raises(ConfigurationError, match="max_prompt_length"):
            BatchSettings.from_config(compose(), pad_token_id=0)

    @pytest.mark.parametrize("wrong", [{"level": "turn"}, {"max_prompt_length": 0}, {"max_response_length": None}])
    def test_settings_that_cannot_be_used_are_named(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            BatchSettings(**{"max_prompt_length": 1, "max_response_length": 1, **wrong})


class TestDataProto:
    def test_verl_gets_every_column_by_its_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("numpy")
        verl: Any = ModuleType("verl")
        verl.__spec__ = ModuleSpec("verl", None)
        verl.DataProto = type("DataProto", (), {"from_dict": staticmethod(lambda **given: given)})
        monkeypatch.setitem(sys.modules, "verl", verl)
        whole = batch([triplet([1], [2], 1.0, logprobs=[-1])], settings_of())

        found = whole.to_dataproto()

        assert found["tensors"].keys() == whole.tensors().keys()
        assert {name: list(values) for name, values in found["non_tensors"].items()} == {
            "data_id_list": ["data-1"],
            "rollout_id_list": ["ro-1"],
            "turn_index_list": [0],
        }
        assert found["meta_info"] == {"metrics": whole.metrics}

    def test_without_verl_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "verl", None)

        with pytest.raises(ConfigurationError, match=r"pip install .*\[verl\]"):
            batch([triplet([1], [2])], settings_of()).to_dataproto()


# ---------------------------------------------------------------------- for any rollouts

tokens = st.lists(st.integers(0, 50), min_size=1, max_size=8)
triplets = st.lists(st.builds(triplet, tokens, tokens), max_size=4)
sequences = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3).map(
    lambda turns: sequence(*[part for given, sampled in turns for part in (("given", given), ("sampled", sampled))])
)
traces = st.one_of(triplets, st.lists(sequences, max_size=3).map(lambda found: trajectory(*found)))
rewarded = st.lists(st.tuples(traces, st.floats(-100, 100, width=32)), max_size=4)
shapes = st.builds(settings_of, st.sampled_from(get_args(Level)), st.integers(1, 10), st.integers(1, 10))


def sampled_by_row(trace: Any, level: Level) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, response and mask of every row of a trajectory, told another way."""
    rows: list[tuple[list[int], list[int], list[int]]] = []
    for one in trace.sequences:
        starts = [call.start for call in one.calls]
        ends = [call.end for call in one.calls]
        spans = list(zip(starts, ends, strict=True)) if level == "transition" else [(starts[0], ends[-1])]
        rows += [(list(one.token_ids[:s]), list(one.token_ids[s:e]), list(one.loss_mask[s:e])) for s, e in spans]
    return rows


@settings(max_examples=150, deadline=None)
@given(rewarded, shapes)
def test_padding_changes_no_token_and_scores_sum_to_the_reward(found: list[Any], chosen: BatchSettings) -> None:
    rollouts = [TracedRollout(str(n), "data", trace, reward) for n, (trace, reward) in enumerate(found)]

    whole = batch_of(rollouts, chosen)

    width = chosen.max_prompt_length
    for row, owner in enumerate(whole.rollout_id_list):
        is_token = whole.attention_mask[row].bool()
        ids = whole.input_ids[row]
        assert torch.equal(ids[:width], whole.prompts[row])
        assert torch.equal(ids[width:], whole.responses[row])
        assert (ids[~is_token] == PAD).all()
        assert whole.position_ids[row][is_token].tolist() == list(range(int(is_token.sum())))
        assert (whole.response_mask[row] <= whole.attention_mask[row, width:]).all()
        assert whole.token_level_scores[row].sum().item() == found[int(owner)][1]
        assert (whole.token_level_scores[row][whole.response_mask[row] == 0] == 0).all()


@settings(max_examples=150, deadline=None)
@given(st.lists(sequences, min_size=1, max_size=3), shapes)
def test_rows_hold_the_tokens_of_the_trajectory_and_the_mask_the_sampled_ones_kept(
    found: list[TokenSequence], chosen: BatchSettings
) -> None:
    trace = trajectory(*found, reward=1.0)
    expected = sampled_by_row(trace, chosen.level)

    whole = batch(trace, chosen)

    width, length = chosen.max_prompt_length, chosen.max_response_length
    assert len(whole) == len(expected)
    for row, (prompt, response, mask) in enumerate(expected):
        kept = [*prompt[-width:], *response[:length]]
        assert whole.input_ids[row][whole.attention_mask[row].bool()].tolist() == kept
        assert whole.is_drop_mask[row].item() == (len(prompt) > width)
        assert whole.response_mask[row].sum().item() == sum(mask[:length])
    if length >= max(len(response) for _, response, _ in expected):
        assert whole.response_mask.sum().item() == trace.n_sampled_tokens
