"""Prompts on their way through the store: sent with tasks, waited for, and read as rewards and examples.

A rollout that fails, is late or has no reward counts as the lowest reward there can be. Evaluations have names that
follow from their order and their content; what they gave is kept in the journal under these, so that a run that goes on
does only what is missing.
"""

import asyncio
import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.apo.budget import BudgetSpent, Hold, Ledger
from agentlightning.algorithm.apo.journal import Journal
from agentlightning.algorithm.apo.tasks import cancel_unfinished, finished_rollouts, first_traceback, found_in, send
from agentlightning.algorithm.gepa.feedback import ReflectiveRecord, reflective_record
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store.base import LightningStore
from agentlightning.types import Dataset, NamedResources, PromptTemplate, Rollout, RolloutMode, Span
from agentlightning.types.rewards import final_reward_of

__all__ = ["Evaluation", "Outcome", "PromptTexts", "RolloutEvaluator", "digest_of"]

logger = logging.getLogger(__name__)

DIGEST_DIGITS: Final = 16
FAILED_BATCHES_IN_A_ROW: Final = 3
"""After so many batches in which no rollout succeeded the fault is not the prompts'."""

PromptTexts = Mapping[str, str]
"""The prompts of a candidate by the names of their resources."""


def digest_of(texts: PromptTexts) -> str:
    """A short name for a set of prompts, the same for the same texts."""
    told = json.dumps(dict(texts), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(told.encode()).hexdigest()[:DIGEST_DIGITS]


@dataclass(frozen=True)
class Outcome:
    """What a rollout came to."""

    score: float
    example: ReflectiveRecord | None = None
    """For the reflecting model; of training tasks alone."""


@dataclass(frozen=True)
class Evaluation:
    """A candidate that is to run on tasks."""

    texts: PromptTexts
    mode: RolloutMode
    numbers: Sequence[int]
    """Of the tasks in the data set of the mode."""


@dataclass
class RolloutEvaluator:
    """Runs candidates on tasks."""

    store: LightningStore
    resources: NamedResources
    """What a rollout is given; the prompts are replaced."""
    tasks: Mapping[RolloutMode, Dataset[Any]]
    journal: Journal
    ledger: Ledger
    adapter: TraceToMessages
    reward_range: tuple[float, float]
    timeout_seconds: float
    key: str
    """Sets the resources of this run apart from those of others."""
    counts: Counter[str] = field(default_factory=Counter)
    _published: set[str] = field(default_factory=set)
    _number: int = 0
    _failed_batches: int = 0
    _has_succeeded: bool = False
    _has_reward: bool = False

    async def evaluate(self, evaluations: Sequence[Evaluation]) -> list[list[Outcome]]:
        """Run several at once; their outcomes in the order of their tasks. BudgetSpent if they are too many."""
        steps = []
        for one in evaluations:
            self._number += 1
            tasks = ",".join(map(str, one.numbers))
            steps.append(f"evaluation {self._number} {digest_of(one.texts)} {one.mode} {tasks}")
        holds = await self._take(list(zip(evaluations, steps, strict=True)))
        works = [
            asyncio.ensure_future(self._outcomes(one, step, hold))
            for one, step, hold in zip(evaluations, steps, holds, strict=True)
        ]
        try:
            return list(await asyncio.gather(*works))
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _take(self, evaluations: Sequence[tuple[Evaluation, str]]) -> list[Hold | None]:
        """Count rollouts that are about to be sent: all of them, or none. None for what is known already."""
        new = [one for one, step in evaluations if not self._is_sent(step)]
        wanted = sum(len(one.numbers) for one in new)
        if wanted and wanted > self.ledger.rollouts_left() - self.ledger.kept_rollouts:
            kept = f", of which {self.ledger.kept_rollouts} are kept for the comparison"
            told = f"{self.ledger.rollouts_left():.0f} rollouts are left{kept if self.ledger.kept_rollouts else ''}"
            raise BudgetSpent(f"{told}, and the next are {wanted}")
        holds: list[Hold | None] = []
        for one, step in evaluations:
            if step in self.journal:
                holds.append(None)
                continue
            is_new = not self._is_sent(step)
            ids = None if is_new else self.journal.rollout_ids(step, len(one.numbers))
            found = 0 if ids is None else await found_in(self.store, ids)
            count = len(one.numbers)
            holds.append(await self.ledger.take_rollouts(count, is_new=is_new, found=found, can_wait=False))
            if is_new:
                self.journal.put(f"{step} sent", count)
        return holds

    def _is_sent(self, step: str) -> bool:
        return step in self.journal or f"{step} sent" in self.journal

    async def _outcomes(self, one: Evaluation, step: str, hold: Hold | None) -> list[Outcome]:
        kept = self.journal.get(step)
        if kept is not None:
            self._has_succeeded = self._has_reward = True
            return [Outcome(**outcome) for outcome in kept]
        resources_id = await self._publish(one.texts)
        tasks = [self.tasks[one.mode][number] for number in one.numbers]
        ids = await self._usable_ids(self.journal.rollout_ids(step, len(tasks)))
        sent = await send(self.store, tasks, one.mode, resources_id, rollout_ids=ids)
        try:
            finished = await finished_rollouts(self.store, sent, self.timeout_seconds)
        except asyncio.CancelledError:
            await asyncio.shield(cancel_unfinished(self.store, sent, []))
            raise
        late = await cancel_unfinished(self.store, sent, finished)
        if late:
            self.counts["rollouts that were late"] += late
            logger.warning("%d rollouts were not finished after %.0f s.", late, self.timeout_seconds)
        assert hold is not None
        outcomes = await self._read(one, tasks, sent, finished, hold)
        self.journal.put(step, [asdict(outcome) for outcome in outcomes])
        mean = fmean(outcome.score for outcome in outcomes)
        logger.debug("Prompts %s score %.3f on %d %s tasks.", digest_of(one.texts), mean, len(tasks), one.mode)
        return outcomes

    async def _publish(self, texts: PromptTexts) -> str:
        resources_id = f"{self.key}-{digest_of(texts)}"
        if resources_id not in self._published:
            await self.store.update_resources(resources_id, self.resources_with(texts))
            self._published.add(resources_id)
        return resources_id

    def resources_with(self, texts: PromptTexts) -> NamedResources:
        """All resources, with these prompts."""
        changed: NamedResources = dict(self.resources)
        for name, text in texts.items():
            seed = changed[name]
            assert isinstance(seed, PromptTemplate)
            changed[name] = seed.model_copy(update={"template": text})
        return changed

    async def _usable_ids(self, ids: list[str] | None) -> list[str] | None:
        """Ids under which rollouts can be sent: those that a killed run left as failed are run again, under others."""
        if ids is None:
            return None
        usable = []
        for rollout_id in ids:
            name = rollout_id
            for again in itertools.count(1):
                known = await self.store.get_rollout_by_id(name)
                if known is None or known.status not in ("failed", "cancelled"):
                    break
                name = f"{rollout_id}-again-{again}"
            if name != rollout_id and known is None:
                again_hold = await self.ledger.take_rollouts(1, can_wait=False)
                self.ledger.end_rollouts(again_hold, [], unfinished=1)  # what the first one may have cost
                self.journal.put(f"{name} sent", 1)
            usable.append(name)
        return usable

    async def _read(
        self, one: Evaluation, tasks: Sequence[Any], sent: Sequence[str], finished: Sequence[Rollout], hold: Hold
    ) -> list[Outcome]:
        by_id = {rollout.rollout_id: rollout for rollout in finished}
        traces, outcomes = [], []
        for task, rollout_id in zip(tasks, sent, strict=True):
            rollout = by_id.get(rollout_id)
            spans = [] if rollout is None else list(await self.store.query_spans(rollout_id, "latest"))
            if rollout is not None:
                traces.append(await self._attributes(rollout_id, spans))
            succeeded = rollout is not None and rollout.status == "succeeded"
            reward = final_reward_of(spans) if succeeded else None
            self._has_reward = self._has_reward or reward is not None
            example = None
            if one.mode == "train":
                error = None if succeeded else await self._error_of(rollout)
                told = self._told(reward)
                example = reflective_record(task, spans, reward=told, error=error, adapter=self.adapter)
            outcomes.append(Outcome(self._score(reward), example))
        self.ledger.end_rollouts(hold, traces, unfinished=len(tasks) - len(traces))
        await self._check(finished)
        return outcomes

    async def _attributes(self, rollout_id: str, latest: Sequence[Span]) -> list[Mapping[str, Any]]:
        """What the spans of a rollout say; earlier attempts cost money too."""
        attempts = await self.store.query_attempts(rollout_id) if self.ledger.budget.prices else ()
        spans = latest if len(attempts) < 2 else await self.store.query_spans(rollout_id)
        return [span.attributes for span in spans]

    def _score(self, reward: float | None) -> float:
        low, high = self.reward_range
        if reward is None:
            return low
        if not low <= reward <= high:
            raise ConfigurationError(
                f"A reward of {reward} lies outside {low} to {high}, for which the comparison holds; set reward_range."
            )
        return float(reward)

    def _told(self, reward: float | None) -> str:
        low, high = self.reward_range
        return "There is no reward." if reward is None else f"Reward: {reward:g} (from {low:g} to {high:g})"

    async def _error_of(self, rollout: Rollout | None) -> str:
        return "it was not finished in time" if rollout is None else await first_traceback(self.store, [rollout])

    async def _check(self, finished: Sequence[Rollout]) -> None:
        """Stop a run in which nothing works."""
        succeeded = any(rollout.status == "succeeded" for rollout in finished)
        self._failed_batches = 0 if succeeded else self._failed_batches + 1
        is_hopeless = not self._has_succeeded or self._failed_batches >= FAILED_BATCHES_IN_A_ROW
        self._has_succeeded = self._has_succeeded or succeeded
        if not succeeded and is_hopeless:
            if not finished:
                raise TrainingError(
                    f"No rollout was finished after {self.timeout_seconds:.0f} s; are there runners, and can they work?"
                )
            told = await first_traceback(self.store, finished)
            raise TrainingError(f"All {len(finished)} rollouts failed, so there is nothing to learn from; {told}")
        if succeeded and not self._has_reward:
            raise TrainingError(
                "No rollout has a reward, so no prompt can be told from another; return one from the agent, or emit it."
            )
