"""The evolution itself: gepa's engine, whose candidates run as rollouts and whose reflection asks our model.

The engine keeps a pool of candidates. In each iteration it takes one that is the best at some task, runs it on a few
training tasks, has a new text written by what they show, and runs that on the same tasks. What is better there is tried
on the validation tasks by which candidates are chosen, and joins the pool.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.apo.budget import BudgetSpent
from agentlightning.algorithm.apo.optimiser import OptimiserFailed
from agentlightning.algorithm.apo.record import RunRecord
from agentlightning.algorithm.gepa.bridge import EngineBridge
from agentlightning.algorithm.gepa.reflection import Examples, Proposer, ReflectionJob
from agentlightning.algorithm.gepa.rollouts import Evaluation, Outcome, PromptTexts, RolloutEvaluator, digest_of
from agentlightning.errors import ConfigurationError
from agentlightning.types import RolloutMode
from agentlightning.utils.installation import install_command

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch, GEPAAdapter, ProposalFn
    from gepa.proposer.reflective_mutation.reflection_lm import ReflectionProposal

__all__ = ["Evolution", "EvolutionSettings", "Member", "new_text_in", "reflection_question", "require_gepa"]

logger = logging.getLogger(__name__)


def require_gepa() -> None:
    """ConfigurationError if the package is not there."""
    try:
        import gepa  # noqa: F401 # only whether it can be imported
    except ImportError as error:
        raise ConfigurationError(f"GEPA runs on the gepa package: run `{install_command('gepa')}`.") from error


def reflection_question(text: str, examples: Sequence[Mapping[str, Any]], beside: str) -> str:
    """What the model is asked, in gepa's words and with what stands beside them."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    template = InstructionProposalSignature.default_prompt_template + beside
    told = {"current_instruction_doc": text, "dataset_with_feedback": list(examples), "prompt_template": template}
    return str(InstructionProposalSignature.prompt_renderer(told))


