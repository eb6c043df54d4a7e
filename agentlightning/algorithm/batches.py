"""Rollouts in batches, as every algorithm needs them: sent, waited for, read, withdrawn, and scored.

An algorithm of your own starts here:

    batches = Batches(store, retried_config(timeout_seconds=60))
    sent = await batches.send(tasks, copies=4, resources_id=update.resources_id)
    for finished in await batches.gather(sent): ...

The copies of a task form a group. Where the waiting ends early, by Ctrl-C, an error or a timeout, the rollouts that are
not over are cancelled, so that no work stays behind in the queue. Everything passes through the store; which runners do
the work does not matter.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentlightning.adapter.trajectory import Trajectory
from agentlightning.algorithm.base import Tasks
from agentlightning.algorithm.comparison import Estimate, FailedReward, estimate, is_finite, reward_of_failed
from agentlightning.errors import ConfigurationError, StoreError, TrainingError
from agentlightning.semconv import AGL_ANNOTATION
from agentlightning.store.base import LightningStore
from agentlightning.store.selection import failure_text
from agentlightning.types import (
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    Span,
)
from agentlightning.types.records import CURRENT_RUN
from agentlightning.types.rewards import final_reward_of
from agentlightning.utils.json_values import JsonObject

__all__ = [
    "Batches",
    "FinishedRollout",
    "Score",
    "Sent",
    "TrainingUse",
    "first_traceback",
    "groups_that_differ",
    "retried_config",
    "rewards_of_tasks",
    "score_of",
]

logger = logging.getLogger(__name__)

READS_AT_ONCE: Final = 32
"""Rollouts that are read from the store at the same time."""
TRAINING: Final = "agentlightning.training"
"""Prefix of what a training made of a rollout: `is_used`, `reason`, `advantage`, `run_id`, `model`, and
`left_out.{span id}` with the reason for each call that was left out."""
WRITES_AT_ONCE: Final = 500
"""Spans that are written at the same time."""


def retried_config(timeout_seconds: float | None = None) -> RolloutConfig:
    """Rollouts of which an attempt is tried once more if it hung or lost its worker: that is not the agent's fault.

    Args:
        timeout_seconds: Limit of one attempt.
    """
    return RolloutConfig(timeout_seconds=timeout_seconds, max_attempts=2, retry_condition=["unresponsive", "timeout"])


@dataclass
class Sent:
    """Rollouts under way: the groups they belong to, by id, in the order in which they were sent."""

    group_of: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that is over, and what it left."""

    rollout: Rollout
    group: str
    spans: list[Span]
    """Of the last attempt."""
    reward: float | None
    error: str | None = None
    turn_return: float | None = None
    """What it counts where its turns are judged by themselves; None counts the reward."""
    trajectory: Trajectory | None = None
    """What it gives to learn from, where that was read."""
    unreadable: str | None = None
    """Why its spans cannot be read; None if they can, or were not looked at."""
    counts_as_failed: bool = False
    """Whether its reward is that of a failed rollout."""

    @property
    def rollout_id(self) -> str:
        return self.rollout.rollout_id

    @property
    def status(self) -> str:
        return "failed" if self.counts_as_failed else self.rollout.status

    @property
    def has_succeeded(self) -> bool:
        return self.rollout.status == "succeeded"

    @property
    def own_reward(self) -> float | None:
        """What it counts, if the rollout succeeded and that is a finite number; None if it counts as failed."""
        counted = self.reward if self.turn_return is None else self.turn_return
        return counted if self.has_succeeded and counted is not None and is_finite(counted) else None

    @property
    def failure(self) -> str:
        """Why it counts as failed, in one line."""
        without = "without a reward" if self.reward is None else f"with the reward {self.reward:g}"
        return self.error or f"{self.rollout.status}, {without}"


@dataclass(frozen=True)
class TrainingUse:
    """What a training made of one rollout."""

    reason: str | None = None
    """Why it was not learned from; None if it was."""
    advantage: float | None = None
    calls: Mapping[str, str] = field(default_factory=dict)
    """Why model calls were left out, by the ids of their spans."""

    def attributes(self, **about: str | None) -> dict[str, str | bool | float]:
        """As an annotation of the rollout holds it, with what else is known."""
        named = {**about, "is_used": self.reason is None, "reason": self.reason, "advantage": self.advantage}
        named |= {f"left_out.{span_id}": reason for span_id, reason in self.calls.items()}
        return {f"{TRAINING}.{name}": value for name, value in named.items() if value is not None}


