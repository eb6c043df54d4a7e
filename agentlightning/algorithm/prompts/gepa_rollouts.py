"""GEPA's candidates on tasks: rewards, and examples for the reflecting model.

A rollout that fails, is late or has no reward counts as the lowest reward there can be. The name of an evaluation
follows from its order and its content.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.batches import first_traceback
from agentlightning.algorithm.prompts.budget import BudgetSpent, Hold
from agentlightning.algorithm.prompts.evaluation import Evaluator, RunState
from agentlightning.algorithm.prompts.reflection import PromptTexts, ReflectiveRecord, digest_of, reflective_record
from agentlightning.algorithm.utils import gathered
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store.base import LightningStore
from agentlightning.types import Dataset, NamedResources, PromptTemplate, Rollout, RolloutMode, Span
from agentlightning.types.rewards import final_reward_of

__all__ = ["CandidateEvaluator", "Evaluation", "Outcome"]

logger = logging.getLogger(__name__)

FAILED_BATCHES_IN_A_ROW: Final = 3
"""After so many batches in which no rollout succeeded the fault is not the prompts'."""


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
class CandidateEvaluator:
    """Runs candidates on tasks."""

    store: LightningStore
    state: RunState
    resources: NamedResources
    """What a rollout is given; the prompts are replaced."""
    tasks: Mapping[RolloutMode, Dataset[Any]]
    adapter: TraceToMessages
    reward_range: tuple[float, float]
    timeout_seconds: float
    key: str
    """Sets the resources of this run apart from those of others."""
    _published: set[str] = field(default_factory=set)
    _number: int = 0
    _has_reward: bool = False

    def __post_init__(self) -> None:
        limit = FAILED_BATCHES_IN_A_ROW
        self._evaluator = Evaluator(self.store, self.state, self.timeout_seconds, most_failed_batches=limit)

    async def evaluate(self, evaluations: Sequence[Evaluation]) -> list[list[Outcome]]:
        """Run several at once; their outcomes in the order of their tasks. BudgetSpent if they are too many."""
        named = []
        for one in evaluations:
            self._number += 1
            tasks = ",".join(map(str, one.numbers))
            named.append((one, f"evaluation {self._number} {digest_of(one.texts)} {one.mode} {tasks}"))
        holds = await self._reserve(named)
        works = [self._outcomes(one, step, hold) for (one, step), hold in zip(named, holds, strict=True)]
        return await gathered(works, limit=len(works))

    async def _reserve(self, evaluations: Sequence[tuple[Evaluation, str]]) -> list[Hold | None]:
        """Count rollouts that are about to be sent: all of them, or none. None for what is known already."""
        ledger = self.state.ledger
        wanted = sum(len(one.numbers) for one, step in evaluations if not self._evaluator.is_sent(step))
        if wanted and wanted > ledger.rollouts_left() - ledger.kept_rollouts:
            kept = f", of which {ledger.kept_rollouts} are kept for the comparison" if ledger.kept_rollouts else ""
            raise BudgetSpent(f"{ledger.rollouts_left():.0f} rollouts are left{kept}, and the next are {wanted}")
        return [
            None
            if step in self.state.journal
            else await self._evaluator.reserve(step, len(one.numbers), can_wait=False)
            for one, step in evaluations
        ]

    async def _outcomes(self, one: Evaluation, step: str, hold: Hold | None) -> list[Outcome]:
        kept = self.state.journal.get(step)
        if kept is not None:
            self._evaluator.has_succeeded = self._has_reward = True
            return [Outcome(**outcome) for outcome in kept]
        assert hold is not None
        tasks = [self.tasks[one.mode][number] for number in one.numbers]
        resources_id = await self._publish(one.texts)
        sent, finished = await self._evaluator.run(step, tasks, mode=one.mode, resources_id=resources_id)
        by_id = {rollout.rollout_id: rollout for rollout in finished}
        traces: list[list[Mapping[str, Any]]] = []
        outcomes = [
            await self._read(one, task, by_id.get(rollout_id), traces)
            for task, rollout_id in zip(tasks, sent, strict=True)
        ]
        self.state.ledger.end_rollouts(hold, traces, unfinished=len(tasks) - len(traces))
        await self._evaluator.check(finished)
        if not self._has_reward and any(rollout.status == "succeeded" for rollout in finished):
            raise TrainingError(
                "No rollout has a reward, so prompts cannot be compared; return one from the agent, or emit it."
            )
        self.state.journal.put(step, [asdict(outcome) for outcome in outcomes])
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

    async def _read(
        self, one: Evaluation, task: Any, rollout: Rollout | None, traces: list[list[Mapping[str, Any]]]
    ) -> Outcome:
        """The outcome of one rollout, None if it was late; what its spans say is added to the traces."""
        spans: list[Span] = []
        if rollout is not None:
            spans = list(await self.store.query_spans(rollout.rollout_id, "latest"))
            attempts = await self.store.query_attempts(rollout.rollout_id) if self.state.ledger.budget.prices else ()
            # Earlier attempts cost money too.
            paid = spans if len(attempts) < 2 else await self.store.query_spans(rollout.rollout_id)
            traces.append([span.attributes for span in paid])
        succeeded = rollout is not None and rollout.status == "succeeded"
        reward = final_reward_of(spans) if succeeded else None
        self._has_reward = self._has_reward or reward is not None
        low, high = self.reward_range
        if reward is not None and not low <= reward <= high:
            raise ConfigurationError(
                f"A reward of {reward} lies outside {low} to {high}, for which the comparison holds; set reward_range."
            )
        score = low if reward is None else float(reward)
        if one.mode != "train":
            return Outcome(score)
        error = None
        if not succeeded:
            error = "it was not finished in time" if rollout is None else await first_traceback(self.store, [rollout])
        shown = "There is no reward." if reward is None else f"Reward: {reward:g} (from {low:g} to {high:g})"
        return Outcome(score, reflective_record(task, spans, reward=shown, error=error, adapter=self.adapter))
