"""Evaluations of prompts: paid for, sent with tasks, waited for; what an earlier process finished is not done again.

An evaluation of a run with a state file has a name, its step. The journal holds the outcome of each step, and the ids
of its rollouts follow from the name, so a run that goes on finds the rollouts that were under way in the store.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from typing_extensions import Self

from agentlightning.adapter import TraceAdapter, TracerTraceToTriplet, TraceToMessages
from agentlightning.algorithm.batches import Batches, first_traceback
from agentlightning.algorithm.prompts.budget import Hold, Ledger, OptimisationBudget
from agentlightning.algorithm.prompts.journal import RunJournal
from agentlightning.algorithm.prompts.results import Lineage, RunRecord, logger_of
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store.base import LightningStore
from agentlightning.types import Rollout, RolloutConfig, RolloutMode

logger = logging.getLogger(__name__)

SILENCE_SECONDS: Final = 60.0
"""After which an attempt counts as dead; runners send a heartbeat every ten seconds."""


@dataclass
class RunState:
    """What a run has done, spent and counted."""

    journal: RunJournal
    ledger: Ledger
    counts: Counter[str] = field(default_factory=Counter)
    """Candidates that were rejected, calls that failed, and what else went wrong."""
    lineage: Lineage = field(default_factory=Lineage)
    round: int = 0
    """The one under way, as the curves count; 0 is that of the seed."""

    @classmethod
    def of(cls, journal: RunJournal, budget: OptimisationBudget) -> Self:
        """The state that an earlier process left in the journal, or an empty one."""
        ledger = Ledger(budget, changed=lambda spent: journal.put("spent", spent))
        sent = sum(count for step, count in journal.items() if step.endswith(" sent"))
        ledger.restore(sent, journal.get("spent"))
        return cls(journal, ledger)


@dataclass
class Evaluator:
    """Runs tasks for one run of an algorithm, within its budget."""

    store: LightningStore
    state: RunState
    timeout_seconds: float
    _: KW_ONLY
    record: RunRecord | None = None
    """Of the run to which rollouts belong."""
    most_failed_batches: int | None = None
    """Batches in a row without a success after which the run is given up; None for any number."""
    has_succeeded: bool = False
    """Whether any rollout has; a run in which none does is given up."""
    _failed_batches: int = 0
    _rewards: Counter[bool] = field(default_factory=Counter)
    """How many lay within their range, and how many did not."""

    def __post_init__(self) -> None:
        self._batches = Batches(self.store)  # one for all, which numbers the groups

    def is_sent(self, step: str | None) -> bool:
        return f"{step} sent" in self.state.journal

    async def reserve(self, step: str | None, count: int, *, can_wait: bool = True) -> Hold:
        """Count rollouts before they are sent; BudgetSpent if they are too many.

        Args:
            step: The name of the evaluation, which counts once however often it is resumed; None cannot be resumed.
            can_wait: Whether to wait for money that others hold back.
        """
        journal, is_new = self.state.journal, not self.is_sent(step)
        ids = None if is_new else journal.rollout_ids(step, count)
        found = 0 if ids is None else len(await self.store.query_rollouts(rollout_id_in=ids))
        hold = await self.state.ledger.take_rollouts(count, is_new=is_new, found=found, can_wait=can_wait)
        if is_new and step is not None:
            journal.put(f"{step} sent", count)
        return hold

    async def run(
        self, step: str | None, tasks: Sequence[Any], *, mode: RolloutMode, resources_id: str
    ) -> tuple[list[str], list[Rollout]]:
        """Send tasks and wait; the ids of all rollouts, and the rollouts that are over. Late ones are cancelled."""
        ids, config = await self._usable_ids(self.state.journal.rollout_ids(step, len(tasks))), None
        if ids is not None:  # a runner that dies with this process leaves its rollout to another
            config = RolloutConfig(
                unresponsive_seconds=SILENCE_SECONDS, max_attempts=3, retry_condition=["unresponsive"]
            )
        metadata = {"step": self.state.round - 1, **({} if self.record is None else self.record.rollout_metadata())}
        sent = await self._batches.send(
            tasks, mode=mode, resources_id=resources_id, rollout_ids=ids, metadata=metadata, config=config
        )
        finished = await self._batches.wait(sent, self.timeout_seconds)
        if late := len(sent.group_of) - len(finished):
            self.state.counts["rollouts that were late"] += late
            logger.warning("%d rollouts are not over after %.0f s and are cancelled.", late, self.timeout_seconds)
        return list(sent.group_of), finished

    async def _usable_ids(self, ids: Sequence[str] | None) -> list[str] | None:
        """Ids under which rollouts can be sent; those that failed or were cancelled run again under another id."""
        if ids is None:
            return None
        known = {one.rollout_id: one for one in await self.store.query_rollouts(rollout_id_in=ids)}
        usable = []
        for rollout_id in ids:
            name, found = rollout_id, known.get(rollout_id)
            for again in itertools.count(1):
                if found is None or found.status not in ("failed", "cancelled"):
                    break
                name = f"{rollout_id}-again-{again}"
                found = await self.store.get_rollout_by_id(name)
            if name != rollout_id and found is None:
                hold = await self.state.ledger.take_rollouts(1, can_wait=False)
                self.state.ledger.end_rollouts(hold, [], unfinished=1)  # what the first one may have cost
                self.state.journal.put(f"{name} sent", 1)
            usable.append(name)
        return usable

    def bounded(self, reward: float, reward_range: tuple[float, float]) -> float:
        """A reward within its range: of one that lies outside, as an agent may write it, the nearer bound."""
        low, high = reward_range
        is_within = low <= reward <= high
        self._rewards[is_within] += 1
        if not is_within:
            self.state.counts["rewards outside of their range"] += 1
            if self._rewards[False] == 1:
                logger.warning("A reward of %g lies outside %g to %g, and counts as the nearer one.", reward, low, high)
        return min(max(reward, low), high)

    async def check(self, finished: Sequence[Rollout]) -> None:
        """TrainingError if nothing works: then more rollouts would only cost.

        ConfigurationError if most rewards lie outside of their range, so that it is wrong.
        """
        if self._rewards[False] > self._rewards[True]:
            raise ConfigurationError(
                f"{self._rewards[False]} of {self._rewards.total()} rewards lie outside of the range for which the "
                "comparison holds; set reward_range."
            )
        is_success = any(rollout.status == "succeeded" for rollout in finished)
        self._failed_batches = 0 if is_success else self._failed_batches + 1
        self.has_succeeded = self.has_succeeded or is_success
        too_many = self.most_failed_batches is not None and self._failed_batches >= self.most_failed_batches
        if is_success or (self.has_succeeded and not too_many):
            return
        if not finished:
            raise TrainingError(
                f"No rollout was finished after {self.timeout_seconds:.0f} s; are there runners, and can they work?"
            )
        error = await first_traceback(self.store, finished)
        raise TrainingError(f"All {len(finished)} rollouts failed, so there is nothing to learn from; {error}")


def messages_adapter(adapter: TraceAdapter[Any] | None, algorithm: str) -> TraceToMessages:
    """The given adapter if it gives conversations, else a new TraceToMessages.

    A log line names any other adapter that is not used; a TracerTraceToTriplet is the Trainer's default.
    """
    if isinstance(adapter, TraceToMessages):
        return adapter
    if adapter is not None and type(adapter) is not TracerTraceToTriplet:
        unused = type(adapter).__name__
        logger_of(algorithm).info(
            "%s reads conversations, so it uses a TraceToMessages and not the %s it was given.", algorithm, unused
        )
    return TraceToMessages()
