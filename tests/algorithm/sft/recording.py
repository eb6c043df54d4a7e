"""Rollouts of the tiny model, written into a store by hand."""

from typing import Any

from agentlightning.engine.tiny.codec import TinyChatCodec
from agentlightning.engine.tiny.tokenizer import END
from agentlightning.store import LightningStore
from tests.adapter.spans import CHAT, REWARD, span


def prompt_of(task: str) -> list[int]:
    return TinyChatCodec().render([{"role": "user", "content": task}])


def response_of(answer: str) -> list[int]:
    return [*TinyChatCodec().encode(answer), END]


async def record(
    store: LightningStore,
    task: str,
    answer: str | list[int] | None,
    reward: float | None = 1.0,
    *,
    status: Any = "succeeded",
    ended: str = "stop",
    **rollout: Any,
) -> str:
    """A finished rollout with one model call, if there is an answer, and a reward, if there is one; its id."""
    attempted = await store.start_rollout(input=task, **{"mode": "train", **rollout})
    owner = {"rollout_id": attempted.rollout_id, "attempt_id": attempted.attempt.attempt_id}
    spans = [span("root", start=0.0, end=9.0, **owner)]
    if answer is not None:
        ids = response_of(answer) if isinstance(answer, str) else answer
        attributes = {"prompt_token_ids": prompt_of(task), "response_token_ids": ids, "gen_ai.request.model": "tiny"}
        attributes["gen_ai.completion.0.finish_reason"] = ended
        spans.append(span("call", "root", name=CHAT, start=1.0, end=2.0, attributes=attributes, sequence_id=1, **owner))
    if reward is not None:
        found = {"reward": reward}
        spans.append(span("reward", "root", name=REWARD, start=3.0, end=3.0, attributes=found, sequence_id=2, **owner))
    await store.add_many_spans(spans)
    await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status=status)
    return attempted.rollout_id