def new_text_in(answer: str) -> str:
    """The new prompt of an answer, without the fences around it."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    return InstructionProposalSignature.output_extractor(answer.strip())["new_instruction"]


@dataclass(frozen=True)
class EvolutionSettings:
    """How far and how wide candidates are looked for."""

    iterations: int
    patience: int
    minibatch_size: int
    proposals: int
    perfect_score: float
    seed: int


@dataclass(frozen=True)
class Member:
    """A candidate of the pool."""

    version: str
    texts: PromptTexts
    score: float
    """Mean reward on the validation tasks by which candidates are chosen."""


@dataclass(frozen=True)
class _Sample:
    """A task as the engine knows it."""

    mode: RolloutMode
    number: int


@dataclass
class Evolution:
    """One run of the engine, and what it left."""

    evaluator: RolloutEvaluator
    proposer: Proposer
    record: RunRecord
    settings: EvolutionSettings
    pool: list[Member] = field(default_factory=list)
    """The seed first."""
    stopped: str | None = None
    """Why it ended before its last iteration."""
    _scores: dict[str, float] = field(default_factory=dict)  # on the last minibatch, by digest
    _last_gain: int = 0  # the iteration in which the pool grew last

    @property
    def iteration(self) -> int:
        """The one that is under way, or was the last."""
        return self.proposer.round

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
        adapter: GEPAAdapter[_Sample, Outcome, Outcome] = _EngineAdapter(self)
        optimize(
            seed_candidate=seed,
            trainset=[_Sample("train", number) for number in train],
            valset=[_Sample("val", number) for number in front],
            adapter=adapter,
            reflection_strategy=_EngineReflection(self),
            sampling_strategy=IndependentSampling(settings.proposals) if settings.proposals > 1 else None,
            reflection_minibatch_size=settings.minibatch_size,
            perfect_score=settings.perfect_score,
            stop_callbacks=self._is_over,
            callbacks=[_EngineEvents(self)],  # type: ignore[list-item] # gepa: "implement only those you need"
            logger=_EngineLogger(),
            track_best_outputs=False,
            seed=settings.seed,
        )

    def _is_over(self, gepa_state: Any) -> bool:
        """Asked by the engine before each iteration."""
        done = gepa_state.i + 1
        if done >= self.settings.iterations:
            return True
        if self.pool and self.best.score >= self.settings.perfect_score:
            self.stopped = f"{self.best.version} has the highest reward on all tasks by which candidates are chosen"
        elif done - self._last_gain >= self.settings.patience:
            self.stopped = f"no candidate was added in {self.settings.patience} iterations"
        return self.stopped is not None

    # ------------------------------------------------------------------ what the engine's thread calls

    def evaluated(self, items: Sequence[tuple[PromptTexts, Sequence[_Sample]]]) -> list[list[Outcome]]:
        """Run candidates on tasks."""
        evaluations = [
            Evaluation(texts, samples[0].mode, [sample.number for sample in samples]) for texts, samples in items
        ]
        found = self._bridge.call(self.evaluator.evaluate(evaluations))
        for one, outcomes in zip(evaluations, found, strict=True):
            if one.mode == "train":
                self._scores[digest_of(one.texts)] = fmean(outcome.score for outcome in outcomes)
        return found

    def proposed(self, jobs: Sequence[ReflectionJob]) -> list[dict[str, str]]:
        """Have new texts written."""
        return self._bridge.call(self.proposer.propose(jobs))

    def begin(self, iteration: int) -> None:
        self.proposer.round = iteration

    def add(self, texts: PromptTexts, score: float, iteration: int) -> None:
        """A candidate was tried on all tasks by which candidates are chosen, and joins the pool."""
        version = self.proposer.version_of[digest_of(texts)]
        candidate = self.proposer.lineage[version]
        candidate.scores[iteration] = score
        self.proposer.lineage.settle(version, "kept")
        self.pool.append(Member(version, dict(texts), score))
        self._last_gain = iteration
        origin = "the seed" if candidate.parent is None else f"from {candidate.parent}"
        logger.info("Candidate %s (%s) joins the pool with a score of %.3f.", version, origin, score)

    def end(self, iteration: int) -> None:
        """An iteration is over: the curves go on."""
        self._settle_dropped()
        spent = self.evaluator.ledger.spent
        values = {"gepa/candidates": len(self.pool), "gepa/best_score": self.best.score}
        values |= {f"gepa/{name}": value for name, value in spent.items()}
        self._bridge.call(self.record.draw(iteration, values))

    def _settle_dropped(self) -> None:
        """Say of the candidates that did not join the pool why they did not."""
        digests = {version: digest for digest, version in self.proposer.version_of.items()}
        for candidate in self.proposer.lineage:
            if candidate.fate != "proposed":
                continue
            own = self._scores.get(digests.get(candidate.version, ""))
            parent = self._scores.get(digests.get(candidate.parent or "", ""))
            reason = "the run ended before it was tried"
            if own is not None and parent is not None:
                reason = f"it scores {own:.3f} on a minibatch on which {candidate.parent} scores {parent:.3f}"
            self.proposer.lineage.settle(candidate.version, "dropped", reason)
            logger.info("Candidate %s (from %s) is dropped: %s.", candidate.version, candidate.parent, reason)


# ---------------------------------------------------------------------- as gepa wants it


class _EngineAdapter:
    """gepa's view of rollouts."""

    propose_new_texts: "ProposalFn | None" = None

    def __init__(self, evolution: Evolution) -> None:
        self._evolution = evolution

    def evaluate(
        self, batch: list[_Sample], candidate: dict[str, str], capture_traces: bool = False
    ) -> "EvaluationBatch[Outcome, Outcome]":
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(
        self, items: list[tuple[dict[str, str], list[_Sample]]]
    ) -> "list[EvaluationBatch[Outcome, Outcome]]":
        from gepa.core.adapter import EvaluationBatch

        return [
            EvaluationBatch(outputs=outcomes, scores=[outcome.score for outcome in outcomes], trajectories=outcomes)
            for outcomes in self._evolution.evaluated(items)
        ]

    def make_reflective_dataset(
        self,
        candidate: dict[str, str],
        eval_batch: "EvaluationBatch[Outcome, Outcome]",
        components_to_update: list[str],
    ) -> Examples:
        examples = [outcome.example for outcome in eval_batch.outputs if outcome.example is not None]
        return dict.fromkeys(components_to_update, examples)


class _EngineReflection:
    """gepa's view of the reflecting model."""

    def __init__(self, evolution: Evolution) -> None:
        self._evolution = evolution

    def reflect(
        self, candidate: dict[str, str], reflective_dataset: Examples, components_to_update: list[str]
    ) -> "tuple[ReflectionProposal, _EngineReflection]":
        return self.reflect_many([(candidate, reflective_dataset, components_to_update)])[0]

    def reflect_many(self, jobs: list[ReflectionJob]) -> "list[tuple[ReflectionProposal, _EngineReflection]]":
        from gepa.proposer.reflective_mutation.reflection_lm import ReflectionProposal

        return [(ReflectionProposal(new_texts=texts), self) for texts in self._evolution.proposed(jobs)]


class _EngineEvents:
    """What the engine tells as it goes."""

    def __init__(self, evolution: Evolution) -> None:
        self._evolution = evolution

    def on_iteration_start(self, event: Mapping[str, Any]) -> None:
        self._evolution.begin(event["iteration"])

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        self._evolution.add(event["candidate"], event["average_score"], event["iteration"])

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        self._evolution.end(event["iteration"])


class _EngineLogger:
    """The engine's own words are for those who look for a fault."""

    def log(self, message: str) -> None:
        logger.debug("%s", message)