class Batches:
    """Sends tasks to the store and collects the results.

    Args:
        config: Time limits and retries of every rollout; `retried_config` is a good choice.
        run_id: The run that the rollouts name as theirs; None takes the one that a trainer has under way here, if any.
    """

    def __init__(
        self, store: LightningStore, config: RolloutConfig | None = None, *, run_id: str | None = None
    ) -> None:
        self._store = store
        self._config = config or RolloutConfig()
        self._run_id = run_id or CURRENT_RUN.get()
        self._numbers = itertools.count()
        self._reading = asyncio.Semaphore(READS_AT_ONCE)

    async def send(
        self,
        tasks: Tasks | Sequence[object],
        *,
        copies: int = 1,
        mode: RolloutMode = "train",
        resources_id: str | None = None,
        metadata: JsonObject | None = None,
        rollout_ids: Sequence[str] | None = None,
        config: RolloutConfig | None = None,
    ) -> Sent:
        """Enqueue all tasks or none, each `copies` times as a group.

        Args:
            metadata: Of every rollout; with `step`, counted from 0, the dashboard shows them at the point `step + 1` of
                the curves.
            config: Of these rollouts, in the place of that of all.
            rollout_ids: Ids of your own, one for each rollout; those that the store knows are not sent again.
        """
        owners: list[tuple[Any, str]] = []
        for place in range(len(tasks)):  # a data set need not end an iteration
            owners += [(tasks[place], f"group-{next(self._numbers)}")] * copies
        if copies < 1 or (rollout_ids is not None and len(rollout_ids) != len(owners)):
            raise ConfigurationError(
                f"{len(tasks)} tasks in {copies} copies cannot be sent with {len(rollout_ids or ())} rollout_ids; give "
                "at least one copy, and one id for each rollout or none."
            )
        named = {} if self._run_id is None else {"run_id": self._run_id}
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode=mode,
                resources_id=resources_id,
                config=config or self._config,
                metadata={**named, **(metadata or {}), "group": group},
                **({} if rollout_ids is None else {"rollout_id": rollout_ids[number]}),
            )
            for number, (task, group) in enumerate(owners)
        ]
        rollouts = await self._store.enqueue_many_rollouts(requests)
        return Sent({rollout.rollout_id: group for rollout, (_, group) in zip(rollouts, owners, strict=True)})

    async def wait(self, sent: Sent, timeout_seconds: float | None = None) -> list[Rollout]:
        """Wait until all rollouts are over, or the time is; those that are over, in the order in which they were sent.

        Late rollouts are cancelled, and so are all where the waiting itself is interrupted.
        """
        ids = list(sent.group_of)
        deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            while True:
                began = time.monotonic()
                patience = max(0.0, min(30.0, deadline - began))
                finished = await self._store.wait_for_rollouts(rollout_ids=ids, timeout=patience)
                now = time.monotonic()
                if len(finished) >= len(ids):
                    return list(finished)
                if now >= deadline:
                    break
                if now - began < patience:  # a store that does not wait
                    await asyncio.sleep(min(0.05, deadline - now))  # it returned early
        except BaseException:
            await asyncio.shield(self.withdraw(ids))
            raise
        over = {rollout.rollout_id for rollout in finished}
        await self.withdraw(rollout_id for rollout_id in ids if rollout_id not in over)
        return list(finished)

    async def gather(
        self, sent: Sent, timeout_seconds: float | None = None, *, with_spans: bool = True
    ) -> list[FinishedRollout]:
        """Wait for rollouts as `wait` does, and read their rewards and spans.

        Args:
            with_spans: Keep the spans; without them, memory does not grow with what agents did.
        """
        rollouts = await self.wait(sent, timeout_seconds)

        async def read(rollout: Rollout) -> FinishedRollout:
            spans, error = [], failure_text(getattr(rollout, "attempt", None))
            async with self._reading:
                try:
                    spans = list(await self._store.query_spans(rollout.rollout_id, "latest"))
                except StoreError as unread:  # its spans may have been dropped to save memory
                    error = f"{type(unread).__name__}: {unread}"
            reward = final_reward_of(spans) if spans else None
            group = sent.group_of[rollout.rollout_id]
            return FinishedRollout(rollout, group, spans if with_spans else [], reward, error)

        return list(await asyncio.gather(*map(read, rollouts)))

    async def record_uses(
        self, finished: Sequence[FinishedRollout], uses: Mapping[str, TrainingUse], model: str
    ) -> None:
        """Write what a training made of rollouts behind their spans, where the dashboard finds it.

        Args:
            uses: By the ids of the rollouts.
            model: What was trained.
        """
        spans, now = [], time.time()
        for one in finished:
            attempt = getattr(one.rollout, "attempt", None)
            if attempt is not None and one.rollout.rollout_id in uses:  # without an attempt there is no trace
                spans.append(
                    Span.from_attributes(
                        name=AGL_ANNOTATION,
                        attributes=uses[one.rollout.rollout_id].attributes(run_id=self._run_id, model=model),
                        rollout_id=one.rollout.rollout_id,
                        attempt_id=attempt.attempt_id,
                        start_time=now,
                        end_time=now,
                    )
                )
        for start in range(0, len(spans), WRITES_AT_ONCE):
            await self._store.add_many_spans(spans[start : start + WRITES_AT_ONCE])

    async def withdraw(self, rollout_ids: Iterable[str]) -> list[Rollout]:
        """Cancel those of the rollouts that are not over; which these were."""
        wanted = list(rollout_ids)
        return await self._cancel(wanted, None) if wanted else []

    async def withdraw_left(self, resources_ids: Iterable[str]) -> list[Rollout]:
        """Cancel what a killed run left in the queue, by the resources that only this run uses; which these were."""
        return await self._cancel(None, list(resources_ids))

    async def _cancel(self, rollout_ids: list[str] | None, resources_ids: list[str] | None) -> list[Rollout]:
        try:
            left = await self._store.query_rollouts(
                status_in=("queuing", "requeuing", "preparing", "running"),
                rollout_id_in=rollout_ids,
                resources_id_in=resources_ids,
            )
            await asyncio.gather(*(self._store.update_rollout(one.rollout_id, status="cancelled") for one in left))
        except StoreError as error:  # the rollouts are useless, and do no harm but the work they make
            logger.warning("Rollouts that are not needed any more could not be cancelled: %s", error)
            return []
        return list(left)


