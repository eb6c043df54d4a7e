"""The evolution: gepa's engine, whose candidates run as rollouts and whose reflection calls our model.

The engine keeps a pool of candidates. In each iteration it takes one that is the best at some task, runs it on a few
training tasks, has a new text written by what they show, and runs that on the same tasks. What is better there is tried
on the validation tasks by which candidates are chosen, and joins the pool.

The engine is synchronous, while stores and models are awaited, so it runs in a thread of its own (`EngineBridge`).
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.base import Tasks
from agentlightning.algorithm.batches import first_traceback
from agentlightning.algorithm.comparison import estimate, is_finite
from agentlightning.algorithm.prompts.budget import BudgetSpent, Hold
from agentlightning.algorithm.prompts.evaluation import Evaluator, RunState
from agentlightning.algorithm.prompts.model import OptimiserFailed
from agentlightning.algorithm.prompts.reflection import (
    Examples,
    PromptTexts,
    Proposer,
    ReflectionJob,
    ReflectiveRecord,
    digest_of,
    reflective_record,
)
from agentlightning.algorithm.prompts.results import RunRecord
from agentlightning.algorithm.utils import gathered
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.store.base import LightningStore
from agentlightning.types import NamedResources, PromptTemplate, Rollout, RolloutMode, Span
from agentlightning.types.rewards import final_reward_of
from agentlightning.utils.daemon_threads import DaemonThreads
from agentlightning.utils.installation import install_command
from agentlightning.utils.json_values import JsonMapping

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch, GEPAAdapter, ProposalFn
    from gepa.proposer.reflective_mutation.reflection_lm import ReflectionProposal

    from agentlightning.algorithm.prompts.gepa import GEPA

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def require_gepa() -> None:
    """ConfigurationError if the package is not there."""
    try:
        import gepa  # noqa: F401 # only whether it can be imported
    except ImportError as error:
        raise ConfigurationError(f"GEPA runs on the gepa package: run `{install_command('gepa')}`.") from error


def reflection_question(text: str, examples: Sequence[JsonMapping], beside: str) -> str:
    """What the model is asked, in gepa's words and with what stands beside them."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    template = InstructionProposalSignature.default_prompt_template + beside
    arguments = {"current_instruction_doc": text, "dataset_with_feedback": list(examples), "prompt_template": template}
    return str(InstructionProposalSignature.prompt_renderer(arguments))


def new_text_in(answer: str) -> str:
    """The new prompt of an answer, without the fences around it."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    return InstructionProposalSignature.output_extractor(answer.strip())["new_instruction"]


class _Halt(BaseException):
    """Ends the engine; not an `Exception`, because the engine goes on after some of those. It stays in this file."""


class EngineBridge:
    """Runs an engine in a thread and its coroutines on the loop on which the bridge is made.

    An error on the loop ends the engine at once, whatever the engine would make of it, and is raised where the engine
    was started. Cancelling the run ends the engine too, and waits for its thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changing = threading.Lock()  # protects what is under way and whether the bridge is closed
        self._under_way: Future[Any] | None = None
        self._is_closed = False
        self._failure: BaseException | None = None

    async def run(self, engine: Callable[[], object]) -> None:
        """Run an engine in a thread until it ends; raises what ended it."""
        threads = DaemonThreads("gepa")

        def until_halted() -> None:
            with suppress(_Halt):
                engine()

        work = asyncio.ensure_future(threads.run(until_halted))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._close()
            await asyncio.gather(work, return_exceptions=True)
            raise
        finally:
            threads.close()
        if self._failure is not None:
            raise self._failure

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """What a coroutine returns on the loop; for the engine's thread."""
        with self._changing:
            if self._is_closed:
                coroutine.close()
                raise _Halt
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._under_way = future
        try:
            return future.result()
        except CancelledError:
            raise _Halt from None
        except BaseException as error:
            self._failure = error
            raise _Halt from error

    def _close(self) -> None:
        with self._changing:
            self._is_closed = True
            if self._under_way is not None:
                self._under_way.cancel()


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
    tasks: Mapping[RolloutMode, Tasks]
    adapter: TraceToMessages
    reward_range: tuple[float, float]
    timeout_seconds: float
    key: str
    """Sets the resources of this run apart from those of others."""
    record: RunRecord
    _published: set[str] = field(default_factory=set)
    _number: int = 0
    _has_reward: bool = False

    def __post_init__(self) -> None:
        self._evaluator = Evaluator(
            self.store,
            self.state,
            self.timeout_seconds,
            record=self.record,
            most_failed_batches=3,  # then the fault is not the prompts'
        )

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
        traces: list[list[JsonMapping]] = []
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
        self, one: Evaluation, task: object, rollout: Rollout | None, traces: list[list[JsonMapping]]
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
        if reward is not None:
            reward = self._evaluator.bounded(reward, self.reward_range) if is_finite(reward) else None
        self._has_reward = self._has_reward or reward is not None
        low, high = self.reward_range
        score = low if reward is None else reward
        if one.mode != "train":
            return Outcome(score)
        error = None
        if not succeeded:
            error = "it was not finished in time" if rollout is None else await first_traceback(self.store, [rollout])
        shown = "There is no reward." if reward is None else f"Reward: {reward:g} (from {low:g} to {high:g})"
        return Outcome(score, reflective_record(task, spans, reward=shown, error=error, adapter=self.adapter))


