"""Token sequences and finished rollouts, written by hand."""

from collections.abc import Sequence
from typing import Any

from agentlightning.adapter.sequences import FinishReason, SampledCall, TokenSequence
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.types import Rollout, Span


def token_sequence(
    *turns: tuple[Sequence[int], Sequence[int]],
    logprobs: Sequence[Sequence[float | None]] | None = None,
    version: str | None = None,
    versions: Sequence[str | None] | None = None,
    ended: Sequence[FinishReason | None] | None = None,
    rewards: Sequence[float | None] | None = None,
) -> TokenSequence:
    """A conversation: what was given and what was sampled, turn after turn; the rest is by turn too."""
    ids: list[int] = []
    columns: dict[str, list[Any]] = {"loss_mask": [], "logprobs": [], "weights_versions": [], "calls": []}
    for turn, (given, sampled) in enumerate(turns):
        known = [None] * len(sampled) if logprobs is None else logprobs[turn]
        ids += [*given, *sampled]
        columns["loss_mask"] += [0] * len(given) + [1] * len(sampled)
        columns["logprobs"] += [*[None] * len(given), *known]
        columns["weights_versions"] += [None] * len(given) + [versions[turn] if versions else version] * len(sampled)
        call: dict[str, Any] = {"span_id": f"s{turn}", "start": len(ids) - len(sampled), "end": len(ids)}
        call |= {"finish_reason": ended[turn] if ended else "stop", "reward": rewards[turn] if rewards else None}
        columns["calls"].append(SampledCall(**call))
    return TokenSequence(agent_name="solver", token_ids=tuple(ids), **columns)


def rewarded(group: str = "g", ids: Sequence[int] | None = None, **rewards: float) -> FinishedRollout:
    """A rollout with one model call, if it has token ids, and rewards by name, the primary one first."""
    owner = {"rollout_id": f"ro-{group}-{ids}", "attempt_id": "at-1"}
    flat: dict[str, Any] = {}
    for number, (name, value) in enumerate(rewards.items()):
        flat |= {f"agentlightning.reward.{number}.name": name, f"agentlightning.reward.{number}.value": value}
    spans = [Span.from_attributes(attributes=flat, name="agentlightning.annotation", sequence_id=2, **owner)]
    if ids is not None:
        sampled = {"response_token_ids": list(ids)}
        spans.insert(0, Span.from_attributes(attributes=sampled, name="litellm_request", sequence_id=1, **owner))
    rollout = Rollout(rollout_id=owner["rollout_id"], input=group, start_time=0.0, status="succeeded")
    return FinishedRollout(rollout, group, spans if rewards else [], next(iter(rewards.values()), None))
