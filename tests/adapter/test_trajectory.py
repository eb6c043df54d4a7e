"""Spans become token sequences: what is merged, where it breaks, what is dropped."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentlightning.adapter import (
    BreakReason,
    DropReason,
    TokenSequence,
    TraceReport,
    TraceToTrajectory,
    Trajectory,
    read_jsonl,
    write_jsonl,
)
from agentlightning.types import Span, TraceStatus
from tests.adapter.spans import CHAT, Conversation, reward, span


def adapted(talk: Conversation, **options: Any) -> Trajectory:
    return TraceToTrajectory(**options).adapt(talk.spans)


def reason_after(first: tuple[list[int], list[int]], second: list[int], **attributes: Any) -> tuple[BreakReason, int]:
    """Why, and at which token, a second call with this prompt does not continue the first."""
    talk = Conversation()
    talk.call(*first, **{"gen_ai.completion.0.content": "said"} if attributes else {})
    talk.call(second, [99], **attributes)
    (found,) = adapted(talk).breaks
    return found.reason, found.position


# ---------------------------------------------------------------------- merging


def test_a_call_that_continues_another_adds_only_its_new_tokens() -> None:
    talk = Conversation()
    talk.call([1, 2], [3, 4])
    talk.call([1, 2, 3, 4, 5], [6])

    (sequence,) = adapted(talk).sequences

    assert sequence.token_ids == (1, 2, 3, 4, 5, 6)
    assert sequence.loss_mask == (0, 0, 1, 1, 0, 1)
    assert sequence.sampled_ids == (3, 4, 6)
    assert [(call.span_id, call.start, call.end) for call in sequence.calls] == [("call-1", 2, 4), ("call-2", 5, 6)]


def test_logprobs_and_weights_versions_stand_beside_their_tokens() -> None:
    talk = Conversation()
    content = json.dumps([{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}])
    talk.call([1], [2, 3], **{"logprobs.content": content, "agentlightning.weights_version": 7})
    talk.call([1, 2, 3], [4], **{"logprobs.content": "[]"})

    (sequence,) = adapted(talk).sequences

    assert sequence.logprobs == (None, -0.5, -1.5, None)
    assert sequence.weights_versions == (None, "7", "7", None)
    assert [call.weights_version for call in sequence.calls] == ["7", None]


def test_conversations_that_take_turns_are_both_merged() -> None:
    talk = Conversation()
    talk.call([1], [2])
    talk.call([8], [9])
    talk.call([1, 2, 3], [4])
    talk.call([8, 9, 7], [6])

    assert [sequence.token_ids for sequence in adapted(talk).sequences] == [(1, 2, 3, 4), (8, 9, 7, 6)]


def test_sub_agents_have_sequences_of_their_own() -> None:
    talk = Conversation()
    main = talk.agent("main")
    talk.call([1], [2], under=main)
    talk.call([1, 2], [5], under=talk.agent("helper", under=main, calls=1))
    talk.call([1, 2, 3], [4], under=main)

    trajectory = adapted(talk)

    assert [(s.agent_name, s.token_ids) for s in trajectory.sequences] == [
        ("main", (1, 2, 3, 4)),
        ("helper", (1, 2, 5)),
    ]
    assert [(b.reason, b.sequence) for b in trajectory.breaks] == [(BreakReason.NEW_AGENT, 1)]


def test_rewards_are_kept_of_each_call_and_of_the_attempt() -> None:
    talk = Conversation()
    talk.call([1], [2])
    talk.reward(0.25)
    talk.call([1, 2], [3])
    talk.reward(1.0)

    trajectory = adapted(talk)

    assert [call.reward for call in trajectory.sequences[0].calls] == [0.25, 1.0]
    assert trajectory.final_reward == 1.0
    assert (trajectory.rollout_id, trajectory.attempt_id) == ("ro-1", "at-1")


# ---------------------------------------------------------------------- breaks


@pytest.mark.parametrize(
    ("second", "attributes", "expected"),
    [
        pytest.param([1, 2], {}, (BreakReason.RESAMPLED, 2), id="resampled"),
        pytest.param([1, 2, 3], {}, (BreakReason.CONTEXT_TRUNCATED, 3), id="truncated"),
        pytest.param([1, 2, 3, 7, 5], {}, (BreakReason.RETOKENISED, 3), id="retokenised"),
        pytest.param([8, 9, 7, 6, 5], {}, (BreakReason.NEW_CONVERSATION, 0), id="new-conversation"),
        pytest.param([8, 2, 3, 4, 5], {}, (BreakReason.CONTEXT_EDITED, 0), id="edited"),
        pytest.param([1, 2, 8, 8, 3, 4, 5], {}, (BreakReason.TOOL_OUTPUT_INSERTED, 2), id="inserted"),
        pytest.param(
            [1, 2, 3, 7, 5], {"gen_ai.prompt.0.content": "said"}, (BreakReason.RETOKENISED, 3), id="same-words"
        ),
        pytest.param(
            [1, 2, 3, 7, 5], {"gen_ai.prompt.0.content": "changed"}, (BreakReason.CONTEXT_EDITED, 3), id="other-words"
        ),
        pytest.param(
            [1, 2, 8, 3, 4, 5], {"gen_ai.prompt.0.role": "tool"}, (BreakReason.TOOL_OUTPUT_INSERTED, 2), id="by-tool"
        ),
        pytest.param(
            [1, 2, 8, 3, 4, 5], {"gen_ai.prompt.0.role": "user"}, (BreakReason.CONTEXT_EDITED, 2), id="by-user"
        ),
    ],
)
def test_reasons_of_breaks(second: list[int], attributes: dict[str, Any], expected: tuple[BreakReason, int]) -> None:
    assert reason_after(([1, 2], [3, 4]), second, **attributes) == expected


def test_a_second_way_on_from_one_point_is_a_branch() -> None:
    talk = Conversation()
    talk.call([1], [2])
    talk.call([1, 2, 3], [4])
    talk.call([1, 2, 5], [6])

    trajectory = adapted(talk)

    assert [sequence.token_ids for sequence in trajectory.sequences] == [(1, 2, 3, 4), (1, 2, 5, 6)]
    (found,) = trajectory.breaks
    assert (found.reason, found.earlier_sequence, found.position) == (BreakReason.BRANCHED, 0, 2)
    assert (found.expected_token, found.found_token) == (3, 5)
    assert (found.previous_span_id, found.span_id) == ("call-2", "call-3")


def test_another_answer_to_a_later_prompt_is_no_branch() -> None:
    talk = Conversation()
    talk.call([1], [2])
    talk.call([1, 2, 3], [4])
    talk.call([1, 2, 3], [5])

    assert [(found.reason, found.position) for found in adapted(talk).breaks] == [(BreakReason.RESAMPLED, 3)]


# ---------------------------------------------------------------------- dropped calls


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({"attributes": {}}, DropReason.NO_RESPONSE_IDS, id="nothing"),
        pytest.param({"attributes": {"response_token_ids": [1]}}, DropReason.NO_PROMPT_IDS, id="no-prompt"),
        pytest.param(
            {"attributes": {"prompt_token_ids": "[1", "response_token_ids": [1]}}, DropReason.UNREADABLE_IDS, id="text"
        ),
        pytest.param(
            {"attributes": {"prompt_token_ids": [1], "response_token_ids": [0.5]}},
            DropReason.UNREADABLE_IDS,
            id="floats",
        ),
        pytest.param({"status": TraceStatus(status_code="ERROR")}, DropReason.FAILED, id="failed"),
        pytest.param(
            {"attributes": {"agentlightning.redirect.is_excluded": True, "response_token_ids": [1]}},
            DropReason.EXCLUDED,
            id="excluded",
        ),
    ],
)
def test_calls_without_usable_tokens_are_dropped(fields: dict[str, Any], reason: DropReason) -> None:
    trajectory = TraceToTrajectory().adapt([span("c", name=CHAT, **fields)])

    assert trajectory.sequences == ()
    assert [(call.span_id, call.reason) for call in trajectory.dropped] == [("c", reason)]


def test_calls_of_other_agents_and_of_judges_are_dropped() -> None:
    talk = Conversation()
    main = talk.agent("main")
    talk.call([1], [2], under=main)
    talk.call([1], [2], under=talk.agent("helper", under=main, calls=1))
    talk.spans.append(reward("judging", main, 1.0, at=20.0, sequence_id=20))
    talk.spans.append(span("judge", "judging", name=CHAT, start=20.0, end=20.0, sequence_id=20))

    trajectory = adapted(talk, agent_match="main")

    assert [call.span_id for sequence in trajectory.sequences for call in sequence.calls] == ["call-2"]
    assert {call.span_id: call.reason for call in trajectory.dropped} == {
        "call-4": DropReason.OTHER_AGENT,
        "judge": DropReason.IN_REWARD,
    }


def test_duplicates_and_nested_calls_are_dropped_and_name_the_call_that_counts() -> None:
    talk = Conversation()
    first = talk.call([1], [2])
    talk.call([1], [2], **{"gen_ai.response.id": "r1"})
    talk.call([1], [2], under=first.span_id, **{"gen_ai.response.id": None})

    dropped = {call.span_id: call for call in adapted(talk).dropped}

    assert dropped["call-2"].reason is DropReason.DUPLICATE
    assert dropped["call-3"].reason is DropReason.NESTED
    assert {call.same_call_span_id for call in dropped.values()} == {"call-1"}


# ---------------------------------------------------------------------- what always holds

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> list[Span]:
    """Calls that continue, edit, repeat and interrupt each other, some broken, under a few agents."""
    talk = Conversation()
    agents = ["root", talk.agent("solver"), talk.agent("critic")]
    histories: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 12))):
        history = draw(st.sampled_from(histories))
        prompt = [*history, *draw(TOKENS)] if draw(st.integers(0, 3)) else draw(TOKENS)
        response = draw(TOKENS)
        histories.append(prompt + response)
        as_text = draw(st.booleans())
        ids: Any = json.dumps(response) if as_text else response
        twice = {"gen_ai.response.id": "twice"} if draw(st.integers(0, 5)) == 0 else {}
        given_ids = None if draw(st.integers(0, 5)) == 0 else ids
        call = talk.call(prompt, given_ids, under=draw(st.sampled_from(agents)), **twice)
        agents += [call.span_id] if draw(st.booleans()) else []
        if draw(st.booleans()):
            talk.reward(1.0)
    return talk.spans


@given(conversations(), st.integers(0, 100))
def test_every_call_is_in_one_sequence_or_dropped_whatever_the_order_of_the_spans(spans: list[Span], seed: int) -> None:
    trajectory = TraceToTrajectory().adapt(spans)

    taken = [call.span_id for sequence in trajectory.sequences for call in sequence.calls]
    accounted = taken + [call.span_id for call in trajectory.dropped]
    assert sorted(accounted) == sorted(one.span_id for one in spans if one.name == CHAT)
    assert trajectory.n_calls == len(accounted)
    assert [found.sequence for found in trajectory.breaks] == list(range(1, len(trajectory.sequences)))
    assert TraceToTrajectory().adapt(random.Random(seed).sample(spans, len(spans))) == trajectory


@given(conversations())
def test_merging_changes_no_token(spans: list[Span]) -> None:
    by_id = {one.span_id: one.attributes for one in spans}
    for sequence in TraceToTrajectory().adapt(spans).sequences:
        sampled: list[int] = []
        for call in sequence.calls:
            response: Any = by_id[call.span_id]["response_token_ids"]
            response = json.loads(response) if isinstance(response, str) else response
            assert list(sequence.token_ids[: call.start]) == by_id[call.span_id]["prompt_token_ids"]
            assert list(sequence.token_ids[call.start : call.end]) == response
            sampled += response
        assert list(sequence.sampled_ids) == sampled
        assert sum(sequence.loss_mask) == len(sampled)


@given(conversations())
def test_a_call_begins_anew_only_if_no_open_sequence_of_its_agent_fits(spans: list[Span]) -> None:
    trajectory = TraceToTrajectory().adapt(spans)
    place = {one.span_id: one.sequence_id for one in spans}
    for other in trajectory.dropped:  # a call stands where its own span does, though another one had the tokens
        if other.same_call_span_id is not None and other.reason is not DropReason.DUPLICATE:
            place[other.same_call_span_id] = place[other.span_id]
    for found in trajectory.breaks:
        begun = trajectory.sequences[found.sequence]
        prompt = begun.token_ids[: begun.calls[0].start]
        for sequence in trajectory.sequences[: found.sequence]:
            earlier = [call for call in sequence.calls if place[call.span_id] < place[found.span_id]]
            end = earlier[-1].end if earlier else len(prompt) + 1
            assert sequence.agent_name != begun.agent_name or sequence.token_ids[:end] != prompt[:end]


# ---------------------------------------------------------------------- files and reports


def two_attempts() -> list[Trajectory]:
    talk = Conversation()
    talk.call([1], [2, 3], **{"logprobs.content": "[-Infinity, -0.5]"})
    talk.call([9], [8])
    talk.call([1, 2, 3], None)
    talk.reward(0.5)
    return [adapted(talk), TraceToTrajectory().adapt([span("a", attempt_id="at-2")])]


def test_trajectories_go_to_a_file_and_back(tmp_path: Path) -> None:
    trajectories = two_attempts()

    assert write_jsonl(tmp_path / "t.jsonl", iter(trajectories)) == 2
    assert read_jsonl(tmp_path / "t.jsonl") == trajectories
    assert (tmp_path / "t.jsonl").stat().st_mode & 0o077 == 0, "it is for its owner alone"


@pytest.mark.parametrize("line", ["{", "{}", '{"prompt": 1}'], ids=["no-json", "empty", "triplet"])
def test_a_line_that_is_no_trajectory_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + line + "\n", encoding="utf-8")

    with pytest.raises(ValueError, match=r"Line 2 of .* is no Trajectory"):
        read_jsonl(path)


def test_columns_of_unequal_length_are_refused() -> None:
    columns: dict[str, Any] = {"token_ids": (1, 2), "loss_mask": (0,), "logprobs": (), "weights_versions": ()}

    with pytest.raises(ValidationError, match="equally long"):
        TokenSequence(agent_name="*", **columns, calls=())


def test_a_trajectory_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        two_attempts()[0].final_reward = 1.0


def test_a_report_says_in_words_what_will_be_trained() -> None:
    assert str(TraceReport.of(*two_attempts())) == (
        "2 attempts with 3 model calls: 2 in 2 sequences, 1 dropped.\n"
        "3 tokens will be trained, 2 are context.\n"
        "1 attempt got no reward.\n"
        "1 of the trained tokens have no log-probability.\n"
        "New sequences were begun:\n"
        "  1 x a new conversation\n"
        "Calls were dropped:\n"
        "  1 x no token ids of a response"
    )


def test_a_report_has_a_line_for_each_sequence_and_dropped_call() -> None:
    head, *lines = TraceReport.of(*two_attempts()).table().splitlines()

    assert " ".join(head.split()) == "attempt sequence agent calls given trained reward begins because"
    assert [line.split()[:7] for line in lines] == [
        ["at-1", "0", "*", "1", "1", "2", "-"],
        ["at-1", "1", "*", "1", "1", "1", "0.5"],
        ["at-1", "-", "*", "1", "-", "0", "-"],
    ]
    assert lines[1].endswith("a new conversation (token 0)")
    assert lines[2].endswith("dropped: no token ids of a response")


def test_spans_of_several_attempts_are_refused() -> None:
    with pytest.raises(ValueError, match="belong to 2 attempts"):
        TraceToTrajectory().adapt([span("a"), span("b", attempt_id="at-2")])


# ---------------------------------------------------------------------- rewards of several agents


def several(*, with_ids: bool = True) -> list[Span]:
    """Planner, planner, reward 0.25, solver, reward 1.0."""
    talk = Conversation()
    planner = talk.agent("planner", calls=2)
    for number in (1, 2):
        talk.call([number], [5], under=planner, **{"gen_ai.request.model": "planner"})
    talk.reward(0.25)
    solver = talk.agent("solver", calls=1)
    talk.call([3] if with_ids else None, [6], under=solver, **{"gen_ai.request.model": "solver"})
    talk.reward(1.0)
    return talk.spans


def rewards_of_calls(trajectory: Trajectory) -> list[float | None]:
    return [call.reward for sequence in trajectory.sequences for call in sequence.calls]


@pytest.mark.parametrize("choice", ["agent_match", "model"])
@pytest.mark.parametrize(("name", "rewards"), [("planner", [None, 0.25]), ("solver", [1.0])])
def test_rewards_are_matched_to_all_calls_before_agents_or_models_are_chosen(
    choice: str, name: str, rewards: list[float | None]
) -> None:
    chosen = TraceToTrajectory(**{choice: name}).adapt(several())  # type: ignore[arg-type] # either of two fields

    assert rewards_of_calls(chosen) == rewards
    assert rewards_of_calls(TraceToTrajectory().adapt(several())) == [None, 0.25, 1.0]


def test_a_call_of_another_model_without_tokens_takes_no_reward() -> None:
    chosen = TraceToTrajectory(model="planner").adapt(several(with_ids=False))

    assert rewards_of_calls(chosen) == [1.0, 0.25]


def test_a_judge_of_another_agent_takes_no_reward() -> None:
    talk = Conversation()
    talk.call([1], [5], under=talk.agent("planner", calls=1))
    judge = talk.agent("judge", calls=1)
    talk.call([2], [6], under=judge, **{"agentlightning.redirect.is_excluded": True})
    talk.reward(1.0)

    assert rewards_of_calls(TraceToTrajectory(agent_match="planner").adapt(talk.spans)) == [1.0]


def test_choices_beyond_the_first_are_dropped_by_name() -> None:
    talk = Conversation()
    further = {f"gen_ai.completion.{number}.token_ids": "[7]" for number in (1, 2)}
    talk.call([1], [5], **further)
    talk.call([1, 5, 2], [6])

    found = TraceToTrajectory().adapt(talk.spans)

    assert [(call.reason, call.span_id) for call in found.dropped] == [(DropReason.OTHER_CHOICE, "call-1")] * 2
    assert len(found.sequences) == 1
