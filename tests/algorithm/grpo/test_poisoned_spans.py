"""Spans that an agent forges with its attempt's token, or that another model left: the run goes on without them."""

import asyncio
import itertools
import logging
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch", reason="GRPO needs torch")

import agentlightning as agl  # noqa: E402 # after the check for torch
from agentlightning.algorithm.grpo.settings import SampleSettings  # noqa: E402
from agentlightning.store.http.app import build_app  # noqa: E402
from agentlightning.store.http.tokens import sign_for_attempt  # noqa: E402
from tests.algorithm.grpo.training import Asking, SharedEngine, ask, curve, every_second, fit, grpo  # noqa: E402

SECRET = "the-master-token-of-this-test"
IDS = {"prompt_token_ids": "[1, 2]", "response_token_ids": "[3]"}
FORGED = "5" * 16
DEEP = "[" * 100_000
BAD_SAMPLES: dict[str, dict[str, Any]] = {
    "token beyond the vocabulary": {**IDS, "response_token_ids": "[999999]"},
    "negative token": {**IDS, "prompt_token_ids": "[-1]"},
    "log-probability that is NaN": {**IDS, "logprobs.content": '[{"logprob": NaN}]'},
    "infinite log-probability": {**IDS, "logprobs.content": "[-Infinity]"},
    "huge log-probability": {**IDS, "logprobs.content": "[-1e300]"},
    "log-probability of 400 digits": {**IDS, "logprobs.content": f"[-{'9' * 400}]"},
    "prompt beyond max_length": {**IDS, "prompt_token_ids": str([1] * 9000)},
    "version of 5,000 digits": {**IDS, "agentlightning.weights_version": "9" * 5000},
    "version to come": {**IDS, "agentlightning.weights_version": 99},
}
HARMLESS: dict[str, dict[str, Any]] = {
    "name of 3,000 dots": {**IDS, f"gen_ai.prompt{'.a' * 3000}": "x"},
    "deep lists": dict.fromkeys(("prompt_token_ids", "response_token_ids", "logprobs.content"), DEEP),
    "deep output": {**IDS, "agentops.task.output": DEEP},
    "reward of 400 digits": {**IDS, "agentops.task.output": f'{{"type": "reward", "value": {"9" * 400}}}'},
}


class Forging(Asking):
    """Writes a span that looks like a model call over the store's server, in one rollout of every task."""

    def __init__(self, store: agl.LightningStore, poisons: dict[str, dict[str, Any]]) -> None:
        super().__init__(every_second)
        self.app = build_app(store, token=SECRET)
        self.next_poison = itertools.cycle(poisons.items())
        self.poison_of: dict[str, str] = {}

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        if not self.seen[f"{rollout.mode}/{task}"] % 2:
            self.poison_of[rollout.rollout_id], attributes = next(self.next_poison)
            await self.forge(rollout.rollout_id, rollout.attempt.attempt_id, attributes)
        return await super().rollout_async(task, resources, rollout)

    async def forge(self, rollout_id: str, attempt_id: str, attributes: dict[str, Any]) -> None:
        owner = {"agentlightning.rollout_id": rollout_id, "agentlightning.attempt_id": attempt_id}
        span = {
            "name": "openai.chat.completion",
            "traceId": "5" * 32,
            "spanId": FORGED,
            "startTimeUnixNano": 1,
            "endTimeUnixNano": 2,
            "attributes": _pairs(attributes),
        }
        scopes = [{"spans": [span]}]
        body = {"resourceSpans": [{"resource": {"attributes": _pairs(owner)}, "scopeSpans": scopes}]}
        headers = {"authorization": f"Bearer {sign_for_attempt(SECRET, rollout_id, attempt_id)}"}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answer = await client.post("/v1/traces", json=body, headers=headers)
        assert answer.status_code == 200, answer.text


def _pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"intValue": value} if isinstance(value, int) else {"stringValue": value}


