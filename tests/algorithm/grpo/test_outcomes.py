"""What rollouts give to learn from: calls with token ids, and the calls of one model out of several."""

from typing import Any

import pytest

from agentlightning.adapter import TraceToTrajectory
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.grpo.progress import check_token_ids, spans_of_model, with_trajectories
from agentlightning.errors import TrainingError
from agentlightning.semconv import CALL_SPAN, RAW_SPAN
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Rollout, Span
from tests.adapter.spans import CHAT, span
from tests.conftest import MakeSpan

PROXIED = {
    "agentlightning.proxy.dialect": "responses",
    "agentlightning.proxy.backend": "m#0 at http://model/v1",
    "gen_ai.response.id": "r1",
}
IDS = {"prompt_token_ids": [1, 2], "response_token_ids": [3]}


async def outcomes(*calls: tuple[str, dict[str, Any]]) -> tuple[list[FinishedRollout], list[FinishedRollout]]:
    """A rollout with these calls, by name and attributes, each a second after the one before."""
    rollout = Rollout(rollout_id="ro-1", input=1, start_time=0.0, status="succeeded")
    spans = [
        span(f"call-{number}", name=name, start=float(number), end=number + 0.5, attributes=attributes)
        for number, (name, attributes) in enumerate(calls)
    ]
    finished = [FinishedRollout(rollout, "group", spans, 1.0)]
    return finished, await with_trajectories(finished, TraceToTrajectory())


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([(CHAT, {"server.address": "http://gpt"})], r"1 model calls .*\(1 'openai.chat.completion' by 'http://gpt'\)"),
        ([(CALL_SPAN, PROXIED)], r"\(1 in the responses dialect by backend 'm#0 at http://model/v1'\)"),
        (
            [("openai.responses", {"gen_ai.response.id": "r1"}), (CALL_SPAN, PROXIED)],
            r"1 model calls .*\(1 in the resp",
        ),
        ([(CHAT, {**IDS, "prompt_token_ids": []})], "None of the 1 model calls"),
    ],
    ids=["tracer", "proxy", "both", "no prompt"],
)
async def test_calls_without_token_ids_are_an_error_that_names_who_answered(calls: Any, told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        check_token_ids(*await outcomes(*calls))


@pytest.mark.parametrize(
    "calls",
    [[], [(CHAT, IDS)], [(CHAT, IDS), (CHAT, {"gen_ai.response.id": "judge"})]],
    ids=["no calls", "with ids", "one of two with ids"],
)
async def test_some_token_ids_are_enough(calls: Any) -> None:
    check_token_ids(*await outcomes(("step", {}), *calls))


async def test_calls_of_other_models_are_left_out_with_what_belongs_to_them(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore()
    attempt = await store.start_rollout("task")

    def call(number: int, model: str) -> list[Span]:
        asked = {"agentlightning.proxy.requested_model": model, "gen_ai.request.model": "the backend's name"}
        own = make_span(attempt, 2 * number, name="chat", attributes=asked)
        return [make_span(attempt, 2 * number + 1, name=RAW_SPAN, parent_id=own.span_id, attributes={}), own]

    reward = make_span(attempt, 9, name="reward", attributes={"x": 1})
    spans = [*call(1, "planner"), *call(2, "solver"), reward]

    kept = spans_of_model(spans, "solver")

    assert {span.span_id for span in kept} == {spans[2].span_id, spans[3].span_id, reward.span_id}