@dataclass(frozen=True)
class Member:
    """A candidate of the pool."""

    version: str
    texts: PromptTexts
    scores: Sequence[float]
    """Rewards on the validation tasks by which candidates are chosen."""

    @property
    def score(self) -> float:
        return fmean(self.scores)


@dataclass(frozen=True)
class _Sample:
    """A task as the engine knows it."""

    mode: RolloutMode
    number: int


@dataclass
class Evolution:
    """One run of the engine, and what it left; the engine calls its methods as adapter, reflection and callback."""

    evaluator: CandidateEvaluator
    proposer: Proposer
    settings: "GEPA"
    pool: list[Member] = field(default_factory=list)
    """The seed first."""
    stopped: str | None = None
    """Why it ended before its last iteration."""
    propose_new_texts: "ProposalFn | None" = None
    """Of gepa's adapters: the reflection proposes instead."""
    _scores: dict[str, float] = field(default_factory=dict)  # on the last minibatch, by digest
    _last_gain: int = 0  # the iteration in which the pool grew last

    @property
    def best(self) -> Member:
        """The candidate with the highest score; of several the one that came first."""
        return max(self.pool, key=lambda member: member.score)

    async def run(self, seed: PromptTexts, train: Sequence[int], front: Sequence[int]) -> None:
        """Evolve until it is over; numbers of the tasks to learn from and to choose by."""
        self._bridge = EngineBridge()
        try:
            await self._bridge.run(lambda: self._optimise(dict(seed), train, front))
        except BudgetSpent as spent:
            self.stopped = f"the budget allows no more ({spent})"
        except OptimiserFailed as failed:
            if len(self.pool) < 2:  # the seed alone
                raise
            self.stopped = f"the reflecting model was given up ({failed})"
        self._settle_dropped()

    def _optimise(self, seed: dict[str, str], train: Sequence[int], front: Sequence[int]) -> None:
        from gepa.api import optimize
        from gepa.strategies.proposal_sampling import IndependentSampling

        settings = self.settings
        adapter: GEPAAdapter[_Sample, Outcome, Outcome] = self
        optimize(
            seed_candidate=seed,
            trainset=[_Sample("train", number) for number in train],
            valset=[_Sample("val", number) for number in front],
            adapter=adapter,
            reflection_strategy=self,
            sampling_strategy=IndependentSampling(settings.proposals) if settings.proposals > 1 else None,
            reflection_minibatch_size=settings.minibatch_size,
            perfect_score=settings.reward_range[1],
            stop_callbacks=self._is_over,
            callbacks=[self],  # type: ignore[list-item] # gepa: "implement only those you need"
            logger=self,
            track_best_outputs=False,
            seed=settings.seed,
        )

    def _is_over(self, gepa_state: Any) -> bool:
        """The engine calls it before each iteration."""
        done = gepa_state.i + 1
        if done >= self.settings.iterations:
            return True
        if self.pool and self.best.score >= self.settings.reward_range[1]:
            self.stopped = f"{self.best.version} has the highest reward on all tasks by which candidates are chosen"
        elif done - self._last_gain >= self.settings.patience:
            self.stopped = f"no candidate was added in {self.settings.patience} iterations"
        return self.stopped is not None

    def _settle_dropped(self) -> None:
        """Note why candidates did not join the pool."""
        digests = {version: digest for digest, version in self.proposer.version_of.items()}
        for candidate in self.proposer.state.lineage:
            if candidate.fate != "proposed":
                continue
            own = self._scores.get(digests.get(candidate.version, ""))
            parent = self._scores.get(digests.get(candidate.parent or "", ""))
            reason = "the run ended before it was tried"
            if own is not None and parent is not None:
                reason = f"it scores {own:.3f} on a minibatch on which {candidate.parent} scores {parent:.3f}"
            self.proposer.state.lineage.settle(candidate.version, "dropped", reason)
            logger.info("Candidate %s (from %s) is dropped: %s.", candidate.version, candidate.parent, reason)

    # ------------------------------------------------------------------ gepa's adapter, called in its thread

    def evaluate(
        self, batch: list[_Sample], candidate: dict[str, str], capture_traces: bool = False
    ) -> "EvaluationBatch[Outcome, Outcome]":
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(
        self, items: list[tuple[dict[str, str], list[_Sample]]]
    ) -> "list[EvaluationBatch[Outcome, Outcome]]":
        from gepa.core.adapter import EvaluationBatch

        evaluations = [Evaluation(texts, samples[0].mode, [one.number for one in samples]) for texts, samples in items]
        found = self._bridge.call(self.evaluator.evaluate(evaluations))
        batches = []
        for one, outcomes in zip(evaluations, found, strict=True):
            scores = [outcome.score for outcome in outcomes]
            if one.mode == "train":
                self._scores[digest_of(one.texts)] = fmean(scores)
            batches.append(EvaluationBatch(outputs=outcomes, scores=scores, trajectories=outcomes))
        return batches

    def make_reflective_dataset(
        self,
        candidate: dict[str, str],
        eval_batch: "EvaluationBatch[Outcome, Outcome]",
        components_to_update: list[str],
    ) -> Examples:
        examples = [outcome.example for outcome in eval_batch.outputs if outcome.example is not None]
        return dict.fromkeys(components_to_update, examples)

    # ------------------------------------------------------------------ gepa's reflection strategy

    def reflect(
        self, candidate: dict[str, str], reflective_dataset: Examples, components_to_update: list[str]
    ) -> "tuple[ReflectionProposal, Evolution]":
        return self.reflect_many([(candidate, reflective_dataset, components_to_update)])[0]

    def reflect_many(self, jobs: list[ReflectionJob]) -> "list[tuple[ReflectionProposal, Evolution]]":
        from gepa.proposer.reflective_mutation.reflection_lm import ReflectionProposal

        proposed = self._bridge.call(self.proposer.propose(jobs))
        return [(ReflectionProposal(new_texts=texts), self) for texts in proposed]

    # ------------------------------------------------------------------ gepa's callback and logger

    def on_iteration_start(self, event: JsonMapping) -> None:
        self.proposer.state.round = event["iteration"]

    def on_valset_evaluated(self, event: JsonMapping) -> None:
        """A candidate was tried on all tasks by which candidates are chosen, and joins the pool."""
        texts, score, iteration = event["candidate"], event["average_score"], event["iteration"]
        version = self.proposer.version_of[digest_of(texts)]
        candidate = self.proposer.state.lineage[version]
        candidate.scores[iteration] = score
        self.proposer.state.lineage.settle(version, "kept")
        self.pool.append(Member(version, dict(texts), list(event["scores_by_val_id"].values())))
        self._last_gain = iteration
        origin = "the seed" if candidate.parent is None else f"from {candidate.parent}"
        found = estimate(self.pool[-1].scores)
        logger.info("Candidate %s (%s) joins the pool with a score of %s.", version, origin, found)
        if len(self.pool) == 1:  # the seed, before the first iteration
            self._bridge.call(self.evaluator.record.draw(iteration, {"gepa/best_score": score}))

    def on_iteration_end(self, event: JsonMapping) -> None:
        self._settle_dropped()
        spent = self.proposer.state.ledger.spent
        values = {"gepa/candidates": len(self.pool), "gepa/best_score": self.best.score}
        values |= {f"gepa/{name}": value for name, value in spent.items()}
        self._bridge.call(self.evaluator.record.draw(event["iteration"], values))

    def log(self, message: str) -> None:
        logger.debug("%s", message)
