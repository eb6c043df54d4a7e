"""What finished rollouts give to learn from: trajectories of the calls of one model, or why there are none."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from statistics import fmean
from typing import Final

from agentlightning.adapter import TraceToTrajectory
from agentlightning.adapter.calls import requests_other_model, response_id_of
from agentlightning.adapter.trajectory import DropReason, Trajectory
from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.grpo.samples import RolloutOutcome, first_return
from agentlightning.algorithm.intervals import is_finite
from agentlightning.errors import TrainingError
from agentlightning.llm_proxy.call_record import CALL_SPAN, RAW_SPAN
from agentlightning.types import Span
from agentlightning.types.rewards import named_rewards_of

logger = logging.getLogger(__name__)

_WITHOUT_IDS: Final = (
    *(DropReason.NO_PROMPT_IDS, DropReason.NO_RESPONSE_IDS),
    *(DropReason.UNREADABLE_IDS, DropReason.EXCLUDED),
)


async def outcomes_of(
    finished: Sequence[FinishedRollout],
    adapter: TraceToTrajectory,
    *,
    model: str | None = None,
    with_failed: bool = False,
) -> list[RolloutOutcome]:
    """What rollouts give to learn from.

    Args:
        model: Of a trace with calls of several models, the one to look at.
        with_failed: Read the traces of rollouts that failed too.
    """
    adapter = replace(adapter, model=model)
    outcomes: list[RolloutOutcome] = []
    for number, one in enumerate(finished):
        if number % 8 == 0:
            await asyncio.sleep(0)  # others use this loop too
        trajectory: Trajectory | None = None
        unreadable: str | None = None
        if one.spans and (one.has_succeeded or with_failed):
            try:
                trajectory = adapter.adapt(one.spans)
            except Exception as error:  # what an agent wrote is its own affair, and never ends the run of all
                logger.exception("The spans of rollout '%s' cannot be read.", one.rollout.rollout_id)
                unreadable = f"{type(error).__name__}: {error}"
        outcomes.append(
            RolloutOutcome(
                rollout_id=one.rollout.rollout_id,
                group=one.group,
                status=one.rollout.status,
                reward=one.reward,
                trajectory=trajectory,
                error=one.error,
                unreadable=unreadable,
            )
        )
    return outcomes


async def with_returns(
    finished: Sequence[FinishedRollout], adapter: TraceToTrajectory, discount: float
) -> list[FinishedRollout]:
    """The rollouts with the return of their first turn, which is what they count where turns are judged."""
    outcomes = await outcomes_of(finished, adapter)
    return [
        replace(one, turn_return=first_return(outcome, discount))
        for one, outcome in zip(finished, outcomes, strict=True)
    ]


def weighted_rewards(finished: Sequence[FinishedRollout], weights: Mapping[str, float]) -> list[FinishedRollout]:
    """The rollouts with the sum of their named rewards, times the weights, as reward; none for one without any of them.

    TrainingError where a reward that has a weight is in none of the rollouts.
    """
    named = [named_rewards_of(one.spans) for one in finished]
    known = {name for rewards in named for name in rewards}
    missing = [name for name in weights if name not in known]
    if known and missing:
        raise TrainingError(
            f"No rollout emitted a reward with the name '{missing[0]}', which reward_weights has; they emitted "
            f"{', '.join(map(repr, sorted(known)))}."
        )
    return [
        replace(one, reward=_total([weights[name] * rewards[name] for name in own]) if own else None)
        for one, rewards in zip(finished, named, strict=True)
        for own in [weights.keys() & rewards.keys()]
    ]


def _total(values: Sequence[float]) -> float:
    """The sum, which is NaN where one of the values is not finite."""
    return fsum(values) if all(map(is_finite, values)) else math.nan


def reward_means(finished: Sequence[FinishedRollout], names: Iterable[str]) -> dict[str, float]:
    """The mean of each named reward, over the rollouts that emitted it as a finite number."""
    named = [named_rewards_of(one.spans) for one in finished]
    values = {name: [rewards[name] for rewards in named if is_finite(rewards.get(name, math.nan))] for name in names}
    return {f"reward/{name}": fmean(found) for name, found in values.items() if found}


def check_token_ids(finished: Sequence[FinishedRollout], outcomes: Sequence[RolloutOutcome]) -> None:
    """Raise TrainingError if model calls were recorded and none of them brought token ids; its message says whose."""
    trajectories = [outcome.trajectory for outcome in outcomes if outcome.trajectory is not None]
    dropped = {
        (one.rollout_id, call.span_id) for one in trajectories for call in one.dropped if call.reason in _WITHOUT_IDS
    }
    if not dropped or any(one.sequences for one in trajectories):
        return
    spans = [span for one in finished for span in one.spans]
    proxied = {response_id_of(span.attributes): span for span in spans if span.name == CALL_SPAN}
    calls = [span for span in spans if (span.rollout_id, span.span_id) in dropped]
    sources = Counter(_source_of(proxied.get(response_id_of(call.attributes) or "", call)) for call in calls)
    listed = "; ".join(f"{count} {source}" for source, count in sources.most_common(3))
    raise TrainingError(
        f"None of the {len(dropped)} model calls brought the token ids that training needs ({listed}); serve the model "
        "with a backend that returns them, such as 'hosted_vllm/...' or 'agl/...' in the proxy's model list, call it "
        "with chat completions, and keep it out of redirect_exclude."
    )


def _source_of(span: Span) -> str:
    """The kind of a call and who answered it, as the proxy recorded it or else as the agent's tracer did."""
    attributes = span.attributes
    if span.name == CALL_SPAN:
        dialect, backend = (attributes.get(f"agentlightning.proxy.{name}") for name in ("dialect", "backend"))
        return f"in the {dialect} dialect by backend '{backend}'"
    return f"'{span.name}' by '{attributes.get('server.address', 'an unknown server')}'"


def spans_of_model(spans: Iterable[Span], model: str) -> list[Span]:
    """A trace without the calls of other models, for adapters that have no `model`."""
    kept: list[Span] = []
    left_out: set[str] = set()
    for span in sorted(spans, key=lambda span: span.name == RAW_SPAN):  # those after the calls they belong to
        if requests_other_model(span.attributes, model) or (span.name == RAW_SPAN and span.parent_id in left_out):
            left_out.add(span.span_id)
        else:
            kept.append(span)
    return kept