async def reasons(store: agl.LightningStore, agent: Forging) -> dict[str, object]:
    """Why each forged span was not learned from, by its poison."""
    found: dict[str, object] = {}
    for rollout_id, poison in agent.poison_of.items():
        for span in await store.query_spans(rollout_id):
            found[poison] = span.attributes.get(f"agentlightning.training.left_out.{FORGED}", found.get(poison))
    return found


def test_forged_samples_are_skipped_counted_and_named(engine: SharedEngine, caplog: pytest.LogCaptureFixture) -> None:
    store = agl.InMemoryLightningStore()
    agent = Forging(store, BAD_SAMPLES)
    n = len(BAD_SAMPLES)

    with caplog.at_level(logging.WARNING, logger="agentlightning.algorithm.grpo"):
        made = fit(grpo(steps=2, tasks_per_step=n), agent, store=store)

    assert asyncio.run(reasons(store, agent)) == dict.fromkeys(BAD_SAMPLES, "bad_sample")
    points = curve(made, "skipped/bad_sample", "learner/samples", "samples/all", "rollouts/used")
    expected = {"skipped/bad_sample": n, "learner/samples": 2 * n, "samples/all": 2 * n, "rollouts/used": 2 * n}
    assert points == [expected] * 2
    named = [record.getMessage() for record in caplog.records if "not learned from" in record.getMessage()]
    assert sorted(line.split("'")[1] for line in named) == sorted(agent.poison_of)


def test_hostile_attributes_change_nothing_for_the_run(engine: SharedEngine) -> None:
    store = agl.InMemoryLightningStore()
    n = len(HARMLESS)

    made = fit(grpo(steps=2, tasks_per_step=n), Forging(store, HARMLESS), store=store)

    points = curve(made, "skipped/bad_sample", "skipped/bad_reward", "rollouts/used", "reward/mean")
    healthy = {"skipped/bad_sample": 0, "skipped/bad_reward": 0, "rollouts/used": 2 * n, "reward/mean": 0.5}
    assert points == [healthy] * 2


@pytest.mark.parametrize("reward", [1e99, -1e25])
@pytest.mark.parametrize("advantage", ["grpo_no_std", "rloo", lambda compared: [one.reward for one in compared]])
def test_a_huge_reward_ends_nothing_where_advantages_grow_with_rewards(
    engine: SharedEngine, advantage: Any, reward: float
) -> None:
    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        return reward if agent.seen.total() == 2 else every_second(agent, task, rollout, said)

    made = fit(grpo(steps=1, sampling=SampleSettings(advantage=advantage)), Asking(judge))

    (figures,) = curve(made, "learner/samples", "learner/grad_norm")
    assert figures["learner/samples"] == 4
    assert 0 < figures["learner/grad_norm"] < 1e19


def test_an_adapter_that_fails_for_one_rollout_leaves_out_that_one(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentlightning.adapter import TraceToTrajectory

    adapt, seen = TraceToTrajectory.adapt, list[str]()

    def fails_first(self: TraceToTrajectory, source: Any, /) -> Any:
        seen.append(source[0].rollout_id)
        if source[0].rollout_id == seen[0]:
            raise RecursionError("too deep")
        return adapt(self, source)

    monkeypatch.setattr(TraceToTrajectory, "adapt", fails_first)
    made = fit(grpo(steps=1))

    assert curve(made, "skipped/bad_sample", "learner/samples") == [{"skipped/bad_sample": 1, "learner/samples": 3}]


def test_choices_beyond_the_first_are_counted(engine: SharedEngine) -> None:
    class Choosing(Asking):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            self.seen[f"{rollout.mode}/{task}"] += 1
            said = await ask(resources["main_llm"], rollout, str(task), n=3)
            return self.judge(self, task, rollout, said)

    made = fit(grpo(steps=1), Choosing(every_second))

    (figures,) = curve(made, "skipped/other_choice", "skipped/bad_sample", "samples/all")
    assert figures == {"skipped/other_choice": 8, "skipped/bad_sample": 0, "samples/all": 4}
