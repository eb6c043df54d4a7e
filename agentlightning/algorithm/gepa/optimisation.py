"""One run of GEPA: the evolution, the comparison of its best candidate with the seed, and the account of both."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from agentlightning.algorithm.apo.budget import BudgetSpent, Ledger
from agentlightning.algorithm.apo.gain import Challenge, challenged
from agentlightning.algorithm.apo.journal import Journal
from agentlightning.algorithm.apo.lineage import Candidate, Lineage
from agentlightning.algorithm.apo.record import RunRecord
from agentlightning.algorithm.apo.report import OptimisationResult, counted, tell, write_prompts
from agentlightning.algorithm.apo.tasks import messages_adapter
from agentlightning.algorithm.comparison import PairedComparison
from agentlightning.algorithm.gepa.evolution import (
    Evolution,
    EvolutionSettings,
    Member,
    new_text_in,
    reflection_question,
)
from agentlightning.algorithm.gepa.reflection import Proposer
from agentlightning.algorithm.gepa.rollouts import Evaluation, PromptTexts, RolloutEvaluator, digest_of
from agentlightning.errors import ConfigurationError
from agentlightning.store.base import LightningStore
from agentlightning.types import Dataset, NamedResources, PromptTemplate

if TYPE_CHECKING:
    from agentlightning.algorithm.gepa.gepa import GEPA

__all__ = ["BEST_RESOURCES_ID", "RUN_NAME", "Optimisation"]

NAME: Final = "GEPA"
RUN_NAME: Final = "gepa"
BEST_RESOURCES_ID: Final = "gepa-best"
"""Under which the best prompts are published; they are the latest resources then."""
SEED_VERSION: Final = "v0"
ROLLOUTS_A_PAIR: Final = 2
RESERVED_SHARE: Final = 1 / 3
"""Of a budget, at most; more is kept for the comparison only where less could decide nothing."""
MIN_PAIRS: Final = 8
"""No verdict before so many."""
DEFAULT_ALPHA: Final = 0.05
"""For the interval of a run without a test."""
_SETTINGS: Final = (
    *("reflection_model", "temperature", "iterations", "patience", "minibatch_size", "proposals", "front_size"),
    *("alpha", "reward_range", "seed"),
)


class Optimisation:
    """A run over two data sets."""

    def __init__(
        self,
        gepa: "GEPA",
        resources: NamedResources,
        prompts: dict[str, PromptTemplate],
        *,
        train: Dataset[Any],
        val: Dataset[Any],
    ) -> None:
        self._gepa = gepa
        self._prompts = prompts
        self._seed: PromptTexts = {name: prompt.template for name, prompt in prompts.items()}
        self._front, self._judges = _split(len(val), gepa.front_size, gepa.seed)
        self._n_train = len(train)
        self._identity: dict[str, Any] = {
            "algorithm": RUN_NAME,
            **{name: getattr(gepa, name) for name in _SETTINGS},
            # A larger one would lead to another best candidate, and to a second test on the same tasks.
            "budget": [gepa.budget.rollouts, gepa.budget.model_calls, gepa.budget.cost, gepa.budget.rollout_cost],
            "n_train": len(train),
            "n_val": len(val),
            "seed_prompts": {name: prompt.model_dump() for name, prompt in prompts.items()},
        }
        reserve = self._reserve()  # tells what cannot work before a state file is begun
        self._journal = Journal(gepa.state_file, self._identity, algorithm=NAME)
        self._ledger = Ledger(gepa.budget, changed=lambda spent: self._journal.put("spent", spent))
        sent = sum(count for step, count in self._journal.items() if step.endswith(" sent"))
        self._ledger.restore(sent, self._journal.get("spent"))
        gepa.optimiser.ledger = self._ledger
        self._counts: Counter[str] = Counter()
        self.lineage = Lineage()
        self._challenge: Challenge | None = None
        self._evaluator = self._make_evaluator(gepa.get_store(), resources, train, val)
        self._ledger.kept_rollouts = reserve
        self._evolution = self._make_evolution(gepa)

    def _make_evaluator(
        self, store: LightningStore, resources: NamedResources, train: Dataset[Any], val: Dataset[Any]
    ) -> RolloutEvaluator:
        return RolloutEvaluator(
            store=store,
            resources=resources,
            tasks={"train": train, "val": val},
            journal=self._journal,
            ledger=self._ledger,
            adapter=messages_adapter(self._gepa._adapter, NAME),
            reward_range=self._gepa.reward_range,
            timeout_seconds=self._gepa.rollout_batch_timeout,
            key=self._journal.remember("key", lambda: f"{RUN_NAME}-{uuid.uuid4().hex[:12]}"),
            counts=self._counts,
        )

    def _make_evolution(self, gepa: "GEPA") -> Evolution:
        first = next(iter(self._seed))
        self.lineage.add(Candidate(SEED_VERSION, first, self._seed[first], fate="seed"))
        proposer = Proposer(
            ask=gepa.ask,
            seeds=self._prompts,
            lineage=self.lineage,
            journal=self._journal,
            render=reflection_question,
            extract=new_text_in,
            counts=self._counts,
            version_of={digest_of(self._seed): SEED_VERSION},
        )
        settings = EvolutionSettings(
            iterations=gepa.iterations,
            patience=gepa.patience,
            minibatch_size=gepa.minibatch_size,
            proposals=gepa.proposals,
            perfect_score=gepa.reward_range[1],
            seed=gepa.seed,
        )
        self._record = RunRecord(gepa.get_store(), gepa.get_run_id(), name=RUN_NAME)
        return Evolution(self._evaluator, proposer, self._record, settings)

    def _reserve(self) -> int:
        """Rollouts that are kept for the comparison; ConfigurationError if it could not decide anything."""
        alpha, budget = self._gepa.alpha, self._gepa.budget.most_rollouts
        most, fewest = len(self._judges), 1
        if alpha is not None:
            fewest = PairedComparison(alpha, max_pairs=most, reward_range=self._gepa.reward_range).fewest_pairs
        if fewest > most:
            raise ConfigurationError(
                f"{most} validation tasks are left to compare on, and a comparison takes at least {fewest} to decide;"
                " give more of them, a smaller front_size, or alpha=None to do without."
            )
        if budget is None:
            return 0
        before = 2 * (len(self._front) + self._gepa.minibatch_size)  # of the seed and of one candidate
        least = before + ROLLOUTS_A_PAIR * fewest
        if budget < least:
            raise ConfigurationError(
                f"A budget of {counted(budget, 'rollout')} is too small: the scores of the seed and of one candidate, "
                f"and their comparison, take {least}; raise it, or take a smaller front_size or minibatch_size."
            )
        kept = min(budget - before, max(int(budget * RESERVED_SHARE), ROLLOUTS_A_PAIR * fewest))
        return ROLLOUTS_A_PAIR * min(most, kept // ROLLOUTS_A_PAIR)

    # ------------------------------------------------------------------ the run

    async def run(self) -> OptimisationResult:
        """Evolve, compare, publish."""
        await self._record.open(self._identity, self._evaluator.key)
        try:
            await self._evolution.run(self._seed, range(self._n_train), self._front)
            result = await self._judged()
        except BaseException as error:
            is_stopped = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
            told = {**self._account(), "error": f"{type(error).__name__}: {error}"}
            await asyncio.shield(self._record.write("stopped" if is_stopped else "failed", told))
            raise
        best = {name: prompt.template for name, prompt in result.best.items()}
        await self._gepa.get_store().update_resources(BEST_RESOURCES_ID, self._evaluator.resources_with(best))
        if self._gepa.output is not None:
            write_prompts(self._gepa.output, result)
        await self._record.write("succeeded", {**result.to_json(), **self._account()})
        tell(result, NAME)
        return result

    def _account(self) -> dict[str, Any]:
        """How things stand."""
        return {"candidates": self.lineage.to_json(), "spent": self._ledger.spent, "counts": dict(self._counts)}

    # ------------------------------------------------------------------ the comparison

    async def _judged(self) -> OptimisationResult:
        """The outcome: the best candidate if it is better than the seed, otherwise the seed."""
        stopped, best = self._evolution.stopped, None
        seed_score = self._evolution.pool[0].score if self._evolution.pool else None
        pairs: list[tuple[float, float]] = []
        if self._evolution.pool and self._evolution.best.version != SEED_VERSION:
            best = self._evolution.best
            try:
                await self._challenge_seed(best, pairs)
            except BudgetSpent as spent:
                stopped = f"the budget allows no more ({spent})"
        is_better = self._challenge is not None and self._challenge.verdict == "better"
        if best is not None:
            fate_reason = str(self._challenge) if self._challenge is not None else "it could not be compared"
            self.lineage.settle(best.version, "promoted" if is_better else "refused", fate_reason)
        chosen = best if best is not None and is_better else None
        if pairs:
            seed_score = fmean(before for before, _ in pairs)
        texts = self._seed if chosen is None else chosen.texts
        return OptimisationResult(
            seed=self._prompts,
            best={name: one.model_copy(update={"template": texts[name]}) for name, one in self._prompts.items()},
            best_version=SEED_VERSION if chosen is None else chosen.version,
            seed_score=seed_score,
            best_score=seed_score if chosen is None else fmean(after for _, after in pairs),
            gain=None if chosen is None or self._challenge is None else self._challenge.gain,
            challenges=[] if self._challenge is None else [self._challenge],
            spent=self._ledger.spent,
            counts=self._counts,
            stopped=stopped,
        )

    async def _challenge_seed(self, best: Member, pairs: list[tuple[float, float]]) -> None:
        """Run both on the tasks that chose nothing; the pairs are those that the verdict rests on."""
        self._ledger.kept_rollouts = 0
        affordable = min(float(len(self._judges)), self._ledger.rollouts_left() // ROLLOUTS_A_PAIR)
        tasks = self._judges[: self._journal.remember("pairs", lambda: int(affordable))]
        if not tasks:
            raise BudgetSpent("no rollouts are left for the comparison")
        alpha = self._gepa.alpha
        comparison = PairedComparison(
            DEFAULT_ALPHA if alpha is None else alpha,
            max_pairs=len(tasks),
            min_pairs=len(tasks) if alpha is None else MIN_PAIRS,
            reward_range=self._gepa.reward_range,
        )
        scores: dict[str, list[float]] = {SEED_VERSION: [], best.version: []}

        async def rewards(version: str, texts: PromptTexts, numbers: Sequence[int]) -> list[float]:
            (outcomes,) = await self._evaluator.evaluate([Evaluation(texts, "val", numbers)])
            scores[version] += [outcome.score for outcome in outcomes]
            return scores[version][-len(numbers) :]

        try:
            await challenged(
                comparison,
                tasks,
                lambda numbers: rewards(SEED_VERSION, self._seed, numbers),
                lambda numbers: rewards(best.version, best.texts, numbers),
            )
        finally:
            pairs += list(zip(*scores.values(), strict=False))[: comparison.pairs]
            if pairs:
                self._challenge = self._verdict(best, comparison)

    def _verdict(self, best: Member, comparison: PairedComparison) -> Challenge:
        verdict = comparison.verdict
        if self._gepa.alpha is None:
            verdict = "better" if comparison.estimate.mean > 0 else "not better"
        return Challenge(
            round=self._evolution.iteration,
            incumbent=SEED_VERSION,
            candidate=best.version,
            verdict=verdict,
            gain=comparison.estimate,
            alpha=comparison.alpha,
        )


def _split(count: int, front_size: int | None, seed: int) -> tuple[list[int], list[int]]:
    """Validation tasks by which candidates are chosen, and those that judge the best of them; at random."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    size = count // 2 if front_size is None else front_size
    if not 0 < size < count:
        raise ConfigurationError(
            f"Of {count} validation tasks {size} cannot choose candidates and leave others to judge them; give more of "
            "them, or another front_size."
        )
    return sorted(numbers[:size]), numbers[size:]