async def first_traceback(store: LightningStore, rollouts: Sequence[Rollout]) -> str:
    """The first traceback, or else error message, that one of these rollouts recorded."""
    for rollout in rollouts:
        for attempt in await store.query_attempts(rollout.rollout_id):
            error = (attempt.metadata or {}).get("error") or {}
            if text := error.get("traceback") or error.get("message"):
                return f"rollout '{rollout.rollout_id}':\n{text}"
    return "their attempts do not tell why"


# ---------------------------------------------------------------------- scores


@dataclass(frozen=True)
class Score:
    """How well an agent did."""

    reward: Estimate
    errors: Counter[str]
    """Why rollouts failed: they did not succeed, or have no reward that is a finite number."""

    @property
    def failed(self) -> int:
        return self.reward.failed

    def metrics(self, prefix: str = "validation/") -> dict[str, float]:
        """The figures of a validation; bounds may be infinite."""
        found = self.reward
        figures = {"reward": found.mean, "low": found.low, "high": found.high, "failed": float(self.failed)}
        return {f"{prefix}{name}": value for name, value in figures.items()}


def score_of(finished: Sequence[FinishedRollout], failed: FailedReward = "worst") -> Score:
    """The score of rollouts; TrainingError if none has a reward.

    Args:
        failed: What a failed rollout counts.
    """
    rewards = [one.own_reward for one in finished if one.own_reward is not None]
    errors = Counter(one.failure for one in finished if one.own_reward is None)
    if not rewards:
        most = errors.most_common(1)[0][0] if errors else "there were no tasks"
        raise TrainingError(f"None of {len(finished)} rollouts gave a reward; most often: {most}")
    counted = reward_of_failed(failed, rewards) if errors else None
    values = rewards if counted is None else [*rewards, *[counted] * errors.total()]
    return Score(replace(estimate(values), failed=errors.total(), failed_reward=counted), errors)


def rewards_of_tasks(finished: Sequence[FinishedRollout], failed: FailedReward = "worst") -> list[float | None]:
    """The reward of each rollout in the order in which they were sent; None for one that failed and does not count.

    Args:
        failed: What a failed rollout counts.
    """
    counted = reward_of_failed(failed, [one.own_reward for one in finished if one.own_reward is not None])
    return [counted if one.own_reward is None else one.own_reward for one in finished]


def groups_that_differ(finished: Sequence[FinishedRollout], failed: FailedReward) -> int:
    """How many groups have rewards that are not all the same.

    Args:
        failed: What a failed rollout counts.
    """
    rewards: dict[str, set[float | None]] = {}
    for one, reward in zip(finished, rewards_of_tasks(finished, failed), strict=True):
        rewards.setdefault(one.group, set()).add(reward)
    return sum(len(found - {None}) > 1 for found in rewards.values())
